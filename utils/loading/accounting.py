"""Whether every tensor of a model is read, none is missing or of another shape, and its configuration is complete.

A loader that fills in missing values or ignores unknown ones would silently give another model. Knows no files.
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
    """UserError that names up to three of these tensors, if there are any. `mismatched`: name, shape, expected."""
    mistakes = [f"it lacks {tensor}" for tensor in sorted(missing)]
    mistakes += [f"{tensor} is {(*shape,)}, not {(*expected,)}" for tensor, shape, expected in sorted(mismatched)]
    mistakes += [f"it has {tensor}, which nothing reads" for tensor in sorted(unexpected)]
    if mistakes:
        more = f" (and {len(mistakes) - _SHOWN} more)" if len(mistakes) > _SHOWN else ""
        raise UserError(f"{name} does not fit its configuration: {'; '.join(mistakes[:_SHOWN])}{more}")


def check_loaded(name: str, reported: dict[str, Any], unexpected: Collection[str] = (), config: Any = None) -> None:
    """`check_tensors` of transformers' `output_loading_info`, with more `unexpected` tensors.

    The multi-token prediction layers that `config` counts may be there: a drafter reads them.
    """
    surplus = {key for key in reported["unexpected_keys"] if config is None or not _predicts_ahead(key, config)}
    check_tensors(name, reported["missing_keys"], {*surplus, *unexpected}, reported["mismatched_keys"])


def _predicts_ahead(key: str, config: Any) -> bool:
    """Whether a tensor belongs to one of the layers after the last that `config` counts."""
    text, layer = config.get_text_config(decoder=True), re.match(r"model\.layers\.(\d+)\.", key)
    more = getattr(text, "num_nextn_predict_layers", None) or 0
    return layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < more


# Families whose configurations have every key; a missing one would get the default, another model's value.
_COMPLETE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2")
_EPS, _CAPS = "rms_norm_eps", ("attn_logit_softcapping", "final_logit_softcapping")
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
_NEEDED = dict.fromkeys(_COMPLETE, (_EPS,)) | {
    "mistral": (_EPS, "sliding_window"),
    "gemma2": (_EPS, "query_pre_attn_scalar", "sliding_window", *_CAPS),
    "gemma3_text": (_EPS, "query_pre_attn_scalar", "sliding_window", *_CAPS),
    "granite": (_EPS, *_MULTIPLIERS),
    "cohere": ("layer_norm_eps", "logit_scale"),
    "mixtral": (_EPS, "num_experts_per_tok"),
    "qwen3_moe": (_EPS, "num_experts_per_tok", "norm_topk_prob"),
    "smollm3": (_EPS, "no_rope_layers"),
    **{"olmo2": (_EPS,), "phi": ("layer_norm_eps",), "gpt_neox": ("layer_norm_eps",), "stablelm": ("layer_norm_eps",)},
}
_ROPE = ("rope_parameters", "rope_scaling")
_BASE, _KIND, _ORIGINAL = "rope_theta", "rope_type", "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_NEEDED_BEFORE = {  # in files without `rope_parameters`
    **dict.fromkeys(("granite", "cohere", "mixtral", "qwen3_moe", "smollm3", "olmo2"), (_BASE,)),
    **{"phi": (_SHARE, _BASE), "stablelm": (_SHARE, _BASE), "gpt_neox": ("rotary_pct", "rotary_emb_base")},
    "gemma3_text": (_BASE, "rope_local_base_freq"),
}
_UNSCALED = {_BASE, _SHARE, "mrope_section", "mrope_interleaved"}  # go without a kind
_STRETCHES = _UNSCALED | {
    *(_KIND, "type", _ORIGINAL, "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor"),
    *("finetuned", "max_position_embeddings"),
}
_FIRST_WITH_BASE, _FIRST_WITH_POSITIONS = (4, 33), (5, 0)  # releases of transformers that began to write them
_NO_EFFECT = re.compile(r"drop|init|^(bos|pad|sep|cls|mask)_token_id$|loss|^(use_cache|pretraining_tp)$|^output_router")
_SCALARS = {*_CAPS, *_MULTIPLIERS, "logit_scale", "num_experts_per_tok", "query_pre_attn_scalar", "no_rope_layers"}


def check_said(name: str, stored: Mapping[str, Any]) -> None:
    """UserError if config.json, `stored`, lacks a key that no tensor's shape implies."""
    family, positions = str(stored.get("model_type")), _positions(stored)
    needed = (*_NEEDED.get(family, ()), *(() if _ROPE[0] in stored else _NEEDED_BEFORE.get(family, ())))
    missing = [key for key in needed if key not in stored]
    missing += [key for rope in positions for key in _unsaid(rope, stored)]
    unknown = {key for rope in positions for key in rope.keys() - _STRETCHES} if family in _NEEDED else set()
    if family in _COMPLETE:
        if _BASE not in stored and not all(_BASE in rope for rope in positions or [{}]) and not _is_old(stored):
            missing.append(_BASE)
        unknown |= {key for key, value in stored.items() if key.startswith("rope_") and value} - {*_ROPE, _BASE}
    if unknown:
        raise UserError(f"the config.json of {name} says of positions what nothing reads: {', '.join(sorted(unknown))}")
    _refuse(name, missing)


