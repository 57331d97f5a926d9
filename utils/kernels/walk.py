"""What a round must know of one position's logits, in one call: the largest few, what the softmax divides by, and which
id a draw with known noise takes; and how large p / u is for every id. Imports numba.

The noise is the SplitMix64 stream of sampling/sampler.py, the draw the largest p / E of its exponential race. Here p
and E are rounded otherwise than there, so a race that two ids lead within `NEAR` of each other is left undecided.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64, uint64
from torch import Tensor

from utils.kernels.compiler import Entry
from utils.kernels.vectors import (
    WIDTH,
    add,
    compiled,
    div,
    exponential,
    get_float,
    larger,
    largest,
    load,
    mul,
    put_float,
    record_at,
    splat,
    store,
    sub,
    total,
)

_GOLDEN, _FIRST, _SECOND = uint64(0x9E3779B97F4A7C15), uint64(0xBF58476D1CE4E5B9), uint64(0x94D049BB133111EB)
MOST = 16  # of the largest that are told
NEAR = 1e-4  # quotients so near each other, relatively, are told apart by the sampler itself
_BLOCK, _RIVALS = 256, 256  # ids whose noise is made at a time; that may still win a race
_ABOVE_ALL = float32(1 - 2.0**-24)  # no uniform number is larger, in 32 bits


class _Record(ctypes.Structure):
    """What a walk is told and tells, and what it works in."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("logits", "count", "most", "draws", "state", "drawn", "rival_count")),
        *((name, ctypes.c_float) for name in ("inverse", "mass", "tempered", "unused")),
        ("ids", ctypes.c_int64 * MOST),
        ("values", ctypes.c_float * MOST),
        ("rivals", ctypes.c_int64 * _RIVALS),
        ("quotients", ctypes.c_float * _BLOCK),
        ("weights", ctypes.c_float * _BLOCK),
    )


_walk_at = record_at(np.dtype(_Record))
_QUOTIENTS, _WEIGHTS = _Record.quotients.offset, _Record.weights.offset


@compiled
def mixed(word: Any) -> Any:
    """The number in float64 that a word of the stream is."""
    word = (word ^ (word >> uint64(30))) * _FIRST
    word = (word ^ (word >> uint64(27))) * _SECOND
    word = (word ^ (word >> uint64(31))) >> uint64(11)
    return (float64(word) + 0.5) * 2.0**-53


@compiled
def uniform(state: int, place: int) -> Any:
    """Number `place` of the stream in this state."""
    return mixed(uint64(state) + uint64(place + 1) * _GOLDEN)


@compiled
def find_largest(w: Any) -> None:
    """The largest, the first of equal ones before the others; id −1 where there are fewer."""
    for place in range(w.most):
        w.ids[place], w.values[place] = -1, -np.inf
    least, last = float32(-np.inf), w.most - 1
    for start in range(0, w.count, _BLOCK):
        size = min(_BLOCK, w.count - start)
        top = load(w.logits + 4 * start)
        for at in range(4 * WIDTH, 4 * size, 4 * WIDTH):
            top = larger(top, load(w.logits + 4 * start + at))
        if largest(top) <= least:  # not so for NaN
            continue
        for number in range(start, start + size):
            value = get_float(w.logits + 4 * number)
            if value > least:
                place = last
                while place > 0 and w.values[place - 1] < value:
                    w.values[place], w.ids[place] = w.values[place - 1], w.ids[place - 1]
                    place -= 1
                w.values[place], w.ids[place] = value, number
                least = w.values[last]


@compiled
def add_up(w: Any) -> None:
    """Σ e to the power of each logit less the largest."""
    top, mass = splat(w.values[0]), splat(float32(0.0))
    for start in range(0, w.count, WIDTH):
        mass = add(mass, exponential(sub(load(w.logits + 4 * start), top)))
    w.mass = total(mass)


@compiled
def collect(w: Any, quotients: int, weights: int) -> None:
    """The same at temperature 1 and at the draw's; and who may win the race: of p / E it is enough for most ids that
    u < E < u / (1 − u)."""
    top, inverse = splat(w.values[0]), splat(w.inverse)
    mass, tempered = splat(float32(0.0)), splat(float32(0.0))
    best, found, word = float32(0.0), 0, uint64(w.state)
    for start in range(0, w.count, _BLOCK):
        size = min(_BLOCK, w.count - start)
        for at in range(0, 4 * size, 4 * WIDTH):
            less = sub(load(w.logits + 4 * start + at), top)
            weight = exponential(mul(less, inverse))
            mass, tempered = add(mass, exponential(less)), add(tempered, weight)
            store(weights + at, weight)
        for place in range(size):
            word += _GOLDEN
            w.quotients[place] = float32(mixed(word))  # by an address LLVM would write them one by one
        most, sure = splat(float32(0.0)), splat(best)
        for at in range(0, 4 * size, 4 * WIDTH):
            weight = load(weights + at)
            quotient = div(weight, load(quotients + at))
            store(quotients + at, quotient)
            most, sure = larger(most, quotient), larger(sure, sub(quotient, weight))
        best = largest(sure)
        bound = best * float32(1 - NEAR)
        if largest(most) < bound:
            continue
        for place in range(size):
            if get_float(quotients + 4 * place) >= bound and found < _RIVALS:
                w.rivals[found] = start + place
                found += 1
    w.mass, w.tempered, w.rival_count = total(mass), total(tempered), found


@compiled
def decide(w: Any) -> None:
    """The race among those who may win it; −1 where two are too near each other."""
    w.drawn = -1
    first = second = -1.0
    for at in range(w.rival_count):
        number = w.rivals[at]
        noise = min(float32(uniform(w.state, number)), _ABOVE_ALL)
        less = float64(get_float(w.logits + 4 * number)) - float64(w.values[0])
        quotient = math.exp(less * float64(w.inverse)) / -math.log1p(-float64(noise))
        if quotient > first:
            first, second, w.drawn = quotient, first, number
        elif quotient > second:
            second = quotient
    if second >= first * (1 - NEAR) or w.rival_count == _RIVALS:
        w.drawn = -1


def _walk(record: int) -> None:
    w = _walk_at(record)
    find_largest(w)
    if w.ids[0] < 0:
        w.mass, w.drawn = float32(np.nan), -1
        return
    w.drawn = w.ids[0]
    if not w.draws:
        add_up(w)
        return
    collect(w, record + _QUOTIENTS, record + _WEIGHTS)
    if w.mass == w.mass:
        decide(w)


walk_entry = Entry(_walk)


@cache
def _function(address: int, arguments: int) -> Any:
    """The compiled function at an address, to be called from Python."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(address)


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
    _function(walk_entry.address, 1)(ctypes.addressof(w))
    return Walk(w.ids[:most], w.values[:most], w.mass, w.tempered, w.drawn)


def _over_noise(state: int, count: int, probs: int, result: int) -> None:
    for place in range(count):
        put_float(result + 4 * place, get_float(probs + 4 * place) / float32(uniform(state, place)))


over_entry = Entry(_over_noise, 4)


def over_noise(state: int, probs: Tensor) -> np.ndarray:
    """[V] float32: probs [V] (contiguous float32) over the uniform numbers of the stream in this (signed) state."""
    result = np.empty(len(probs), np.float32)
    _function(over_entry.address, 4)(state, len(probs), probs.data_ptr(), result.ctypes.data)
    return result
