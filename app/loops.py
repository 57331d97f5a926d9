"""How much of an answer is a repeating loop: small greedy models repeat themselves, and loops flatter n-gram drafts.

A token is in a loop iff it lies in a stretch of at least `repeats`·p tokens in which every token but the first p
equals the one p places before it, for some period p of 1 … `period`. So a stretch is as long as the period holds:
an unfinished last repeat counts, and so does "000" (period 1). Knows ids only, no text and no models.
"""

from __future__ import annotations

from collections.abc import Sequence

PERIOD = 20  # longest period, in tokens
REPEATS = 3  # a stretch holds its period so often at least
LOOPS = 0.25  # a prompt loops if a larger share of its answer lies in loops


def looping_tokens(ids: Sequence[int], period: int = PERIOD, repeats: int = REPEATS) -> int:
    """How many of `ids` lie in a loop; at most `period` comparisons a token."""
    inside = [False] * len(ids)
    for step in range(1, min(period, len(ids) // repeats) + 1):
        since = 0  # where the stretch that has this period begins
        for end in range(step, len(ids) + 1):
            if end < len(ids) and ids[end] == ids[end - step]:
                continue
            if end - since >= repeats * step:
                inside[since:end] = [True] * (end - since)
            since = end - step + 1
    return sum(inside)


def looping_share(ids: Sequence[int]) -> float:
    """The share of `ids` that lies in a loop, 0 for none."""
    return looping_tokens(ids) / len(ids) if ids else 0.0
