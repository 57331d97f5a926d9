"""`bench`: many prompts under several methods and gammas, timed fairly.

Every answer starts from nothing (no cache, no n-grams of an earlier one); the order of the methods
rotates and reverses from round to round; a warm-up is not counted. An interrupt keeps what was
measured. Later turns of a chat continue from the reference's answer, so that all methods read the
same prompts. Knows how to run lanes, not what the figures mean (app/bench_table.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.answers import Answer, compared, run_lane, shown_settings
from app.bench_file import machine, writable, write_json
from app.oneshot import INTERRUPTED, load_engine
from app.prompts import Question, conversation, fitting, read_questions, stratified
from app.terminal import Interrupts
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.arguments import BenchArgs
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
    questions = stratified(read_questions(args.prompts), args.limit)
    if args.out is not None:
        writable(Path(args.out))
    with Interrupts() as interrupt:
        engine = load_engine(settings, options, interrupt)
        bench = Bench(engine, settings, args, questions, interrupt)
        if args.check_identity:
            from app.identity import check_identity

            return check_identity(bench, options)
        bench.run()
    return bench.show()


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
    ) -> None:
        self.engine, self.settings, self.args = engine, settings, args
        self.questions, self.interrupt = questions, interrupt
        self.items: list[Item] = []
        self.skipped: list[str] = []
        self.interrupted = False
        self.variants = self._variants()
        names = [variant.method for variant in self.variants]
        self.reference = self.variants[names.index("ar") if "ar" in names else 0]
        self.decode = conversation(engine, settings).text

    def _variants(self) -> list[Variant]:
        """Methods × gammas; a method that drafts nothing appears once."""
        found: list[Variant] = []
        for method in self.args.methods or self.settings.compare:
            drafts = self.engine.lane(method, self.settings).drafts
            gammas: Sequence[int | str | None] = dict.fromkeys(self.args.gammas) if drafts else [None]  # type: ignore[assignment]
            found += [Variant(method, gamma) for gamma in gammas]
        return found

    def lane(self, variant: Variant, **changes: Any) -> Lane:
        """A lane that remembers nothing of earlier answers."""
        self.engine.forget()
        if variant.gamma is not None:
            changes["gamma"] = variant.gamma
        return self.engine.lane(variant.method, self.settings.changed(**changes))

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
            for question in self.questions:
                done = 0
                for item, prompt in self._turns(question):
                    self.items.append(item)
                    if not self._measure(item, prompt, bar):
                        self.interrupted = True
                        return
                    done += 1
                bar.total = (bar.total or 0) - (len(question.turns) - done) * self.args.repeat * len(self.variants)

    def _warm_up(self, bar: Any) -> None:
        """One short answer of each variant, not counted."""
        bar.set_description("warming up", refresh=False)
        item, prompt = next(self._turns(self.questions[0]), (None, None))
        for variant in self.variants if item is not None and prompt is not None else ():
            lane = self.lane(variant, max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))
            run_lane(lane, prompt or [], self.decode, interrupt=self.interrupt)

    def _turns(self, question: Question) -> Iterator[tuple[Item, list[int]]]:
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
                answer = run_lane(self.lane(variant), prompt, self.decode, interrupt=self.interrupt)
                if answer.interrupted:
                    return False
                row[variant] = answer
                bar.update()
        return True

    # -- telling ------------------------------------------------------------------------------

    def show(self) -> int:
        """Print the table and write the file; the exit code."""
        from app.bench_table import print_tables, summarise

        summary = summarise(self.items, self.variants)
        for line in self.skipped:
            sys.stderr.write(f"{line}\n")
        if any(any(item.answers) for item in self.items):
            print_tables(summary, self.settings, sys.stdout)
        if self.interrupted:
            done = sum(len(row) for item in self.items for row in item.answers)
            sys.stderr.write(f"interrupted after {done} answers\n")
        if self.args.out is not None:
            write_json(Path(self.args.out), {**self.facts(), "summary": summary, "prompts": self._prompts()})
        return INTERRUPTED if self.interrupted else 0

    def facts(self) -> dict[str, Any]:
        """What was measured, on what machine, when."""
        loaded = self.engine.loaded
        return {
            "pair": loaded.spec.name,
            "target": loaded.target.name,
            "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_kind,
            "machine": machine(loaded),
            "settings": shown_settings(self.settings),
            "prompts_file": None if self.args.prompts is None else str(self.args.prompts),
            "methods": list(dict.fromkeys(variant.method for variant in self.variants)),
            "gammas": list(self.args.gammas),
            "repeat": self.args.repeat,
            "limit": self.args.limit,
            "complete": not self.interrupted,
            "skipped": self.skipped,
        }

    def _prompts(self) -> list[dict[str, Any]]:
        return [self._prompt(item) for item in self.items if any(item.answers)]

    def _prompt(self, item: Item) -> dict[str, Any]:
        return {
            "question_id": item.question.question_id,
            "category": item.question.category,
            "turn": item.turn,
            "pair": self.engine.loaded.spec.name,
            "prompt": item.prompt,
            "settings": shown_settings(self.settings),
            "results": [
                {**replace(answer, method=variant.method).to_json(), "gamma": variant.gamma, "repeat": repeat}
                | self._against(row, answer)
                for repeat, row in enumerate(item.answers)
                for variant in self.variants
                if (answer := row.get(variant)) is not None
            ],
        }

    def _against(self, row: dict[Variant, Answer], answer: Answer) -> dict[str, Any]:
        plain = row.get(self.reference) if self.reference.method == "ar" else None
        return compared([answer] if plain is None or plain is answer else [plain, answer])
