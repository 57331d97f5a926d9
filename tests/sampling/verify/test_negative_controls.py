"""Mistakes that the proofs must catch: each mutant has to fail the statistic.

A mutant is a published mistake, put in by wrapping one small piece: a drafter, the sampler, or the
`verify` that the loop calls. A control that passes the proof fails its test.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sampling.loop
import sampling.verify.rules
from sampling.drafters.draft_model import ModelDrafter
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Drafter, Rows, Rule, Sampler, Verdict
from tests.sampling.verify.test_chi_square import PROMPT as START, target as toy_target
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.branching import BranchingSampler, Script, softmax
from tests.support.mutants import (
    CutAfterTheDraw,
    DraftsWithTargetNoise,
    DropsUnsure,
    FullPAfterLaw,
    FullPAfterPoint,
    GreedyCalledLaw,
    GridDrafter,
    NaiveVerify,
    OffByOneRatio,
    RawLaw,
    SharedNumbers,
    ShiftedLaw,
    UnfilteredBonus,
    UnfilteredResidual,
)
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.refusals import refused
from tests.support.runs import answers, enumeration_error, greedy, sample_counts, sampler
from tests.support.toys import LawDrafter, PointDrafter, TableLM, ToyLM, chain_lm

CAUGHT = 1e-3  # the enumeration must be off by far more than rounding
HOPELESS = 1e-6
Examine = Callable[[Tensor, Draft, Rows, Tensor, Sampler, Rule], Verdict]
real_verify = sampling.verify.rules.verify


# -- enumeration ----------------------------------------------------------------------------------

NARROW = NaiveLaw(temperature=0.7, top_k=2)


def model(kind: type[ModelDrafter | LawDrafter] = ModelDrafter) -> Callable[[], Drafter]:
    return lambda: kind(TableLM(3, seed=7))


def error(make: Callable[[], Drafter], law: Any = softmax) -> float:
    return enumeration_error(sure_start(3, 4), make, prompt=PROMPT, length=4, gamma=2, law=law)


def point() -> Drafter:
    return PointDrafter(3, lambda row: 0)


VERIFIERS: dict[str, tuple[type[NaiveVerify], Callable[[], Drafter], Any]] = {
    "full p after a refused law": (FullPAfterLaw, model(), softmax),
    "full p after a refused point mass": (FullPAfterPoint, point, softmax),
    "filters missing in the residual": (UnfilteredResidual, model(), NARROW),
    "filters missing in the bonus": (UnfilteredBonus, model(), NARROW),
    "q of the position before in the ratio": (OffByOneRatio, model(), softmax),
}
DRAFTERS: dict[str, tuple[Callable[[], Drafter], Any]] = {
    "raw q": (model(RawLaw), NARROW),
    "q passed up one position late": (model(ShiftedLaw), softmax),
    "a drawn token dropped": (model(DropsUnsure), softmax),
    "cut after the draw": (model(CutAfterTheDraw), softmax),
    "greedy drafts called a law": (model(GreedyCalledLaw), softmax),
}


@pytest.mark.parametrize("name", VERIFIERS)
def test_enumeration_catches_a_wrong_verifier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, make, law = VERIFIERS[name]
    monkeypatch.setattr(sampling.loop, "verify", mutant())
    assert error(make, law) > CAUGHT


@pytest.mark.parametrize("make", [model(), point, model(LawDrafter)])
@pytest.mark.parametrize("law", [softmax, NARROW])
def test_the_unmutated_naive_verifier_passes(
    make: Callable[[], Drafter], law: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what the mutants fail by is their mutation, and nothing else."""
    monkeypatch.setattr(sampling.loop, "verify", NaiveVerify())
    assert error(make, law) < EXACT


@pytest.mark.parametrize("name", DRAFTERS)
def test_enumeration_catches_a_wrong_drafter(name: str) -> None:
    make, law = DRAFTERS[name]
    assert error(make, law) > CAUGHT


