"""Whether every tensor of a model is accounted for: none is missing, none of another shape, none that nothing reads.

A loader that fills what is missing, or leaves out what it does not know, gives another model without a word. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
