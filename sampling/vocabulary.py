"""What is done over a whole vocabulary or a reduced one: the largest and the few largest, the chances of a few, values
for a few ids laid out as values for all.

As `argmax` and `topk` find them, several times as fast on a CPU, where numpy looks for the largest faster than torch.
Knows shapes only: no distributions and no models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from utils.kernels.bindings import at_hand
from utils.logits_processors import check_finite, check_number

MANY = 4096  # ids; of fewer torch's own way is as fast, and a compiled walk gains nothing
_FEW = 16  # of more `topk` is faster
_PARTED = 1 << 19  # of fewer values work is not shared out: to wake a thread takes longer, on a busy machine far longer
_KINDS = (torch.float32, torch.float64)  # that numpy knows too, and compares fast


def largest(values: Tensor) -> Tensor:
    """The place [...] of the largest of values [..., V], the first of equal ones."""
    if not _quick(values):
        return values.argmax(dim=-1)
    return torch.from_numpy(np.asarray(values.detach().numpy().argmax(axis=-1)))


def best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, places) [..., count] of the largest of values [..., V], the largest first; all where V is less."""
    if not _quick(values) or count > _FEW:
        return values.topk(min(count, values.shape[-1]), dim=-1)
    shape = (*values.shape[:-1], count)
    left = values.detach().numpy().reshape(-1, values.shape[-1]).copy()
    rows = np.arange(len(left))[:, None]
    found, places = np.empty((len(left), count), left.dtype), np.empty((len(left), count), np.int64)
    for turn in range(count):
        place = left.argmax(axis=-1)[:, None]
        places[:, turn : turn + 1], found[:, turn : turn + 1] = place, left[rows, place]
        left[rows, place] = -np.inf
    if np.isneginf(found).any():  # fewer are possible: those that were found look like the others
        return values.topk(count, dim=-1)
    return torch.from_numpy(found.reshape(shape)), torch.from_numpy(places.reshape(shape))


def likeliest(logits: Tensor, count: int) -> dict[int, float]:
    """The places of the `count` largest (up to 16) of float32 logits [V], the largest first, and their softmax.
    LogitsError for NaN, +inf or nothing but -inf."""
    if len(logits) >= _FEW and at_hand():
        from utils.kernels.walk import fits, walk

        if fits(logits):
            seen = walk(logits.data_ptr(), len(logits), count)
            check_number(seen.mass)
            known = [
                (one, value - seen.values[0]) for one, value in zip(seen.ids, seen.values, strict=True) if one >= 0
            ]
            return {one: math.exp(less) / seen.mass for one, less in known}
    values, places = logits.topk(min(count, len(logits)))
    check_finite(values[:1])  # NaN and +inf come first
    return dict(zip(places.tolist(), chances_of(logits.cpu().numpy(), places.cpu().numpy()), strict=True))


@contextmanager
def together(values: int) -> Iterator[None]:
    """Torch works on so many values here, by one thread where they are few; bits do not depend on it."""
    threads = torch.get_num_threads() if values < _PARTED else 1
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def gap_of(values: np.ndarray) -> float:
    """What the largest of values [V] is ahead of the next one."""
    place = int(values.argmax())
    rest = [part.max() for part in (values[:place], values[place + 1 :]) if len(part)]
    return float(values[place] - max(rest, default=values[place]))


def chances_of(values: np.ndarray, ids: Sequence[int] | np.ndarray) -> list[float]:
    """softmax(values [V]) of these ids alone."""
    top = values.max()
    found: list[float] = (np.exp(values[ids] - top) / np.exp(values - top).sum()).tolist()
    return found


def _quick(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype in _KINDS and values.shape[-1] >= MANY


def spread(values: Tensor, ids: Tensor | None, size: int, fill: float) -> Tensor:
    """values [..., n] of the ids [n] → [..., size] with `fill` elsewhere; ids None = `values` as they are."""
    if ids is None:
        return values
    return values.new_full((*values.shape[:-1], size), fill).index_copy_(-1, ids, values)
