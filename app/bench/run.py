"""`bench`: many prompts under several methods, gammas and temperatures, timed fairly.

Every answer starts from nothing (no cache, no n-grams of an earlier one); the order of the methods
rotates and reverses from round to round; a warm-up is not counted. An interrupt keeps what was
measured, and with --out the same command goes on from there (app/bench/journal.py). Later turns of a chat continue
from the first temperature's reference's answer, so that all methods read the same prompts. Knows how to run lanes (and
the rivals of --against), not what the figures mean (app/bench/summary.py).
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from app.bench.against import rivals_of
from app.bench.batches import check_batches, run_batches
from app.bench.journal import Place, open_journal
from app.bench.plan import Item, Measurement
from app.bench.results import facts, prompt_rows
from app.lanes.answers import Answer, run_lane
from app.lanes.comparison import Variant, order
from app.lanes.costs import terms_of
from app.prompts.datasets import questions_of
from app.prompts.questions import chosen, cut, stratified
from app.replay.log_writer import Asked, recorder_of, take_of
from app.screen.output import answer_bar, load_engine
from app.screen.terminal import Interrupts
from utils.errors import UsageError
from utils.files import writable, write_json
from utils.machine import machine
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.bench.options import BenchArgs
    from app.replay.log_writer import Recorder
    from app.settings.layers import ModelOptions, Settings


WARM_UP = 16  # tokens


def run_bench(settings: Settings, options: ModelOptions, args: BenchArgs) -> int:
    """Run the benchmark (or the identity check); the exit code."""
    for flag, given in (("against", args.against), ("temperatures", args.temperatures)):
        if args.check_identity and given:
            raise UsageError(f"--check-identity has its own references and the one --temperature: leave --{flag} out")
    check_batches(args, args.methods or settings.compare, settings.record)
    known = questions_of(args.prompts, settings.data_dir, offline=options.offline)
    listed = known if args.ids is None else chosen(known, args.ids)
    questions = cut(stratified(listed, args.limit), args.turns)
    if args.out is not None:
        writable(args.out)
    if args.report is not None:
        writable(args.report, "--report")
    journal = open_journal(settings, options, args, questions)
    try:
        with Interrupts() as interrupt, recorder_of(settings) or nullcontext() as recorder:
            engine = load_engine(settings, options, interrupt)
            rivals, notes = rivals_of(engine, settings, options, args.against) if args.against else ({}, [])
            bench = Bench(engine, settings, args, questions, interrupt, rivals, notes, journal)
            bench.recorder = recorder
            if args.check_identity:
                from app.bench.identity import check_identity

                return check_identity(bench, options)
            bench.run()
        return bench.show()
    finally:
        if journal is not None:
            journal.close()


class Bench(Measurement):
    """A measurement that is made: `run()` fills `items`, `show()` prints and writes them."""

    recorder: Recorder | None = None

    def answer(self, variant: Variant, prompt: list[int], said: str | None = None, **changes: Any) -> Answer:
        """One answer of a lane or a rival, from nothing. A lane's is recorded if the prompt's text is `said`."""
        rival = self.rivals.get(variant.method)
        if rival is not None:
            return rival.answer(prompt, self.settings_of(variant, **changes), self.decode, self.interrupt)
        lane = self.lane(variant, **changes)
        recorder = None if said is None else self.recorder
        take = take_of(recorder, self.engine, [lane], Asked(said or "", prompt), lane.settings, self.decode)
        told: dict[str, Any] = {} if take is None else {"show": take.listening(0, None)}
        terms = terms_of(lane, self.engine)
        answer = run_lane(lane, prompt, self.decode, interrupt=self.interrupt, terms=terms, **told)
        if take is not None and (problem := take.end()):
            sys.stderr.write(f"{problem}\n")
        return answer

    # -- measuring ----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer every prompt with every variant, `repeat` times, but for what the journal has."""
        known = 0 if self.journal is None else len(self.journal.known)
        if self.journal is not None:
            self.journal.begin(machine(self.engine.loaded))
        each = self.args.repeat * len(self.variants)
        total = sum(len(question.turns) for question in self.questions) * each
        with answer_bar(total, self.settings, known) as bar:
            if known < total:
                self._warm_up(bar)
            if self.args.batch_size > 1:
                self.interrupted = not run_batches(self, bar)
                return
            for number, question in enumerate(self.questions):
                left = len(question.turns)
                for item, prompt in self.turns(question):
                    self.items.append(item)
                    if not self._measure(number, item, prompt, bar):
                        self.interrupted = True
                        return
                    left -= 1
                bar.total = (bar.total or 0) - left * each

    def _warm_up(self, bar: Any) -> None:
        """One short answer of each variant, not counted."""
        bar.set_description("warming up", refresh=False)
        item, prompt = next(self.turns(self.questions[0]), (None, None))
        for variant in self.variants if item is not None and prompt is not None else ():
            self.answer(variant, prompt or [], max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))
        bar.unpause()  # the time until here is no answer's

    def _measure(self, number: int, item: Item, prompt: list[int], bar: Any) -> bool:
        """All repeats of one prompt; False after an interrupt, whose unfinished answer is dropped."""
        for repeat in range(self.args.repeat):
            row: dict[Variant, Answer] = {}
            item.answers.append(row)
            turn = sum(len(before.answers) for before in self.items) - 1
            for variant in order(self.variants, turn):
                answer = self._one(Place(number, item.turn, repeat, variant), item.prompt, prompt, bar)
                if answer.interrupted:
                    return False
                row[variant] = answer
        if self.journal is not None:
            self.journal.sync()
        return True

    def _one(self, place: Place, said: str, prompt: list[int], bar: Any) -> Answer:
        """The journal's answer, or a new one, which is entered there."""
        if self.journal is not None and (known := self.journal.answer(place, len(prompt))) is not None:
            return known
        bar.set_description(place.variant.label, refresh=False)
        answer = self.answer(place.variant, prompt, said)
        if not answer.interrupted:
            if self.journal is not None:
                self.journal.add(place, answer)
            bar.update()
        return answer

    # -- telling ------------------------------------------------------------------------------

    def figures(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A row per variant; of each temperature what loops."""
        from app.bench.summary import loops, summarise

        looping = [loops(self.items, reference) for reference in self.references.values()]
        return summarise(self.items, self.variants), looping

    def show(self) -> int:
        """Print the table and write the file; the exit code."""
        from app.bench.table import print_tables

        summary, looping = self.figures()
        for line in self.skipped:
            sys.stderr.write(f"{line}\n")
        if self.interrupted:
            sys.stderr.write(f"{self._interrupted()}\n")
        try:
            self._write(summary, looping)
        finally:
            if self.measured:
                print_tables(summary, looping, self.settings, sys.stdout)
        return INTERRUPTED if self.interrupted else 0

    def _interrupted(self) -> str:
        told = f"interrupted after {self.measured} answers"
        return told if self.journal is None else f"{told}: the same command goes on from there"

    def _write(self, summary: list[dict[str, Any]], looping: list[dict[str, Any]]) -> None:
        """The file of --out, whole; the journal goes when all is in it. Then the page of --report."""
        if self.args.out is None and self.args.report is None:
            return
        loops = {"loops": looping[0], **({"loops_by_temperature": looping} if self.args.temperatures else {})}
        told = {**self.facts(), **loops, "summary": summary, "prompts": prompt_rows(self)}
        if self.args.out is not None:
            write_json(self.args.out, told)
        if self.journal is not None and not self.interrupted:
            self.journal.close(done=True)
        if self.args.report is not None:
            from app.bench.report import write_report

            write_report(told, self.args.report)

    def facts(self) -> dict[str, Any]:
        """What was measured, on what machine, when."""
        return facts(self)
