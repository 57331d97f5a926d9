"""Beam search: the likeliest sequences instead of the likeliest next token.

A step scores every running beam in one pass, grows each by its likeliest tokens, and keeps the best. The caches are
reordered with the beams (`Session.select`), never recomputed. :class:`BeamPlan` has the scores and the end of the
search. Knows sessions, but no models, no drafters and no text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sampling.events import Beam, BeamStep, BeamTree, Call, Event, Fate, Finished, Reason
from sampling.loop import prefill, room_of
from sampling.rows import common_prefix, few, put
from sampling.types import LM, Draft, Limits, Rows, Session
from sampling.vocabulary import best
from utils.errors import UserError, number, shown, whole
from utils.logits_processors import LogitsProcessor, check_finite
from utils.processes import broadcast
from utils.progress import never
from utils.timing import Stopwatch

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """Parameters of a search: score = Σ log p / ((m + len) / (m + 1))^α (Wu et al., arXiv 1609.08144, eq. 14; m = 5).

    Args:
        num_beams: running beams, and finished ones after which the search may stop.
        top_k: tokens by which a beam may grow in a step; 0 = as many as can be kept or finish.
        min_length: least tokens of an answer before a stop id.
        alpha: length penalty; 0 = none, larger ones favour longer answers.
        offset: the penalty's m; with 0 it is transformers' `length_penalty` of the same α.
        early_stopping: when to stop after `num_beams` have finished, as in transformers. True: at once.
            False: when no running beam, scored as it stands, beats the worst of them. "never": when none could beat it
            by any further growth up to the limit (exact, and the longest search).

    Raises:
        UserError: a value outside its range.
    """

    num_beams: int = 4
    top_k: int = 0
    min_length: int = 0
    alpha: float = 1.2
    offset: float = 5.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        whole("num_beams", self.num_beams, 1, "a whole number, at least 1")
        whole("top_k", self.top_k, 0, "a whole number, 0 (as many as count) or more")
        whole("min_length", self.min_length, 0, "a whole number, at least 0")
        number("alpha", self.alpha, lambda alpha: True, "a finite number")
        number("offset", self.offset, lambda offset: offset >= 0, "a finite number, at least 0")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise UserError(f"early_stopping must be True, False or 'never', got {shown(self.early_stopping)}")

    def score(self, log_p: float, length: int) -> float:
        """Return Σ log p of `length` ≥ 1 tokens with the length penalty."""
        return log_p / float(((self.offset + length) / (self.offset + 1)) ** self.alpha)


def beam_generate(
    lm: LM,
    prompt: Rows,
    limits: Limits,
    plan: BeamPlan | None = None,
    *,
    processor: LogitsProcessor | None = None,
    session: Session | None = None,
    interrupt: Callable[[], bool] = never,
) -> Iterator[Event]:
    """Search for the best answer to one prompt.

    Args:
        lm: the model.
        prompt: one row of ids, at least one.
        limits: new tokens, stop ids, context. A beam that reaches a limit finishes.
        plan: parameters of the search.
        processor: log p is that of its distribution (temperature, top-k …; tokens of probability 0 are never tried).
            Without one, or with a greedy one, that of the model's own distribution at temperature 1 (after the greedy
            one's bias and rules of repetition).
        session: an open session of `lm` for this prompt (one row), whose cache is reused by common prefix. It has one
            row again when the generator ends or is closed: the one that shares most with the answer.
        interrupt: polled between steps and prefill pieces, never inside a forward pass.

    Yields:
        Prefill for each piece of the prompt but its last token, then BeamSteps and one Finished. The answer is
        :attr:`sampling.events.BeamTree.best` of the steps, closed unless it was interrupted.

    Raises:
        UserError: at the call, for several prompts or none, an empty one, one that fills the context, or limits without
            a new token.
    """
    if len(prompt) != 1:
        raise UserError(f"beam search takes one prompt at a time, got {len(prompt)}")
    session = lm.open(prompt) if session is None else session
    row = list(session.initial[0])
    longest = min(limits.max_new_tokens, room_of(lm, [row], limits) - len(row))
    search = _Search(lm, session, plan or BeamPlan(), processor, limits.stop, longest, row, [list(row)])
    return search.events(interrupt)


class _Candidate(NamedTuple):
    """Beam `parent` grown by its `rank`-th likeliest token; ties order by parent, then by rank."""

    log_p: float
    parent: int
    rank: int
    token: int


@dataclass
class _Search:
    """The running beams: `rows[i]`, prompt and tokens of `tree.running[i]`, is row `i` of the session."""

    lm: LM
    session: Session
    plan: BeamPlan
    processor: LogitsProcessor | None
    stop: frozenset[int]
    longest: int  # tokens of an answer
    prompt: list[int]
    rows: Rows
    tree: BeamTree = field(default_factory=BeamTree)
    length: int = 0  # tokens of every running beam

    def events(self, interrupt: Callable[[], bool]) -> Iterator[Event]:
        yield from prefill(self.session, self.rows, lambda: broadcast(interrupt()))
        try:
            while self.unfinished and not broadcast(interrupt()):
                yield self.step()
            yield Finished(0, "interrupted" if self.unfinished else self.reason)
        finally:
            self.narrow()

    @property
    def unfinished(self) -> bool:
        """Return whether a running beam could still be the answer, by the plan."""
        running, finished, plan = self.tree.running, self.tree.finished, self.plan
        if not running or len(finished) < plan.num_beams:
            return bool(running)
        if plan.early_stopping is True:
            return False
        # Σ log p only falls; with α > 0 the penalty of the longest answer bounds what a beam can reach.
        reached = self.longest if plan.early_stopping == "never" and plan.alpha > 0 else self.length
        return plan.score(running[0].log_p, reached) > finished[plan.num_beams - 1].score

    @property
    def reason(self) -> Reason:
        """Return the reason why the best finished beam ended."""
        return "eos" if self.tree.finished[0].tokens[-1] in self.stop else "length"

    def step(self) -> BeamStep:
        """Score, grow, choose, and reorder rows and caches as the kept beams."""
        watch = Stopwatch(self.lm.device)
        logits = self.session.score(self.rows, Draft.empty(len(self.rows)))[:, 0]
        verify_s = watch.lap()
        beams = broadcast(self._choose(self._candidates(self._log_probs(logits))))
        step = BeamStep(0, self.plan.num_beams, beams, (Call(self.lm.name, 1, verify_s),), verify_s, watch.lap())
        self.tree.add(step)
        self.length += 1
        if self.unfinished:
            parents = [beam.parent for beam in step.kept]
            if parents != list(range(len(self.rows))):
                self.session.select(torch.tensor(parents))
            self.rows = [[*self.rows[beam.parent], beam.token] for beam in step.kept]
        return replace(step, overhead_s=watch.lap())

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Map [B, V] logits to [B, V] log p; -inf for stop ids before `min_length`.

        The model's own distribution is not renormalised for them, a processor's is: it sees only allowed tokens.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        early = self.stop if self.length < self.plan.min_length else ()
        banned = put(few([token for token in early if token < scores.shape[-1]]), scores.device)
        processor = self.processor
        if processor is not None and not processor.greedy:
            return processor(scores.index_fill(-1, banned, -torch.inf), self.rows).log()
        if processor is not None:
            scores = processor.biased(scores)
            scores = processor.ruled(scores, self.rows) if processor.needs_prefixes else scores
        check_finite(scores.amax(dim=-1))
        return scores.log_softmax(dim=-1).index_fill(-1, banned, -torch.inf)

    def _candidates(self, log_p: Tensor) -> list[_Candidate]:
        """Return each beam grown by its likeliest tokens, all of them best first."""
        # Of a beam's tokens at most num_beams are kept and at most len(stop) end it: others can never count.
        values, ids = best(log_p, self.plan.top_k or self.plan.num_beams + len(self.stop))
        candidates = [
            _Candidate(beam.log_p + value, parent, rank, token)
            for parent, beam in enumerate(self.tree.running)
            for rank, (value, token) in enumerate(zip(values[parent].tolist(), ids[parent].tolist(), strict=True))
            if value > -torch.inf
        ]
        if not candidates:
            raise ValueError("no token is left to choose: each has probability 0, or is a stop id before min_length")
        return sorted(candidates, key=lambda candidate: (-candidate.log_p, candidate.parent, candidate.rank))

    def _choose(self, candidates: list[_Candidate]) -> tuple[Beam, ...]:
        """Return the candidates, given best first, with their fates. One that ends counts only among the best num_beams
        of its step, as in transformers; answers that differ only in their stop id are one answer."""
        beams: list[Beam] = []
        seen: set[tuple[int, int | None]] = set()
        kept = rank = 0
        for candidate in candidates:
            stops = candidate.token in self.stop
            ends = stops or self.length + 1 >= self.longest
            key = (candidate.parent, None if stops else candidate.token)
            fate: Fate = "dropped"
            if key in seen:
                fate = "merged"
            elif ends and rank < self.plan.num_beams:
                fate = "finished"
            elif not ends and kept < self.plan.num_beams:
                fate = "kept"
            seen.add(key)
            rank += fate != "merged"
            kept += fate == "kept"
            if fate != "dropped" or len(beams) < 2 * self.plan.num_beams:
                score = self.plan.score(candidate.log_p, self.length + 1)
                beams.append(Beam(candidate.parent, candidate.token, candidate.log_p, score, fate))
        return tuple(beams)

    def narrow(self) -> None:
        """Leave the session with the one row that shares most with the answer."""
        if len(self.rows) > 1:
            answer = [*self.prompt, *self.tree.best.tokens]
            kept = max(range(len(self.rows)), key=lambda row: common_prefix(self.rows[row], answer))
            self.session.select(torch.tensor([kept]))
            self.rows = [self.rows[kept]]
