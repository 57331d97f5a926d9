"""What a benchmark times: variants (a method at a gamma and a temperature), their order, their references.

Asks lanes what they take, and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from app.bench.journal import Journal
from app.bench.options import BenchArgs
from app.lanes.answers import Answer
from app.lanes.comparison import Variant
from app.lanes.costs import ignores_gamma
from app.prompts.questions import Question, conversation, fitting
from app.settings.table import Settings
from utils.errors import UsageError
from utils.machine import machine

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine


@dataclass
class Item:
    """One prompt (one turn of a question) and its answers: `answers[repeat][variant]`."""

    question: Question
    turn: int
    prompt: str
    prompt_n: int
    answers: list[dict[Variant, Answer]] = field(default_factory=list)


class BenchTurn(NamedTuple):
    """What is asked next: the number of its question, where its answers go, the prompt's ids."""

    number: int
    item: Item
    prompt: list[int]


def variants_of(engine: PairEngine, settings: Settings, args: BenchArgs) -> list[Variant]:
    """At every temperature methods × gammas; a method that drafts nothing appears once.

    One that ignores gamma appears once for all numbers (its gamma is None) and once for auto.
    """
    found: list[Variant] = []
    for temperature in args.temperatures or (None,):
        tempered = settings if temperature is None else settings.changed(temperature=temperature)
        for method in args.methods or settings.compare:
            lane = engine.lane(method, tempered)
            gammas: Iterable[int | str | None] = dict.fromkeys(args.gammas) if lane.drafts else [None]
            if ignores_gamma(lane):
                gammas = dict.fromkeys(gamma if gamma == "auto" else None for gamma in gammas)
            found += [Variant(method, gamma, temperature) for gamma in gammas]
    return found


def references(variants: Sequence[Variant]) -> dict[float | None, Variant]:
    """Of each temperature the variant whose answers stand for it: `ar`, else its first one."""
    found: dict[float | None, Variant] = {}
    for variant in variants:
        if variant.method == "ar" or variant.temperature not in found:
            found[variant.temperature] = variant
    return found


class Measurement:
    """A benchmark's pair, settings, questions and variants, and its answers so far (`items`)."""

    def __init__(
        self,
        engine: PairEngine,
        settings: Settings,
        args: BenchArgs,
        questions: Sequence[Question],
        interrupt: Callable[[], bool],
        journal: Journal | None = None,
    ) -> None:
        self.engine, self.settings, self.args = engine, settings, args
        self.questions, self.interrupt, self.journal = questions, interrupt, journal
        self.items: list[Item] = []
        self.skipped: list[str] = []
        self.interrupted = False
        # A variant without gamma must not inherit `auto` from the settings: it takes the first fixed gamma.
        self._fixed = next((gamma for gamma in args.gammas if gamma != "auto"), None)
        self.variants = variants_of(engine, settings, args)
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
        return self.engine.lane(variant.method, self.settings_of(variant, **changes))

    def settings_of(self, variant: Variant, **changes: Any) -> Settings:
        if variant.temperature is not None:
            changes["temperature"] = variant.temperature
        return self.settings.changed(**changes)

    def turns(self, number: int) -> Iterator[BenchTurn]:
        """The prompts of a question; the next one is planned when the last has been answered."""
        chat, question = conversation(self.engine, self.settings), self.questions[number]
        for turn, text in enumerate(question.turns):
            plan = chat.plan(text)
            try:
                fitting(plan.prompt, self.engine.context)
            except UsageError as error:
                self.skipped.append(f"prompt {question.line or question.question_id}, turn {turn + 1} skipped: {error}")
                return
            item = Item(question, turn, text, len(plan.prompt))
            yield BenchTurn(number, item, plan.prompt)
            answer = item.answers[0][self.reference]
            chat.commit(plan, list(answer.ids), answer.stats.stop_reason or "length")
