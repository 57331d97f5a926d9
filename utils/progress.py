"""How long work reports back and is stopped: two callables and one error. Knows no screen."""

from __future__ import annotations

import time
from collections.abc import Callable

from utils.errors import UserError

Progress = Callable[[str, float | None], None]
"""(what is being done, fraction done 0..1 or None where it is not known)"""


INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


class Cancelled(UserError):  # noqa: N818  # not a failure
    """The user stopped it; nothing half-done is left behind."""

    exit_code = INTERRUPTED


class Remaining:
    """Says how far long work is and how long it will take: " 43%, 25 s left"."""

    def __init__(self) -> None:
        self._stage, self._begun, self._first = "", 0.0, 0.0

    def text(self, stage: str, fraction: float | None) -> str:
        """What stands after the stage; the time left where it can be told and is worth a word."""
        if stage != self._stage:
            self._stage, self._begun, self._first = stage, time.monotonic(), fraction or 0.0
        if fraction is None:
            return ""
        taken, done = time.monotonic() - self._begun, fraction - self._first
        left = taken * (1 - fraction) / done if done > 0.01 else 0.0
        words = f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
        return f" {100 * fraction:.0f}%" + (f", {words} left" if taken >= 3 and left >= 3 else "")


def silent(_stage: str, _fraction: float | None) -> None:
    """A Progress that shows nothing."""


def never() -> bool:
    """A `cancelled` that never asks to stop."""
    return False


def check(cancelled: Callable[[], bool]) -> None:
    """Raise :class:`Cancelled` if the user asked to stop."""
    if cancelled():
        raise Cancelled("loading was cancelled")
