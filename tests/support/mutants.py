"""Mutants: published mistakes of a verifier or a drafter, each put in by wrapping one small piece."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.proposal import Growth, Node, Offer
from sampling.sampler import KeyedSampler, SamplerView
from sampling.types import Budget, Draft, Rows, Rule, Sampler, Verdict
from sampling.verify.distributions import HostDistributions
from sampling.verify.rules import Keys
from tests.support.branching import softmax
from tests.support.toys import LawDrafter, ToyLM

# -- a naive verifier, right by default, with a place for every mistake ---------------------------


class NaiveVerify:
    """Token by token, row by row. Subclasses get one step wrong."""

    def __call__(self, logits: Tensor, draft: Draft, rows: Rows, keys: Keys, sampler: Sampler, rule: Rule) -> Verdict:
        law = sampler.probs(logits, [])
        path, token = list[list[int]](), list[int]()
        for row, chain in enumerate(draft.tokens):
            laws = None if draft.probs is None else draft.probs[row]
            accepted, own = self.row(law[row], laws, chain, torch.tensor(keys[row]), sampler, logits[row])
            path.append(list(range(accepted)))
            token.append(own)
        return Verdict(path, token, HostDistributions(logits, draft, rows, sampler), logits)

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

    def __init__(self, drafter: "GridDrafter", shared: str) -> None:
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


def filled(draft: Draft) -> Rows:
    """The drafts of each row, followed by ids 0 up to the draft's width."""
    return [[*row, *[0] * (draft.width - len(row))] for row in draft.tokens]


# -- mutant drafters ------------------------------------------------------------------------------


class RawLaw(ModelDrafter):
    """Passes up the raw law, not the processed one the tokens were drawn from."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, sampler)
        if draft.probs is None:
            return draft
        chains = [
            [row + drafted[:depth] for depth in range(len(drafted))]
            for row, drafted in zip(rows, filled(draft), strict=True)
        ]
        raw = [softmax(self.lm.logits(prefixes)) for prefixes in chains]  # type: ignore[attr-defined]
        return replace(draft, probs=torch.stack(raw).to(draft.probs.dtype))


class ShiftedLaw(ModelDrafter):
    """Passes up each token's law one position too late."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, sampler)
        if draft.probs is None:
            return draft
        shifted = torch.cat([draft.probs[:, :1], draft.probs[:, :-1]], dim=1)
        return replace(draft, probs=(shifted + 1e-6) / (1 + 1e-6 * shifted.shape[-1]))


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
        return super().propose(rows, budget, ArgmaxDraws(sampler))


class ArgmaxDraws(SamplerView):
    greedy = point_mass = needs_prefixes = False

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        return probs.argmax(dim=-1)


class DraftsWithTargetNoise(ModelDrafter):
    """Rejection with drafts drawn from the *target's* noise: draft and residual share their numbers."""

    sampler: KeyedSampler

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        return super().propose(rows, budget, _TargetNoise(self.sampler))  # type: ignore[arg-type]


class _TargetNoise(SamplerView):
    greedy = point_mass = needs_prefixes = False
