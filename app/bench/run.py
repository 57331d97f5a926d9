"""`bench`: many prompts under several methods, gammas and temperatures, timed fairly.

Every answer starts from nothing (no cache, no n-grams of an earlier one); the order of the methods
rotates and reverses from round to round; a warm-up is not counted. Chats of a batch go on side by side: the first turns
of a group of questions are answered together, then the second turns of those that have one. The rows of a batch share
every pass: a row's seconds are its even share of each round it was active in, so that Σ tokens / Σ seconds over the
rows is the batch's own rate. An interrupt keeps what was measured, and with --out the same command goes on from there
(app/bench/journal.py). Later turns of a chat continue from the first temperature's reference's answer, so that all
methods read the same prompts. Knows how to run lanes, not what the figures mean (app/bench/summary.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.bench.journal import Slot, open_journal
from app.bench.options import BenchArgs
from app.bench.plan import BenchTurn, Measurement
from app.bench.results import facts, prompt_rows
from app.lanes.answers import Answer, run_lane
from app.lanes.comparison import Variant, may_differ, order
from app.lanes.costs import Terms, terms_of
from app.prompts.datasets import selected
from app.prompts.questions import fitting_prompts
from app.replay.log_writer import Asked, SessionLogWriter, answer_log_of, log_writer_of
from app.screen.output import answer_bar, load_engine, screen
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.stats.metrics import Meter
from utils.errors import UsageError, UserError
from utils.files import separate, writable, write_result
from utils.machine import machine
from utils.processes import agreed
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes.lane import Lane


WARM_UP = 16  # tokens


def run_bench(settings: Settings, options: ModelOptions, args: BenchArgs) -> int:
    """Run the benchmark (or the identity check), or make the page of an earlier one; the exit code."""
    if args.source is not None:
        from app.bench.report import report_of

        return report_of(args.source, settings, args)
    own, nothing = "has its own references and the one --temperature", "writes no page and no log"
    for why, flag, given in (
        (own, "temperatures", args.temperatures),
        *((nothing, "report", args.report), (nothing, "log", settings.record)),
    ):
        if args.check_identity and given:
            raise UsageError(f"--check-identity {why}: leave --{flag} out")
    check_batches(args, args.methods or settings.compare, settings.record)
    questions = selected(args, settings.data_dir)
    written = {"--out": args.out, "--report": args.report}
    for flag, path in written.items():
        if path is not None:
            writable(path, flag)
    prompts = args.prompts if isinstance(args.prompts, Path) else None  # else the name of a data set
    separate({**written, "--log": settings.record}, [prompts, args.ids])
    journal = open_journal(settings, options, args, questions)
    try:
        with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as recorder:
            engine = load_engine(settings, options, interrupt)
            bench = Bench(engine, settings, args, questions, interrupt, journal)
            bench.recorder = recorder
            if args.check_identity:
                from app.bench.identity import check_identity

                return check_identity(bench, options)
            bench.run()
        return bench.show()
    finally:
        if journal is not None:
            journal.close()


def check_batches(args: BenchArgs, methods: Sequence[str], record: str | None = None) -> None:
    """UsageError, before any work, for what is answered one prompt at a time only."""
    alone = {
        "lane beam searches for": "beam" in methods,
        "--record tells of": record,
        "--check-identity compares": args.check_identity,
    }
    for words, given in alone.items():
        if given and args.batch_size > 1:
            raise UsageError(f"{words} one prompt at a time, got --batch-size {args.batch_size}")


class Bench(Measurement):
    """A measurement that is made: `run()` fills `items`, `show()` prints and writes them."""

    recorder: SessionLogWriter | None = None

    def answer(self, variant: Variant, prompt: list[int], text: str | None = None, **changes: Any) -> Answer:
        """One answer of a lane, from nothing; it is recorded if the prompt's text is `text`."""
        lane = self.lane(variant, **changes)
        recorder = None if text is None else self.recorder
        answer_log = answer_log_of(recorder, self.engine, [lane], Asked(text or "", prompt), lane.settings, self.decode)
        show = None if answer_log is None else partial(answer_log.feed, 0)
        terms = terms_of(lane, self.engine)
        answer = run_lane(lane, prompt, self.decode, interrupt=self.interrupt, show=show, terms=terms)
        if answer_log is not None and (problem := answer_log.end()):
            sys.stderr.write(f"{problem}\n")
        return answer

    # -- measuring ----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer every prompt with every variant, `repeat` times, except the answers that the journal already holds."""
        if self.journal is not None:
            self.journal.begin(machine(self.engine.loaded))
            self.journal.drop_broken_rounds(self.variants)
        known = agreed(0 if self.journal is None else len(self.journal.known))
        each, size = self.args.repeat * len(self.variants), self.args.batch_size
        total = sum(len(question.turns) for question in self.questions) * each
        with answer_bar(total, self.settings, known) as bar:
            if known < total:
                self._warm_up(bar)
            for start in range(0, len(self.questions), size):
                group = range(start, min(start + size, len(self.questions)))
                left = sum(len(self.questions[number].turns) for number in group)
                chats = [self.turns(number) for number in group]
                while together := [turn for chat in chats if (turn := next(chat, None)) is not None]:
                    self.items += [turn.item for turn in together]
                    if not self._measure(together, bar):
                        self.interrupted = True
                        return
                    for turn in together:  # all have answered it: from now on it was said before
                        said = turn.item.answers[-1][self.reference].ids
                        self.engine.drafters.answers.add(turn.prompt, said)
                    left -= len(together)
                bar.total = (bar.total or 0) - left * each

    def _warm_up(self, bar: Any) -> None:
        """One short answer of each variant, not counted."""
        bar.set_description("warming up", refresh=False)
        for prompt in islice(fitting_prompts(self.engine, self.questions, self.settings), 1):
            for variant in self.variants:
                self.answer(variant, prompt, max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))
        bar.unpause()  # the time until here is no answer's

    def _measure(self, together: Sequence[BenchTurn], bar: Any) -> bool:
        """All repeats of one batch of prompts; False after an interrupt, whose unfinished answers are dropped."""
        for repeat in range(self.args.repeat):
            for turn in together:
                turn.item.answers.append({})
            rounds = sum(len(item.answers) for item in self.items) // len(together)
            for variant in order(self.variants, rounds - 1):
                answers = self._answered(variant, together, repeat, bar)
                if any(answer.interrupted for answer in answers):
                    return False
                for turn, answer in zip(together, answers, strict=True):
                    turn.item.answers[-1][variant] = answer
        if self.journal is not None:
            self.journal.sync()
        return True

    def _answered(self, variant: Variant, together: Sequence[BenchTurn], repeat: int, bar: Any) -> list[Answer]:
        """The journal's answers; where it lacks one all are answered anew, and those that it has stay."""
        journal = self.journal
        places = [Slot(turn.number, turn.item.turn, repeat, variant) for turn in together]
        known = agreed(
            [
                None if journal is None else journal.answer(place, len(turn.prompt))
                for place, turn in zip(places, together, strict=True)
            ]
        )
        if None not in known:
            return [answer for answer in known if answer is not None]
        bar.set_description(variant.label, refresh=False)
        answers = self._asked(variant, together)
        if any(answer.interrupted for answer in answers):
            return answers
        for place, before, answer in zip(places, known, answers, strict=True):
            if before is None:
                bar.update()
                if journal is not None:
                    journal.add(place, answer)
        return [before or answer for before, answer in zip(known, answers, strict=True)]

    def _asked(self, variant: Variant, together: Sequence[BenchTurn]) -> list[Answer]:
        """New answers, from nothing."""
        if self.args.batch_size == 1:
            return [self.answer(variant, turn.prompt, turn.item.prompt) for turn in together]
        lane = self.lane(variant)
        terms, prompts = terms_of(lane, self.engine), [turn.prompt for turn in together]
        return run_rows(lane, prompts, self.decode, interrupt=self.interrupt, terms=terms)

    # -- telling ------------------------------------------------------------------------------

    def figures(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A row per variant; of each temperature what loops."""
        from app.bench.summary import loops, summarise

        looping = [loops(self.items, reference) for reference in self.references.values()]
        return summarise(self.items, self.variants), looping

    def show(self) -> int:
        """Print the table and write the file; the exit code."""
        from app.bench.table import show_tables

        summary, looping = self.figures()
        for line in self.skipped:
            sys.stderr.write(f"{line}\n")
        if not self.measured and not self.interrupted:
            if self.journal is not None:
                self.journal.close(done=True)
            raise UserError(f"nothing was measured: none of the {len(self.questions)} prompts fits into the context")
        if self.interrupted:
            more = "" if self.journal is None else ": the same command goes on from there"
            sys.stderr.write(f"interrupted after {self.measured} answers{more}\n")
        try:
            self._write(summary, looping)
        finally:
            if self.measured:
                show_tables(summary, looping, self.settings, screen(self.settings, sys.stdout))
        return INTERRUPTED if self.interrupted else 0

    def _write(self, summary: list[dict[str, Any]], looping: list[dict[str, Any]]) -> None:
        """The file of --out, whole; the journal goes when all is in it. Then the page of --report."""
        if self.args.out is None and self.args.report is None:
            return
        loops = {"loops": looping[0], **({"loops_by_temperature": looping} if self.args.temperatures else {})}
        data = {**facts(self), **loops, "summary": summary, "prompts": prompt_rows(self)}
        page = self.args.report
        if self.args.out is not None and not write_result(self.args.out, data):
            sys.stderr.write(f"{self.args.out} holds a finished result: it stays\n")
            page = None
        if self.journal is not None and not self.interrupted:
            self.journal.close(done=True)
        if page is not None:
            from app.bench.report import write_report

            write_report(data, page)


def run_rows(
    lane: Lane,
    prompts: Sequence[list[int]],
    decode: Callable[[list[int]], str],
    *,
    interrupt: Callable[[], bool],
    terms: Terms | None = None,
) -> list[Answer]:
    """Decode the prompts as one batch to their ends: an answer for each. The lane reads them itself."""
    meters = [Meter(len(prompt), row, len(prompts)) for row, prompt in enumerate(prompts)]
    for event in lane.run_rows([list(prompt) for prompt in prompts], interrupt=interrupt):
        row = getattr(event, "row", None)
        for meter in meters if row is None else [meters[row]]:
            meter.add(event)
    differs = may_differ(lane, lane.settings)
    return [
        Answer(lane.name, tuple(one.ids), decode(one.ids), one.stats, differs, terms or Terms(), len(prompts))
        for one in meters
    ]
