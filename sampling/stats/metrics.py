"""Events → figures: one meaning each, the same in the console, the JSON, the benchmark and the docs.

drafted D = accepted A + rejected R (the first refused of a round) + discarded (behind it, never
examined). Every answer opens with a prefill round: its time is the time to first token, its token
counts among the emitted ones, and neither enters a rate. Of a beam search the best beam's tokens are
the emitted ones. Pure arithmetic over
:mod:`sampling.events`; the record itself is :class:`sampling.stats.summary.Stats`. Knows no text, no tensors, no
models and no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sampling.events import BeamStep, BeamTree, Event, Finished, Prefill, Reason, Step
from sampling.stats.summary import Stats


def _bump(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


class Meter:
    """Adds up the events of one row; `stats` and `ids` may be read at any time.

    `prompt_n` is the prompt's length; when not given it is taken from the Prefill events, which leave
    the last token of the prompt to the opening round. `rows`: how many prompts are answered together. What reading them
    took is then shared out among them, as the seconds of rounds are; the first token comes when all is read.
    """

    def __init__(self, row: int = 0, prompt_n: int | None = None, rows: int = 1) -> None:
        self.row, self.rows = row, rows
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
        self._call_s: dict[str, float] = {}
        self._sources: list[list[int]] = []
        self._reviews: dict[str, list[int]] = {}  # of each reviewer accepted, examined, drafted
        self._tail = [0, 0, 0]
        self._gaps: list[float | None] = []
        self._tree = BeamTree()
        self._beams = 0

    def add(self, event: Event) -> None:
        """Take in one event; those of other rows are passed over."""
        if isinstance(event, Prefill):
            self._prompt_s += event.seconds / self.rows
            self._read = max(self._read, event.total + 1)
        elif event.row != self.row:
            return
        elif isinstance(event, Finished):
            self._finish(event)
        else:
            if isinstance(event, BeamStep):
                self._search(event)
            else:
                self._emit(event)
            if self._ttft_s is None:
                self._open(event)
            else:
                self._round(event)

    def _finish(self, event: Finished) -> None:
        self._reason = event.reason
        if self._beams and event.reason != "interrupted":
            self._tree.close()
            self.ids = list(self._tree.best.tokens)

    def _search(self, step: BeamStep) -> None:
        self._tree.add(step)
        self._beams = max(self._beams, step.num_beams)
        self.ids = list(self._tree.best.tokens)

    def _emit(self, step: Step) -> None:
        emitted = step.emitted
        self.ids += emitted
        self._gaps += [None] * (len(emitted) - 1)
        self._gaps += [step.top2_gap] * min(1, len(emitted))

    def _open(self, step: Step | BeamStep) -> None:
        self._ttft_s = self.rows * (self._prompt_s + step.seconds)
        self._prompt_s += step.verify_s

    def _round(self, step: Step | BeamStep) -> None:
        self._rounds += 1
        for name in self._seconds:
            self._seconds[name] += getattr(step, f"{name}_s", 0.0)
        for call in step.calls:
            self._calls[call.model] += call.passes
            self._call_s[call.model] = self._call_s.get(call.model, 0.0) + call.seconds
        if isinstance(step, Step):
            self._judge(step)

    def _judge(self, step: Step) -> None:
        """What became of the drafts of a round."""
        self._propose(step)
        for review in step.inner:
            self._review(review)
        rejected = step.rejected[:1]  # of siblings the first stands for all: one refusal a round
        self._drafts.update(drafted=len(step.drafted), accepted=len(step.path), rejected=len(rejected))
        depths = step.depths
        self._width = max([self._width, step.gamma, *(depth + 1 for depth in depths)])
        for node in (*step.path, *rejected):
            _bump(self._examined_at, depths[node])
        for node in step.path:
            _bump(self._accepted_at, depths[node])
        _bump(self._histogram, len(step.path))

    def _propose(self, step: Step) -> None:
        """Who proposed the drafts of a round, and how those fared that nobody had reviewed."""
        accepted, examined = set(step.path), {*step.path, *step.rejected[:1]}
        for node, source in enumerate(step.source):
            self._sources.extend([0, 0] for _ in range(source + 1 - len(self._sources)))
            self._sources[source][0] += 1
            self._sources[source][1] += node in accepted
        if step.inner:  # reviewed drafts come first
            tail = range(sum(len(review.emitted) for review in step.inner), len(step.drafted))
            for index, nodes in enumerate((set(tail), accepted, examined)):
                self._tail[index] += len(nodes.intersection(tail))

    def _review(self, step: Step) -> None:
        """A nested round, with those inside it."""
        accepted, drafted = len(step.path), len(step.drafted)
        counts = self._reviews.setdefault(step.calls[-1].model, [0, 0, 0])
        for index, count in enumerate((accepted, accepted + len(step.rejected), drafted)):
            counts[index] += count
        for review in step.inner:
            self._review(review)

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
            acceptance_histogram=_padded(self._histogram, width + 1) if self._histogram else (),
            draft_ms=1000 * seconds["draft"],
            verify_ms=1000 * seconds["verify"],
            sample_ms=1000 * seconds["sample"],
            overhead_ms=1000 * seconds["overhead"],
            calls=dict(self._calls),
            call_ms={model: 1000 * seconds for model, seconds in self._call_s.items()},
            reviews={model: (accepted, examined) for model, (accepted, examined, _) in self._reviews.items()},
            reviewed={model: drafted for model, (_, _, drafted) in self._reviews.items()},
            sources=tuple((drafted, accepted) for drafted, accepted in self._sources),
            tail=(self._tail[0], self._tail[1], self._tail[2]),
            openings=0 if self._ttft_s is None else 1,
            top2_gaps=tuple(self._gaps),
            beams=self._beams,
        )


def _padded(counts: list[int], length: int) -> tuple[int, ...]:
    return tuple(counts + [0] * (length - len(counts)))


def measure(events: Iterable[Event], row: int = 0, prompt_n: int | None = None) -> Stats:
    """The figures of a whole stream of events."""
    meter = Meter(row, prompt_n)
    for event in events:
        meter.add(event)
    return meter.stats
