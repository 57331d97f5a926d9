"""The only decode loop. Autoregressive decoding is this loop with no drafter.

A round: draft, score the draft with the target, verify, commit. Knows neither models nor drafters
by name, and no text. It is a generator of events: nothing happens between two `next` calls, and
closing it at any time leaves the caches consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.events import Call, Event, Finished, Prefill, Reason, by_row
from sampling.rows import check_rows, few, first_rows
from sampling.types import (
    LM,
    Budget,
    Draft,
    Drafter,
    FixedPace,
    GammaController,
    Limits,
    Rows,
    Rule,
    Sampler,
    Session,
    Traits,
    Verdict,
)
from sampling.verify.round_metrics import PositionRecorder, RoundMetrics
from sampling.verify.rules import rule_of, verify
from utils.errors import UserError
from utils.processes import agreed, first
from utils.progress import never
from utils.timing import Stopwatch, synchronize

PIECE = 256  # prompt tokens read between two polls of the interrupt


def generate(
    lm: LM,
    prompt: Rows,
    drafter: Drafter,
    sampler: Sampler,
    limits: Limits,
    *,
    pace: GammaController | None = None,
    session: Session | None = None,
    interrupt: Callable[[], bool] = never,
    alternatives: int = 0,
) -> Iterator[Event]:
    """Decode B prompts to their ends.

    Args:
        lm: the target.
        prompt: B ragged rows of ids, at least one each.
        drafter: the source of drafts; `NoDrafter()` for plain decoding.
        sampler: processors, seed and coupling.
        limits: new tokens, stop ids, context.
        pace: the gamma controller; 4 drafts a round by default.
        session: an open session of `lm` for this prompt, whose cache is reused; it must keep the hidden states that the
            drafter's traits name.
        interrupt: polled between rounds and prefill pieces, never inside a forward pass.
        alternatives: the number of likeliest tokens that each Step has of every position; 0 for none. Their time is not
            counted.

    Yields:
        Prefill for each piece of the prompt but its last token; then for each row Steps (the first
        is its opening round, nothing drafted) and one Finished. Seconds exclude the consumer's time.

    Raises:
        UserError: at the call, a prompt that is empty or that leaves the context no room; several for a drafter that
            follows one.
    """
    if session is None:
        traits = drafter.traits
        session = lm.open(prompt, hidden=traits.needs_hidden if len(prompt) == 1 or not traits.reads_one_row else False)
    rows = [list(row) for row in first_rows(prompt, session)]
    room = room_of(lm, rows, limits)
    check_rows(drafter.traits, prompt)
    ids, ends = list(range(len(rows))), [min(len(row) + limits.max_new_tokens, room) for row in rows]
    rule = rule_of(drafter, sampler)
    if not first():
        drafter = _Silent()
    recorder = PositionRecorder(sampler, rule, alternatives) if alternatives and first() else None
    run = _Run(lm, session, drafter, sampler, rule, pace or FixedPace(4), limits.stop, rows, ids, ends, recorder)
    return _decoded(run, prompt, interrupt)


def room_of(lm: LM, rows: Rows, limits: Limits) -> int:
    """Return the most tokens that a row may have. UserError if limits or context leave a row no new token."""
    if limits.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {limits.max_new_tokens}")
    room, longest = min(limits.context, lm.context), max(map(len, rows), default=0)
    if longest >= room:
        raise UserError(
            f"the prompt is {longest} tokens; the context holds {room}, and at least one must be left for the answer"
        )
    return room


def _decoded(run: _Run, prompt: Rows, interrupt: Callable[[], bool]) -> Iterator[Event]:
    drafter, session = run.drafter, run.session
    drafter.start(prompt, session, session)
    yield from prefill(session, run.rows, lambda: agreed(interrupt()))
    # The drafters' own prefill belongs to the opening round.
    own = drafter.sessions
    waited = sum(piece.seconds for reader in own for piece in prefill(reader, reader.initial, interrupt))
    while run.rows:
        if agreed(interrupt()):
            yield from (Finished(row, "interrupted") for row in run.ids)
            return
        yield from run.round(waited)
        waited = 0.0


def prefill(session: Session, rows: Rows, interrupt: Callable[[], bool] = never) -> Iterator[Prefill]:
    """Feed all but the last token of each row in pieces of 256, each an event; the last token is
    left to the opening round. Stops early when interrupted.

    A session's `source`, which is no part of its rows, is read first, in one piece.
    """
    if session.source is not None and not interrupt():
        watch = Stopwatch(session.device)
        if count := session.read():
            yield Prefill(count, count, watch.lap())
    total = max(map(len, rows)) - 1
    done = min(session.rollback(rows))
    while done < total and not interrupt():
        watch = Stopwatch(session.device)
        done = min(done + PIECE, total)
        part = [row[:done] for row in rows]
        session.score(part, Draft.empty(len(part)))
        yield Prefill(done, total, watch.lap())


class _Silent(Drafter):
    """A drafter that drafts nothing, for processes other than the first."""

    traits = Traits(())


class _Outcome(NamedTuple):
    """The gain of one row in a round: accepted nodes (cut at a stop), own token, its reason to end."""

    path: list[int]
    token: int | None
    reason: Reason | None


@dataclass
class _Run:
    """The rows still active: `ids[i]` is the caller's number of `rows[i]`, `ends[i]` its longest length."""

    lm: LM
    session: Session
    drafter: Drafter
    sampler: Sampler
    rule: Rule  # the same in all rounds
    controller: GammaController
    stop: frozenset[int]
    rows: Rows
    ids: list[int]
    ends: list[int]
    recorder: PositionRecorder | None = None
    opening: bool = True

    def round(self, waited: float) -> Iterator[Event]:
        """Draft, score, verify, commit. One Step a row, and a Finished for each that ended."""
        watch = Stopwatch()  # drafts and verdicts reach the host before a lap, so only the pass has to be waited for
        share = len(self.rows)
        wanted = Budget([0] * share) if self.opening else self.controller.budget(self.ids)
        room = list(map(self._room, self.rows, self.ends))
        budget = wanted
        if max(wanted.max_depth) > min(room):
            budget = replace(wanted, max_depth=list(map(min, wanted.max_depth, room)))
        keys = few([[number, len(row)] for number, row in zip(self.ids, self.rows, strict=True)])
        draft = self._draft(budget, keys)
        took = watch.lap()
        draft_s = (took if draft.seconds is None else draft.seconds) + waited
        logits = self.session.score(self.rows, draft)
        synchronize(self.lm.device)
        verify_s = watch.lap()
        verdict = self._verdict(logits, draft, keys)
        metrics = RoundMetrics.of(verdict, draft)
        sample_s = watch.lap()
        self.drafter.observe(self.rows, draft, verdict)
        draft_s += watch.lap()
        self.session.commit(verdict.path)
        gained = zip(self.rows, self.ends, metrics.tokens, verdict.path.tolist(), verdict.token.tolist(), strict=True)
        outcomes = [self._commit(*row) for row in gained]
        calls = tuple(call.shared(share) for call in (*draft.calls, Call(self.lm.name, 1, verify_s)))
        inner = by_row(draft.trace)
        steps = [
            metrics.step(
                index,
                outcome.path,
                outcome.token,
                row=row,
                gamma=depth,  # the budget after limits: the controller learns that a limit is not silence
                calls=calls,
                draft_s=draft_s / share,
                verify_s=verify_s / share,
                sample_s=sample_s / share,
                inner=tuple(inner.get(row, ())),
            )
            for index, (row, depth, outcome) in enumerate(zip(self.ids, budget.max_depth, outcomes, strict=True))
        ]
        if not self.opening:
            self.controller.observe(steps, draft.promised)
        self.opening = False
        self._select([index for index, outcome in enumerate(outcomes) if outcome.reason is None])
        overhead_s = watch.lap() / share
        drafter = self.drafter if max(budget.max_depth) > 0 else None
        for index, (step, gamma, outcome) in enumerate(zip(steps, wanted.max_depth, outcomes, strict=True)):
            step = replace(step, gamma=gamma, overhead_s=overhead_s)
            if self.recorder is not None:
                step = self.recorder.noted(step, index, int(keys[index, 1]), drafter, draft, verdict)
            yield step
            if outcome.reason is not None:
                yield Finished(step.row, outcome.reason)

    def _room(self, row: list[int], end: int) -> int:
        """Return the most tokens that may be drafted: remaining − 1, since the target's own token needs room."""
        most, reach = end - len(row) - 1, self.session.draftable(len(row))
        return most if reach is None else min(most, reach)

    def _draft(self, budget: Budget, keys: Tensor) -> Draft:
        """Return the round's draft; of several processes the first drafts, and the others get ids and parents."""
        draft = Draft.empty(len(self.rows))
        if first() and max(budget.max_depth) > 0:
            draft = self.drafter.propose(self.rows, budget, self.sampler.drafting(keys))
        tokens, parents = agreed((draft.tokens, draft.parents))
        return draft if first() else Draft(tokens, parents=parents)

    def _verdict(self, logits: Tensor, draft: Draft, keys: Tensor) -> Verdict:
        """Return the verdict; of several processes the first one verifies."""
        sampler = self.sampler if self.recorder is None else self.recorder.begin()
        verdict = verify(logits, draft, self.rows, keys, sampler, self.rule) if first() else None
        path, token = agreed((verdict.path, verdict.token) if verdict else (logits, logits))
        return verdict or Verdict(path, token, logits, logits)

    def _commit(self, row: list[int], end: int, drafted: list[int], nodes: list[int], token: int) -> _Outcome:
        """Append a row's gain: the accepted `nodes` (-1 padded) of its drafts and its own token.

        The earliest stop ends it; no token after a stop is emitted. Drafts beyond the budget get no more room either.
        """
        path = [node for node in nodes if node >= 0][: end - len(row)]
        for count, node in enumerate(path, start=1):
            row.append(drafted[node])
            if drafted[node] in self.stop:
                return _Outcome(path[:count], None, "eos")
        if len(row) >= end:
            return _Outcome(path, None, "length")
        row.append(token)
        if token in self.stop:
            return _Outcome(path, token, "eos")
        return _Outcome(path, token, "length" if len(row) >= end else None)

    def _select(self, active: list[int]) -> None:
        """Keep only the rows with these indices."""
        if len(active) == len(self.rows):
            return
        self.rows = [self.rows[at] for at in active]
        self.ids, self.ends = ([part[at] for at in active] for part in (self.ids, self.ends))
        if active:
            index = torch.tensor(active)
            self.session.select(index)
            self.drafter.select(index)
