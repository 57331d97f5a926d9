"""Errors that a user can mend, and checks of single values that raise them. Shown as one line; a traceback only with
--verbose. Knows nothing of what the values are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

COLDEST = 2.0**-126
"""The smallest number that float32 can divide by: its reciprocal is the largest one that it can multiply by."""


class UserError(Exception):
    """One line that names what is wrong, the value given and what is allowed."""

    exit_code = 1


class LogitsError(UserError, ValueError):
    """What a model gives for the next token is no distribution."""


class UsageError(UserError):
    """A wrong flag, command, setting or configuration file."""

    exit_code = 2


def number(name: str, value: object, fits: Callable[[float], bool], allowed: str) -> float:
    """`value` as a float; UserError where it is no finite number or does not fit."""
    try:
        read = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        read = math.inf
    if not math.isfinite(read) or not fits(read):
        raise UserError(f"{name} must be {allowed}, got {shown(value)}")
    return read


def whole(name: str, value: object, least: int, allowed: str) -> int:
    """`value` as an int; UserError where it is no whole number from `least` on."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be {allowed}, got {shown(value)}")
    return int(value)


def shown(value: object) -> str:
    """A value as an error names it: short, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:39] + "…"
