"""The units of a benchmark: prompts with their answers, and variants (a method at a gamma and a temperature).

Asks lanes what they take, and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.bench.options import BenchArgs
from app.lanes.answers import Answer
from app.lanes.comparison import Variant
from app.lanes.costs import ignores_gamma
from app.prompts.questions import Question
from app.settings.table import Settings

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


@dataclass
class Item:
    """One prompt, which is turn `turn` of question number `number`, and its answers: `answers[repeat][variant]`."""

    number: int
    question: Question
    turn: int
    ids: list[int]
    answers: list[dict[Variant, Answer]] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The message as the question has it."""
        return self.question.turns[self.turn]


def variants_of(engine: PairEngine, settings: Settings, args: BenchArgs) -> list[Variant]:
    """Return methods × gammas at every temperature; a method that drafts nothing appears once.

    A method that ignores gamma appears once for all numbers (its gamma is None) and once for auto.
    """
    variants: list[Variant] = []
    for temperature in args.temperatures or (None,):
        tempered = settings if temperature is None else settings.changed(temperature=temperature)
        for method in args.methods or settings.compare:
            lane = engine.lane(method, tempered)
            gammas: Iterable[int | str | None] = dict.fromkeys(args.gammas) if lane.drafts else [None]
            if ignores_gamma(lane):
                gammas = dict.fromkeys(gamma if gamma == "auto" else None for gamma in gammas)
            variants += [Variant(method, gamma, temperature) for gamma in gammas]
    return variants


def references(variants: Sequence[Variant]) -> dict[float | None, Variant]:
    """Return the variant whose answers stand for each temperature: `ar`, or without it the first one."""
    chosen: dict[float | None, Variant] = {}
    for variant in variants:
        if variant.method == "ar" or variant.temperature not in chosen:
            chosen[variant.temperature] = variant
    return chosen
