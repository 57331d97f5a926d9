"""Mistakes that the proofs must catch: each mutant has to fail the statistic.

A mutant is a published mistake, put in by wrapping one small piece: a drafter, the sampler, or the
`verify` that the loop calls. A control that passes the proof fails its test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sampling.loop
import sampling.verify.rules
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.proposal import Growth, Node, Offer
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Drafter, Rows, Rule, Sampler, Verdict
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.branching import BranchingSampler, Script, softmax
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.runs import answers, enumeration_error, sample_counts
from tests.support.toy_drafters import LawDrafter, PointDrafter
from tests.support.toys import TableLM, ToyLM, chain_lm
from utils.logits_processors import make_processor

CAUGHT = 1e-3  # the enumeration must be off by far more than rounding
HOPELESS = 1e-6
Examine = Callable[[Tensor, Draft, Rows, Tensor, Sampler, Rule], Verdict]
real_verify = sampling.verify.rules.verify


# -- a naive verifier, right by default, with a place for every mistake ---------------------------


class NaiveVerify:
    """Token by token, row by row. Subclasses get one step wrong."""

    def __call__(self, logits: Tensor, draft: Draft, rows: Rows, keys: Tensor, sampler: Sampler, rule: Rule) -> Verdict:
        law = sampler.probs(logits, [])
        path = torch.full(draft.tokens.shape, -1, dtype=torch.long)
        token = torch.full((len(rows),), -1, dtype=torch.long)
        for row, chain in enumerate(draft.tokens.tolist()):
            laws = None if draft.probs is None else draft.probs[row]
            accepted, own = self.row(law[row], laws, [x for x in chain if x >= 0], keys[row], sampler, logits[row])
            path[row, :accepted] = torch.arange(accepted)
            token[row] = own
        return Verdict(path, token, law, logits)

    def row(
        self, p: Tensor, q: Tensor | None, chain: list[int], key: Tensor, sampler: Sampler, logits: Tensor
    ) -> tuple[int, int]:
        for depth, x in enumerate(chain):
            at = key + torch.tensor([0, depth])
            if q is None:
                own = self.draw(p[depth], at, sampler)
                if own != x:
                    return depth, self.refused_point(p[depth], own, at, sampler)
            elif not self.accept(p, q, depth, x, at, sampler):
                return depth, self.draw(self.left(p[depth], q[depth], logits[depth]), at, sampler)
        end = len(chain)
        return end, self.draw(self.bonus(p[end], logits[end]), key + torch.tensor([0, end]), sampler)

    def draw(self, law: Tensor, key: Tensor, sampler: Sampler) -> int:
        return int(sampler.draw(law[None], key[None]))

    def accept(self, p: Tensor, q: Tensor, depth: int, x: int, key: Tensor, sampler: Sampler) -> bool:
        ratio = p[depth, x].double() / q[depth, x].double()
        return bool(sampler.coin(ratio.clamp(max=1.0)[None], F.pad(key[None], (0, 2))))

    def refused_point(self, p: Tensor, own: int, key: Tensor, sampler: Sampler) -> int:
        return own

    def left(self, p: Tensor, q: Tensor, logits: Tensor) -> Tensor:
        rest = (p.double() - q.double()).clamp(min=0)
        return rest / rest.sum() if float(rest.sum()) > 1e-12 else p

    def bonus(self, p: Tensor, logits: Tensor) -> Tensor:
        return p


class FullPAfterLaw(NaiveVerify):
    """After a refusal draws from the full p instead of the residual."""

    def left(self, p: Tensor, q: Tensor, logits: Tensor) -> Tensor:
        return p


class FullPAfterPoint(NaiveVerify):
    """After refusing a point mass draws again from the full p."""

    def refused_point(self, p: Tensor, own: int, key: Tensor, sampler: Sampler) -> int:
        return self.draw(p, key + torch.tensor([1 << 20, 0]), sampler)


class UnfilteredResidual(NaiveVerify):
    """The filters shape the ratio but not the residual."""

    def left(self, p: Tensor, q: Tensor, logits: Tensor) -> Tensor:
        return super().left(softmax(logits), q, logits)


class UnfilteredBonus(NaiveVerify):
    """The filters shape the ratio but not the bonus."""

    def bonus(self, p: Tensor, logits: Tensor) -> Tensor:
        return softmax(logits)


class OffByOneRatio(NaiveVerify):
    """Compares with the draft law of the position before."""

    def accept(self, p: Tensor, q: Tensor, depth: int, x: int, key: Tensor, sampler: Sampler) -> bool:
        before = q[max(depth - 1, 0), x].double()
        ratio = (p[depth, x].double() / before.clamp(min=1e-9)).clamp(max=1.0)
        return bool(sampler.coin(ratio[None], F.pad(key[None], (0, 2))))


class SharedNumbers(NaiveVerify):
    """Draft, acceptance and residual by inverse distribution functions, each with a uniform number
    of a coarse grid. `shared` says which of the three use one and the same number."""

    def __init__(self, drafter: GridDrafter, shared: str) -> None:
        self.drafter, self.shared = drafter, shared

    def row(
        self, p: Tensor, q: Tensor | None, chain: list[int], key: Tensor, sampler: Sampler, logits: Tensor
    ) -> tuple[int, int]:
        for depth, x in enumerate(chain):
            assert q is not None
            at = key + torch.tensor([0, depth])
            u = self.drafter.used[int(at[1])] if "draft" in self.shared else one_uniform(sampler, at)
            if u >= float(p[depth, x] / q[depth, x]):
                u = u if "residual" in self.shared else one_uniform(sampler, at, turn=1)
                return depth, inverse_draw(self.left(p[depth], q[depth], logits[depth]), u)
        return len(chain), self.draw(p[len(chain)], key + torch.tensor([0, len(chain)]), sampler)


class GridDrafter(LawDrafter):
    """Draws by the inverse distribution function and remembers the uniform number of each position."""

    def __init__(self, lm: ToyLM) -> None:
        super().__init__(lm)
        self.used: dict[int, float] = {}

    def chain(self, name: int, row: list[int], want: int, sampler: Sampler) -> list[tuple[int, Tensor]]:
        drafted: list[tuple[int, Tensor]] = []
        for _ in range(want):
            law = self.law_of(row, sampler)
            u = self.used[len(row)] = one_uniform(sampler, torch.tensor([name, len(row)]))
            # The law the grid really draws from, so that only the sharing is wrong.
            points = torch.tensor([inverse_draw(law, (i + 0.5) / GRID) for i in range(GRID)])
            drafted.append((inverse_draw(law, u), torch.bincount(points, minlength=len(law)) / GRID))
            row.append(drafted[-1][0])
        return drafted


GRID = 12  # uniform numbers of the shared-noise mutants: few enough to enumerate


def one_uniform(sampler: Sampler, key: Tensor, turn: int = 0) -> float:
    """A uniform number of GRID values, drawn with the sampler under test."""
    keys = F.pad(key[None], (0, 1), value=turn)
    return (int(sampler.draw(torch.full((1, GRID), 1 / GRID, dtype=torch.float64), keys)) + 0.5) / GRID


def inverse_draw(law: Tensor, u: float) -> int:
    return min(int((law.double().cumsum(dim=0) <= u).sum()), len(law) - 1)


# -- mutant drafters ------------------------------------------------------------------------------


class RawLaw(ModelDrafter):
    """Passes up the raw law, not the processed one the tokens were drawn from."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, sampler)
        if draft.probs is None:
            return draft
        chains = [
            [row + drafted[:depth] for depth in range(len(drafted))]
            for row, drafted in zip(rows, draft.tokens.clamp(min=0).tolist(), strict=True)
        ]
        raw = [softmax(self.lm.logits(prefixes)) for prefixes in chains]  # type: ignore[attr-defined]
        return Draft(draft.tokens, torch.stack(raw).to(draft.probs.dtype))


