"""A reviewer's judgement by hand: the law of what it lets out, and how far lenience goes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.sampler import KeyedSampler
from sampling.types import Draft, DraftTree, Rows
from sampling.verify.rules import Keys, Review, review
from utils.logits_processors import make_processor


class Fixed:
    """Coins fall as `coins` says, draws take the token of `draws`; writes the probabilities down."""

    needs_prefixes = False
    point_mass = False

    def __init__(self, coins: list[bool], draws: list[int]) -> None:
        self.coins, self.draws = coins, draws
        self.tossed: list[float] = []
        self.drawn: list[list[float]] = []

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        return logits.softmax(dim=-1)

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        self.tossed += prob.tolist()
        return torch.tensor([self.coins.pop(0) for _ in prob])

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        self.drawn += probs.tolist()
        return torch.tensor([self.draws.pop(0) for _ in probs])

    def drafting(self, starts: Keys) -> "Fixed":
        return self


M = [[0.5, 0.3, 0.2], [0.25, 0.25, 0.5]]  # the reviewer's law before and behind the draft


def reviewed(fixed: Any, draft: Draft, lenience: float, laws: list[list[float]] = M) -> Review:
    return review(torch.tensor([laws], dtype=torch.float64).log(), draft, [[0]], [(0, 1)], fixed, lenience)


def law_at(found: Review, depth: int) -> list[float]:
    assert found.probs is not None
    return list(found.probs[0, depth].tolist())


def test_the_law_of_a_reviewed_point_mass() -> None:
    """d = 1, λ = 2: a = 2·0.3 = 0.6; the other 0.4 go to 0 and 2 as 5 : 2."""
    fixed = Fixed([False], [2])
    found = reviewed(fixed, Draft.of([[1]]), 2.0)
    assert (fixed.tossed, fixed.drawn[0]) == (pytest.approx([0.6]), pytest.approx([5 / 7, 0, 2 / 7]))
    assert law_at(found, 0) == about([0.4 * 5 / 7, 0.6, 0.4 * 2 / 7])
    assert (found.verdict.path, found.verdict.token) == ([[]], [2])


def test_the_law_of_a_reviewed_draw() -> None:
    """q = (.2 .7 .1), λ = 2: min(q, 2m) = (.2 .6 .1), sum .9; r = (.3 0 .1) / .4; q̃ = (.2 + .075, .6, .1 + .025)."""
    draft = Draft.of([[1]], torch.tensor([[[0.2, 0.7, 0.1]]], dtype=torch.float64))
    fixed = Fixed([False], [0])
    found = reviewed(fixed, draft, 2.0)
    assert (fixed.tossed, fixed.drawn[0]) == (pytest.approx([2 * 0.3 / 0.7]), pytest.approx([0.75, 0, 0.25]))
    assert law_at(found, 0) == about([0.275, 0.6, 0.125])
    assert law_at(reviewed(Fixed([False], [0]), draft, 1.0), 0) == about(M[0])  # without lenience it is the reviewer's


def test_behind_an_accepted_draft_the_own_token_has_the_reviewers_law() -> None:
    fixed = Fixed([True], [2])
    found = reviewed(fixed, Draft.of([[1]]), 5.0)
    assert fixed.tossed == pytest.approx([1.5])  # always accepted
    assert (law_at(found, 0), law_at(found, 1)) == (about([0, 1, 0]), about(M[1]))
    assert fixed.drawn == [pytest.approx(M[1])]
    assert (found.verdict.path, found.verdict.token) == ([[0]], [2])


def test_the_law_of_a_token_that_rounding_hid_is_not_zero() -> None:
    """q and m differ in the last digit: Σ min(q, m) rounds to 1, but token 2 can be drawn, so its law says so."""
    tiny = 2.0**-25
    m = torch.tensor([[[0.5, 0.5 - tiny, tiny]]])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    fixed = Fixed([False], [2])
    fixed.probs = lambda logits, prefixes: m.expand(1, 2, 3)  # type: ignore[method-assign]
    found = reviewed(fixed, Draft.of([[1]], q), 1.0)
    assert found.verdict.token == [2]
    assert found.probs is not None
    assert 0 < float(found.probs[0, 0, 2]) < 1e-6


def about(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(
    ("lenience", "raw", "passes"),
    [  # λ, what the drafter says of its token, whether 1 passes where m(1) = .3 and the best is 0
        (1.0, 0.01, False),  # without lenience only the best passes
        (1.5, 0.44, True),  # .44 / 1.5 = .293
        (1.5, 0.46, False),  # .46 / 1.5 = .307
        (2.0, 0.59, True),
        (2.0, 0.61, False),
        (3.0, None, False),  # a point mass: 1 / 3 = .333
        (4.0, None, True),  # 1 / 4 = .25
    ],
)
def test_greedy_drafts_pass_as_far_as_the_lenience_goes(
    lenience: float, raw: float | None, passes: bool, temperature: float
) -> None:
    """p and q are those of temperature 1, whatever the answer's is. The draws here take the best token."""

    class Best(KeyedSampler):
        def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
            return probs.argmax(dim=-1)

    sampling = Best(make_processor(temperature), draft_sampling="greedy")
    found = reviewed(sampling, Draft([DraftTree.of([1], draft_prob=None if raw is None else [raw])]), lenience)
    assert found.probs is None
    assert (found.verdict.path, found.verdict.token) == ([[0] if passes else []], [2 if passes else 0])
    assert reviewed(sampling, Draft([DraftTree.of([0], draft_prob=[1.0])]), lenience).verdict.path == [[0]]


def test_an_absent_draft_never_passes() -> None:
    absent = Draft.of([[]])
    assert reviewed(KeyedSampler(make_processor(0.0)), absent, 5.0).verdict.path == [[]]
    assert reviewed(Fixed([], [1]), absent, 5.0).verdict.token == [1]
