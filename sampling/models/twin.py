"""A small random model with the arithmetic of a large one: its configuration with a layer of each kind, few heads,
narrow widths, and windows of a few tokens. What the twin computes wrongly the model computes wrongly too, and to try it
takes milliseconds. Knows transformers' configurations; knows no decoding.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import gcd
from typing import Any

import torch

from utils.loading.loaded import CONTEXTS, context_of

VOCABULARY, WINDOW, FEW = 96, 12, 16
LARGEST = 150_000_000  # parameters of a twin
_LAYERS = re.compile(
    r"((conf|t2u|speech)_)?(num_)?((en|de)coder_|hidden_)?layers(_per_stack)?|n_layers?|num_blocks|depth"
)
_HEADS = re.compile(
    r"(swa_|(num_)?(en|de)coder_)?(num_)?(attention_|key_value_|kv_)?heads|n_heads?|kv_n_heads"
    r"|mamba_(n|num)_heads|n_mamba_heads"
)
_GROUPS = re.compile(r"(mamba_)?n_?groups")  # that the heads of a recurrent layer share
_WIDTHS = re.compile(
    r"(attention_)?hidden_size|d_model|n_embd|dim_model|emb_dim|embedding_size|word_embed_proj_dim|lru_width|mamba_d_ssm"
)
_INNER = re.compile(r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dff|dim_ff|n_inner|.*ffn_hidden_size")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|zero_expert_num")
_WINDOWS = re.compile(  # lengths beyond which a model looks back otherwise
    r"sliding_window(_size)?|window_size|attention_chunk_size|local_attention(_window_len)?|attention_window"
    r"|(keep|local)_window_size|local_radius|floor_scale|log_scaling_n_floor|rel_extent|index_topk|index_block_size"
)
_FROM_BELOW = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
)  # that many layers are another kind
_FROM_ABOVE = ("num_kv_shared_layers",)
_NOT_SIZES = ("label2id", "id2label", "quantization_config")


def twin(model: Any, config: Any) -> Any:
    """A small model of the class of `model` and of a :func:`small` configuration: random float32 weights, on the CPU.

    Raises whatever transformers raises for a configuration that it does not take.
    """
    attention = "eager" if model.config._attn_implementation == "eager" else "sdpa"
    given = {"dtype": torch.float32, "attn_implementation": attention}
    with torch.device("meta"):
        size = sum(weight.numel() for weight in type(model)._from_config(config, **given).parameters())
    if size > LARGEST:
        raise ValueError(f"its small twin would have {size / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _spread(type(model)._from_config(config, **given)).eval()


@torch.no_grad()
def _spread(model: Any) -> Any:
    """`model` with weights so large that every token seen moves every logit."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return model


def small(config: Any, narrow: bool = True) -> Any:
    """`config` with few layers, a small vocabulary and short windows; if `narrow` also with few heads.

    Raises whatever transformers raises for a configuration that it does not take.
    """
    sizes = _small(config.to_dict(), windows(config), narrow)
    for name in ("quantization_config", "transformers_version"):
        sizes.pop(name, None)
    return type(config).from_dict(sizes)


def windows(config: Any) -> list[int]:
    """The lengths in tokens, within its context, beyond which a model of `config` looks back otherwise."""
    text = config.get_text_config(decoder=True)
    sizes = {size for name, size in text.to_dict().items() if _WINDOWS.fullmatch(name) and _counts(size)}
    return [size for size in sizes if size < context_of(text)]


