"""The only decode loop. Autoregressive decoding is this loop with no drafter.

A round: draft, score the draft with the target, verify, commit. Knows neither models nor drafters
by name, and no text. It is a generator of events: nothing happens between two `next` calls, and
closing it at any time leaves the caches consistent.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.events import Call, Event, Finished, Prefill, Reason, Step, by_row
from sampling.rows import check_rows, first_rows
from sampling.types import (
    LM,
    Budget,
    Draft,
    Drafter,
    DraftTree,
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
from sampling.verify.distributions import HostDistributions
from sampling.verify.round_metrics import PositionRecorder, Seconds, facts_on, step_of
from sampling.verify.rules import Keys, rule_of, verify
from utils.errors import ServerError, UserError
from utils.processes import broadcast, is_first_process
from utils.progress import Cancelled, never
from utils.remote.pieces import ServerFigures
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
        is its opening round, nothing drafted) and one Finished. Seconds exclude the consumer's time. Where a server
        fails after the first token, the Finished's report says why.

    Raises:
        UserError: at the call, for a prompt that is empty, has ids outside the vocabulary or fills the context, for
            several prompts of a drafter that takes one, and for limits without a new token.
    """
    if session is None:
        traits = drafter.traits
        session = lm.open(prompt, hidden=traits.needs_hidden if len(prompt) == 1 or not traits.reads_one_row else False)
    rows = [list(row) for row in first_rows(prompt, session)]
    room = room_of(lm, rows, limits)
    check_rows(drafter.traits, prompt)
    if sampler.constraint is not None:
        sampler.constraint.begin(rows)
    ids, ends = list(range(len(rows))), [min(len(row) + limits.max_new_tokens, room) for row in rows]
    rule = rule_of(drafter, sampler)
    recorder = PositionRecorder(sampler, rule, alternatives) if alternatives and is_first_process() else None
    if not is_first_process():
        drafter = _Silent()
    run = _Run(
        lm,
        session,
        drafter,
        sampler,
        rule,
        recorder,
        controller=pace or FixedPace(4),
        stop=limits.stop,
        rows=rows,
        ids=ids,
        ends=ends,
        clock=Clock(lm.device),
    )
    return run.events(prompt, interrupt)


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


