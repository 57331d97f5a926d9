"""One drafter where it is sure, another where it is not and where that pays.

For each row the first drafter proposes. Rows that it leaves empty, or whose first token it holds for unlikely, are
drafted for by the second: a match that costs nothing is followed, a trained drafter earns its time elsewhere. With
`learn` the second is only asked while it brings more tokens than its time is worth, by what both have brought in past
rounds (the first's guesses are compared with the text even where they were not drafted). Knows neither of the two.

Who drafts is settled before the round's first draw, from past rounds alone, so the text stays lossless; with laws
(`coupling rejection`) and `learn`, clocks decide which draw of the distribution comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.cape import Expansion
from sampling.drafters.combined import joint_rule
from sampling.rows import check_rows, common_prefix
from sampling.types import Draft, Drafter, Rows, Rule, Sampler, Session, Verdict
from sampling.verify.rules import depth_of
from utils.errors import UserError
from utils.timing import Stopwatch

WEIGHT = 0.1  # of a round in the running means
PROBE_EVERY = 8  # rounds without the second drafter after which it is asked again
HOPED = 0.6  # tokens a round that it is thought to bring before it has drafted


class Guessing(Drafter, Protocol):
    """A drafter that can say how sure it is. Its drafts are point masses: those it is unsure of are thrown away."""

    def chances(self, rows: Rows) -> list[float]: ...  # of the first token it would draft for each row; 0 = none


@dataclass
class Case:
    """What both drafters bring, in tokens a round, where the first is silent, or where it is unsure."""

    first: float = 0.0
    then: float = HOPED
    idle: int = 0  # such rounds since the second was asked

    def learn(self, first: int, then: int | None) -> None:
        """A row's round is over; `then` is None where the second was not asked."""
        self.first += WEIGHT * (first - self.first)
        if then is not None:
            self.then += WEIGHT * (then - self.then)


@dataclass
class Worth:
    """What the second drafter's time is worth: seconds of its drafts, of everything else, and tokens a round."""

    drafting: float = 0.0
    rest: float = 0.0
    tokens: float = 1.0

    def learn(self, drafting: float | None, rest: float, tokens: float) -> None:
        self.rest = rest if self.rest == 0.0 else self.rest + WEIGHT * (min(rest, 3 * self.rest) - self.rest)
        self.tokens += WEIGHT * (tokens - self.tokens)
        if drafting is not None:
            least = 3 * self.drafting or drafting  # a disturbed round counts as three
            self.drafting += (WEIGHT if self.drafting else 1.0) * (min(drafting, least) - self.drafting)

    @property
    def price(self) -> float:
        """Tokens that the time of one round's drafts would have brought."""
        return self.drafting * self.tokens / self.rest if self.rest else 0.0


@dataclass
class _Round:
    """What `observe` must know of the round, by row: its case (None: the first drafts), what the first guessed, and
    whether the second was asked."""

    cases: list[Case | None]
    guesses: Rows
    asked: list[bool]
    drafting: float
    watch: Stopwatch = field(default_factory=Stopwatch)


