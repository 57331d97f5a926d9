"""Events → figures: one meaning each, the same in the console, the JSON, the benchmark and the docs.

drafted D = accepted A + rejected R (the first refused of a round) + discarded (behind it, never
examined). Every answer opens with a prefill round: its time is the time to first token, its token
counts among the emitted ones, and neither enters a rate. Pure arithmetic over
:mod:`sampling.events`; knows no text, no tensors, no models and no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sampling.events import Event, Finished, Prefill, Reason, Step


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class Stats:
    """The figures of one answer (or of several, see :func:`merge`); all times in milliseconds.

    `predicted_n` counts every emitted token, the opening round's included; `openings` is how many
    of them opening rounds yielded (1 for an answer that has begun), and rates leave those out.
    `predicted_ms`, `draft_ms`, `verify_ms`, `sample_ms`, `overhead_ms`, `calls`, `target_passes` and
    everything about drafts cover the rounds after the opening one. `prompt_ms` is what reading the
    prompt took, `ttft_ms` that and the rest of the opening round (None before the first token).
    `accepted_at[j]` and `examined_at[j]` count drafts at depth j (0 = first after the prefix);
    `acceptance_histogram[a]` counts rounds that accepted a drafts. `top2_gaps[i]` is the gap of the
    target's two best logits at emitted token i, None where it was not recorded (inside a run of
    accepted drafts). Figures that are undefined are None, never NaN.
    """

    stop_reason: Reason | None = None
    prompt_n: int = 0
    prompt_ms: float = 0.0
    ttft_ms: float | None = None
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_n_rejected: int = 0
    draft_n_discarded: int = 0
    target_passes: int = 0
    accepted_at: tuple[int, ...] = ()
    examined_at: tuple[int, ...] = ()
    acceptance_histogram: tuple[int, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    overhead_ms: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    openings: int = 0
    top2_gaps: tuple[float | None, ...] = ()

    @property
    def predicted_per_second(self) -> float | None:
        """Tokens a second after the first token; None before a round has been timed."""
        return ratio(1000.0 * (self.predicted_n - self.openings), self.predicted_ms)

    @property
    def tokens_per_pass(self) -> float | None:
        """Block efficiency: tokens emitted a target pass, the target's own token included."""
        return ratio(self.predicted_n - self.openings, self.target_passes)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        return ratio(self.draft_n_accepted, self.draft_n)

    @property
    def alpha(self) -> float | None:
        """Accepted / examined: the chance that an examined draft is accepted."""
        return ratio(self.draft_n_accepted, self.draft_n_accepted + self.draft_n_rejected)

    @property
    def alpha_per_position(self) -> tuple[float | None, ...]:
        """Accepted at j / examined at j for every draft position up to gamma."""
        return tuple(ratio(a, e) for a, e in zip(self.accepted_at, self.examined_at, strict=True))

    @property
    def last_top2_gap(self) -> float | None:
        """The gap of the target's two best logits at the last emitted token."""
        return self.top2_gaps[-1] if self.top2_gaps else None

    def gap_at(self, position: int) -> float | None:
        """The top-2 gap at emitted token `position` (from 0), None where it is not known."""
        return self.top2_gaps[position] if 0 <= position < len(self.top2_gaps) else None

    def to_json(self) -> dict[str, Any]:
        """The figures under the names of `run --json`, in their order; times in milliseconds."""
        return {
            "stop_reason": self.stop_reason,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "ttft_ms": _round(self.ttft_ms, 3),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": _round(self.predicted_per_second, 3),
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "draft_n_rejected": self.draft_n_rejected,
            "target_passes": self.target_passes,
            "tokens_per_pass": _round(self.tokens_per_pass, 4),
            "acceptance_rate": _round(self.acceptance_rate, 4),
            "alpha": _round(self.alpha, 4),
            "alpha_per_position": [_round(alpha, 4) for alpha in self.alpha_per_position],
            "acceptance_histogram": list(self.acceptance_histogram),
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "sample_ms": round(self.sample_ms, 3),
            "calls": dict(self.calls),
        }


