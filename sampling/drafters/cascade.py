"""A drafter whose drafts are reviewed by a model between it and the target.

The vertical cascade of Cascade Speculative Drafting (arXiv 2312.11462, section 3.2): the reviewer runs the rounds
that a target runs, may be lenient, and passes up the law that its tokens really have (sampling/review.py). Knows
neither the drafter below nor the target above.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.composite import Composite, Growing, renumbered
from sampling.drafters.drawing import Covered
from sampling.drafters.model import opened, scoring
from sampling.events import Call, Step, by_row
from sampling.review import Review, review
from sampling.short_list import spread
from sampling.told import Told
from sampling.types import LM, Draft, Drafter, Rows, Sampler, Session, Verdict
from utils.k_matrix import check_lenience
from utils.timing import Stopwatch


class Reviewer:
    """A model with its session, as a member of a cascade: judges drafts and adds a token of its own."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
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

    def number(self, place: int) -> int:
        """The caller's number of the row at `place`."""
        return self._ids[place]

    def fitting(self, rows: Rows, k: list[int]) -> list[int]:
        """k as far as the reviewer's context goes."""
        if self.session is None:
            return [0] * len(rows)
        return [max(0, min(want, self.lm.context - len(row))) for want, row in zip(k, rows, strict=True)]

    def review(self, rows: Rows, draft: Draft, sampler: Sampler, lenience: float) -> tuple[Review, Told, Tensor | None]:
        """The judgement, what it tells the watcher, and the ids that its laws cover (None: all)."""
        session = self.session
        assert session is not None
        score, ids = scoring(session, whole=sampler.needs_prefixes)
        logits = score([row[: self.lm.context] for row in rows], draft)  # cut rows have no drafts, and are not heard
        seen = draft
        if ids is not None:
            logits = F.pad(logits, (0, 1), value=-torch.inf)  # the last column: every id that is not covered
            seen = _covered(draft, ids)
            sampler = Covered(sampler, ids, self.lm.vocab_size)
        keys = torch.tensor([[name, len(row)] for name, row in zip(self._ids, rows, strict=True)])
        found = review(logits, seen, rows, keys, sampler, lenience)
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
        draft = self.inner.propose(rows, [max(0, most - 1) for most in k], sampler)
        drafting = watch.lap()
        found, told, ids = self.reviewer.review(rows, draft, sampler, self.lenience)
        call = Call(self.reviewer.lm.name, 1, watch.lap())
        grown = Growing(rows, self.names)
        numbers = self.numbered(self.inner)
        for one in (*draft.calls, call):
            grown.called(one)
        grown.append(_emitted(found, draft, ids, numbers, self.reviewer.lm.vocab_size), range(len(self.names)), k)
        going = [place for place, most in enumerate(k) if most > 0]
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
    spoken = verdict.token if ids is None else ids.cpu()[verdict.token]
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