def _counts(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _small(sizes: dict[str, Any], short: list[int], narrow: bool) -> dict[str, Any]:
    found = {**sizes, **(_few_heads(sizes) if narrow else {})}
    for name, size in sizes.items():
        if isinstance(size, dict) and name not in _NOT_SIZES:
            text = re.search("text|decoder|encoder$|attn_config|ffn_config", name) and "audio" not in name
            found[name] = _small(size, short, narrow and bool(text))
        elif re.search("token_(id|index)$", name):
            found[name] = _small_ids(size)
        elif narrow and _INNER.fullmatch(name):
            if size is not None or name in ("n_inner", "intermediate_size"):
                found[name] = [4 * FEW] * len(size) if isinstance(size, list) else 4 * FEW
        elif not _counts(size):
            continue
        elif re.fullmatch("(src_|tgt_|decoder_)?vocab_size(_per_layer_input)?|n_words", name):
            found[name] = VOCABULARY
        elif name in (*CONTEXTS, "original_max_position_embeddings"):
            found[name] = max(size, 4 * FEW)
        elif _EXPERTS.fullmatch(name):
            found[name] = min(size, FEW)
        elif name == "index_topk_blocks":
            found[name] = 1
        elif _WINDOWS.fullmatch(name) and size in short:
            found[name] = WINDOW
    return found | _few_layers(found)


def _small_ids(ids: Any) -> Any:
    if isinstance(ids, list):
        return [_small_ids(token) for token in ids]
    return min(ids, VOCABULARY - 1) if isinstance(ids, int) else ids


def _few_heads(sizes: dict[str, Any]) -> dict[str, Any]:
    """Heads and widths divided by the same number, so that the size of a head stays."""
    heads = {name: size for name, size in sizes.items() if _HEADS.fullmatch(name) and _counts(size) and size > 1}
    if not heads:
        return {}
    common, most = gcd(*heads.values()), max(heads.values())
    several = [number for number in range(2, most // 4 + 1) if common % number == 0]
    by = max(several, default=common if most > FEW else 1)
    widths = {
        name: size for name, size in sizes.items() if _WIDTHS.fullmatch(name) and _counts(size) and size % by == 0
    }
    fewer = {name: size // by for name, size in {**heads, **widths}.items()}
    share = gcd(*(fewer[name] for name in heads if "mamba" in name or name == "num_heads"))
    groups = {name: gcd(size, share) for name, size in sizes.items() if _GROUPS.fullmatch(name) and _counts(size)}
    return fewer | groups


def _few_layers(sizes: dict[str, Any]) -> dict[str, Any]:
    """A layer of each kind, at least two; whatever says something of single layers says it of those."""
    counts = {name: size for name, size in sizes.items() if _LAYERS.fullmatch(name) and _counts(size)}
    if kinds := sizes.get("attention_types"):  # GPT-Neo's
        return {"attention_types": [[kinds[0][0], 1]], "attention_layers": kinds[0][0], "num_layers": len(kinds[0][0])}
    if not counts:
        return {}
    total = max(counts.values())
    if pattern := sizes.get("block_types"):  # RecurrentGemma's, repeated
        return dict.fromkeys(counts, len(pattern))
    if sizes.get("attn_layer_period"):  # Jamba's
        return {**dict.fromkeys(counts, 2), "attn_layer_period": 2, "attn_layer_offset": 1}
    lists = {name: each for name, each in sizes.items() if isinstance(each, list)}
    indices = {
        name: each
        for name, each in lists.items()
        if re.search("(layers|idxs|layer_ids)$", name)
        and all(isinstance(layer, int) for layer in each)
        and all(a < b for a, b in pairwise([-1, *each]))
    }
    listed = {name: each for name, each in lists.items() if name not in indices and len(each) == total > 2}
    single = {int(layer): change for layer, change in (sizes.get("per_layer_config") or {}).items()}
    bounds = {name: sizes[name] for name in _FROM_BELOW + _FROM_ABOVE if sizes.get(name)}
    layers: dict[str, int] = {}
    for layer in range(total):
        beyond = [layer < count if name in _FROM_BELOW else layer >= total - count for name, count in bounds.items()]
        kind = [[each[layer] for each in listed.values()], [layer in each for each in indices.values()], beyond]
        layers.setdefault(repr([*kind, single.get(layer)]), layer)
    kept = sorted(layers.values()) if len(layers) > 1 else list(range(min(total, 2)))
    found: dict[str, Any] = {name: min(size, len(kept)) for name, size in counts.items()}
    found |= {name: [each[layer] for layer in kept] for name, each in listed.items()}
    found |= {name: [kept.index(layer) for layer in each if layer in kept] for name, each in indices.items()}
    for name, count in bounds.items():
        found[name] = sum(layer < count if name in _FROM_BELOW else layer >= total - count for layer in kept)
    if single:
        found["per_layer_config"] = {str(kept.index(layer)): single[layer] for layer in kept if layer in single}
    return found