@pytest.mark.parametrize(
    ("shared", "error"),
    [
        ("nothing", (0.0, 0.02)),
        *((what, (0.1, 1.0)) for what in ("the residual", "the draft", "the draft and the residual")),
    ],
)
def test_enumeration_catches_shared_random_numbers(
    shared: str, error: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numbers of its own the scheme is off by the grid's coarseness alone; the acceptance's
    number used again for the residual, the draft or both is far worse."""
    drafter = GridDrafter(TableLM(4, seed=32, sharpness=1.0))
    monkeypatch.setattr(sampling.loop, "verify", SharedNumbers(drafter, shared))
    target = ToyLM(4, lambda prefix: [0.9, 0.3, 0.0, -0.4] if len(prefix) == 4 else [0.0, *[-torch.inf] * 3])
    found = enumeration_error(target, lambda: drafter, prompt=PROMPT, length=3, gamma=1, law=NaiveLaw())
    assert error[0] <= found < error[1]


# -- chi-square through the real sampler ------------------------------------------------------------


def far_drafter() -> TableLM:
    return TableLM(8, seed=22, sharpness=1.2, dtype=torch.float32)


def counted_p(make: Callable[[KeyedSampler], Drafter], law: NaiveLaw, samples: int) -> float:
    total = sum_counts = None
    for seed in range(samples // 1_000):
        drawing = sampler(law.temperature, seed, law.top_p, law.top_k, law.min_p)
        options = {"prompt": START, "samples": 1_000, "batch": 1_000, "length": 4, "gamma": 2}
        total = sample_counts(toy_target(), lambda s=drawing: make(s), lambda _, s=drawing: s, **options)
        sum_counts = total if sum_counts is None else sum_counts + total
    assert sum_counts is not None
    return chi_square_p(sum_counts, exact_law(toy_target(), START, law, 3))


def coupled(sampler: KeyedSampler) -> Drafter:
    drafter = DraftsWithTargetNoise(far_drafter())
    drafter.sampler = sampler
    return drafter


SHAPED = NaiveLaw(temperature=0.8, top_k=5)
COUNTED: dict[str, tuple[Callable[[KeyedSampler], Drafter], NaiveLaw, Examine]] = {
    "raw q": (lambda _: RawLaw(far_drafter()), SHAPED, real_verify),
    "q one position late": (lambda _: ShiftedLaw(far_drafter()), NaiveLaw(), real_verify),
    "greedy drafts called a law": (lambda _: GreedyCalledLaw(far_drafter()), NaiveLaw(), real_verify),
    "draft and residual share their noise": (coupled, NaiveLaw(), real_verify),
    "full p after a refused law": (lambda _: ModelDrafter(far_drafter()), NaiveLaw(), FullPAfterLaw()),
    "full p after a refused point": (lambda _: PointDrafter(8, lambda row: 2), NaiveLaw(), FullPAfterPoint()),
    "filters missing in the residual": (lambda _: ModelDrafter(far_drafter()), SHAPED, UnfilteredResidual()),
}


@pytest.mark.parametrize(  # noise that is shared takes four times as many; every branch shows it above
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if "noise" in name else ()) for name in COUNTED]
)
def test_counting_catches_the_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, law, examine = COUNTED[name]
    monkeypatch.setattr(sampling.loop, "verify", examine)
    assert counted_p(make, law, samples=20_000 if "noise" in name else 3_000) < HOPELESS


def test_counting_passes_the_unmutated_set_up() -> None:
    """The control of the controls: same models, same counts, no mistake."""
    assert counted_p(lambda _: ModelDrafter(far_drafter()), NaiveLaw(), samples=3_000) > HOPELESS


# -- single draws ---------------------------------------------------------------------------------


class ZeroCoins(BranchingSampler):
    """Every uniform number is exactly 0; `compare` is the test against the probability."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(Script([]))
        self.compare = compare

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        return self.compare(torch.zeros_like(prob), prob)


def impossible_accepted(compare: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a drafted token of target probability 0 is accepted when the coin shows u = 0."""
    logits = torch.tensor([[[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]])
    draft = Draft.of([[1]], torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64))
    return real_verify(logits, draft, [[0]], [(0, 1)], ZeroCoins(compare), Rule.DRAWN).path == [[0]]


def test_u_equal_to_the_probability_must_not_accept() -> None:
    assert impossible_accepted(torch.le)
    assert not impossible_accepted(torch.lt)


def test_the_real_coin_never_accepts_probability_zero_and_always_one() -> None:
    drawing = sampler(1.0, seed=5)
    for row in range(50):
        keys = torch.tensor([[row, position, 0, 0] for position in range(2000)])
        assert not drawing.coin(torch.zeros(2000), keys).any()
        assert drawing.coin(torch.ones(2000), keys).all()


def test_the_drafter_proposing_outside_its_own_law_is_an_error() -> None:
    """0/0 is an error, not "refused"."""
    logits = torch.tensor([[[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]])
    draft = Draft.of([[1]], torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64))
    refused(real_verify, logits, draft, [[0]], [(0, 1)], sampler(1.0), Rule.DRAWN, kind=ValueError, match="0/0")


def test_nan_logits_are_an_error() -> None:
    logits = torch.tensor([[[0.0, float("nan"), 0.0]]])
    refused(
        real_verify, logits, Draft.empty(1), [[0]], [(0, 1)], sampler(1.0), Rule.POINT, kind=ValueError, match="NaN"
    )


class RatiosAtZero(NaiveVerify):
    """Greedy decided by softmax ratios with random acceptance."""

    def row(
        self, p: Tensor, q: Tensor | None, chain: list[int], key: Tensor, sampler: Sampler, logits: Tensor
    ) -> tuple[int, int]:
        soft = softmax(logits)
        for depth, x in enumerate(chain):
            if not bool(sampler.coin(soft[depth, x][None], F.pad(key[None], (0, 2), value=depth))):
                return depth, int(p[depth].argmax())
        return len(chain), int(p[len(chain)].argmax())


def test_greedy_by_softmax_ratios_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableLM(8, seed=1)
    options = {"length": 30, "gamma": 3}

    def second_best(row: list[int]) -> int:
        return int(target.logits([row])[0].topk(2).indices[1])

    def answer(seed: int) -> list[int]:
        return answers(target, [[1, 2]], PointDrafter(8, second_best), sampler(0.0, seed=seed), **options)[0]

    plain = answers(target, [[1, 2]], None, greedy(), **options)[0]
    assert [answer(seed) for seed in range(5)] == [plain] * 5
    monkeypatch.setattr(sampling.loop, "verify", RatiosAtZero())
    assert all(answer(seed) != plain for seed in range(5))


def test_a_scripted_target_exposes_an_overwritten_correction() -> None:
    """The always-wrong drafter against a scripted chain: every round emits exactly the target's token."""
    script = [4, 5, 6, 7, 1, 2]
    found = answers(chain_lm(8, [0], script), [[0]], PointDrafter(8, lambda row: 3), greedy(), length=6, gamma=4)
    assert found == [script]
