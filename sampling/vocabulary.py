"""Functions over a vocabulary: the largest value, the few largest, values of a reduced vocabulary spread over all ids.

On a CPU numpy finds the largest several times as fast as torch.
Knows no drafts, no samplers and no models.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from sampling.rows import fetched
from utils.kernels.bindings import at_hand, walk, walkable
from utils.logits_processors import check_finite, check_number

MANY = 4096  # ids; for fewer torch is as fast, and a compiled walk gains nothing
_FEW = 16  # largest values that a compiled walk finds
_PARALLEL = 1 << 19  # values; for fewer waking a thread takes longer than its share of the work
_DTYPES = (torch.float32, torch.float64)  # numpy has them too, and compares them fast


def largest(values: Tensor) -> Tensor:
    """Return the index [...] of the largest of values [..., V], the first of equal ones."""
    if values.device.type != "cpu" or values.dtype not in _DTYPES or values.shape[-1] < MANY:
        return values.argmax(dim=-1)
    return torch.from_numpy(np.asarray(values.detach().numpy().argmax(axis=-1)))


def best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (values, indices) [..., count] of the largest of values [..., V], the largest first; all if V < count."""
    return values.topk(min(count, values.shape[-1]), dim=-1)


def likeliest_of_each(logits: Tensor, count: int) -> list[dict[int, float]]:
    """Return the ids of the `count` largest (up to 16) of each of logits [M, V], the largest first, with their softmax;
    from a device by one transfer.

    LogitsError for NaN, +inf or nothing but -inf.
    """
    rows, size = logits.shape
    if size >= _FEW and at_hand() and walkable(logits):
        address, step = logits.data_ptr(), 4 * logits.stride(0)
        return [likeliest_at(address + step * row, size, count) for row in range(rows)]
    logits = logits.float()
    values, indices = logits.topk(min(count, size), dim=-1)
    probs, ids = fetched((values - logits.logsumexp(dim=-1, keepdim=True)).exp(), indices)
    check_finite(probs)
    return [dict(zip(*row, strict=True)) for row in zip(ids.long().tolist(), probs.tolist(), strict=True)]


def likeliest_at(address: int, size: int, count: int) -> dict[int, float]:
    """Return :func:`likeliest_of_each` for one row of logits at an address; `size` is a multiple of 16."""
    seen = walk(address, size, count)
    check_number(seen.mass)
    ids, values = seen.ids[:count], seen.values[:count]
    pairs = zip(ids, values, strict=True)
    return {token: math.exp(value - values[0]) / seen.mass for token, value in pairs if token >= 0}


@contextmanager
def single_thread_if_small(values: int) -> Iterator[None]:
    """Run torch in one thread while it works on few values; the results have the same bits."""
    threads = torch.get_num_threads() if values < _PARALLEL else 1
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def spread(values: Tensor, ids: Tensor | None, size: int, fill: float) -> Tensor:
    """Spread values [..., n] of the ids [n] over [..., size] with `fill` elsewhere; ids None returns `values`."""
    return values if ids is None else values.new_full((*values.shape[:-1], size), fill).index_copy_(-1, ids, values)
