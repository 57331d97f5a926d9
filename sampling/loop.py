"""The only decode loop. Autoregressive decoding is this loop with no drafter.

A round: draft, score the draft with the target, verify, commit. Knows neither models nor drafters
by name, and no text. It is a generator of events: nothing happens between two `next` calls, and
closing it at any time leaves the caches consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampling.events import Call, Event, Finished, Prefill, Reason, Step, by_row
from sampling.rows import check_rows, first_rows
from sampling.types import LM, Draft, Drafter, FixedPace, Limits, Pace, Rows, Sampler, Session
from sampling.verify.round_metrics import Told
from sampling.verify.rules import rule_of, verify
from utils.errors import UserError
from utils.timing import Stopwatch

PIECE = 256  # prompt tokens read between two looks at the interrupt


def never() -> bool:
    """The interrupt that does not come."""
    return False


def generate(
    lm: LM,
    prompt: Rows,
    drafter: Drafter,
    sampler: Sampler,
    limits: Limits,
    *,
    pace: Pace | None = None,
    session: Session | None = None,
    interrupt: Callable[[], bool] = never,
) -> Iterator[Event]:
    """Decode B prompts to their ends.

    Args:
        lm: the target.
        prompt: B ragged rows of ids, at least one each.
        drafter: where drafts come from; `NoDrafter()` for plain decoding.
        sampler: processors, seed and coupling.
        limits: new tokens, stop ids, context.
        pace: chooses gamma; 4 by default.
        session: an open session of `lm` for this prompt, whose cache is reused; it must keep hidden states
            if the drafter's `needs_hidden` says so.
        interrupt: polled between rounds and prefill pieces, never inside a forward pass.

    Yields:
        Prefill for each piece of the prompt but its last token; then for each row Steps (the first
        is its opening round, nothing drafted) and one Finished. Seconds exclude the consumer's time.

    Raises:
        UserError: a prompt that is empty, or that leaves the context no room; several for a drafter that follows one.
    """
    if limits.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {limits.max_new_tokens}")
    if session is None:
        session = lm.open(prompt, hidden=getattr(drafter, "needs_hidden", False))
    room, rows = min(limits.context, lm.context), first_rows(prompt, session)
    longest = max(map(len, rows), default=0)
    if longest >= room:
        raise UserError(f"the prompt is {longest} tokens, the context holds {room} with room for one more")
    check_rows(drafter, prompt)
    drafter.start(prompt, session, session)
    yield from prefill(session, rows, interrupt)
    helping = [piece.seconds for one in drafter.sessions for piece in prefill(one, one.initial, interrupt)]
    run = _Run(lm, rows, drafter, sampler, limits, room, pace or FixedPace(4), session)
    waited = sum(helping)  # the drafters' own prefill belongs to the opening round
    while run.rows:
        if interrupt():
            yield from (Finished(row, "interrupted") for row in run.ids)
            return
        yield from run.round(waited)
        waited = 0.0


def prefill(session: Session, rows: Rows, interrupt: Callable[[], bool] = never) -> Iterator[Prefill]:
    """Feed all but the last token of each row in pieces of 256, each an event; the last token is
    left to the opening round. Stops early when interrupted.

    A session that has more to read than its rows (it has a `read` then) reads that first, in one piece.
    """
    read = getattr(session, "read", None)
    if read is not None and not interrupt():
        watch = Stopwatch(getattr(session, "device", None))
        if count := read():
            yield Prefill(count, count, watch.lap())
    total = max(map(len, rows)) - 1
    done = min(session.sync(rows))
    while done < total and not interrupt():
        watch = Stopwatch(getattr(session, "device", None))
        done = min(done + PIECE, total)
        part = [row[:done] for row in rows]
        session.score(part, Draft.empty(len(part)))
        yield Prefill(done, total, watch.lap())


class _Outcome(NamedTuple):
    """What one row gained in a round: accepted nodes (cut at a stop), own token, why it ended."""

    path: list[int]
    token: int | None
    reason: Reason | None


class _Run:
    """The rows still active: `ids[place]` is the caller's number of `rows[place]`."""

    def __init__(
        self,
        lm: LM,
        rows: Rows,
        drafter: Drafter,
        sampler: Sampler,
        limits: Limits,
        room: int,
        pace: Pace,
        session: Session,
    ) -> None:
        self.name, self.drafter, self.sampler = lm.name, drafter, sampler
        self.stop, self.pace, self.session = limits.stop, pace, session
        self.rule = rule_of(drafter, sampler)
        self.device = getattr(lm, "device", None)
        self.rows = [list(row) for row in rows]
        self.ids = list(range(len(rows)))
        self.ends = [min(len(row) + limits.max_new_tokens, room) for row in rows]
        self.opening = True

    def round(self, waited: float) -> Iterator[Event]:
        """Draft, score, verify, commit. One Step a row, and a Finished for each that ended."""
        watch = Stopwatch(self.device)
        gammas = [0] * len(self.rows) if self.opening else self.pace.gamma(self.ids)
        # Draft at most remaining − 1: the target's own token always has room.
        depths = [min(g, end - len(row) - 1) for g, end, row in zip(gammas, self.ends, self.rows, strict=True)]
        keys = torch.tensor([[name, len(row)] for name, row in zip(self.ids, self.rows, strict=True)])
        draft = self._draft(depths, keys)
        draft_s = watch.lap() + waited
        logits = self.session.score(self.rows, draft)
        verify_s = watch.lap()
        verdict = verify(logits, draft, self.rows, keys, self.sampler, self.rule)
        told = Told.of(verdict, draft)
        sample_s = watch.lap()
        self.drafter.observe(self.rows, draft, verdict)
        draft_s += watch.lap()
        self.session.keep(verdict.path)
        gained = zip(self.rows, self.ends, told.tokens, verdict.path.tolist(), verdict.token.tolist(), strict=True)
        outcomes = [self._commit(*one) for one in gained]
        share = len(self.rows)
        shared = [seconds / share for seconds in (draft_s, verify_s, sample_s)]
        calls = [*draft.calls, Call(self.name, 1, verify_s)]
        records = self._records(draft, told, outcomes, calls, shared)
        if not self.opening:
            for record, depth in zip(records, depths, strict=True):
                self.pace.observe(Step(gamma=depth, **record))  # what was asked for: a limit is not silence
        self.opening = False
        self._drop([place for place, outcome in enumerate(outcomes) if outcome.reason is None])
        overhead_s = watch.lap() / share
        for record, gamma, outcome in zip(records, gammas, outcomes, strict=True):
            yield Step(gamma=gamma, overhead_s=overhead_s, **record)
            if outcome.reason is not None:
                yield Finished(record["row"], outcome.reason)

    def _records(
        self, draft: Draft, told: Told, outcomes: list[_Outcome], calls: list[Call], shared: list[float]
    ) -> list[dict[str, Any]]:
        """What a round's Steps hold beside gamma and overhead; `shared` are each row's seconds of drafting, verifying
        and sampling."""
        draft_s, verify_s, sample_s = shared
        each = tuple(Call(name, passes, seconds / len(outcomes)) for name, passes, seconds in calls)
        inner = by_row(draft.trace)
        return [
            {
                "row": self.ids[place],
                **told.row(place, outcome.path, outcome.token),
                "token": outcome.token,
                "calls": each,
                "draft_s": draft_s,
                "verify_s": verify_s,
                "sample_s": sample_s,
                "inner": tuple(inner.get(self.ids[place], ())),
            }
            for place, outcome in enumerate(outcomes)
        ]

    def _draft(self, depths: list[int], keys: Tensor) -> Draft:
        if not any(depth > 0 for depth in depths):
            return Draft.empty(len(self.rows))
        return self.drafter.propose(self.rows, depths, self.sampler.drafting(keys))

    def _commit(self, row: list[int], end: int, drafted: list[int], nodes: list[int], token: int) -> _Outcome:
        """Append what a row gained: the accepted `nodes` (-1 padded) of its drafts and its own token.

        The earliest stop ends it; nothing behind a stop is emitted.
        """
        path = [node for node in nodes if node >= 0]
        for count, node in enumerate(path, start=1):
            row.append(drafted[node])
            if drafted[node] in self.stop:
                return _Outcome(path[:count], None, "eos")
        row.append(token)
        if token in self.stop:
            return _Outcome(path, token, "eos")
        return _Outcome(path, token, "length" if len(row) >= end else None)

    def _drop(self, active: list[int]) -> None:
        """Go on with the rows at these places only."""
        if len(active) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in active]
        self.ids = [self.ids[place] for place in active]
        self.ends = [self.ends[place] for place in active]
        if active:
            index = torch.tensor(active)
            self.session.select(index)
            self.drafter.select(index)