def _bump(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


def _depths(step: Step) -> list[int]:
    """The depth of every draft node, 0 for children of the committed prefix."""
    depths: list[int] = []
    for parent in step.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


class Meter:
    """Adds up the events of one row; `stats` and `ids` may be read at any time.

    `prompt_n` is the prompt's length; when not given it is taken from the Prefill events, which leave
    the last token of the prompt to the opening round.
    """

    def __init__(self, row: int = 0, prompt_n: int | None = None) -> None:
        self.row = row
        self.ids: list[int] = []
        self._prompt_n = prompt_n
        self._read = 0
        self._reason: Reason | None = None
        self._prompt_s = 0.0
        self._ttft_s: float | None = None
        self._seconds = {"draft": 0.0, "verify": 0.0, "sample": 0.0, "overhead": 0.0}
        self._drafts: Counter[str] = Counter()
        self._rounds = 0
        self._width = 0
        self._accepted_at: list[int] = []
        self._examined_at: list[int] = []
        self._histogram: list[int] = []
        self._calls: Counter[str] = Counter()
        self._gaps: list[float | None] = []

    def add(self, event: Event) -> None:
        """Take in one event; those of other rows are passed over."""
        if isinstance(event, Prefill):
            self._prompt_s += event.seconds
            self._read = max(self._read, event.total + 1)
        elif event.row != self.row:
            return
        elif isinstance(event, Finished):
            self._reason = event.reason
        else:
            self._emit(event)
            if self._ttft_s is None:
                self._open(event)
            else:
                self._round(event)

    def _emit(self, step: Step) -> None:
        emitted = step.emitted
        self.ids += emitted
        self._gaps += [None] * (len(emitted) - 1)
        self._gaps += [step.top2_gap] * min(1, len(emitted))

    def _open(self, step: Step) -> None:
        self._prompt_s += step.verify_s
        self._ttft_s = self._prompt_s + step.seconds - step.verify_s

    def _round(self, step: Step) -> None:
        self._rounds += 1
        for name in self._seconds:
            self._seconds[name] += getattr(step, f"{name}_s")
        for call in step.calls:
            self._calls[call.model] += call.passes
        rejected = step.rejected
        self._drafts.update(drafted=len(step.drafted), accepted=len(step.path), rejected=len(rejected))
        depths = _depths(step)
        self._width = max([self._width, step.gamma, *(depth + 1 for depth in depths)])
        for node in (*step.path, *rejected):
            _bump(self._examined_at, depths[node])
        for node in step.path:
            _bump(self._accepted_at, depths[node])
        _bump(self._histogram, len(step.path))

    @property
    def stats(self) -> Stats:
        """The figures so far."""
        drafts, seconds, width = self._drafts, self._seconds, self._width
        return Stats(
            stop_reason=self._reason,
            prompt_n=self._read if self._prompt_n is None else self._prompt_n,
            prompt_ms=1000 * self._prompt_s,
            ttft_ms=None if self._ttft_s is None else 1000 * self._ttft_s,
            predicted_n=len(self.ids),
            predicted_ms=1000 * sum(seconds.values()),
            draft_n=drafts["drafted"],
            draft_n_accepted=drafts["accepted"],
            draft_n_rejected=drafts["rejected"],
            draft_n_discarded=drafts["drafted"] - drafts["accepted"] - drafts["rejected"],
            target_passes=self._rounds,
            accepted_at=_padded(self._accepted_at, width),
            examined_at=_padded(self._examined_at, width),
            acceptance_histogram=_padded(self._histogram, width + 1) if self._rounds else (),
            draft_ms=1000 * seconds["draft"],
            verify_ms=1000 * seconds["verify"],
            sample_ms=1000 * seconds["sample"],
            overhead_ms=1000 * seconds["overhead"],
            calls=dict(self._calls),
            openings=0 if self._ttft_s is None else 1,
            top2_gaps=tuple(self._gaps),
        )


def _padded(counts: list[int], length: int) -> tuple[int, ...]:
    return tuple(counts + [0] * (length - len(counts)))


def measure(events: Iterable[Event], row: int = 0, prompt_n: int | None = None) -> Stats:
    """The figures of a whole stream of events."""
    meter = Meter(row, prompt_n)
    for event in events:
        meter.add(event)
    return meter.stats


def _added(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


_SUMMED = (
    *("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "openings", "target_passes"),
    *("draft_n", "draft_n_accepted", "draft_n_rejected", "draft_n_discarded"),
    *("draft_ms", "verify_ms", "sample_ms", "overhead_ms"),
)
_ADDED = ("accepted_at", "examined_at", "acceptance_histogram")


def merge(stats: Iterable[Stats]) -> Stats:
    """One Stats for several answers: counts and times add up, so rates are Σ tokens / Σ time.

    `ttft_ms` is the mean over the answers that have begun; `stop_reason` is theirs if they agree.
    """
    parts = list(stats)
    reasons = {part.stop_reason for part in parts}
    begun = [part for part in parts if part.ttft_ms is not None]
    openings = sum(part.openings for part in begun)
    calls: Counter[str] = Counter()
    for part in parts:
        calls.update(part.calls)
    fields: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    fields |= {name: _added(getattr(part, name) for part in parts) for name in _ADDED}
    return Stats(
        **fields,
        stop_reason=reasons.pop() if len(reasons) == 1 else None,
        ttft_ms=ratio(sum((part.ttft_ms or 0.0) * part.openings for part in begun), openings),
        calls=dict(calls),
        top2_gaps=tuple(gap for part in parts for gap in part.top2_gaps),
    )
