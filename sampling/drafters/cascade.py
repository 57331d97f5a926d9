"""A drafter whose drafts are reviewed by a model between it and the target.

The vertical cascade of Cascade Speculative Drafting (Chen et al., arXiv 2312.11462, section 3.2): the reviewer runs
the rounds that a target runs, may be lenient, and passes up the distribution that its tokens really have
(sampling/verify/review.py). A cascade as it is written down, a list of drafters, large to small, a K matrix and a
lenience, becomes one drafter by :func:`cascade_of` (algorithm 1). Knows neither the drafter below nor the target above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.combined import ChainDrafter, Composite, Growing, Link, renumbered
from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.drafters.draft_model import ModelDrafter, opened, scoring
from sampling.drafters.drawing import Covered
from sampling.drafters.registry import DraftRequest, Parts
from sampling.events import Call, Step, by_row
from sampling.types import LM, Draft, Drafter, Rows, Rule, Sampler, Session, Verdict
from sampling.verify.review import Review, review
from sampling.verify.round_metrics import Told
from sampling.vocabulary import spread
from utils.catalogue.k_matrix import Matrix, check_fit, check_lenience
from utils.errors import UsageError, UserError
from utils.timing import Stopwatch

_ALL = 1 << 30  # a review is never cut but by the room that is left


class Reviewer:
    """A model with its session, as a member of a cascade: judges drafts and adds a token of its own.

    `rule`: by which the target judges what it lets out; its own reviews go token by token.
    """

    def __init__(self, lm: LM, rule: Rule = Rule.DRAWN) -> None:
        self.lm, self.rule = lm, rule
        self.names = (lm.name,)
        self.session: Session | None = None
        self._ids: list[int] = []

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.session is None else (self.session,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer; the cache of the last answer is reused by common prefix."""
        previous, self.session = self.session, None
        self._ids = list(range(len(prompt)))
        self.session = opened(self.lm, prompt, previous, target)

    def keys(self, rows: Rows) -> Tensor:
        """[B, 2]: the caller's number of each row and where it ends."""
        return torch.tensor([[name, len(row)] for name, row in zip(self._ids, rows, strict=True)])

    def number(self, place: int) -> int:
        """The caller's number of the row at `place`."""
        return self._ids[place]

    def fitting(self, rows: Rows, k: list[int]) -> list[int]:
        """k as far as the reviewer's context goes."""
        if self.session is None:
            return [0] * len(rows)
        return [max(0, min(want, self.lm.context - len(row))) for want, row in zip(k, rows, strict=True)]

    def review(
        self, rows: Rows, draft: Draft, keys: Tensor, going: Tensor, sampler: Sampler, lenience: float
    ) -> tuple[Review, Told, Tensor | None]:
        """The judgement of the rows `going` [M], what it tells the watcher, and the ids its laws cover (None: all).

        `keys` are those of all rows. The others draw nothing: it would be drawn again where they go on.
        """
        session = self.session
        assert session is not None
        score, ids = scoring(session, whole=sampler.needs_prefixes)
        logits = score([row[: self.lm.context] for row in rows], draft)  # cut rows have no drafts, and are not heard
        seen = draft
        if ids is not None:
            logits = F.pad(logits, (0, 1), value=-torch.inf)  # the last column: every id that is not covered
            seen = _covered(draft, ids)
            sampler = Covered(sampler, ids, session.vocab_size)
        found = review(logits, seen, rows, keys, sampler, lenience, going)
        session.keep(found.verdict.path)
        return found, Told.of(found.verdict, seen), ids

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        return None  # the cache follows by common prefix

    def select(self, rows: Tensor) -> None:
        self._ids = [self._ids[row] for row in rows.tolist()]
        if self.session is not None:
            self.session.select(rows)


