"""Values for a few ids laid out as values for all ids. Knows shapes only."""

from __future__ import annotations

from torch import Tensor


def spread(values: Tensor, ids: Tensor | None, size: int, fill: float) -> Tensor:
    """values [..., n] of the ids [n] → [..., size] with `fill` elsewhere; ids None = `values` as they are."""
    if ids is None:
        return values
    return values.new_full((*values.shape[:-1], size), fill).index_copy_(-1, ids, values)
