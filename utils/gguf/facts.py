"""A GGUF file's metadata → the model's configuration, by llama.cpp's rules.

transformers reads sizes and weights. This module reads positions, windows and soft caps, and refuses
a file with keys of its architecture that neither knows: without them it would silently be another model.
"""

import math
from collections.abc import Collection, Mapping

from utils.errors import UserError
from utils.gguf.header import TOKENS, GgufHeader
from utils.objects import HfConfig, Json

_PLAIN_BASE = 10000.0  # base of rotary frequencies if the file names none

_ATTRIBUTES = {  # a key → attributes of the configuration; a family has one of them, or none
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
}

_READ = {  # keys that this module reads, that transformers gets from the tensors, or without effect on a pass
    *("context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *(
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "use_parallel_residual",
        "pooling_type",
    ),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
    *(
        f"rope.scaling.{name}"
        for name in ("type", "factor", "original_context_length", "attn_factor", "finetuned", "yarn_attn_factor")
    ),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
# Keys with a default in the format, or known from the tensors' shapes.
_OPTIONAL = {
    *("vocab_size", "attention.head_count_kv", "rope.dimension_count", "attention.key_length"),
    *("decoder_start_token_id", "feed_forward_length", "nextn_predict_layers"),
}
# Values without effect, as are 0, empty and false ones. Every sixth layer of Gemma 3 has full attention.
_NEUTRAL = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0, "attention.sliding_window_pattern": 6}


def check_said(header: GgufHeader, name: str) -> None:
    """Raise UserError if the file `name` lacks a key for which transformers would fill in another model's value."""
    family, needed = header.architecture, {key for key, known in _mapped(header).items() if known} - _OPTIONAL
    # A Llama file with a sentencepiece vocabulary may be older than the key rope.freq_base; files of the three other
    # families never have it.
    early = family == "llama" and header.metadata.get("tokenizer.ggml.model") == "llama"
    needed |= {"expert_used_count"} if header.get("expert_count") else set()
    needed -= {"attention.layer_norm_rms_epsilon"} if header.get("attention.layer_norm_epsilon") is not None else set()
    needed -= {"rope.freq_base"} if early or family in ("falcon", "gemma2", "nemotron") else set()
    keys = ["general.architecture", *(f"{family}.{key}" for key in sorted(needed))]
    if missing := [key for key in keys if key not in header.metadata]:
        more = f" (and {len(missing) - 3} more keys)" if len(missing) > 3 else ""
        raise UserError(f"{name} does not say {', '.join(missing[:3])}{more}")
    tokens = header.metadata.get(TOKENS, ())
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        if not 0 <= (token := header.metadata.get(f"tokenizer.ggml.{role}_token_id", 0)) < max(1, len(tokens)):
            raise UserError(f"{name} has {len(tokens)} tokens, and tokenizer.ggml.{role}_token_id is {token}")


def teach_families() -> None:
    """Add families to those whose GGUF files transformers reads."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    table: Json = GGUF_CONFIG_MAPPING
    plain = table["qwen2"]
    table["granite"] = plain | {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    table |= dict.fromkeys(("olmo2", "smollm3", "olmoe"), plain)
    reader.GGUF_SUPPORTED_ARCHITECTURES.extend(("granite", "olmo2", "smollm3", "olmoe"))
    delta = (
        *("full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"),
        *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")),
    )
    # transformers makes their configurations without this table.
    table |= dict.fromkeys(("qwen35", "qwen35moe"), plain | dict.fromkeys(delta, ""))
    # Their files permute the rows of queries and keys as Llama's do.
    reader.TENSOR_PROCESSORS.update(dict.fromkeys(("granite", "smollm3"), reader.TENSOR_PROCESSORS["llama"]))


def complete(config: HfConfig, header: GgufHeader) -> None:
    """Complete a transformers configuration from the file; UserError, in one line, for a key that it cannot express."""
    attributes = {key for key, names in _ATTRIBUTES.items() if any(hasattr(config, name) for name in names)}
    # Families whose windowed layers are the same in transformers:
    windows = {"attention.sliding_window"} if header.architecture in ("gemma2", "gemma3", "phi3") else set()
    check_known(header, {key for key, name in _mapped(header).items() if name is not None} | attributes | windows)
    heads = getattr(config, "num_attention_heads", None)
    for key, names in _ATTRIBUTES.items():
        name = next((name for name in names if hasattr(config, name)), None)
        if name is not None and (value := header.get(key)) is not None:
            setattr(config, name, value)
    if config.model_type in ("phi3", "mistral"):  # transformers' default is not the file's
        config.sliding_window = header.get("attention.sliding_window") or None
    if not heads or not getattr(config, "rope_parameters", None):
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    for key in ("attention.key_length", "attention.value_length"):
        if header.get(key, size) != size:
            raise UserError(f"{header.architecture}.{key} is {header.get(key)}, where its heads have {size}")
    if hasattr(config, "query_pre_attn_scalar"):  # llama.cpp recognises the largest of a family by its layer count
        large = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}.get(header.architecture)
        config.query_pre_attn_scalar = config.hidden_size // heads if large else size
    _set_rope(config, header, size)


def _mapped(header: GgufHeader) -> Mapping[str, str | None]:
    """Return the keys of the architecture that transformers knows → their names in its configuration."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    plain = header.architecture.replace("-", "").replace("_", "")
    table: Json = GGUF_CONFIG_MAPPING
    return next((keys for name, keys in table.items() if name.replace("_", "") == plain), {})


