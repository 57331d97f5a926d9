"""Sequences of ids → the best next tokens of every context, with how far to trust them. Arrays only.

A context's law is interpolated with the law of the context one token shorter:
P_n(w) = (c_n(w) + k · P_{n-1}(w)) / (c_n + k), with P_0 the share of the token. The best tokens are those with
the largest P_n of the tokens seen there, so that ties go to what follows the shorter context more often,
and P_n is their confidence. Knows no files, no text and no models.
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
LEAST = 0.03
"""A further token of a context is kept from this confidence on: less likely ones are never drafted."""


@dataclass(frozen=True)
class Passage:
    """One sequence; the tokens from index `start` on are counted, those before it are context only."""

    ids: Sequence[int]
    start: int = 0


@dataclass(frozen=True)
class Level:
    """The entries of all contexts of `size` tokens, sorted by key; of one key the likeliest token first. All [N]."""

    size: int
    keys: Array  # uint32
    tokens: Array  # int64: a next token
    confidence: Array  # float64 in (0, 1]
    counts: Array  # int64: sightings of the context; of the context with this token where it is not the best one
    repeats: Array  # bool: it is the best token of the context one token shorter

    def take(self, chosen: Array) -> Level:
        """Only the entries where `chosen` [N] is true."""
        arrays = (self.keys, self.tokens, self.confidence, self.counts, self.repeats)
        return Level(self.size, *(array[chosen] for array in arrays))


def count_levels(passages: Iterable[Passage], max_n: int, prior: float = PRIOR, most: int = 1) -> list[Level]:
    """Levels of 1 … `max_n` context tokens, as far as the passages reach; at most `most` entries a context."""
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
        level, below, likely = _level(size, states, front, follows, below, likely, prior, most)
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
    size: int, states: Array, front: Array, follows: Array, below: Array, likely: Array, prior: float, most: int
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
    _, start = np.unique(owner[order], return_index=True)
    rank = np.empty(len(order), dtype=np.int64)  # of each pair in its context, 0 for the largest P
    rank[order] = np.arange(len(order)) - start[owner[order]]
    best = token[order[start]]  # [contexts]
    keys = keys_of(states[first], front[first], size)
    stays = _frequent(keys, totals)[owner] & ((rank == 0) | ((rank < most) & (law >= LEAST)))
    kept = np.flatnonzero(stays)
    kept = kept[np.lexsort((rank[kept], keys[owner[kept]]))]
    owners = owner[kept]
    level = Level(
        size,
        keys[owners],
        token[kept],
        law[kept],
        np.where(rank[kept] == 0, totals[owners], counts[kept]),
        token[kept] == likely[first][owners],
    )
    return level, law[pair], best[context]


def _frequent(keys: Array, totals: Array) -> Array:
    """[contexts] bool: of those that share a key the most frequent one."""
    order = np.lexsort((-totals, keys))
    _, unique = np.unique(keys[order], return_index=True)
    found = np.zeros(len(keys), dtype=bool)
    found[order[unique]] = True
    return found
