"""One piece of work in a thread, with its progress and a way to call it off. Knows no models and
draws nothing: who waits for it reads `status`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Progress = Callable[[str, float | None], None]
Work = Callable[[Progress, Callable[[], bool]], T]


class Job(Generic[T]):
    """Runs `work(progress, cancelled)` in a daemon thread from :meth:`start` on.

    `changed` is called, in that thread, whenever the status line may have changed.
    """

    def __init__(self, work: Work[T], changed: Callable[[], None] = lambda: None) -> None:
        self._work, self._changed = work, changed
        self._stage, self._fraction = "starting", None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._cancelled, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)

    _fraction: float | None

    def start(self) -> Job[T]:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._value = self._work(self._progress, self._cancelled.is_set)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            self._changed()

    def _progress(self, stage: str, fraction: float | None) -> None:
        before = self.status
        self._stage, self._fraction = stage, fraction
        if self.status != before:
            self._changed()

    @property
    def status(self) -> str:
        """What it is doing: "converting 42%", or "" once it has ended."""
        if self.done:
            return ""
        share = "" if self._fraction is None else f" {100 * min(1.0, max(0.0, self._fraction)):.0f}%"
        return f"{self._stage}{share}"

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once it has ended."""
        return self._error if self.done else None

    def cancel(self) -> None:
        """Ask it to end early; it does so at its next look, with an error of its own."""
        self._cancelled.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended within so many seconds."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """What it made; raises what it raised. Waits for the end."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
