"""The common prefix of two sequences: the fast search against one token at a time."""

import pytest
from hypothesis import given, settings, strategies as st

from sampling.rows import common_prefix


def naive(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@settings(max_examples=300, deadline=None)
@given(
    shared=st.lists(st.integers(0, 2), max_size=80),
    left=st.lists(st.integers(0, 2), max_size=60),
    right=st.lists(st.integers(0, 2), max_size=60),
)
def test_short_sequences(shared: list[int], left: list[int], right: list[int]) -> None:
    left, right = shared + left, shared + right
    before = list(left), list(right)
    assert common_prefix(left, right) == naive(left, right)
    assert (left, right) == before


@pytest.mark.parametrize("length", [31, 32, 33, 160, 161, 700, 4000])
def test_long_sequences_that_part_near_the_end_in_the_middle_and_at_once(length: int) -> None:
    """At each place around which the search changes its step, and at some others."""
    left = [place % 3 for place in range(length)]
    steps = [0, 1, 31, 32, 33, 127, 128, 129, 159, 160, 161, 671, 672, 673]
    places = {length - step for step in steps} | set(steps) | {length // 2}
    for place in sorted(place for place in places if 0 <= place < length):
        right = list(left)
        right[place] = 9
        assert common_prefix(left, right) == common_prefix(right, left) == place
        assert common_prefix(left, right + [1] * 50) == place
        right[-1] = 8  # what comes behind the place has no say
        assert common_prefix(left, right) == place
        assert common_prefix(left, left[:place]) == place
