"""Kinds of setting: how a value is read from text, what is allowed, how it is shown and completed.

A kind turns what a user typed (or a configuration file holds) into a plain Python value, or raises
:class:`RefusedError` with the words that follow "must be". Knows no setting by name, no flags, no torch.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from app.words import NUMBER, SHOWN, did_you_mean, plain
from utils.specs import BEHIND, CASCADES, STUDENTS

LOOKED_UP = ("ngram", "tables", "static", "match", "maxgram")  # lanes in which no model drafts
MATCHED = {f"match+{kind}": kind for kind in STUDENTS}  # a match first, a trained drafter where there is none
LANES: tuple[str, ...] = ("ar", "spec", "draft", *LOOKED_UP, *STUDENTS, *BEHIND, *MATCHED, *CASCADES, "beam")
SEED_LIMIT = 2**63 - 1

_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)


class RefusedError(ValueError):
    """A value that a kind does not take; the text is what would have been allowed."""


class Kind(Protocol):
    """What the table of settings asks of a kind."""

    @property
    def allowed(self) -> str: ...  # what follows "must be" in an error, and stands in /help and the README
    @property
    def metavar(self) -> str: ...  # short: N, X, on|off, a|b
    @property
    def choices(self) -> tuple[str, ...]: ...  # values to offer on Tab; may be empty
    def read(self, value: object) -> Any: ...  # raises RefusedError
    def show(self, value: Any) -> str: ...


@dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high` (no upper end when None)."""

    low: int
    high: int | None = None
    metavar: str = "N"
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        return f"a whole number, {self.low} or more" if self.high is None else self._range

    @property
    def _range(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def read(self, value: object) -> int:
        if isinstance(value, str) and _WHOLE.fullmatch(value) and len(value) <= SHOWN:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise RefusedError(self.allowed)
        # Counts reach tensors: what does not fit 64 bits is no count.
        if value < self.low or value > (SEED_LIMIT if self.high is None else self.high):
            raise RefusedError(self.allowed)
        return value

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class WholeOr:
    """A whole number from `low` to `high`, or the one word that leaves the number to the program."""

    low: int
    high: int
    word: str

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high} or {self.word}"

    @property
    def metavar(self) -> str:
        return f"N|{self.word}"

    @property
    def choices(self) -> tuple[str, ...]:
        return (self.word,)

    def read(self, value: object) -> int | str:
        if value == self.word:
            return self.word
        try:
            return Whole(self.low, self.high).read(value)
        except RefusedError:
            raise RefusedError(self.allowed) from None

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Number:
    """A finite number between `low` and `high`; either end may be left out."""

    low: float
    high: float
    without_low: bool = False
    without_high: bool = False
    metavar: str = "X"
    choices: tuple[str, ...] = ()

    @property
    def _range(self) -> str:
        if not (self.without_low or self.without_high):
            return f"from {plain(self.low)} to {plain(self.high)}"
        low = f"above {plain(self.low)}" if self.without_low else f"at least {plain(self.low)}"
        return low + (f" and below {plain(self.high)}" if self.without_high else f" and at most {plain(self.high)}")

    @property
    def allowed(self) -> str:
        return f"a number, {self._range}" if self._range.startswith("at") else f"a number {self._range}"

    def read(self, value: object) -> float:
        if isinstance(value, str) and NUMBER.fullmatch(value):
            value = float(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise RefusedError(self.allowed)
        too_low = value <= self.low if self.without_low else value < self.low
        too_high = value >= self.high if self.without_high else value > self.high
        if too_low or too_high:
            raise RefusedError(self._range)
        return float(value) + 0.0  # -0.0 becomes 0.0

    def show(self, value: Any) -> str:
        return plain(value)


@dataclass(frozen=True)
class Choice:
    """One of a few words. `suggests`: an error names the word that was nearly given."""

    choices: tuple[str, ...]
    suggests: bool = False

    @property
    def metavar(self) -> str:
        every = "|".join(self.choices)
        return every if len(every) <= SHOWN else "NAME"

    @property
    def allowed(self) -> str:
        return " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.choices:
            near = did_you_mean(str(value), self.choices) if self.suggests else ""
            raise RefusedError(self.allowed + near)
        return value

    def show(self, value: Any) -> str:
        return str(value)


_SWITCH = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Switch:
    """On or off; also yes/no, true/false, 1/0."""

    metavar: str = "on|off"
    allowed: str = "on or off"
    choices: tuple[str, ...] = ("on", "off")

    def read(self, value: object) -> bool:
        if isinstance(value, str):
            value = _SWITCH.get(value.lower())
        if not isinstance(value, bool):
            raise RefusedError(self.allowed)
        return value

    def show(self, value: Any) -> str:
        return "on" if value else "off"


@dataclass(frozen=True)
class Text:
    """Any text; with `optional` an absent value is None and empty text is refused; `pattern` narrows it."""

    metavar: str = "TEXT"
    allowed: str = "text"
    choices: tuple[str, ...] = ()
    optional: bool = False
    pattern: str = r"(?s:.*)"

    def read(self, value: object) -> str | None:
        if value is None and self.optional:
            return None
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.ASCII):
            raise RefusedError(self.allowed)
        if (self.optional and not value.strip()) or any("\ud800" <= letter <= "\udfff" for letter in value):
            raise RefusedError(self.allowed)
        return value

    def show(self, value: Any) -> str:
        return "(none)" if value in (None, "") else str(value)


@dataclass(frozen=True)
class Seed:
    """A seed for the noise; `random` draws one now, so that what is shown can be repeated."""

    metavar: str = "N|random"
    choices: tuple[str, ...] = ("random",)
    allowed: str = f"a whole number from 0 to {SEED_LIMIT} or random"

    def read(self, value: object) -> int:
        if value == "random":
            return secrets.randbelow(2**31)
        try:
            return Whole(0, SEED_LIMIT).read(value)
        except RefusedError:
            raise RefusedError(self.allowed) from None

    def show(self, value: Any) -> str:
        return str(value)