class ShiftedLaw(ModelDrafter):
    """Passes up each token's law one position too late."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, sampler)
        if draft.probs is None:
            return draft
        shifted = torch.cat([draft.probs[:, :1], draft.probs[:, :-1]], dim=1)
        return Draft(draft.tokens, (shifted + 1e-6) / (1 + 1e-6 * shifted.shape[-1]))


class DropsUnsure(LawDrafter):
    """Stops early by dropping a token that was already drawn, because *it* is improbable."""

    def chain(self, name: int, row: list[int], want: int, sampler: Sampler) -> list[tuple[int, Tensor]]:
        drafted = super().chain(name, row, want, sampler)
        sure = next((i for i, (token, law) in enumerate(drafted) if float(law[token]) < 0.4), len(drafted))
        return drafted[:sure]


class CutAfterTheDraw(ModelDrafter):
    """Drops a token that was drawn behind another, because *it* is improbable."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        taken = Growth.add_drawn

        def likely(growth: Growth, parent: Node, offer: Offer) -> None:
            if offer[1] >= LIKELY or not parent.depth:
                taken(growth, parent, offer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Growth, "add_drawn", likely)
            return super().propose(rows, budget, sampler)


LIKELY = 0.4  # below this the mutant drops what it has drawn


class GreedyCalledLaw(ModelDrafter):
    """Drafts greedily but says the tokens were drawn from the law."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, ArgmaxDraws(sampler))
        return Draft(draft.tokens, draft.probs)


class ArgmaxDraws:
    greedy = point_mass = needs_prefixes = False

    def __init__(self, sampler: Sampler) -> None:
        self.probs = sampler.probs

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        return probs.argmax(dim=-1)


class DraftsWithTargetNoise(ModelDrafter):
    """Rejection with drafts drawn from the *target's* noise: draft and residual share their numbers."""

    sampler: KeyedSampler

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        return super().propose(rows, budget, _TargetNoise(self.sampler))  # type: ignore[arg-type]


