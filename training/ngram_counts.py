"""Sequences of ids → the best next token of every context, with how far to trust it. Arrays only.

A context's law is interpolated with the law of the context one token shorter:
P_n(w) = (c_n(w) + k · P_{n-1}(w)) / (c_n + k), with P_0 the share of the token. The best token is the
argmax over the tokens seen there, so that ties go to what follows the shorter context more often,
and P_n is its confidence. Knows no files, no text and no models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sampling.drafters.table_keys import grown, keys_of

Array = np.ndarray[Any, Any]
PRIOR = 8.0
"""k: how many sightings the shorter context's law is worth; at 8 the confidence is what is then seen."""


@dataclass(frozen=True)
class Passage:
    """One sequence; the tokens from index `start` on are counted, those before it are context only."""

    ids: Sequence[int]
    start: int = 0


@dataclass(frozen=True)
class Level:
    """All contexts of `size` tokens, sorted by key, no key twice. All arrays are [N]."""

    size: int
    keys: Array  # uint32
    tokens: Array  # int64: the best next token
    confidence: Array  # float64 in (0, 1]
    counts: Array  # int64: sightings of the context
    repeats: Array  # bool: the context one token shorter has the same best token

    def take(self, chosen: Array) -> Level:
        """Only the entries where `chosen` [N] is true."""
        arrays = (self.keys, self.tokens, self.confidence, self.counts, self.repeats)
        return Level(self.size, *(array[chosen] for array in arrays))


def count_levels(passages: Iterable[Passage], max_n: int, prior: float = PRIOR) -> list[Level]:
    """Levels of 1 … `max_n` context tokens, as far as the passages reach."""
    flat, at, reach = _flattened(passages)
    if not len(at):
        return []
    follows = flat[at]
    unigrams = np.bincount(follows)
    below = unigrams[follows] / len(follows)  # P of the shorter context, for each counted token
    likely = np.full(len(at), -1)  # and that context's best token; the tables have no empty context
    states = np.zeros(len(at), dtype=np.uint64)
    levels: list[Level] = []
    for size in range(1, max_n + 1):
        whole = reach >= size
        at, follows, reach, below, likely = at[whole], follows[whole], reach[whole], below[whole], likely[whole]
        if not len(at):
            break
        front = flat[at - size]
        states = grown(states[whole], front)
        level, below, likely = _level(size, states, front, follows, below, likely, prior)
        levels.append(level)
    return levels


def _flattened(passages: Iterable[Passage]) -> tuple[Array, Array, Array]:
    """All ids [T], the index of each counted token [N] and how many tokens of its passage precede it [N]."""
    pieces, places, reaches, offset = [], [], [], 0
    for passage in passages:
        ids = np.asarray(passage.ids, dtype=np.int64)
        inside = np.arange(max(passage.start, 1), len(ids))
        pieces.append(ids)
        places.append(inside + offset)
        reaches.append(inside)
        offset += len(ids)
    none = np.zeros(0, dtype=np.int64)
    return (
        np.concatenate([none, *pieces]),
        np.concatenate([none, *places]),
        np.concatenate([none, *reaches]),
    )


def _level(
    size: int, states: Array, front: Array, follows: Array, below: Array, likely: Array, prior: float
) -> tuple[Level, Array, Array]:
    """One level, and for each counted token [N] its P at this size and its context's best token."""
    _, first, context, totals = np.unique(states, return_index=True, return_inverse=True, return_counts=True)
    vocabulary = int(follows.max()) + 1
    pairs, seen, pair, counts = np.unique(
        context * vocabulary + follows, return_index=True, return_inverse=True, return_counts=True
    )
    owner, token = pairs // vocabulary, pairs % vocabulary
    law = (counts + prior * below[seen]) / (totals[owner] + prior)
    order = np.lexsort((token, -law, owner))
    _, best = np.unique(owner[order], return_index=True)
    chosen = order[best]  # for each context the pair with the largest P
    keys = keys_of(states[first], front[first], size)
    order = np.lexsort((-totals, keys))  # of contexts that share a key the more frequent stays
    keys, unique = np.unique(keys[order], return_index=True)
    kept = order[unique]
    best = token[chosen]  # [contexts]
    repeats = best == likely[first]
    level = Level(size, keys, best[kept], law[chosen][kept], totals[kept], repeats[kept])
    return level, law[pair], best[context]
