"""Kinds of lists: names, whole numbers, figures, seconds by tokens. Knows no setting by name, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.kinds import Kind, Number, RefusedError, Whole, WholeOr
from app.words import plain


@dataclass(frozen=True)
class Names:
    """A comma list (or a sequence) of one or more different names out of `choices`, in the order given."""

    choices: tuple[str, ...]
    metavar: str = "LIST"

    @property
    def allowed(self) -> str:
        return f"a comma list of {', '.join(self.choices)}, each once"

    def read(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.split(","))
        if not isinstance(value, list | tuple) or not value or any(name not in self.choices for name in value):
            raise RefusedError(self.allowed)
        if len(set(value)) != len(value):
            raise RefusedError(self.allowed)
        return tuple(value)

    def show(self, value: Any) -> str:
        return ",".join(value)


@dataclass(frozen=True)
class WholeList:
    """A comma list of different whole numbers from `low` to `high`, in the order given; `word` may stand among them."""

    low: int
    high: int
    word: str = ""
    metavar: str = "LIST"
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        word = f" or {self.word}" if self.word else ""
        return f"a comma list of whole numbers from {self.low} to {self.high}{word}, each once"

    def read(self, value: object) -> tuple[int | str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise RefusedError(self.allowed)
        one: Kind = WholeOr(self.low, self.high, self.word) if self.word else Whole(self.low, self.high)
        numbers = _each(parts, one.read, self.allowed)
        if len(set(numbers)) != len(numbers):
            raise RefusedError(self.allowed)
        return numbers

    def show(self, value: Any) -> str:
        return ",".join(map(str, value))


@dataclass(frozen=True)
class NumberList:
    """A comma list of numbers between `low` and `high`; one may come more often than another unless `once`."""

    low: float
    high: float
    without_low: bool = False
    once: bool = False
    metavar: str = "LIST"
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        told = f"a comma list of numbers {self._one.allowed.removeprefix('a number').lstrip(', ')}"
        return told + (", each once" if self.once else "")

    @property
    def _one(self) -> Number:
        return Number(self.low, self.high, without_low=self.without_low)

    def read(self, value: object) -> tuple[float, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise RefusedError(self.allowed)
        found = _each(parts, self._one.read, self.allowed)
        if self.once and len(set(found)) != len(found):
            raise RefusedError(self.allowed)
        return found

    def show(self, value: Any) -> str:
        return ",".join(map(plain, value))


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a pass over n tokens, as pairs: from one number (for every n), numbers for 1, 2, …, or n:seconds."""

    metavar: str = "S|LIST"
    allowed: str = "seconds above 0: one number, a comma list for 1, 2, … tokens, or tokens:seconds pairs"
    choices: tuple[str, ...] = ()

    def read(self, value: object) -> tuple[tuple[int, float], ...]:
        parts = value.split(",") if isinstance(value, str) else []
        pairs = [part.split(":") if ":" in part else [str(place), part] for place, part in enumerate(parts, start=1)]
        if not pairs or any(len(pair) != 2 for pair in pairs) or len({":" in part for part in parts}) > 1:
            raise RefusedError(self.allowed)
        counts = _each([pair[0] for pair in pairs], Whole(1, 1000).read, self.allowed)
        seconds = _each([pair[1] for pair in pairs], Number(0, 1e6, without_low=True).read, self.allowed)
        if len(set(counts)) != len(counts):
            raise RefusedError(self.allowed)
        return tuple(sorted(zip(counts, seconds, strict=True)))

    def show(self, value: Any) -> str:
        return ",".join(f"{count}:{plain(seconds)}" for count, seconds in value)


def _each(parts: Any, read: Callable[[object], Any], allowed: str) -> tuple[Any, ...]:
    try:
        return tuple(read(part.strip() if isinstance(part, str) else part) for part in parts)
    except RefusedError:
        raise RefusedError(allowed) from None
