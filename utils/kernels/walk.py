"""What a round must know of one position's logits, in one call (walk.c): the largest few, what the softmax divides by,
and which id a draw with known noise takes; and how large p / u is for every id.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from torch import Tensor

from utils.kernels.bindings import Walk as _Record
from utils.kernels.bindings import kernels

WIDTH = 16  # logits that are read at a time


class Walk(NamedTuple):
    """Of one position: the largest logits and their ids, Σ e^(logit − largest) at temperature 1 and at the draw's, and
    the id drawn, −1 where that is not decided here."""

    ids: list[int]
    values: list[float]
    mass: float
    tempered: float
    drawn: int


def fits(logits: Tensor) -> bool:
    """Whether a walk reads logits [..., V]."""
    plain = logits.device.type == "cpu" and logits.element_size() == 4 and logits.stride(-1) == 1
    return plain and logits.is_floating_point() and logits.shape[-1] % WIDTH == 0


def walk(address: int, count: int, most: int, state: int | None = None, temperature: float = 1.0) -> Walk:
    """Over `count` float32 logits at an address, a multiple of 16: the `most` largest, up to 16, and with a (signed)
    `state` of the noise the draw at this temperature, without one the largest. `mass` is NaN where a logit is, where
    one is infinite, and where nothing is possible."""
    w = _Record(address, count, most, state is not None, state or 0, inverse=1 / temperature)
    kernels().walk(ctypes.addressof(w))
    return Walk(w.ids[:most], w.values[:most], w.mass, w.tempered, w.drawn)


def over_noise(state: int, probs: Tensor) -> np.ndarray:
    """[V] float32: probs [V] (contiguous float32) over the uniform numbers of the stream in this (signed) state."""
    result = np.empty(len(probs), np.float32)
    kernels().over_noise(state, len(probs), probs.data_ptr(), result.ctypes.data)
    return result