class _TargetNoise:
    greedy = point_mass = needs_prefixes = False

    def __init__(self, sampler: KeyedSampler) -> None:
        self.probs, self.draw = sampler.probs, sampler.draw


# -- enumeration ----------------------------------------------------------------------------------

NARROW = NaiveLaw(temperature=0.7, top_k=2)


def model(kind: type[ModelDrafter] = ModelDrafter) -> Callable[[], Drafter]:
    return lambda: kind(TableLM(3, seed=7))


def law_drafter(kind: type[LawDrafter]) -> Callable[[], Drafter]:
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
    "a drawn token dropped": (law_drafter(DropsUnsure), softmax),
    "cut after the draw": (model(CutAfterTheDraw), softmax),
    "greedy drafts called a law": (model(GreedyCalledLaw), softmax),
}


@pytest.mark.parametrize("name", VERIFIERS)
def test_enumeration_catches_a_wrong_verifier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, make, law = VERIFIERS[name]
    monkeypatch.setattr(sampling.loop, "verify", mutant())
    assert error(make, law) > CAUGHT


@pytest.mark.parametrize("make", [model(), point, law_drafter(LawDrafter)])
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


@pytest.mark.parametrize("shared", ["the residual", "the draft", "the draft and the residual"])
def test_enumeration_catches_shared_random_numbers(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers of its own the scheme is off by the grid's coarseness alone; the acceptance's
    number used again for the residual, the draft or both is far worse."""

    def shared_error(which: str) -> float:
        drafter = GridDrafter(TableLM(4, seed=32, sharpness=1.0))
        monkeypatch.setattr(sampling.loop, "verify", SharedNumbers(drafter, which))
        target = ToyLM(4, lambda prefix: [0.9, 0.3, 0.0, -0.4] if len(prefix) == 4 else [0.0, *[-torch.inf] * 3])
        return enumeration_error(target, lambda: drafter, prompt=PROMPT, length=3, gamma=1, law=NaiveLaw())

    assert shared_error("nothing") < 0.02
    assert shared_error(shared) > 0.1


# -- chi-square through the real sampler ------------------------------------------------------------

START = [3, 1, 3, 1, 3]


def toy_target() -> TableLM:
    return TableLM(8, seed=21, sharpness=1.2, dtype=torch.float32)


def far_drafter() -> TableLM:
    return TableLM(8, seed=22, sharpness=1.2, dtype=torch.float32)


def counted_p(make: Callable[[KeyedSampler], Drafter], law: NaiveLaw, samples: int = 20_000) -> float:
    processor = make_processor(law.temperature, law.top_k, law.top_p, law.min_p)
    total = sum_counts = None
    for seed in range(samples // 1_000):
        sampler = KeyedSampler(processor, seed=seed)
        options = {"prompt": START, "samples": 1_000, "batch": 1_000, "length": 4, "gamma": 2}
        total = sample_counts(toy_target(), lambda s=sampler: make(s), lambda _, s=sampler: s, **options)
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


@pytest.mark.parametrize("name", COUNTED)
def test_counting_catches_the_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, law, examine = COUNTED[name]
    monkeypatch.setattr(sampling.loop, "verify", examine)
    assert counted_p(make, law, samples=20_000 if "noise" in name else 5_000) < HOPELESS


def test_counting_passes_the_unmutated_set_up() -> None:
    """The control of the controls: same models, same counts, no mistake."""
    assert counted_p(lambda _: ModelDrafter(far_drafter()), NaiveLaw(), samples=5_000) > HOPELESS


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
    draft = Draft(torch.tensor([[1]]), torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64))
    verdict = real_verify(logits, draft, [[0]], torch.tensor([[0, 1]]), ZeroCoins(compare), Rule.DRAWN)
    return int(verdict.path[0, 0]) == 0


def test_u_equal_to_the_probability_must_not_accept() -> None:
    assert impossible_accepted(torch.le)
    assert not impossible_accepted(torch.lt)


def test_the_real_coin_never_accepts_probability_zero_and_always_one() -> None:
    sampler = KeyedSampler(make_processor(1.0), seed=5)
    for row in range(50):
        keys = torch.tensor([[row, position, 0, 0] for position in range(2000)])
        assert not sampler.coin(torch.zeros(2000), keys).any()
        assert sampler.coin(torch.ones(2000), keys).all()


def test_the_drafter_proposing_outside_its_own_law_is_an_error() -> None:
    """0/0 is an error, not "refused"."""
    logits = torch.tensor([[[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]])
    draft = Draft(torch.tensor([[1]]), torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64))
    with pytest.raises(ValueError, match="0/0"):
        real_verify(logits, draft, [[0]], torch.tensor([[0, 1]]), KeyedSampler(make_processor(1.0)), Rule.DRAWN)


def test_nan_logits_are_an_error() -> None:
    logits = torch.tensor([[[0.0, float("nan"), 0.0]]])
    with pytest.raises(ValueError, match="NaN"):
        real_verify(
            logits, Draft.empty(1), [[0]], torch.tensor([[0, 1]]), KeyedSampler(make_processor(1.0)), Rule.POINT
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
        sampler = KeyedSampler(make_processor(0.0), seed=seed)
        return answers(target, [[1, 2]], PointDrafter(8, second_best), sampler, **options)[0]

    plain = answers(target, [[1, 2]], None, KeyedSampler(make_processor(0.0)), **options)[0]
    assert [answer(seed) for seed in range(5)] == [plain] * 5
    monkeypatch.setattr(sampling.loop, "verify", RatiosAtZero())
    assert all(answer(seed) != plain for seed in range(5))


def test_a_scripted_target_exposes_an_overwritten_correction() -> None:
    """The always-wrong drafter against a scripted chain: every round emits exactly the target's token."""
    script = [4, 5, 6, 7, 1, 2]
    target = chain_lm(8, [0], script)
    wrong = PointDrafter(8, lambda row: 3)
    found = answers(target, [[0]], wrong, KeyedSampler(make_processor(0.0)), length=6, gamma=4)
    assert found == [script]
