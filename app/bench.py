"""`bench`: many prompts under several methods and gammas, timed fairly.

Every answer starts from nothing (no cache, no n-grams of an earlier one); the order of the methods
rotates and reverses from round to round; a warm-up is not counted. An interrupt keeps what was
measured. Later turns of a chat continue from the reference's answer, so that all methods read the
same prompts. Knows how to run lanes (and the rivals of --against), not what the figures mean (app/bench_figures.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.answers import Answer, run_lane
from app.batches import check_batches, run_batches
from app.bench_file import facts, prompt_rows, writable, write_json
from app.costs import ignores_gamma, terms_of
from app.oneshot import INTERRUPTED, load_engine
from app.prompts import Question, chosen, conversation, cut, fitting, read_questions, stratified
from app.terminal import Interrupts
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.against import Rival
    from app.bench_fields import BenchArgs
    from app.lanes import Engine, Lane
    from app.settings import ModelOptions, Settings

WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Variant:
    """One thing to time: a method, at one gamma where it drafts."""

    method: str
    gamma: int | str | None = None

    @property
    def label(self) -> str:
        return self.method if self.gamma is None else f"{self.method} gamma {self.gamma}"


@dataclass
class Item:
    """One prompt (one turn of a question) and its answers: `answers[repeat][variant]`."""

    question: Question
    turn: int
    prompt: str
    prompt_n: int
    answers: list[dict[Variant, Answer]] = field(default_factory=list)


def run_bench(settings: Settings, options: ModelOptions, args: BenchArgs) -> int:
    """Run the benchmark (or the identity check); the exit code."""
    if args.check_identity and args.against is not None:
        raise UsageError("--check-identity compares with transformers by itself: leave --against out")
    check_batches(args, args.methods or settings.compare)
    known = read_questions(args.prompts)
    listed = known if args.ids is None else chosen(known, args.ids)
    questions = cut(stratified(listed, args.limit), args.turns)
    if args.out is not None:
        writable(Path(args.out))
    with Interrupts() as interrupt:
        engine = load_engine(settings, options, interrupt)
        rivals, notes = _rivals(engine, settings, options, args)
        bench = Bench(engine, settings, args, questions, interrupt, rivals, notes)
        if args.check_identity:
            from app.identity import check_identity

            return check_identity(bench, options)
        bench.run()
    return bench.show()


def _rivals(
    engine: Engine, settings: Settings, options: ModelOptions, args: BenchArgs
) -> tuple[Mapping[str, Rival], Sequence[str]]:
    """What --against names, and notes on what is left out of it, which are told at once."""
    if args.against is None:
        return {}, ()
    from app.against import make_rivals

    rivals, notes = make_rivals(engine, options, args.against)
    if not settings.quiet:
        sys.stderr.write("".join(f"{note}\n" for note in notes))
    return rivals, notes


def order(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """The variants in the order of round `turn`: rotated by one each time, reversed every other time."""
    start = (turn // 2) % len(variants)
    rotated = [*variants[start:], *variants[:start]]
    return rotated[::-1] if turn % 2 else rotated


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
    ) -> None:
        self.engine, self.settings, self.args = engine, settings, args
        self.questions, self.interrupt = questions, interrupt
        self.rivals, self.notes = rivals or {}, list(notes)
        self.items: list[Item] = []
        self.skipped: list[str] = []
        self.interrupted = False
        # Where a lane's gamma is None it must not be auto all the same.
        self._fixed = next((gamma for gamma in args.gammas if gamma != "auto"), None)
        self.variants = self._variants()
        names = [variant.method for variant in self.variants]
        self.reference = self.variants[names.index("ar") if "ar" in names else 0]
        self.decode = conversation(engine, settings).text

    def _variants(self) -> list[Variant]:
        """Methods × gammas, then the rivals; a method that drafts nothing appears once.

        One that ignores gamma appears once for all numbers (its gamma is None) and once for auto.
        """
        found: list[Variant] = []
        for method in self.args.methods or self.settings.compare:
            lane = self.engine.lane(method, self.settings)
            gammas: Iterable[int | str | None] = dict.fromkeys(self.args.gammas) if lane.drafts else [None]
            if ignores_gamma(lane):
                gammas = dict.fromkeys(gamma if gamma == "auto" else None for gamma in gammas)
            found += [Variant(method, gamma) for gamma in gammas]
        return [*found, *map(Variant, self.rivals)]

    def lane(self, variant: Variant, **changes: Any) -> Lane:
        """A lane that remembers nothing of earlier answers."""
        self.engine.forget()
        gamma = self._fixed if variant.gamma is None else variant.gamma
        if gamma is not None:
            changes["gamma"] = gamma
        return self.engine.lane(variant.method, self.settings.changed(**changes))

    def answer(self, variant: Variant, prompt: list[int], **changes: Any) -> Answer:
        """One answer of a lane or a rival, from nothing."""
        rival = self.rivals.get(variant.method)
        if rival is None:
            lane = self.lane(variant, **changes)
            return run_lane(lane, prompt, self.decode, interrupt=self.interrupt, terms=terms_of(lane, self.engine))
        return rival.answer(prompt, self.settings.changed(**changes), self.decode, self.interrupt)

    # -- measuring ----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer every prompt with every variant, `repeat` times."""
        from tqdm import tqdm

        turns = sum(len(question.turns) for question in self.questions)
        with tqdm(
            total=turns * self.args.repeat * len(self.variants),
            unit="answer",
            disable=self.settings.quiet,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 10,
            leave=False,
        ) as bar:
            self._warm_up(bar)
            if self.args.batch_size > 1:
                self.interrupted = not run_batches(self, bar)
                return
            for question in self.questions:
                done = 0
                for item, prompt in self.turns(question):
                    self.items.append(item)
                    if not self._measure(item, prompt, bar):
                        self.interrupted = True
                        return
                    done += 1
                bar.total = (bar.total or 0) - (len(question.turns) - done) * self.args.repeat * len(self.variants)

    def _warm_up(self, bar: Any) -> None:
        """One short answer of each variant, not counted."""
        bar.set_description("warming up", refresh=False)
        item, prompt = next(self.turns(self.questions[0]), (None, None))
        for variant in self.variants if item is not None and prompt is not None else ():
            self.answer(variant, prompt or [], max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))

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

    def _measure(self, item: Item, prompt: list[int], bar: Any) -> bool:
        """All repeats of one prompt; False after an interrupt, whose unfinished answer is dropped."""
        for _ in range(self.args.repeat):
            row: dict[Variant, Answer] = {}
            item.answers.append(row)
            turn = sum(len(before.answers) for before in self.items) - 1
            for variant in order(self.variants, turn):
                bar.set_description(variant.label, refresh=False)
                answer = self.answer(variant, prompt)
                if answer.interrupted:
                    return False
                row[variant] = answer
                bar.update()
        return True

    # -- telling ------------------------------------------------------------------------------

    def show(self) -> int:
        """Print the table and write the file; the exit code."""
        from app.bench_figures import loops, summarise
        from app.bench_table import print_tables

        summary = summarise(self.items, self.variants, self.reference)
        looping = loops(self.items, self.reference)
        for line in self.skipped:
            sys.stderr.write(f"{line}\n")
        if any(any(item.answers) for item in self.items):
            print_tables(summary, looping, self.settings, sys.stdout)
        if self.interrupted:
            done = sum(len(row) for item in self.items for row in item.answers)
            sys.stderr.write(f"interrupted after {done} answers\n")
        if self.args.out is not None:
            figures = {"loops": looping, "summary": summary, "prompts": prompt_rows(self)}
            write_json(Path(self.args.out), {**self.facts(), **figures})
        return INTERRUPTED if self.interrupted else 0

    def facts(self) -> dict[str, Any]:
        """What was measured, on what machine, when."""
        return facts(self)
