"""The laws of a verdict: each worked out when it is asked for, the same as if all had been."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sampling.sampler import KeyedSampler
from sampling.types import Draft, Rows, Rule, Verdict
from sampling.verify.distributions import LazyDistributions, distributions_of
from sampling.verify.rules import verify
from utils.errors import LogitsError
from utils.logits_processors import LogitsProcessor

V, NODES = 11, 5
PARENTS = torch.tensor([-1, 0, 0, -1, 3])
ROWS: Rows = [[1, 2, 3, 2], [4, 5, 4]]


class Counting(KeyedSampler):
    """Counts the laws that it works out."""

    made = 0

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        self.made += logits.flatten(0, -2).shape[0]
        return super().probs(logits, prefixes)


def case(seed: int = 0) -> tuple[Tensor, Draft]:
    source = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    return torch.randn(2, NODES + 1, V, generator=source), Draft(tokens, parents=PARENTS)


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
    verdict = verify(logits, draft, ROWS, torch.tensor([[0, 4], [1, 3]]), sampler, Rule.POINT)
    expected = distributions_of(logits, draft, ROWS, sampler)
    assert torch.equal(verdict.probs, expected)
    assert torch.equal(verdict.at(torch.tensor([1]), torch.tensor([-1])), expected[[1], [0]])


def test_laws_given_as_a_tensor_are_looked_up() -> None:
    given = torch.rand(2, 3, V)
    verdict = Verdict(torch.zeros(2, 0), torch.zeros(2), given, given)
    assert verdict.probs is given
    assert torch.equal(verdict.at(torch.tensor([1, 0]), torch.tensor([-1, 1])), given[[1, 0], [0, 2]])


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """A tree of one row whose siblings may say the same, some of its nodes absent."""
    count = draw(st.integers(0, 6))
    parents = torch.tensor([draw(st.integers(-1, node - 1)) for node in range(count)], dtype=torch.long)
    tokens = [draw(st.integers(-1, 3)) for _ in range(count)]
    return Draft(torch.tensor([tokens], dtype=torch.long), parents=parents)


@settings(max_examples=150, deadline=None)
@given(drafts(), st.integers(0, 1000), st.sampled_from([0.0, 0.7]))
def test_one_row_is_judged_as_it_is_in_a_batch(draft: Draft, seed: int, temperature: float) -> None:
    count = draft.tokens.shape[1]
    logits = torch.randn(1, count + 1, 4, generator=torch.Generator().manual_seed(seed))
    twice = Draft(draft.tokens.repeat(2, 1), parents=draft.parents)
    key = torch.tensor([[3, 7]])
    alone = verify(logits, draft, [[1]], key, KeyedSampler(LogitsProcessor(temperature), seed), Rule.POINT)
    both = KeyedSampler(LogitsProcessor(temperature), seed)
    pair = verify(logits.repeat(2, 1, 1), twice, [[1], [1]], key.repeat(2, 1), both, Rule.POINT)
    assert torch.equal(alone.path, pair.path[:1])
    assert torch.equal(alone.token, pair.token[:1])
    assert alone.path.dtype == alone.token.dtype == torch.long


@pytest.mark.parametrize("processor", processors())
def test_what_is_drawn_at_a_node_is_the_draw_from_its_law(processor: LogitsProcessor) -> None:
    logits, draft = case(3)
    sampler = Counting(processor)
    laws, expected = LazyDistributions(logits, draft, ROWS, sampler), distributions_of(logits, draft, ROWS, sampler)
    before = sampler.made
    for row in range(2):
        for node in range(-1, NODES):
            key = torch.tensor([[row, 7 + node]])
            assert laws.drawn(row, node, (row, 7 + node)) == int(sampler.draw(expected[row, node + 1][None], key))
    assert (sampler.made == before) is sampler.greedy  # greedily no law is worked out


def test_logits_that_are_no_numbers_are_refused_without_a_law() -> None:
    logits, draft = case()
    for broken in (float("nan"), float("inf")):
        logits[0, 1, 4] = broken
        with pytest.raises(LogitsError):
            LazyDistributions(logits, draft, ROWS, KeyedSampler(LogitsProcessor(temperature=0))).drawn(0, 0, (0, 4))
