"""Contexts as 32-bit keys: the hash that static n-gram tables are built and looked up by.

One definition for plain integers (a look-up) and for numpy arrays (the builder). A context of one
token is its own key; longer ones are hashed, so two of them share a key with probability 2⁻³².
"""

from __future__ import annotations

from typing import Any

import numpy as np

_PRIME = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def suffix_keys(tail: list[int], sizes: int) -> list[int]:
    """Keys of the last 1, 2 … tokens of `tail`, as many as it has and at most `sizes`."""
    keys: list[int] = []
    state = 0
    for token in tail[: -sizes - 1 : -1]:
        state = (state + token + 1) * _PRIME & _WORD
        state ^= state >> 32
        keys.append((state & 0xFFFFFFFF) if keys else token)
    return keys


def grown(states: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Hash states [N] uint64 of contexts made one token longer at their front: tokens [N]."""
    states = (states + tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_PRIME)
    mixed: np.ndarray[Any, Any] = states ^ (states >> np.uint64(32))
    return mixed


def keys_of(states: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Keys [N] uint32 of contexts of `size` tokens: their hash, or for size 1 their only token."""
    return tokens.astype(np.uint32) if size == 1 else (states & np.uint64(0xFFFFFFFF)).astype(np.uint32)
