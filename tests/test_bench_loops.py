"""Loops in an answer: cases by hand, the definition spelled out as an oracle, and what the benchmark makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from app.loops import looping_share, looping_tokens

A, B, C = [1, 2, 3], [4, 5, 6, 7], list(range(100, 120))


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        ([], 0),
        ([1], 0),
        ([1, 1], 0),
        ([1, 1, 1], 3),
        ([9, 1, 1, 1, 9], 3),
        ([*A, *A], 0),  # twice is no loop
        ([*A, *A, 1, 2], 0),  # nor is twice and a bit
        ([*A, *A, *A], 9),
        ([*A, *A, *A, 1, 2], 11),  # the unfinished fourth repeat belongs to it
        ([8, *A, *A, *A, 8], 9),
        ([*A, *A, *A, *B, *B, *B], 21),
        ([*A, *A, *A, 3, 3], 11),  # 3 3 3 at the end is a loop of its own
        ([*A, *A, *B, *A, *A], 0),  # what comes between parts them
        ([1, 2, 1, 2, 1, 2], 6),
        ([3, 1, 2, 3, 1, 2, 3, 1, 2], 9),  # a loop may begin anywhere in its period
        ([*C, *C, *C], 60),  # period 20
        ([*C, 120, *C, 120, *C, 120], 0),  # period 21
    ],
)
def test_tokens_in_loops_are_counted(ids: list[int], count: int) -> None:
    assert looping_tokens(ids) == count
    assert looping_share(ids) == (count / len(ids) if ids else 0)


def by_definition(ids: Sequence[int], period: int, repeats: int) -> int:
    """Every stretch of every period, tried one by one."""
    inside: set[int] = set()
    for step in range(1, period + 1):
        for start in range(len(ids)):
            for end in range(start + repeats * step, len(ids) + 1):
                if all(ids[i] == ids[i - step] for i in range(start + step, end)):
                    inside.update(range(start, end))
    return len(inside)


def test_the_count_is_that_of_the_definition() -> None:
    draw = random.Random(5)
    found = set()
    for _ in range(400):
        ids = [draw.randrange(2) for _ in range(draw.randrange(1, 16))]
        if draw.random() < 0.5:
            ids = ids[:4] * draw.randrange(1, 5) + ids[4:]
        for period, repeats in ((20, 3), (2, 3), (4, 2)):
            count = looping_tokens(ids, period, repeats)
            assert count == by_definition(ids, period, repeats), (ids, period, repeats)
            found.add(0 if count == 0 else (1 if count < len(ids) else 2))
    assert found == {0, 1, 2}
