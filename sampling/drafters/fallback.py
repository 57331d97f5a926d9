"""One drafter where it is sure, another where it is not and where that pays.

For each row the first drafter proposes. Rows that it leaves empty, or whose first token it holds for unlikely, are
drafted for by the second: a match that costs nothing is followed, a trained drafter earns its time elsewhere. With
`learn` the second is only asked while it brings more tokens than its time is worth, by what both have brought in past
rounds (the first's guesses are compared with the text even where they were not drafted). Knows neither of the two.

Who drafts is settled before the round's first draw, from past rounds alone, so the text stays lossless; with
distributions (`coupling rejection`) and `learn`, clocks decide which draw of the distribution comes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.combined import Composite
from sampling.gamma.ratios import Ratios
from sampling.rows import common_prefix
from sampling.types import Budget, Draft, Drafter, Rows, Rule, Sampler, Session, Tree, Verdict
from sampling.verify.rules import depth_of
from utils.errors import UserError

PROBE_EVERY = 8  # rounds without the second drafter after which it is asked again
HOPED = 0.6  # tokens a round that it is thought to bring before it has drafted


class Case:
    """What both drafters bring, in tokens a round, where the first is silent, or where it is unsure."""

    def __init__(self, name: str, chances: Ratios) -> None:
        self.first, self.then = chances.of((name, "first"), 0.0), chances.of((name, "then"), HOPED)
        self.idle = 0  # such rounds since the second was asked

    @property
    def gain(self) -> float:
        return max(0.0, self.then.value - self.first.value)


@dataclass
class _Round:
    """What `observe` must know of the round, by row: where the second may gain (None: the first drafts), what the first
    guessed, and whether the second was asked."""

    cases: list[Case | None]
    guesses: Rows
    asked: list[bool]


class FallbackDrafter(Composite):
    """`first`, and `then` where it is silent or unsure. `source` is [B, N].

    Args:
        sure: the first drafts where its first token is at least this likely; 0: where it has any.
        learn: ask the second only where that pays.
    """

    def __init__(
        self,
        first: Drafter,
        then: Drafter,
        *,
        sure: float = 0.0,
        learn: bool = False,
        chances: Ratios | None = None,
    ) -> None:
        names = first.traits.names
        if sure > 0 and first.traits.rule is not Rule.POINT:
            raise UserError(f"sure must be 0 beside {', '.join(names)}, whose drafts are drawn, got {sure:g}")
        super().__init__((first, then))
        tree = Tree.SIDEWAYS if then.traits.tree is Tree.SIDEWAYS else None
        self.traits = replace(self.traits, names=(*names, *then.traits.names), tree=tree)
        self.first, self.then, self.sure, self.learn = first, then, sure, learn
        chances = Ratios() if chances is None else chances
        self.silent, self.unsure = Case("silent", chances), Case("unsure", chances)
        self._round: _Round | None = None

    def given_away(self) -> tuple[Drafter, ...]:
        """Itself: it learns from every round."""
        return (self,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._round = None
        super().start(prompt, target, verifier)

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """A chain for each row, of one drafter alone."""
        draft = self.first.propose(rows, budget, sampler)
        guesses = [[token for token in row if token >= 0] for row in draft.tokens.tolist()]
        cases = self._cases(rows, budget.max_depth, guesses)
        asked = self._asked(cases, budget.opportunity_cost)
        self._round = _Round(cases, guesses, asked)
        if not any(asked):
            return draft
        depth = [most if ask else 0 for most, ask in zip(budget.max_depth, asked, strict=True)]
        other = self.then.propose(rows, replace(budget, max_depth=depth), sampler)
        source = _sources(other) + len(self.first.traits.names)
        other = replace(other, source=source, calls=(*draft.calls, *other.calls))
        answered = (other.tokens >= 0).any(dim=1).tolist()  # a trained drafter may have run out of context
        firsts = torch.tensor([bool(guess) and not has for guess, has in zip(guesses, answered, strict=True)])
        return _merged(draft, other, firsts[:, None]) if bool(firsts.any()) else other

    def _cases(self, rows: Rows, depth: list[int], guesses: Rows) -> list[Case | None]:
        confidence = self.first.confidence(rows) if self.sure > 0 else [1.0] * len(rows)
        found: list[Case | None] = []
        for guess, sure, most in zip(guesses, confidence, depth, strict=True):
            case = self.unsure if sure < self.sure else None
            found.append(None if most <= 0 else case if guess else self.silent)
        return found

    def _asked(self, cases: list[Case | None], price: float | None) -> list[bool]:
        """Which rows to ask the second drafter for. Its time is lost to every row, whichever it drafts for."""
        if not self.learn:
            return [case is not None for case in cases]
        gains = [0.0 if case is None else case.gain for case in cases]
        pays = sum(gains) > (price or 0.0) * len(cases)
        due = [case is not None and case.idle >= PROBE_EVERY for case in cases]
        return [(pays and gain > 0) or again for gain, again in zip(gains, due, strict=True)]

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        last, self._round = self._round, None
        if last is not None:
            drafted, paths, own = draft.tokens.tolist(), verdict.path.tolist(), verdict.token.tolist()
            emitted = [
                [*(tokens[node] for node in path if node >= 0), token]
                for tokens, path, token in zip(drafted, paths, own, strict=True)
            ]
            for kind in (self.silent, self.unsure):
                met = [ask for case, ask in zip(last.cases, last.asked, strict=True) if case is kind]
                kind.idle = 0 if any(met) else kind.idle + bool(met)
            for case, guess, text, ask in zip(last.cases, last.guesses, emitted, last.asked, strict=True):
                if case is not None:
                    case.first.learn(common_prefix(guess, text))
                    if ask:
                        case.then.learn(len(text) - 1)
        super().observe(rows, draft, verdict)


def _sources(draft: Draft) -> Tensor:
    """[B, N], also where the drafter has one name and gives none."""
    return torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)


def _raw(draft: Draft) -> Tensor:
    return torch.ones(draft.tokens.shape) if draft.draft_prob is None else draft.draft_prob.float()


def _merged(one: Draft, other: Draft, firsts: Tensor) -> Draft:
    """Rows of `one` where `firsts` [B, 1], else of `other`; point masses become one-hot distributions beside
    distributions.

    Beside a tree the rows of `one` follow its first chain, as far as that goes.
    """
    count = one.tokens.shape[1] if other.parents is None else depth_of(other.parents, len(other.parents))
    width = max(one.tokens[:, :count].shape[1], other.tokens.shape[1])

    def chosen(ours: Tensor, theirs: Tensor, fill: float) -> Tensor:
        ours, theirs = (F.pad(part, (0, width - part.shape[1]), value=fill) for part in (ours[:, :count], theirs))
        return torch.where(firsts, ours, theirs)

    tokens = chosen(one.tokens, other.tokens, -1)
    source, raw = chosen(_sources(one), _sources(other), 0), chosen(_raw(one), _raw(other), 1.0)
    probs, known = None, one.probs if one.probs is not None else other.probs
    if known is not None:
        masses = F.one_hot(tokens.clamp(min=0), known.shape[-1]).to(known)
        each = (None if one.probs is None else one.probs[:, :count], other.probs)
        ours, theirs = (masses if one is None else F.pad(one, (0, 0, 0, width - one.shape[1])) for one in each)
        probs = torch.where(firsts[..., None].to(known.device), ours, theirs)
    return Draft(tokens, probs, raw, other.parents, source=source, calls=other.calls)