def check_written(name: str, stored: Mapping[str, Any], config: Any) -> None:
    """Raise UserError if config.json, `stored`, lacks a key that its release wrote for the class of `config`, or has a
    number that only other families read.

    A release writes every key of its class; keys of a nested configuration may be left out. Keys that an older file
    lacks came later, with a default that changed nothing. Heads and parts are as old as their families.
    """
    from transformers import PreTrainedConfig

    kind, usual = type(config), config.to_dict()
    if not kind.__module__.startswith("transformers."):
        return  # the model's own code, of any age
    unread = [key for key, value in stored.items() if key in _SCALARS and value and not hasattr(kind, key)]
    if unread:
        raise UserError(f"the config.json of {name} says what its family does not read: {', '.join(unread)}")
    spelled = {kind.attribute_map.get(key, key) for key in stored} | stored.keys()
    heads = kind.attribute_map.get("num_attention_heads", "num_attention_heads")
    needed = {heads, *([] if heads in spelled else ["text_config"])} & usual.keys()
    version = str(stored.get("transformers_version"))
    if _release(version) >= _FIRST_WITH_POSITIONS:
        own = usual.keys() - PreTrainedConfig().to_dict().keys()
        same = version == usual["transformers_version"]
        needed |= {key for key in own if not _NO_EFFECT.search(key) and (same or usual[key] is not None)}
    if spelled & {_ROPE[1], _BASE}:  # where older files have them
        needed.discard(_ROPE[0])
    rope, whole = stored.get(_ROPE[0]) or {}, usual.get(_ROPE[0]) or {}
    parts = [(rope.get(key), part) for key, part in whole.items() if isinstance(part, Mapping)] or [(rope, whole)]
    turned = {key for rope, whole in parts if rope for key in ({_BASE, _SHARE} & whole.keys()) - rope.keys()}
    _refuse(name, sorted((needed | turned) - spelled))


def _refuse(name: str, missing: Collection[str]) -> None:
    if missing:
        raise UserError(f"the config.json of {name} does not say {', '.join(missing)}")


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _positions(stored: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary parameters: one mapping, or one for each kind of layer."""
    ropes = [stored[key] for key in _ROPE if isinstance(stored.get(key), Mapping)]
    return [part for rope in ropes for part in [v for v in rope.values() if isinstance(v, Mapping)] or [rope]]


def _unsaid(rope: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """The missing keys without which another rule would turn positions."""
    kind = rope.get(_KIND, rope.get("type"))
    if kind is None:
        return [_KIND] if rope.keys() - _UNSCALED else []
    lengths = kind in ("llama3", "yarn", "longrope") and _ORIGINAL not in {*rope, *stored}
    return [_ORIGINAL] if lengths else []


def _is_old(stored: Mapping[str, Any]) -> bool:
    """Whether it is a Llama's from before configurations had the base of its positions."""
    release = _release(str(stored.get("transformers_version", "")))
    old = release < _FIRST_WITH_BASE if release else stored.get("vocab_size") == 32000
    return stored.get("model_type") == "llama" and old
