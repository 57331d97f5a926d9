"""What a benchmark times: variants (a method at a gamma and a temperature), their order, their references.

Asks lanes what they take, and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from app.costs import ignores_gamma
from app.words import plain

if TYPE_CHECKING:
    from app.answers import Answer
    from app.bench_fields import BenchArgs
    from app.lanes import Engine
    from app.prompts import Question
    from app.settings import Settings


@dataclass(frozen=True)
class Variant:
    """One thing to time: a method, at one gamma where it drafts. `temperature`: None for that of the settings."""

    method: str
    gamma: int | str | None = None
    temperature: float | None = None

    @property
    def label(self) -> str:
        gamma = "" if self.gamma is None else f" gamma {self.gamma}"
        return f"{self.method}{gamma}{at_temperature(self.temperature)}"


def at_temperature(temperature: float | None) -> str:
    """ " temperature 0.7" with a leading space, or nothing."""
    return "" if temperature is None else f" temperature {plain(temperature)}"


@dataclass
class Item:
    """One prompt (one turn of a question) and its answers: `answers[repeat][variant]`."""

    question: Question
    turn: int
    prompt: str
    prompt_n: int
    answers: list[dict[Variant, Answer]] = field(default_factory=list)


class Place(NamedTuple):
    """Which of a benchmark's answers: question and turn (from 0), repeat (from 0), variant."""

    question: int
    turn: int
    repeat: int
    variant: Variant


def variants_of(engine: Engine, settings: Settings, args: BenchArgs, rivals: Iterable[str] = ()) -> list[Variant]:
    """At every temperature methods × gammas, then the rivals; a method that drafts nothing appears once.

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
        found += [Variant(name, temperature=temperature) for name in rivals]
    return found


def references(variants: Sequence[Variant]) -> dict[float | None, Variant]:
    """Of each temperature the variant whose answers stand for it: `ar`, else its first one."""
    found: dict[float | None, Variant] = {}
    for variant in variants:
        if variant.method == "ar" or variant.temperature not in found:
            found[variant.temperature] = variant
    return found


def order(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """The variants in the order of round `turn`: rotated by one each time, reversed every other time."""
    start = (turn // 2) % len(variants)
    rotated = [*variants[start:], *variants[:start]]
    return rotated[::-1] if turn % 2 else rotated
