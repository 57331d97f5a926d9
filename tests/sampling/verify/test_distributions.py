"""The laws of a verdict: each worked out when it is asked for, the same as if all had been."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sampling.sampler import KeyedSampler
from sampling.types import Draft, Rows, Rule
from sampling.verify.distributions import HostDistributions, prefixes_of
from sampling.verify.rules import verify
from utils.errors import LogitsError
from utils.logits_processors import LogitsProcessor

V, NODES = 11, 5
ROWS: Rows = [[1, 2, 3, 2], [4, 5, 4]]


class Counting(KeyedSampler):
    """Counts the laws that it works out."""

    made = 0

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        self.made += logits.flatten(0, -2).shape[0]
        return super().probs(logits, prefixes)


def case(seed: int = 0) -> tuple[Tensor, Draft]:
    source = torch.Generator().manual_seed(seed)
    tokens = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    return torch.randn(2, NODES + 1, V, generator=source), Draft.of(tokens, parents=[-1, 0, 0, -1, 3])


def processors() -> list[LogitsProcessor]:
    return [
        LogitsProcessor(),
        LogitsProcessor(temperature=0),
        LogitsProcessor(temperature=0.7, top_k=4),
        LogitsProcessor(repetition_penalty=2.0),
        LogitsProcessor(temperature=0, no_repeat_ngram=2),
    ]


@pytest.mark.parametrize("processor", processors())
def test_the_laws_of_a_verdict_are_all_there(processor: LogitsProcessor) -> None:
    logits, draft = case(1)
    sampler = KeyedSampler(processor)
    verdict = verify(logits, draft, ROWS, [(0, 4), (1, 3)], sampler, Rule.POINT)
    expected = sampler.probs(logits, prefixes_of(ROWS, draft))
    assert torch.equal(verdict.distributions.all(), expected)
    assert torch.equal(verdict.distributions.at([1], [-1]), expected[[1], [0]])
    assert torch.equal(verdict.distributions.at([1, 0], [-1, 1]), expected[[1, 0], [0, 2]])


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """A tree of one row whose siblings may say the same."""
    count = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    return Draft.of([[draw(st.integers(0, 3)) for _ in range(count)]], parents=parents)


@settings(max_examples=150, deadline=None)
@given(drafts(), st.integers(0, 1000), st.sampled_from([0.0, 0.7]))
def test_one_row_is_judged_as_it_is_in_a_batch(draft: Draft, seed: int, temperature: float) -> None:
    logits = torch.randn(1, draft.width + 1, 4, generator=torch.Generator().manual_seed(seed))
    twice, key = Draft([*draft.trees] * 2), [(3, 7)]
    alone = verify(logits, draft, [[1]], key, KeyedSampler(LogitsProcessor(temperature), seed), Rule.POINT)
    both = KeyedSampler(LogitsProcessor(temperature), seed)
    pair = verify(logits.repeat(2, 1, 1), twice, [[1], [1]], key * 2, both, Rule.POINT)
    assert (alone.path * 2, alone.token * 2) == (pair.path, pair.token)


@pytest.mark.parametrize("processor", processors())
def test_what_is_drawn_at_a_node_is_the_draw_from_its_law(processor: LogitsProcessor) -> None:
    logits, draft = case(3)
    sampler = Counting(processor)
    laws, expected = HostDistributions(logits, draft, ROWS, sampler), sampler.probs(logits, prefixes_of(ROWS, draft))
    before = sampler.made
    for row in range(2):
        for node in range(-1, NODES):
            key = torch.tensor([[row, 7 + node]])
            assert laws.drawn(row, node, (row, 7 + node)) == int(sampler.draw(expected[row, node + 1][None], key))
    assert (sampler.made == before) is sampler.greedy  # greedily no law is worked out


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused_without_a_law(broken: float) -> None:
    logits, draft = case()
    logits[0, 1, 4] = broken
    with pytest.raises(LogitsError):
        HostDistributions(logits, draft, ROWS, KeyedSampler(LogitsProcessor(temperature=0))).drawn(0, 0, (0, 4))
