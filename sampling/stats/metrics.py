"""Turns events into figures. Each has one meaning, the same in the console, the JSON, the benchmark and the docs.

drafted D = accepted A + rejected R (at most one a round) + discarded (all others, counted as never
examined). Every answer opens with a round without a draft: its time and that of reading the prompt are the time to
first token, its token counts among the emitted ones, and neither enters a rate. The emitted tokens of a beam search are
those of the best beam. Pure arithmetic over :mod:`sampling.events`; the record itself is
:class:`sampling.stats.summary.Stats`. Knows no text, no tensors, no models and no clock.
"""

from collections import Counter, defaultdict
from typing import Any

from sampling.events import BeamStep, BeamTree, Event, Finished, Prefill, Reason, Step
from sampling.stats.summary import Stats
from utils.remote.pieces import ServerFigures


class Meter:
    """Sums up the events of one row; `stats` and `ids` may be read at any time.

    `prompt_n` is the prompt's length, `rows` the number of prompts answered together: the time of reading them is
    divided among them, as the seconds of rounds are; the first token comes after all are read.
    """

    def __init__(self, prompt_n: int, row: int = 0, rows: int = 1) -> None:
        self.prompt_n, self.row, self.rows = prompt_n, row, rows
        self.ids: list[int] = []
        self._reason: Reason | None = None
        self._report: ServerFigures | None = None
        self._pieces = 0
        self._prompt_s = 0.0
        self._ttft_s: float | None = None
        self._sums: Any = Counter()  # rounds, drafts and seconds, by name
        self._width = 0
        self._least_s: dict[bool, float] = {}  # of a target pass, by whether it read drafts
        self._counts: defaultdict[str, Any] = defaultdict(Counter)  # by name: over depths, drafts or models
        self._sources: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._reviews: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # accepted, examined
        self._gaps: list[float | None] = []
        self._tree, self._beams = BeamTree(), 0

    def add(self, event: Event) -> None:
        """Add one event; events of other rows are ignored."""
        if isinstance(event, Prefill):
            self._prompt_s += event.seconds / self.rows
        elif event.row != self.row:
            return
        elif isinstance(event, Finished):
            self._reason, self._report = event.reason, event.report
            if self._pieces and self._report is not None and not self._report.tokens:  # the server counts none
                self._report = self._report._replace(tokens=None)
            if self._beams and event.reason != "interrupted":
                self._tree.close()
                self.ids = list(self._tree.best.tokens)
        else:
            self._emit(event)
            if self._ttft_s is None:
                self._ttft_s = self.rows * (self._prompt_s + event.seconds)
                self._prompt_s += event.verify_s
            else:
                self._round(event)

    def _emit(self, step: Step | BeamStep) -> None:
        if isinstance(step, BeamStep):
            self._tree.add(step)
            self._beams = max(self._beams, step.num_beams)
            self.ids = list(self._tree.best.tokens)
        elif emitted := step.emitted:
            self._pieces += step.top2_gap is None and step.verify_s > 0  # else ids of a token cut at a stop
            self.ids += emitted
            self._gaps += [*[None] * (len(emitted) - 1), step.top2_gap]

    def _round(self, step: Step | BeamStep) -> None:
        self._sums.update(verify_s=step.verify_s, sample_s=step.sample_s, overhead_s=step.overhead_s)
        if isinstance(step, Step) and step.top2_gap is None:  # a server's piece of text
            return
        self._sums["rounds"] += 1
        if self.rows == 1:  # in a batch a row's share is not the time of the pass
            wide = isinstance(step, BeamStep) or bool(step.drafted)
            self._least_s[wide] = min(self._least_s.get(wide, step.verify_s), step.verify_s)
        for call in step.calls:
            self._counts["calls"][call.model] += call.passes
            self._counts["call_s"][call.model] += call.seconds
        if isinstance(step, Step):
            self._count_drafts(step)

    def _count_drafts(self, step: Step) -> None:
        """Count the drafts of a round by source and by fate."""
        rejected = step.rejected[:1]  # one refusal a round: the first sibling counts for all
        accepted, depths = set(step.path), step.depths
        self._sums.update(draft_s=step.draft_s, n=len(step.drafted), accepted=len(step.path), rejected=len(rejected))
        self._sums["branched"] += step.is_tree
        for node, source in enumerate(step.source):
            self._sources[source][0] += 1
            self._sources[source][1] += node in accepted
        self._review(step.inner)
        self._width = max([self._width, step.gamma, *(depth + 1 for depth in depths)])
        self._counts["examined"].update(depths[node] for node in (*step.path, *rejected))
        self._counts["accepted"].update(depths[node] for node in step.path)
        self._counts["histogram"][len(step.path)] += 1
        self._counts["drafted"][len(step.drafted)] += 1

    def _review(self, steps: tuple[Step, ...]) -> None:
        """Count nested rounds, and those inside them."""
        for step in steps:
            counts = self._reviews[step.calls[-1].model]
            counts[0] += len(step.path)
            counts[1] += len(step.path) + len(step.rejected)
            self._review(step.inner)

    def _reported(self, name: str, otherwise: int) -> int:
        """Return the server's count of this name; `otherwise` if no server reports it."""
        count: int | None = getattr(self._report, name, None)
        return otherwise if count is None else count

    @property
    def stats(self) -> Stats:
        """Return the figures so far."""
        sums, counts, width = self._sums, self._counts, self._width
        seconds = [float(sums[name]) for name in ("draft_s", "verify_s", "sample_s", "overhead_s")]
        draft_ms, verify_ms, sample_ms, overhead_ms = (1000 * spent for spent in seconds)
        return Stats(
            stop_reason=self._reason,
            prompt_n=self._reported("prompt_tokens", 0 if self._pieces else self.prompt_n),
            prompt_ms=1000 * self._prompt_s,
            ttft_ms=None if self._ttft_s is None else 1000 * self._ttft_s,
            predicted_n=self._reported("tokens", len(self.ids)),
            predicted_ms=1000 * sum(seconds),
            draft_n=sums["n"],
            draft_n_accepted=sums["accepted"],
            draft_n_rejected=sums["rejected"],
            draft_n_discarded=sums["n"] - sums["accepted"] - sums["rejected"],
            target_passes=sums["rounds"],
            accepted_at=tuple(counts["accepted"][depth] for depth in range(width)),
            examined_at=tuple(counts["examined"][depth] for depth in range(width)),
            acceptance_histogram=tuple(counts["histogram"][count] for count in range(width + 1) if counts["histogram"]),
            draft_histogram=tuple(counts["drafted"][count] for count in range(max(counts["drafted"], default=-1) + 1)),
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            sample_ms=sample_ms,
            overhead_ms=overhead_ms,
            calls=dict(counts["calls"]),
            call_ms={model: 1000 * seconds for model, seconds in counts["call_s"].items()},
            reviews={model: (accepted, examined) for model, (accepted, examined) in self._reviews.items()},
            sources=tuple(
                (self._sources[source][0], self._sources[source][1])
                for source in range(max(self._sources, default=-1) + 1)
            ),
            openings=int(self._ttft_s is not None and bool(self.ids)),
            top2_gaps=tuple(self._gaps),
            beams=self._beams,
            least_pass_ms=1000 * self._least_s[False] if False in self._least_s else None,
            least_wide_ms=1000 * self._least_s[True] if True in self._least_s else None,
            branched=sums["branched"],
            pieces=self._pieces,
            report=self._report,
        )
