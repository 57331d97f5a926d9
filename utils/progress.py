"""Long work: how it reports its progress and is stopped, also in a helper process. Knows no screen."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from utils.errors import UserError

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended


class Cancelled(UserError):  # noqa: N818  # not a failure
    """The user stopped the work; nothing half-done stays."""

    exit_code = INTERRUPTED


class Remaining:
    """The text for the progress of long work: " 43%, 25 s left"."""

    def __init__(self) -> None:
        self._stage, self._begun, self._first = "", 0.0, 0.0

    def text(self, stage: str, fraction: float | None) -> str:
        """Return the fraction done of `stage`, and the time left once it can be estimated and is 3 s or more."""
        if stage != self._stage:
            self._stage, self._begun, self._first = stage, time.monotonic(), fraction or 0.0
        if fraction is None:
            return ""
        taken, done = time.monotonic() - self._begun, fraction - self._first
        left = taken * (1 - fraction) / done if done > 0.01 else 0.0
        words = f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
        return f" {100 * fraction:.0f}%" + (f", {words} left" if taken >= 3 and left >= 3 else "")


def never() -> bool:
    """Return False: nothing asks to stop."""
    return False


@dataclass(frozen=True)
class Progress:
    """Long work's way to report and to be stopped. A call says the stage and the fraction done, 0..1, or None if it is
    not known; it and `check` raise :class:`Cancelled` where `cancelled()` is true."""

    show: Callable[[str, float | None], object] = lambda stage, fraction: None
    cancelled: Callable[[], bool] = never

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        self.show(stage, fraction)
        self.check()

    def check(self) -> None:
        if self.cancelled():
            raise Cancelled("loading was cancelled")


SILENT = Progress()


def run_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    on_tick: Callable[[], None],
    on_line: Callable[[str], None] = lambda line: None,
) -> tuple[int, str]:
    """Run `command` until it ends; return its exit status and its stderr.

    `on_line` gets each line of its stdout (from another thread), `on_tick` is called at once and every 0.1 s; if it
    raises, the process is killed. The process has a separate session, so a Ctrl-C in the terminal does not reach it.
    """
    process = subprocess.Popen(
        list(command),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    errors: list[str] = []
    readers = [
        threading.Thread(target=_drain, args=(process.stdout, on_line), daemon=True),
        threading.Thread(target=_drain, args=(process.stderr, errors.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        while process.returncode is None:
            on_tick()
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        for reader in readers:
            reader.join(1.0)
    return process.returncode, "".join(errors)


def _drain(pipe: Iterable[str], sink: Callable[[str], None]) -> None:
    for line in pipe:
        sink(line)
