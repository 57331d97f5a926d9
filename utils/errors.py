"""Errors in one line, most of which a user can mend, and checks of single values that raise them."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real

# The lowest temperature that does not count as 0: float32's smallest normal number, whose reciprocal is finite too.
COLDEST = 2.0**-126


class UserError(Exception):
    """One line that names the mistake, the value and the allowed values."""

    exit_code = 1


class LogitsError(UserError, ValueError):
    """A model's logits give no distribution."""


class ServerError(UserError):
    """A server failed, or sent what cannot be used."""


class UsageError(UserError):
    """A wrong flag, command, setting or configuration file."""

    exit_code = 2


class UnfitError(Exception):
    """The compiled pass cannot compute this model; the message says why."""


def holding(cases: Mapping[str, object]) -> list[str]:
    """Return the texts whose condition holds."""
    return [text for text, holds in cases.items() if holds]


def raise_first(cases: Mapping[str, object], kind: type[Exception] = UsageError) -> None:
    """Raise an error of this kind with the first text whose condition holds, if one does."""
    for text in holding(cases):
        raise kind(text)


def number(name: str, value: object, fits: Callable[[float], bool], allowed: str) -> float:
    """`value` as a float; UserError if it is no finite number or does not fit."""
    try:
        read = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        read = math.inf
    if not math.isfinite(read) or not fits(read):
        raise UserError(f"{name} must be {allowed}, got {shown(value)}")
    return read


def whole(name: str, value: object, least: int, allowed: str) -> int:
    """`value` as an int; UserError if it is no whole number from `least` on."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be {allowed}, got {shown(value)}")
    return int(value)


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value is an int from `least` on, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def shown(value: object) -> str:
    """Return a value for an error message: short, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:39] + "…"


def printable(line: str) -> str:
    """Return an error's line, which may quote a file or a typed word, with unprintable characters escaped."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in line)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most like `word`, or None if none is near; leading slashes and dashes do not count."""
    bare = {name.lstrip("/-"): name for name in sorted(set(names))}
    wanted = word.lstrip("/-").casefold()
    near = (
        wanted,
        *[name for name in bare if len(wanted) > 1 and name.startswith(wanted)],
        *difflib.get_close_matches(wanted, list(bare), 1, 0.6),
    )
    return next((bare[name] for name in near if name in bare), None)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """ " (did you mean NAME?)" with a leading space, or nothing."""
    name = nearest(word, names)
    return f" (did you mean {name}?)" if name else ""
