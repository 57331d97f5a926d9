"""How long work reports back and is stopped: two callables and one error. Knows no screen."""

from __future__ import annotations

from collections.abc import Callable

from utils.errors import UserError

Progress = Callable[[str, float | None], None]
"""(what is being done, fraction done 0..1 or None where it is not known)"""


INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


class Cancelled(UserError):  # noqa: N818  # not a failure
    """The user stopped it; nothing half-done is left behind."""

    exit_code = INTERRUPTED


def silent(_stage: str, _fraction: float | None) -> None:
    """A Progress that shows nothing."""


def never() -> bool:
    """A `cancelled` that never asks to stop."""
    return False


def check(cancelled: Callable[[], bool]) -> None:
    """Raise :class:`Cancelled` if the user asked to stop."""
    if cancelled():
        raise Cancelled("loading was cancelled")