def check_known(header: GgufHeader, known: Collection[str]) -> None:
    """Raise UserError for a key of the architecture that has an effect, and is neither in `known` nor in `_READ`."""
    prefix = f"{header.architecture}."
    unknown = [
        f"{key} = {value}"
        for key, value in header.metadata.items()
        if key.startswith(prefix)
        and (short := key.removeprefix(prefix)) not in {*known, *_READ}
        and value
        and value != _NEUTRAL.get(short)
    ]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UserError(f"it has keys that this program does not know: {', '.join(unknown[:3])}{more}")


def _set_rope(config: HfConfig, header: GgufHeader, size: int) -> None:
    """Set the rotary positions. A family that rotates part of a head names the part in its configuration; layers with a
    window have a separate base."""
    rope = config.rope_parameters
    factors = header.factors()
    bases = {key: header.get(key) for key in ("rope.freq_base", "rope.freq_base_swa")}
    for name, values in {**{key: [base] for key, base in bases.items() if base is not None}, **factors}.items():
        if not all(isinstance(value, int | float) and 0 < value < math.inf for value in values):
            raise UserError(f"{name} is no base and no factor to turn positions by: {values[:3]}")
    rotary_dim, key = header.get("rope.dimension_count", size), "partial_rotary_factor"
    part = {key: rotary_dim / size} if key in rope.get("full_attention", rope) else {}
    if rotary_dim != size and not part:
        raise UserError(f"{header.architecture}.rope.dimension_count is {rotary_dim}, where its heads have {size}")
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = _original(config, header)
    full = {
        **{**part, "rope_theta": header.get("rope.freq_base", _PLAIN_BASE)},
        **scaling(config, header, factors, rotary_dim // 2),
    }
    if "full_attention" in rope:
        full = {
            "full_attention": full,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": header.get("rope.freq_base_swa", _PLAIN_BASE),
            },
        }
    config.rope_parameters = full


def _original(config: HfConfig, header: GgufHeader) -> int:
    """Return the context before it was extended."""
    return int(header.get("rope.scaling.original_context_length") or config.max_position_embeddings)


def scaling(config: HfConfig, header: GgufHeader, factors: Mapping[str, list[float]], pairs: int) -> Json:
    """Return the stretching of positions as transformers' rope parameters, for `pairs` pairs of dimensions.

    A frequency is base^(−2i/D), divided by its factor if the file has one for each; cos and sin are multiplied by the
    attention factor. A list of factors, such as Llama 3's, is a "longrope" whose lists for short and long texts are the
    same. UserError for another kind of scaling, and for lists that do not fit.
    """
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0
    kind = header.get("rope.scaling.type", "linear")
    attention = header.get("rope.scaling.attn_factor", 1.0)
    original = _original(config, header)
    before = {"original_max_position_embeddings": original}
    if kind not in ("linear", "longrope", "none", "yarn"):
        raise UserError(f"{header.architecture}.rope.scaling.type is '{kind}': known are linear, longrope, none, yarn")
    lists = {name.split(".")[0]: values for name, values in factors.items()}
    for name, values in lists.items():
        if len(values) != pairs:
            raise UserError(f"{name} has {len(values)} factors, where heads have {pairs} pairs of dimensions to turn")
    both = {"rope_factors_long", "rope_factors_short"}
    by_length = kind == "longrope" or (header.architecture == "phi3" and original < config.max_position_embeddings)
    if not both <= lists.keys() and (both & lists.keys() or by_length):
        raise UserError("the factors of long and short texts (rope_factors_long, rope_factors_short) are not all there")
    each = lists.get("rope_freqs", [1.0] * pairs)
    if kind == "yarn":
        if set(each) != {1.0} or lists.keys() - {"rope_freqs"}:
            raise UserError(f"{header.architecture}.rope.scaling.type is 'yarn', beside factors of each frequency")
        scale = header.get("rope.scaling.yarn_attn_factor", 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
        betas = {name: header.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        given = {name: value for name, value in betas.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, **before, "attention_factor": scale * attention, **given}
    if kind == "linear":
        each = [factor * value for value in each]
    short, long = (lists.get(f"rope_factors_{name}", each) for name in ("short", "long"))
    if short == long and attention == 1.0 and len(set(short)) == 1:
        return {"rope_type": "default"} if short[0] == 1.0 else {"rope_type": "linear", "factor": short[0]}
    return {
        **{"rope_type": "longrope", "short_factor": short, "long_factor": long},
        "factor": max(1.0, config.max_position_embeddings / original),
        **before,
        "attention_factor": attention,
    }
