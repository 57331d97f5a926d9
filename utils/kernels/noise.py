"""How large p / u is for every id of a vocabulary, u being the SplitMix64 stream of a draw, in one walk. Imports numba.

The stream is defined in sampling/sampler.py, which also decides the draw; these quotients only say between which ids.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import float32, float64, uint64
from torch import Tensor

from utils.kernels.compiler import Entry
from utils.kernels.vectors import compiled, get_float, put_float

_GOLDEN, _FIRST, _SECOND = uint64(0x9E3779B97F4A7C15), uint64(0xBF58476D1CE4E5B9), uint64(0x94D049BB133111EB)


@compiled
def uniform(state: int, place: int) -> Any:
    """Number `place` of the stream in this state, in float64."""
    word = uint64(state) + uint64(place + 1) * _GOLDEN
    word = (word ^ (word >> uint64(30))) * _FIRST
    word = (word ^ (word >> uint64(27))) * _SECOND
    word = (word ^ (word >> uint64(31))) >> uint64(11)
    return (float64(word) + 0.5) * 2.0**-53


def _over_noise(state: int, count: int, probs: int, result: int) -> None:
    for place in range(count):
        put_float(result + 4 * place, get_float(probs + 4 * place) / float32(uniform(state, place)))


_entry = Entry(_over_noise, 4)
_kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def over_noise(state: int, probs: Tensor) -> np.ndarray:
    """[V] float32: probs [V] (contiguous float32) over the uniform numbers of the stream in this (signed) state."""
    result = np.empty(len(probs), np.float32)
    _kind(_entry.address)(state, len(probs), probs.data_ptr(), result.ctypes.data)
    return result
