"""The largest and the few largest, as numpy finds them, are those of `argmax` and `topk`."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sampling.vocabulary import best, largest


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 5), st.integers(0, 10_000), st.booleans())
def test_it_finds_what_topk_finds_and_changes_nothing(size: int, count: int, seed: int, masked: bool) -> None:
    values = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
    if masked:  # nearly nothing is possible, as after top-k
        values = values.masked_fill(values < values.max() - 1e-6, float("-inf"))
    before = values.clone()
    found, places = best(values, count)
    assert torch.equal(values, before)
    assert torch.equal(found, values.topk(min(count, size), dim=-1).values)
    assert torch.equal(values.gather(-1, places), found)
    assert all(len(set(row)) == len(row) for row in places.flatten(0, 1).tolist())


@pytest.mark.parametrize("size", [49152, 49153, 4097, 4096])
@pytest.mark.parametrize("place", [0, -1])
def test_both_ends_are_looked_at(size: int, place: int) -> None:
    values = torch.zeros(1, size)
    values[0, place] = 1.0
    found, places = best(values, 4)
    assert found[0, 0] == 1
    assert places[0, 0] == place % size
    assert (found[0, 1:] == 0).all()
    assert largest(values)[0] == place % size


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9000), st.integers(0, 10_000), st.integers(1, 50))
def test_the_first_of_the_largest_is_found(size: int, seed: int, kinds: int) -> None:
    values = torch.randint(kinds, (2, 3, size), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(largest(values), (values == values.amax(dim=-1, keepdim=True)).int().argmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_kind_of_number_may_be_compared(dtype: torch.dtype) -> None:
    values = torch.randperm(5000, generator=torch.Generator().manual_seed(1)).to(dtype)[None]
    assert values[0, largest(values)[0]] == values.max()
    assert best(values, 2)[0][0, 0] == values.max()
