"""Types of setting: how a value is read from text, what is allowed, how it is shown and completed.

A kind turns what a user typed (or a configuration file holds) into a plain Python value, or raises
:class:`RefusedError` with the words that follow "must be"; an error line shows what was refused and what was nearly
given. What only a loaded pair can tell (which models it has, whether rows of a K matrix and drafters agree) is not
asked here. Knows no setting by name, no flags, no torch.
"""

from __future__ import annotations

import difflib
import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from sampling.drafters import registry
from sampling.drafters.registry import MEMBERS
from utils.catalogue.k_matrix import Matrix, check_shape
from utils.catalogue.specs import unknown_member
from utils.errors import UserError

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
SHOWN = 40

LANES = ("ar", "spec", "draft", *registry.LANES, "beam")
SEED_LIMIT = 2**63 - 1

_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)

METHODS = ("spec", *registry.LANES)

NONE = "(none)"
PUBLISHED = ("[[5,10],[0,10]]", "[[13,10],[0,10]]", "[[5,14,10],[0,1,10],[0,0,10]]")


def got(value: object) -> str:
    """The refused value for an error line: numbers bare, text quoted, long ones cut, always one line."""
    text = value if isinstance(value, str) and NUMBER.fullmatch(value) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def named(word: str) -> str:
    """A refused name for an error line: as typed, but cut when long and always one printable line."""
    text = word if word.isprintable() else repr(word)[1:-1]
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name most like `word`, or None when nothing is near; slashes and dashes in front do not count."""
    bare = {name.lstrip("/-"): name for name in sorted(set(names))}
    wanted = word.lstrip("/-").casefold()
    begun = [name for name in bare if len(wanted) > 1 and name.startswith(wanted)]
    close = difflib.get_close_matches(wanted, list(bare), 1, 0.6)
    return next((bare[name] for name in (wanted, *begun, *close) if name in bare), None)


def did_you_mean(word: str, names: Iterable[str], prefix: str = "") -> str:
    """ " (did you mean NAME?)" with a leading space, or nothing."""
    name = nearest(word, names)
    return f" (did you mean {prefix}{name}?)" if name else ""


def plain(value: float) -> str:
    """A number without a needless ".0": 1.0 → 1, 0.9 → 0.9."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


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
    """A finite number between `low` and `high`; either end may be left out. What is below `least` counts as 0."""

    low: float
    high: float
    without_low: bool = False
    without_high: bool = False
    least: float = 0.0
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
        return 0.0 if value < self.least else float(value) + 0.0  # -0.0 becomes 0.0

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


@dataclass(frozen=True)
class Drafters:
    """A comma list (or a sequence) of drafters: words, or names of models that the pair brings. Empty: the pair's."""

    choices: tuple[str, ...] = MEMBERS
    metavar: str = "LIST"

    @property
    def allowed(self) -> str:
        return f"a comma list of {', '.join(self.choices)} or names of the pair's models, each once, large to small"

    def read(self, value: object) -> tuple[str, ...]:
        if value in ("", NONE, (), []):
            return ()
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise RefusedError(self.allowed)
        names = tuple(part.strip() for part in parts)
        if len(set(names)) != len(names) or not all(name and name.isprintable() and "," not in name for name in names):
            raise RefusedError(self.allowed)
        if (meant := next(filter(None, (unknown_member(name, MEMBERS) for name in names)), None)) is not None:
            raise RefusedError(f"{self.allowed} (did you mean {meant}?)")
        return names

    def show(self, value: Any) -> str:
        return ",".join(value) or NONE


@dataclass(frozen=True)
class KMatrix:
    """A K matrix as JSON text or as rows of numbers; see utils/catalogue/k_matrix.py. Empty: the pair's."""

    choices: tuple[str, ...] = PUBLISHED
    metavar: str = "ROWS"
    allowed: str = "rows of whole numbers like [[5,10],[0,10]], upper triangular"

    def read(self, value: object) -> Matrix:
        if value in ("", NONE, (), []):
            return ()
        try:
            return check_shape(json.loads(value) if isinstance(value, str) else value)
        except (ValueError, RecursionError):
            raise RefusedError(self.allowed) from None
        except UserError as error:
            why = str(error).partition(", got ")[0]  # the value given stands in the line already
            raise RefusedError(re.sub(r"^k_matrix must (be|hold) ", "", why)) from None

    def show(self, value: Any) -> str:
        return json.dumps(value, separators=(",", ":")) if value else NONE
