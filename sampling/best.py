"""The largest of many, and the few largest: as `argmax` and `topk` find them, several times as fast over a vocabulary
on a CPU. Knows no laws.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 256
_PIECES = 16  # of fewer, or for more than so many, all is sought through at once


def largest(values: Tensor) -> Tensor:
    """The place [...] of the largest of values [..., V], the first of equal ones: it is looked for in that piece of V
    whose own largest is largest."""
    size = values.shape[-1]
    if size < _PIECES * _PIECE or values.device.type != "cpu":
        return values.argmax(dim=-1)
    whole = size - size % _PIECE
    tops = values[..., :whole].unflatten(-1, (-1, _PIECE)).amax(dim=-1)
    if whole < size:
        tops = torch.cat([tops, values[..., whole:].amax(dim=-1, keepdim=True)], dim=-1)
    begin: Tensor = tops.argmax(dim=-1, keepdim=True) * _PIECE
    begin = begin.clamp(max=size - _PIECE)  # a short last piece looks back
    inside = values.gather(-1, begin + torch.arange(_PIECE)).argmax(dim=-1)
    return begin.squeeze(-1) + inside


def best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, places) [..., count] of the largest of values [..., V], the largest first.

    The largest lie in those pieces of V whose own largest is largest, and in the rest behind the last whole piece.
    """
    size = values.shape[-1]
    if size < _PIECES * _PIECE or count > _PIECES or values.device.type != "cpu":
        found = values.topk(min(count, size), dim=-1)
        return found.values, found.indices
    whole = size - size % _PIECE
    tops = values[..., :whole].unflatten(-1, (-1, _PIECE)).amax(dim=-1)
    begins = tops.topk(count, dim=-1).indices * _PIECE
    inside = (begins[..., None] + torch.arange(_PIECE)).flatten(-2)
    places = torch.cat([inside, torch.arange(whole, size).expand(*values.shape[:-1], -1)], dim=-1)
    found = values.gather(-1, places).topk(count, dim=-1)
    return found.values, places.gather(-1, found.indices)