class TakeOverDrafter:
    """`first`, and `then` where it is silent or unsure. `source` is [B, N].

    Args:
        sure: the first drafts where its first token is at least this likely; 0: where it has any.
        learn: ask the second only where that pays.
    """

    def __init__(self, first: Drafter, then: Drafter, *, sure: float = 0.0, learn: bool = False) -> None:
        if sure > 0 and first.rule is not Rule.POINT:
            raise UserError(f"sure must be 0 beside {', '.join(first.names)}, whose drafts are drawn, got {sure:g}")
        self.first, self.then, self.sure, self.learn = first, then, sure, learn
        self.rule = joint_rule((first, then))
        self.needs_hidden = any(getattr(one, "needs_hidden", False) for one in (first, then))
        self.silent, self.unsure, self.worth = Case(), Case(), Worth()
        self._round: _Round | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.first.names, *self.then.names)

    @property
    def expansion(self) -> Expansion | None:
        """What the second drafter grows sideways by."""
        found: Expansion | None = getattr(self.then, "expansion", None)
        return found

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (*self.first.sessions, *self.then.sessions)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._round = None
        for one in (self.first, self.then):
            check_rows(one, prompt)
            one.start(prompt, target, verifier)

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """A chain for each row, of one drafter alone."""
        draft = self.first.propose(rows, k, sampler)
        cases = self._cases(rows, k, draft)
        asked = self._asked(cases)
        guesses = [[token for token in row if token >= 0] for row in draft.tokens.tolist()]
        self._round = _Round(cases, guesses, asked, 0.0)
        if not any(asked):
            return draft
        other = self.then.propose(rows, [want if ask else 0 for want, ask in zip(k, asked, strict=True)], sampler)
        self._round.drafting = sum(call.seconds for call in other.calls)
        self._round.watch.lap()
        other = replace(other, source=_sources(other) + len(self.first.names), calls=(*draft.calls, *other.calls))
        answered = (other.tokens >= 0).any(dim=1).tolist()  # a trained drafter may have run out of context
        kept = torch.tensor([bool(guess) and not has for guess, has in zip(guesses, answered, strict=True)])
        return _merged(draft, other, kept) if bool(kept.any()) else other

    def _cases(self, rows: Rows, k: list[int], draft: Draft) -> list[Case | None]:
        spoken = (draft.tokens >= 0).any(dim=1).tolist()
        asks = getattr(self.first, "chances", None)
        chances = asks(rows) if asks is not None and self.sure > 0 else [1.0] * len(rows)
        found: list[Case | None] = []
        for has, chance, want in zip(spoken, chances, k, strict=True):
            case = self.unsure if chance < self.sure else None
            found.append(None if want <= 0 else case if has else self.silent)
        return found

    def _asked(self, cases: list[Case | None]) -> list[bool]:
        """Which rows to ask the second drafter for. Its time is lost to every row, whichever it drafts for."""
        if not self.learn:
            return [case is not None for case in cases]
        gains = [0.0 if case is None else max(0.0, case.then - case.first) for case in cases]
        pays = sum(gains) > self.worth.price * len(cases)
        due = [case is not None and case.idle >= PROBE_EVERY for case in cases]
        return [(pays and gain > 0) or again for gain, again in zip(gains, due, strict=True)]

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        if self._round is not None:
            self._note(self._round, draft, verdict)
            self._round = None
        self.first.observe(rows, draft, verdict)
        self.then.observe(rows, draft, verdict)

    def _note(self, last: _Round, draft: Draft, verdict: Verdict) -> None:
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
                case.learn(common_prefix(guess, text), len(text) - 1 if ask else None)
        each = sum(map(len, emitted)) / len(emitted)
        self.worth.learn(last.drafting if any(last.asked) else None, last.watch.lap(), each)

    def select(self, rows: Tensor) -> None:
        self.first.select(rows)
        self.then.select(rows)


def _sources(draft: Draft) -> Tensor:
    """[B, N], also where the drafter has one name and gives none."""
    return torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)


def _merged(one: Draft, other: Draft, kept: Tensor) -> Draft:
    """Rows of `one` where `kept` [B], else of `other`; point masses become one-hot laws beside laws.

    Beside a tree the rows of `one` follow its first chain, as far as that goes.
    """
    if other.parents is not None:
        one = _first(one, depth_of(other.parents, len(other.parents)))
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    chosen = kept[:, None]
    tokens = torch.where(chosen, _wide(one.tokens, width, -1), _wide(other.tokens, width, -1))
    source = torch.where(chosen, _wide(_sources(one), width, 0), _wide(_sources(other), width, 0))
    raw = torch.where(chosen, _wide(_raw(one), width, 1.0), _wide(_raw(other), width, 1.0))
    laws = _laws(one, other, tokens, chosen)
    return Draft(tokens, laws, raw, other.parents, source=source, calls=other.calls)


def _first(draft: Draft, count: int) -> Draft:
    """The first `count` nodes of a chain."""
    if draft.tokens.shape[1] <= count:
        return draft
    cut = {name: part[:, :count] for name in ("tokens", "probs", "raw") if (part := getattr(draft, name)) is not None}
    return replace(draft, **cut, source=_sources(draft)[:, :count])


def _laws(one: Draft, other: Draft, tokens: Tensor, chosen: Tensor) -> Tensor | None:
    known = one.probs if one.probs is not None else other.probs
    if known is None:
        return None
    masses = F.one_hot(tokens.clamp(min=0), known.shape[-1]).to(known)
    ours, theirs = (
        masses if draft.probs is None else F.pad(draft.probs, (0, 0, 0, tokens.shape[1] - draft.probs.shape[1]))
        for draft in (one, other)
    )
    return torch.where(chosen[..., None].to(known.device), ours, theirs)


def _raw(draft: Draft) -> Tensor:
    return torch.ones(draft.tokens.shape) if draft.raw is None else draft.raw.float()


def _wide(values: Tensor, width: int, fill: float) -> Tensor:
    return F.pad(values, (0, width - values.shape[1]), value=fill)