class CascadeDrafter(Composite):
    """`inner` drafts, `reviewer` judges once a proposal and adds one token of its own.

    Args:
        reviewer: a model that can score drafts.
        inner: any drafter; in a cascade of three again a chain of cascades.
        lenience: λ ≥ 1 of the review; the target's own judgement is exact whatever it is.
    """

    def __init__(self, reviewer: LM | Reviewer, inner: Drafter, lenience: float = 1.0) -> None:
        self.reviewer = reviewer if isinstance(reviewer, Reviewer) else Reviewer(reviewer)
        self.inner, self.lenience = inner, check_lenience(lenience)
        super().__init__((self.reviewer, inner))

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """At most k[b] tokens, at least one where k[b] > 0: the inner drafts that pass, then the reviewer's own token.

        Laws, where drafts have laws, are those that the tokens really have. `trace` holds the review, a Step a row.
        """
        k = self.reviewer.fitting(rows, k)
        if max(k) <= 0:
            return Draft.empty(len(rows))
        watch = Stopwatch(getattr(self.reviewer.lm, "device", None))
        keys, going = self.reviewer.keys(rows), [place for place, most in enumerate(k) if most > 0]
        draft = self.inner.propose(rows, [max(0, most - 1) for most in k], sampler.drafting(keys))
        drafting = watch.lap()
        found, told, ids = self.reviewer.review(rows, draft, keys, torch.tensor(going), sampler, self.lenience)
        call = Call(self.reviewer.lm.name, 1, watch.lap())
        grown = Growing(rows, self.names)
        numbers = self.numbered(self.inner)
        for one in (*draft.calls, call):
            grown.called(one)
        assert self.reviewer.session is not None
        emitted = _emitted(found, draft, ids, numbers, self.reviewer.session.vocab_size)
        grown.append(emitted, range(len(self.names)), k)
        steps = self._steps(going, draft, found.verdict, told, ids, call, drafting)
        return replace(grown.draft(), trace=tuple(steps))

    def _steps(
        self,
        places: list[int],
        draft: Draft,
        verdict: Verdict,
        told: Told,
        ids: Tensor | None,
        call: Call,
        drafting: float,
    ) -> list[Step]:
        """The reviews of these rows as nested rounds, for display."""
        share, numbers = len(draft.tokens), self.numbered(self.inner)
        calls = tuple(Call(name, passes, seconds / share) for name, passes, seconds in (*draft.calls, call))
        paths, tokens, drafted = verdict.path.tolist(), verdict.token.tolist(), draft.tokens.tolist()
        inner = by_row(draft.trace)
        steps = []
        for place in places:
            row, token = self.reviewer.number(place), tokens[place]
            fields = told.row(place, [node for node in paths[place] if node >= 0], token)
            fields["drafted"] = tuple(one for one in drafted[place] if one >= 0)
            fields["source"] = tuple(numbers[index] for index in fields["source"])
            steps.append(
                Step(
                    row=row,
                    gamma=draft.tokens.shape[1],
                    **fields,
                    token=token if ids is None else int(ids[token]),
                    calls=calls,
                    draft_s=drafting / share,
                    verify_s=calls[-1].seconds,
                    sample_s=0.0,
                    inner=tuple(renumbered(one, numbers) for one in inner.get(row, ())),
                )
            )
        return steps


def _covered(draft: Draft, ids: Tensor) -> Draft:
    """The draft in terms of the ids covered: token i is ids[i], len(ids) stands for all others."""
    count = len(ids)
    tokens = draft.tokens.to(ids.device)
    at = torch.searchsorted(ids, tokens.clamp(min=0)).clamp(max=count - 1)
    known = torch.where(ids[at] == tokens, at, torch.full_like(at, count))
    probs = draft.probs
    if probs is not None:
        # What q says of an id that is not covered never matters: the reviewer gives it no chance.
        probs = F.pad(probs.to(ids.device).index_select(-1, ids), (0, 1), value=1.0)
    return replace(draft, tokens=torch.where(tokens < 0, tokens, known), probs=probs)


def _emitted(found: Review, draft: Draft, ids: Tensor | None, numbers: list[int], vocab_size: int) -> Draft:
    """What a review lets out: accepted drafts and the reviewer's own token behind them, [B, N+1].

    Sources are numbered as the cascade does: 0 is the reviewer, `numbers` says what the inner ones are.
    """
    verdict = found.verdict
    rows, count = draft.tokens.shape
    accepted = (verdict.path >= 0).sum(dim=1)
    own = F.pad(torch.zeros_like(draft.tokens), (0, 1)).scatter(1, accepted[:, None], 1).bool()
    before = torch.arange(count + 1).expand(rows, -1) < accepted[:, None]
    spoken = verdict.token if ids is None else torch.where(verdict.token < 0, -1, ids.cpu()[verdict.token])
    drafted = F.pad(draft.tokens, (0, 1), value=-1)
    tokens = torch.where(before, drafted, torch.where(own, spoken[:, None], torch.full_like(drafted, -1)))
    source = torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)
    source = torch.tensor([*numbers, 0])[F.pad(source, (0, 1))]
    laws = found.laws
    if laws is not None and ids is not None:
        laws = spread(laws[..., :-1], ids, vocab_size, 0.0)
    raw = _chances(verdict, tokens, ids)
    return Draft(tokens, laws, raw, source=torch.where(before, source, torch.zeros_like(source)))


