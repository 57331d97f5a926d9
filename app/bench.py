"""`bench`: many prompts under several methods, gammas and temperatures, timed fairly.

Every answer starts from nothing (no cache, no n-grams of an earlier one); the order of the methods
rotates and reverses from round to round; a warm-up is not counted. An interrupt keeps what was
measured, and with --out the same command goes on from there (app/bench_journal.py). Later turns of a chat continue
from the first temperature's reference's answer, so that all methods read the same prompts. Knows how to run lanes (and
the rivals of --against), not what the figures mean (app/bench_figures.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from app.against import rivals_of
from app.answer_bar import answer_bar
from app.answers import Answer, run_lane
from app.batches import check_batches, run_batches
from app.bench_file import facts, machine, prompt_rows, writable, write_json
from app.bench_journal import Journal, open_journal
from app.bench_plan import Item, Place, Variant, order, references, variants_of
from app.costs import terms_of
from app.datasets import questions_of
from app.oneshot import load_engine
from app.prompts import Question, chosen, conversation, cut, fitting, stratified
from app.recorder import Asked, recorder_of, take_of
from app.terminal import Interrupts
from utils.errors import UsageError
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.against import Rival
    from app.bench_fields import BenchArgs
    from app.lane import Lane
    from app.lanes import Engine
    from app.recorder import Recorder
    from app.settings import ModelOptions, Settings

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
            bench = Bench(engine, settings, args, questions, interrupt, rivals, notes, journal, recorder)
            if args.check_identity:
                from app.identity import check_identity

                return check_identity(bench, options)
            bench.run()
        return bench.show()
    finally:
        if journal is not None:
            journal.close()


class Bench:
    """The measurement: `run()` fills `items`, `show()` prints and writes them."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        args: BenchArgs,
        questions: Sequence[Question],
        interrupt: Callable[[], bool],
        rivals: Mapping[str, Rival] | None = None,
        notes: Sequence[str] = (),
        journal: Journal | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine, self.settings, self.args = engine, settings, args
        self.questions, self.interrupt, self.journal = questions, interrupt, journal
        self.rivals, self.notes, self.recorder = rivals or {}, list(notes), recorder
        self.items: list[Item] = []
        self.skipped: list[str] = []
        self.interrupted = False
        # Where a lane's gamma is None it must not be auto all the same.
        self._fixed = next((gamma for gamma in args.gammas if gamma != "auto"), None)
        self.variants = variants_of(engine, settings, args, self.rivals)
        self.references = references(self.variants)
        self.reference = next(iter(self.references.values()))
        self.decode = conversation(engine, settings).text

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Machine and number of answers of every part of the run."""
        if self.journal is not None:
            return self.journal.parts
        return [{"machine": machine(self.engine.loaded), "answers": self.measured}]

    @property
    def measured(self) -> int:
        """How many answers there are."""
        return sum(len(row) for item in self.items for row in item.answers)

    def lane(self, variant: Variant, **changes: Any) -> Lane:
        """A lane that remembers nothing of earlier answers."""
        self.engine.forget()
        gamma = self._fixed if variant.gamma is None else variant.gamma
        if gamma is not None:
            changes["gamma"] = gamma
        return self.engine.lane(variant.method, self._settings(variant, **changes))

    def _settings(self, variant: Variant, **changes: Any) -> Settings:
        if variant.temperature is not None:
            changes["temperature"] = variant.temperature
        return self.settings.changed(**changes)

    def answer(self, variant: Variant, prompt: list[int], said: str | None = None, **changes: Any) -> Answer:
        """One answer of a lane or a rival, from nothing. A lane's is recorded if the prompt's text is `said`."""
        rival = self.rivals.get(variant.method)
        if rival is not None:
            return rival.answer(prompt, self._settings(variant, **changes), self.decode, self.interrupt)
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

    def turns(self, question: Question) -> Iterator[tuple[Item, list[int]]]:
        """The prompts of a question; the next one is planned when the last has been answered."""
        chat = conversation(self.engine, self.settings)
        for turn, text in enumerate(question.turns):
            plan = chat.plan(text)
            try:
                fitting(plan.prompt, self.engine.context)
            except UsageError as error:
                number = question.line or question.question_id
                self.skipped.append(f"prompt {number}, turn {turn + 1} skipped: {error}")
                return
            item = Item(question, turn, text, len(plan.prompt))
            yield item, plan.prompt
            answer = item.answers[0][self.reference]
            chat.commit(plan, list(answer.ids), answer.stats.stop_reason or "length")

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
        from app.bench_figures import loops, summarise

        looping = [loops(self.items, reference) for reference in self.references.values()]
        return summarise(self.items, self.variants), looping

    def show(self) -> int:
        """Print the table and write the file; the exit code."""
        from app.bench_table import print_tables

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
            from app.report import write_report

            write_report(told, self.args.report)

    def facts(self) -> dict[str, Any]:
        """What was measured, on what machine, when."""
        return facts(self)
