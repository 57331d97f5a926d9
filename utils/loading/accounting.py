"""Whether every tensor of a model is accounted for: none is missing, none of another shape, none that nothing reads.

A loader that fills what is missing, or leaves out what it does not know, gives another model without a word. Knows no
files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from utils.errors import UserError

_SHOWN = 3


def check_tensors(
    name: str,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
    mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]] = (),
) -> None:
    """UserError that names up to three tensors, unless there are none to name. `mismatched`: name, shape, expected."""
    said = [f"it lacks {tensor}" for tensor in sorted(missing)]
    said += [f"{tensor} is {(*shape,)}, not {(*expected,)}" for tensor, shape, expected in sorted(mismatched)]
    said += [f"it has {tensor}, which nothing reads" for tensor in sorted(unexpected)]
    if said:
        more = f" (and {len(said) - _SHOWN} more)" if len(said) > _SHOWN else ""
        raise UserError(f"{name} does not fit its configuration: {'; '.join(said[:_SHOWN])}{more}")


def check_loaded(name: str, reported: dict[str, Any], unexpected: Collection[str] = ()) -> None:
    """The same from what transformers' `output_loading_info` reports; `unexpected` names more that nothing reads."""
    check_tensors(
        name, reported["missing_keys"], {*reported["unexpected_keys"], *unexpected}, reported["mismatched_keys"]
    )


# Of these families a configuration says everything; what is left out would be a default's, another model's value.
_COMPLETE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2")
_EPS = "rms_norm_eps"
_NEEDED = dict.fromkeys(_COMPLETE, (_EPS,)) | {
    "mistral": (_EPS, "sliding_window"),
    "gemma2": (_EPS, "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": (_EPS, "query_pre_attn_scalar", "sliding_window"),
    "granite": (_EPS, "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    "cohere": ("layer_norm_eps", "logit_scale"),
    "mixtral": (_EPS, "num_experts_per_tok"),
    "qwen3_moe": (_EPS, "num_experts_per_tok", "norm_topk_prob"),
    "smollm3": (_EPS, "no_rope_layers"),
    **{"olmo2": (_EPS,), "phi": ("layer_norm_eps",), "gpt_neox": ("layer_norm_eps",), "stablelm": ("layer_norm_eps",)},
}
_ROPE = ("rope_parameters", "rope_scaling")
_BASE, _KIND, _ORIGINAL = "rope_theta", "rope_type", "original_max_position_embeddings"
_UNSCALED = {_BASE, "partial_rotary_factor", "mrope_section", "mrope_interleaved"}  # go without a kind
_STRETCHES = _UNSCALED | {
    *(_KIND, "type", _ORIGINAL, "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor"),
    *("finetuned", "max_position_embeddings"),
}
_FIRST_WITH_BASE = (4, 33)  # the release of transformers that began to write a Llama's


def check_said(name: str, stored: Mapping[str, Any]) -> None:
    """UserError if config.json, `stored`, leaves out what no tensor's shape tells."""
    family, positions = stored.get("model_type"), _positions(stored)
    missing = [key for key in _NEEDED.get(str(family), ()) if key not in stored]
    missing += [key for rope in positions for key in _unsaid(rope, stored)]
    if family in _COMPLETE:
        if _BASE not in stored and not all(_BASE in rope for rope in positions or [{}]) and not _is_old(stored):
            missing.append(_BASE)
        beside = {key for key, value in stored.items() if key.startswith("rope_") and value} - {*_ROPE, _BASE}
        if unknown := sorted(beside.union(*(rope.keys() - _STRETCHES for rope in positions))):
            raise UserError(f"the config.json of {name} says of positions what nothing reads: {', '.join(unknown)}")
    if missing:
        raise UserError(f"the config.json of {name} does not say {', '.join(missing)}")


def _positions(stored: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How positions turn: one mapping, or one for each kind of layer."""
    said = [stored[key] for key in _ROPE if isinstance(stored.get(key), Mapping)]
    return [part for rope in said for part in [v for v in rope.values() if isinstance(v, Mapping)] or [rope]]


def _unsaid(rope: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """The keys without which positions would be turned by another rule."""
    kind = rope.get(_KIND, rope.get("type"))
    if kind is None:
        return [_KIND] if rope.keys() - _UNSCALED else []
    lengths = kind in ("llama3", "yarn", "longrope") and _ORIGINAL not in {*rope, *stored}
    return [_ORIGINAL] if lengths else []


def _is_old(stored: Mapping[str, Any]) -> bool:
    """Whether it is a Llama's from before the base of its positions was written."""
    release = tuple(map(int, re.findall(r"\d+", str(stored.get("transformers_version", "")))[:2]))
    old = release < _FIRST_WITH_BASE if release else stored.get("vocab_size") == 32000
    return stored.get("model_type") == "llama" and old