def _chances(verdict: Verdict, tokens: Tensor, ids: Tensor | None) -> Tensor:
    """The reviewer's own probability at temperature 1 of each token [B, N+1] it lets out."""
    logits = verdict.logits.float()
    at = tokens.to(logits.device).clamp(min=0)
    if ids is not None:
        at = torch.searchsorted(ids, at).clamp(max=len(ids) - 1)
    chosen = logits.gather(2, at[..., None])[..., 0]
    return (chosen - logits.logsumexp(dim=-1)).exp().cpu()


def cascade_of(drafters: Sequence[Drafter], matrix: Any, lenience: float = 1.0) -> ChainDrafter:
    """The cascade of `drafters`, large to small, by the K matrix; λ = `lenience` holds between them only.

    All but the last review: model drafters (of which the model is taken) or models. A last one without a model is
    asked for K's last entry at a time, one with a model for what is missing. A cascade ignores gamma: a
    proposal has up to `most` tokens, and what it is asked for only cuts.

    Raises:
        UserError: no drafter, a matrix that does not fit, λ < 1, or a drafter that cannot review before the last.
    """
    if not drafters:
        raise UserError("a cascade needs at least one drafter")
    k, lenience = check_fit(matrix, len(drafters)), check_lenience(lenience)
    *reviewers, last = drafters
    call = None if isinstance(last, ModelDrafter) else k[-1][-1] or None
    links = [Link(last, 0, call, 0 if call is None else call - 1)]
    for place in range(len(reviewers) - 1, -1, -1):
        below = _chain(links, k, place + 1)
        drafter = CascadeDrafter(_reviewer(reviewers[place]), below, lenience)
        links.insert(0, Link(drafter, 0, _ALL, below.most))
    return _chain(links, k, 0)


def chain_of(drafters: Sequence[Drafter], amounts: Sequence[int]) -> ChainDrafter:
    """Drafter i adds amounts[i] tokens behind those before it; nobody reviews but the target.

    UserError for no drafter, another number of amounts, or one below zero.
    """
    if not drafters or len(drafters) != len(amounts):
        raise UserError(f"a chain needs an amount for each of its drafters, got {len(amounts)} for {len(drafters)}")
    if min(amounts) < 0:
        raise UserError(f"the amounts of a chain must be 0 or more, got {min(amounts)}")
    return ChainDrafter([Link(drafter, amount) for drafter, amount in zip(drafters, amounts, strict=True)])


def _chain(links: Sequence[Link], k: Matrix, reviewer: int) -> ChainDrafter:
    """What `reviewer` (0 = the target) is given: the drafters after it, with the tokens of its row."""
    row = k[reviewer][reviewer:]
    return ChainDrafter([link._replace(tokens=tokens) for link, tokens in zip(links, row, strict=True)])


def _reviewer(drafter: Any) -> Reviewer:
    """What reviews: the model of a model drafter, or a model."""
    if isinstance(drafter, FeatureDrafter):
        raise UserError("feature cannot review drafts (it has no states but its target's): only the last can be one")
    model: Any = drafter.lm if isinstance(drafter, ModelDrafter) else drafter
    if not hasattr(model, "open"):
        name = drafter.names[0] if getattr(drafter, "names", ()) else type(drafter).__name__
        raise UserError(f"{name} is no model and cannot review drafts: only the last drafter of a cascade may be one")
    return Reviewer(model, drafter.rule) if isinstance(drafter, ModelDrafter) else Reviewer(model)


def build(pair: Parts, asked: DraftRequest) -> ChainDrafter:
    """The pair's cascade, or its drafters one behind the other."""
    members, matrix, lenience = pair.cascade(asked)
    try:
        return cascade_of(members, matrix, lenience) if asked.word == "cascade" else chain_of(members, matrix[0])
    except UserError as error:
        raise UsageError(f"lane {asked.word}: {error}") from error
