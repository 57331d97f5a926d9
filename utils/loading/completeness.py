"""Whether every tensor of a model is read, none is missing or of another shape, and its configuration is complete.

A loader that fills in missing values or ignores unknown ones would silently give another model. Knows no files.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from utils.errors import UserError
from utils.objects import HfConfig, Json

_SHOWN = 3


def check_tensors(
    name: str,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
    mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]] = (),
) -> None:
    """Raise UserError with up to three of these tensors, if there are any. `mismatched`: name, shape, expected."""
    mistakes = [
        *(f"it lacks {tensor}" for tensor in sorted(missing)),
        *(f"{tensor} is {(*shape,)}, not {(*expected,)}" for tensor, shape, expected in sorted(mismatched)),
        *(f"it has {tensor}, which nothing reads" for tensor in sorted(unexpected)),
    ]
    if mistakes:
        more = f" (and {len(mistakes) - _SHOWN} more)" if len(mistakes) > _SHOWN else ""
        raise UserError(f"{name} does not fit its configuration: {'; '.join(mistakes[:_SHOWN])}{more}")


def check_loaded(name: str, reported: Json, unexpected: Collection[str] = (), config: HfConfig = None) -> None:
    """Apply :func:`check_tensors` to transformers' `output_loading_info`, with more `unexpected` tensors.

    Multi-token prediction layers are allowed as far as `config` counts them: a drafter reads them.
    """
    surplus = {key for key in reported["unexpected_keys"] if config is None or not _predicts_ahead(key, config)}
    check_tensors(name, reported["missing_keys"], {*surplus, *unexpected}, reported["mismatched_keys"])


def _predicts_ahead(key: str, config: HfConfig) -> bool:
    """Return whether a tensor belongs to one of the layers after the last that `config` counts."""
    text, layer = config.get_text_config(decoder=True), re.match(r"model\.layers\.(\d+)\.", key)
    more = getattr(text, "num_nextn_predict_layers", None) or 0
    return layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < more


_ROPE, _ROPE_BEFORE, _BASE, _SHARE = "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"
# Keys that change no logits, and numbers that change them in the families that read them.
_NO_EFFECT = re.compile(r"drop|init|^(bos|pad|sep|cls|mask)_token_id$|loss|^(use_cache|pretraining_tp)$|^output_router")
_SCALARS = {
    *("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "num_experts_per_tok", "query_pre_attn_scalar"),
    "no_rope_layers",
}


def check_written(name: str, stored: Json, config: HfConfig) -> None:
    """Raise UserError if config.json, `stored`, lacks a key that its release of transformers wrote for the class of
    `config`, or has a number that only other families read.

    A release writes every key of its class; keys of a nested configuration may be left out. Keys that an older file
    lacks came later, with a default that changed nothing. The number of heads, or the nested configuration, is needed
    in files of every age.
    """
    from transformers import PreTrainedConfig

    kind, usual = type(config), config.to_dict()
    if not kind.__module__.startswith("transformers."):
        return  # the model's own code, of any age
    if unread := [key for key, value in stored.items() if key in _SCALARS and value and not hasattr(kind, key)]:
        raise UserError(f"the config.json of {name} says what its family does not read: {', '.join(unread)}")
    spelled = {kind.attribute_map.get(key, key) for key in stored} | stored.keys()
    heads = kind.attribute_map.get("num_attention_heads", "num_attention_heads")
    needed = {heads, *([] if heads in spelled else ["text_config"])} & usual.keys()
    version = str(stored.get("transformers_version"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (5, 0):  # the first release that writes rope_parameters
        own = usual.keys() - PreTrainedConfig().to_dict().keys()
        same = version == usual["transformers_version"]
        needed |= {key for key in own if not _NO_EFFECT.search(key) and (same or usual[key] is not None)}
    needed -= {_ROPE} if spelled & {_ROPE_BEFORE, _BASE} else set()  # the keys of older files
    rope, whole = stored.get(_ROPE) or {}, usual.get(_ROPE) or {}
    parts = [(rope.get(key), part) for key, part in whole.items() if isinstance(part, Mapping)] or [(rope, whole)]
    turned = {key for rope, whole in parts if rope for key in ({_BASE, _SHARE} & whole.keys()) - rope.keys()}
    if missing := sorted((needed | turned) - spelled):
        raise UserError(f"the config.json of {name} does not say {', '.join(missing)}")