def prefill(session: Session, rows: Rows, interrupt: Callable[[], bool] = never) -> Iterator[Prefill]:
    """Feed the rows in pieces of 256 tokens, each an event; the last token of the longest row is left to the opening
    round. Stops early when interrupted.

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


class Clock:
    """The seconds of rounds by part: draft, verify, sample, observe, overhead."""

    def __init__(self, device: torch.device | None) -> None:
        self._device, self._since = device, 0.0
        self._seconds = defaultdict[str, float](float)

    def start(self) -> "Clock":
        """Begin to count now; the time since the last lap is not counted."""
        self._since = time.perf_counter()
        return self

    def lap(self, part: str) -> None:
        """Count the time since the last lap as this part's; the part "verify" ends when the device has finished."""
        if part == "verify":
            synchronize(self._device)
        now = time.perf_counter()
        self._seconds[part] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, with the time since the last lap as overhead, and begin again at 0."""
        self.lap("overhead")
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds


class _Gain(NamedTuple):
    """A row's gain in a round: accepted nodes (cut where the row ends), the target's own token, and why the row ends,
    if it does."""

    path: list[int]
    token: int | None
    reason: Reason | None


@dataclass
class _Run:
    """The state of a run. `ids[i]` is the caller's number of the active row `rows[i]`, `ends[i]` the length at which it
    ends. If several processes share the target, the first one drafts and decides."""

    lm: LM
    session: Session
    drafter: Drafter
    sampler: Sampler
    rule: Rule
    recorder: PositionRecorder | None  # of the alternatives at each position
    controller: GammaController
    stop: frozenset[int]
    rows: Rows
    ids: list[int]
    ends: list[int]
    clock: Clock
    opening: bool = True

    def events(self, prompt: Rows, interrupt: Callable[[], bool]) -> Iterator[Event]:
        """Read the prompt, then yield the events of rounds until every row has ended."""
        self.drafter.start(prompt, self.session, self.session)
        yield from prefill(self.session, self.rows, lambda: broadcast(interrupt()))
        # The drafters' own prefill belongs to the opening round.
        waited = sum(
            piece.seconds for reader in self.drafter.sessions for piece in prefill(reader, reader.initial, interrupt)
        )
        report = None
        while self.rows and not broadcast(interrupt()):
            try:
                yield from self.round(waited)
            except Cancelled:  # Ctrl-C, while a server was asked
                break
            except ServerError as error:
                if self.opening:  # nothing came yet
                    raise
                report = ServerFigures(problem=str(error))
                break
            waited = 0.0
        yield from (Finished(row, "interrupted", report) for row in self.ids)

    def round(self, waited: float) -> Iterator[Event]:
        """Draft, score, verify, commit. One Step a row, and a Finished for each that ended. `waited`: seconds that the
        drafter has taken before."""
        clock, keys = self.clock.start(), [(number, len(row)) for number, row in zip(self.ids, self.rows, strict=True)]
        wanted, budget = self._budgets()
        clock.lap("overhead")
        draft = self.propose(budget, keys)
        clock.lap("draft")
        logits = self.session.score(self.rows, draft)
        clock.lap("verify")
        verdict = self.decide(logits, draft, keys)
        clock.lap("sample")
        self.drafter.observe(self.rows, draft, verdict)
        clock.lap("observe")
        gains = self._commit(draft, verdict)
        steps = self._steps(keys, draft, verdict, gains, budget, waited)
        self._learn(steps, draft)
        for step, gamma, gain in zip(steps, wanted.max_depth, gains, strict=True):
            yield step if gamma == step.gamma else replace(step, gamma=gamma)
            if gain.reason is not None:
                yield Finished(step.row, gain.reason)

    def propose(self, budget: Budget, keys: Keys) -> Draft:
        """Return the round's draft, without nodes if nothing may be drafted. Processes other than the first one get the
        trees alone."""
        if max(budget.depth_with_forced or budget.max_depth) > 0:
            draft = self.drafter.propose(self.rows, budget, self.sampler.drafting(keys))
        else:
            draft = Draft.empty(len(self.rows))
        trees = broadcast(draft.trees)
        return draft if trees is draft.trees else Draft(trees)

    def decide(self, logits: Tensor, draft: Draft, keys: Keys) -> Verdict:
        """Return the verdict on a draft under the target's logits [B, N+1, V]."""
        sampler = self.sampler if self.recorder is None else self.recorder.begin()
        own = verify(sampler.biased(logits), draft, self.rows, keys, sampler, self.rule) if is_first_process() else None
        path, token = broadcast(([], []) if own is None else (own.path, own.token))
        return own or Verdict(path, token, HostDistributions(logits, draft, self.rows, sampler), logits)

    def _budgets(self) -> tuple[Budget, Budget]:
        """Return the round's budget as the controller wants it, and cut to the room that is left."""
        wanted = Budget([0] * len(self.rows)) if self.opening else self.controller.budget(self.ids)
        room = list(map(self._room, self.rows, self.ends))
        forced = room if self.sampler.constraint is not None and not self.opening else None
        if forced is None and max(wanted.max_depth) <= min(room):  # nearly every round
            return wanted, wanted
        return wanted, replace(wanted, max_depth=list(map(min, wanted.max_depth, room)), depth_with_forced=forced)

    def _room(self, row: list[int], end: int) -> int:
        """Return the most tokens that may be drafted: remaining − 1, since the target's own token needs room."""
        most, reach = end - len(row) - 1, self.session.draftable(len(row))
        return most if reach is None else min(most, reach)

    def _extended(self, row: list[int], end: int, tree: DraftTree, nodes: list[int], token: int) -> _Gain:
        """Append the accepted `nodes` of its draft and the target's own token to a row, and return this gain.

        The earliest stop token ends the row; no token after it is emitted. Drafts beyond `end` are cut.
        """
        path = nodes[: end - len(row)]
        for count, node in enumerate(path, start=1):
            row.append(tree.tokens[node])
            if tree.tokens[node] in self.stop:
                return _Gain(path[:count], None, "eos")
        if len(row) >= end:
            return _Gain(path, None, "length")
        row.append(token)
        if token in self.stop:
            return _Gain(path, token, "eos")
        return _Gain(path, token, "length" if len(row) >= end else None)

    def _commit(self, draft: Draft, verdict: Verdict) -> list[_Gain]:
        """Commit the accepted nodes; return each row's gain, and keep the rows that go on."""
        self.session.commit(verdict.path)
        gains = list(map(self._extended, self.rows, self.ends, draft.trees, verdict.path, verdict.token))
        active = [index for index, gain in enumerate(gains) if gain.reason is None]
        if len(active) < len(gains):
            self.rows = [self.rows[at] for at in active]
            self.ids, self.ends = ([part[at] for at in active] for part in (self.ids, self.ends))
            if active:
                index = torch.tensor(active)
                self.session.select(index)
                self.drafter.select(index)
        return gains

    def _learn(self, steps: list[Step], draft: Draft) -> None:
        """Let the controller learn from every round but the first, in which nothing was drafted."""
        clock = self.clock.start()
        if not self.opening:
            self.controller.observe(steps, draft.promised)
        self.opening = False
        clock.lap("overhead")

    def _steps(
        self, keys: Keys, draft: Draft, verdict: Verdict, gains: list[_Gain], budget: Budget, waited: float
    ) -> list[Step]:
        """Return each row's Step, with its share of the time, as the controller learns from it."""
        seconds, share, inner = self.clock.take(), len(keys), by_row(draft.trace)
        calls = (*draft.calls, Call(self.lm.name, 1, seconds["verify"]))
        if share > 1:
            calls = tuple(call.shared(share) for call in calls)
        proposed = seconds["draft"] if draft.seconds is None else draft.seconds
        drafting = proposed + seconds["observe"] + waited
        timed = Seconds(drafting / share, *(seconds[part] / share for part in ("verify", "sample", "overhead")))
        steps = list[Step]()
        # The step has the budget cut to the room left: a row near its end did not draft less by choice.
        for (row, start), tree, gain, gamma in zip(keys, draft.trees, gains, budget.max_depth, strict=True):
            facts = facts_on(verdict, len(steps), [-1, *gain.path])
            step = step_of(tree, gain.path, gain.token, facts, draft.probs is None, row, gamma, calls, timed)
            if draft.trace:
                step = replace(step, inner=tuple(inner.get(row, ())))
            if self.recorder is not None:
                drafter = self.drafter if gamma > 0 else None
                step = self.recorder.noted(step, len(steps), start, drafter, draft, verdict)
            steps.append(step)
        return steps
