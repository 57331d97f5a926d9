"""Small random models as GGUF files, with the metadata keys that llama.cpp's converter writes for each family."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

from tests.support.quantized import add_tensor, closed

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTEXT = 256


class Family(NamedTuple):
    """How a family is written: its class in transformers, its name in the file, its own sizes, its control tokens."""

    name: str
    architecture: str
    sizes: Mapping[str, Any]
    tokens: Sequence[str]  # the first begins a text, the second ends it
    eos: str
    template: str
    tokenizer: str = "gpt2"
    pre: str = "default"
    rotary_share: float = 1.0  # share of a head's dimensions


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
QWEN = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")

FAMILIES = {
    "llama3": Family(
        "Llama",
        "llama",
        {"head_dim": 32},
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        "<|eot_id|>",
        LLAMA3,
        pre="llama-bpe",
    ),
    "mistral": Family("Mistral", "llama", {"sliding_window": None}, ("<s>", "</s>"), "</s>", MISTRAL, "llama"),
    "qwen2": Family("Qwen2", "qwen2", {}, QWEN, "<|im_end|>", CHATML, pre="qwen2"),
    "qwen3": Family(
        "Qwen3", "qwen3", {"head_dim": 64, "tie_word_embeddings": True}, QWEN, "<|im_end|>", CHATML, pre="qwen2"
    ),
    "gemma3": Family(
        "Gemma3Text",
        "gemma3",
        {
            **{"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "num_hidden_layers": 7},
            "tie_word_embeddings": True,
        },
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        GEMMA,
        "llama",
    ),
    "gemma2": Family(
        "Gemma2",
        "gemma2",
        {
            **{"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "tie_word_embeddings": True},
            **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
        },
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        GEMMA,
        "llama",
    ),
    "phi3": Family(
        "Phi3",
        "phi3",
        {},
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        PHI3,
        "llama",
    ),
    "granite": Family(
        "Granite",
        "granite",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 2.0},
            **{"attention_multiplier": 0.125, "tie_word_embeddings": True},
        },
        QWEN,
        "<|im_end|>",
        CHATML,
        pre="refact",
    ),
    "olmo2": Family("Olmo2", "olmo2", {}, QWEN, "<|im_end|>", CHATML, pre="qwen2"),
    "smollm3": Family(
        "SmolLM3",
        "smollm3",
        {"num_hidden_layers": 5, "tie_word_embeddings": True},
        QWEN,
        "<|im_end|>",
        CHATML,
        pre="smaug-bpe",
    ),
}
MIXTURES = {
    "mixtral": Family(
        "Mixtral", "llama", {"num_local_experts": 4, "head_dim": 32}, ("<s>", "</s>"), "</s>", MISTRAL, "llama"
    ),
    "qwen2moe": Family(
        "Qwen2Moe",
        "qwen2moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
        QWEN,
        "<|im_end|>",
        CHATML,
        pre="qwen2",
    ),
    "qwen3moe": Family(
        "Qwen3Moe",
        "qwen3moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64},
            "norm_topk_prob": True,
        },
        QWEN,
        "<|im_end|>",
        CHATML,
        pre="qwen2",
    ),
    "olmoe": Family("Olmoe", "olmoe", {"num_experts": 6, "num_experts_per_tok": 2}, QWEN, "<|im_end|>", CHATML),
}
_DELTA = {  # layers of the gated delta rule, and one of attention; fewer heads of keys than of values
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
}
HYBRIDS = {
    "qwen35": Family("Qwen3_5Text", "qwen35", _DELTA, QWEN, "<|im_end|>", CHATML, pre="qwen35"),
    "qwen35moe": Family(
        "Qwen3_5MoeText",
        "qwen35moe",
        _DELTA
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
        QWEN,
        "<|im_end|>",
        CHATML,
        pre="qwen35",
    ),
}
EVERY = {**FAMILIES, **MIXTURES, **HYBRIDS}


def random_model(family: str, **changes: Any) -> Any:
    """A float32 model of two layers, or as many as the family needs, whose norms are no ones."""
    kind = EVERY[family]
    vocabulary = len(vocabulary_of(kind))
    sizes: dict[str, Any] = {
        **{"vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT},
        **{"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": False},
        **kind.sizes,
    }
    config = getattr(transformers, f"{kind.name}Config")(**sizes | changes)
    torch.manual_seed(3)
    name = kind.name.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 2 * parameter.shape[-1] ** -0.5 * noise)
    return model


def vocabulary_of(kind: Family) -> list[str]:
    """Control tokens, then a token for each byte, as the kind of tokenizer spells it."""
    if kind.tokenizer == "gpt2":
        return [*kind.tokens, *BYTES, "ab", "bb"]  # "ab" is merged, "bb" is a token alone
    return [*kind.tokens, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]


def write_gguf(
    path: Path,
    family: str,
    model: Any,
    metadata: Mapping[str, Any] | None = None,
    factors: Mapping[str, np.ndarray] | None = None,
    kind: str = "F32",
    roles: Mapping[str, int] | None = None,
    ahead: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write `model` with further metadata (without the architecture's name; None leaves a key out), rotary factors and
    ids of control tokens by role, its matrices as of type `kind`. `ahead`: its multi-token prediction layer, by the
    names of `MtpLayer`."""
    how, config = EVERY[family], model.config
    writer = gguf.GGUFWriter(str(path), how.architecture)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": shared,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if family in ("llama3", "mistral", "mixtral"):
        said |= {"vocab_size": config.vocab_size, "rope.dimension_count": size}
    if family in ("qwen3", "qwen3moe", "gemma2", "gemma3"):
        said |= {"attention.key_length": size, "attention.value_length": size}
    if family in ("gemma2", "gemma3"):
        said |= {"attention.sliding_window": config.sliding_window}
    if family == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        said |= {"rope.freq_base": None, **{cap: getattr(config, cap) for cap in caps}}
    if family == "phi3":
        said |= {
            "rope.dimension_count": int(size * rope["partial_rotary_factor"]),
            "rope.scaling.original_context_length": config.original_max_position_embeddings,
            "attention.sliding_window": config.sliding_window or 0,
        }
    if family == "granite":
        said |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        said |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    if family in HYBRIDS:
        said |= {
            **{"attention.key_length": size, "attention.value_length": size, "ssm.state_size": 16},
            **{"rope.dimension_count": size // 4, "rope.dimension_sections": [2, 1, 1, 0]},
            **{"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64},
            **{"full_attention_interval": 2, "block_count": 2 + bool(ahead), "nextn_predict_layers": int(bool(ahead))},
        }
    if hasattr(config, "num_experts"):
        said |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    if hasattr(config, "moe_intermediate_size"):
        said["expert_feed_forward_length"] = config.moe_intermediate_size
    if hasattr(config, "shared_expert_intermediate_size"):
        said["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    add_fields(writer, how.architecture, {**said, **(metadata or {})})
    _add_tokenizer(writer, how)
    for role, token in (roles or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    for name, values in (factors or {}).items():
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[how.architecture], config.num_hidden_layers + 1)
    layer = f"model.layers.{config.num_hidden_layers}."
    extra = {name.replace("block.", layer): weight for name, weight in (ahead or {}).items()}
    for name, weight in {**model.state_dict(), **extra}.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own, _, part = name.rpartition(".")
        values = weight.float()
        if how.architecture in ("llama", "granite", "smollm3") and own.endswith(("q_proj", "k_proj")):
            count = heads if own.endswith("q_proj") else shared
            values = values.view(count, 2, -1, config.hidden_size).transpose(1, 2).reshape(values.shape)
        if family in ("gemma2", "gemma3") and own.endswith("norm"):
            values = values + 1
        if family in HYBRIDS:
            values = _as_llama_cpp_has_qwen35(name, values, config)
        for own_name, numbers in _named(names.get_name, own, part, values):
            data = numbers.contiguous().numpy()
            add_tensor(writer, own_name, data, "F32" if data.ndim == 1 or "ffn_gate_inp" in own_name else kind)
    return closed(writer, path)


def _as_llama_cpp_has_qwen35(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """A tensor as llama.cpp's converter changes it: heads of values in turn over those of keys, gains with their 1."""
    if "linear_attn" not in name:
        return values + 1 if name.endswith("norm.weight") else values
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def tiled(rows: torch.Tensor, size: int = config.linear_value_head_dim) -> torch.Tensor:
        return rows.unflatten(0, (keys, each, size)).transpose(0, 1).flatten(0, 2)

    if name.endswith("A_log"):
        return -tiled(values, 1).exp()
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tiled(values, 1)
    if name.endswith("in_proj_z.weight"):
        return tiled(values)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * keys * config.linear_key_head_dim
        return torch.cat((values[:before], tiled(values[before:]))).squeeze()
    return tiled(values.T).T if name.endswith("out_proj.weight") else values


_AHEAD = {"join": "eh_proj", "token_norm": "enorm", "state_norm": "hnorm", "norm": "shared_head_norm"}


def _named(name_of: Callable[[str], str | None], own: str, part: str, values: torch.Tensor) -> list[tuple[str, Any]]:
    """A tensor of transformers' as the file names it: experts' gates and ups lie apart, one row is a vector."""
    layer = own.removeprefix("model.layers.").split(".")[0]
    if own.endswith(".shared_expert_gate"):
        return [(f"blk.{layer}.ffn_gate_inp_shexp.weight", values[0])]
    if part == "gate_up_proj":
        gate, up = values.chunk(2, dim=1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if part == "down_proj":
        return [(f"blk.{layer}.ffn_down_exps.weight", values)]
    if part in ("A_log", "dt_bias"):
        return [(f"blk.{layer}.{'ssm_a' if part == 'A_log' else 'ssm_dt.bias'}", values)]
    if own in _AHEAD:
        return [(f"blk.2.nextn.{_AHEAD[own]}.weight", values)]
    return [(f"{name_of(own)}.{part}", values)]


def add_fields(writer: Any, architecture: str, said: Mapping[str, Any]) -> None:
    """Write these keys of an architecture, or general ones, each as of its value's type; None is left out."""
    for key, value in said.items():
        name = key if key.startswith("general.") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)


def _add_tokenizer(writer: Any, how: Family) -> None:
    tokens = vocabulary_of(how)
    control, ids = len(how.tokens), {token: index for index, token in enumerate(tokens)}
    writer.add_tokenizer_model(how.tokenizer)
    writer.add_tokenizer_pre(how.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * control + [6 if token.startswith("<0x") else 1 for token in tokens[control:]])
    if how.tokenizer == "gpt2":
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_add_space_prefix(False)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(ids[how.eos])
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(how.pre != "qwen2")
    writer.add_chat_template(how.template)


def llama3_factors(size: int, base: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What llama.cpp's converter writes as rope_freqs for Llama 3: by how much each frequency is divided."""
    factors = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / size)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
