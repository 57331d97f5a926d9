"""Whether every tensor of a model is accounted for: none is missing, none of another shape, none that nothing reads.

A loader that fills what is missing, or leaves out what it does not know, gives another model without a word. Knows no
files.
"""

from __future__ import annotations

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
_POSITIONS = ("rope_parameters", "rope_theta", "rope_scaling")


def check_said(name: str, stored: Mapping[str, Any]) -> None:
    """UserError if config.json, `stored`, leaves out what no tensor's shape tells."""
    family = stored.get("model_type")
    if family not in _COMPLETE:
        return
    needed = ["rms_norm_eps", *(["sliding_window"] if family == "mistral" else [])]
    # The first Llamas, of 32000 tokens, are older than the keys of positions.
    if not stored.keys() & {*_POSITIONS} and (family, stored.get("vocab_size")) != ("llama", 32000):
        needed.append(_POSITIONS[0])
    if missing := [key for key in needed if key not in stored]:
        raise UserError(f"the config.json of {name} does not say {', '.join(missing)}")
