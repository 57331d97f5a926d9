"""Tree drafts in the cache: `keep` commits the accepted path, whatever nodes are absent beside it."""

from __future__ import annotations

import pytest
import torch

from sampling.causal import CausalLM
from sampling.types import Draft
from tests.tiny import tiny_model

PARENTS = torch.tensor([-1, -1, 0, 1, 2])
DRAFTS = torch.tensor([[11, -1, 12, -1, 13], [21, 22, 23, 24, -1]])
PATHS = [([0, 2, 4], [1, 3, -1]), ([0, -1, -1], [0, 2, -1]), ([-1, -1, -1], [1, -1, -1])]


@pytest.mark.parametrize("paths", PATHS)
def test_the_cache_after_keep_equals_a_fresh_one(paths: tuple[list[int], list[int]]) -> None:
    lm = CausalLM(tiny_model())
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    session = lm.open(rows)
    logits = session.score(rows, Draft(DRAFTS, parents=PARENTS))
    session.keep(torch.tensor(paths))
    grown = [
        row + [int(drafts[node]) for node in path if node >= 0]
        for row, drafts, path in zip(rows, DRAFTS, paths, strict=True)
    ]
    assert session.sync(grown) == [len(row) for row in grown]
    again = [[*row, 3] for row in grown]
    for place, row in enumerate(again):
        fresh = lm.open([row]).score([row], Draft.empty(1))[0]
        torch.testing.assert_close(session.score(again, Draft.empty(2))[place], fresh, atol=1e-4, rtol=1e-4)
    for place, (row, path) in enumerate(zip(rows, paths, strict=True)):
        for node in (node for node in path if node >= 0):
            row = [*row, int(DRAFTS[place, node])]
            fresh = lm.open([row]).score([row], Draft.empty(1))[0, 0]
            torch.testing.assert_close(logits[place, node + 1], fresh, atol=1e-4, rtol=1e-4)
