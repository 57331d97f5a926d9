"""The real program in a real (pseudo) terminal: pexpect types, pyte draws what comes back."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte

from tests.support.warm import OnTerminal

ROOT = Path(__file__).resolve().parents[2]
PASTE_ON, PASTE_OFF = "\x1b[200~", "\x1b[201~"


class Answering(pyte.HistoryScreen):
    """A screen that answers what programs ask the terminal, and knows whether the cursor shows."""

    reply: Callable[[str], Any] = staticmethod(lambda text: None)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """As terminals do it: rows go at the bottom as far as they are below the cursor, then at the top."""
        above = max(0, self.cursor.y - (lines or self.lines) + 1)
        for row in range(self.lines):
            line = self.buffer.pop(row + above, None)
            if line is not None:
                self.buffer[row] = line
        self.cursor.y -= above
        for row in range(lines or self.lines, self.lines):
            self.buffer.pop(row, None)
        self.lines = min(self.lines, lines or self.lines)
        super().resize(lines, columns)

    def write_process_input(self, data: str) -> None:
        self.reply(data)


class Terminal:
    """`python infer.py ARGS` in a terminal of `columns` × `rows`. `raw` is everything it wrote.

    `warm`: what it imports is imported already (tests/support/warm.py).
    """

    def __init__(
        self, *args: str, columns: int = 100, rows: int = 40, environ: dict[str, str] | None = None, warm: bool = False
    ) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPEC_T", "SPEC_G")) and k not in _UNSET}
        env = {**clean, "TERM": "xterm-256color", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **(environ or {})}
        self.screen = Answering(columns, rows, history=5000, ratio=0.9)
        self.stream = pyte.Stream(self.screen)
        self.raw = ""
        self.started = time.monotonic()
        command = [str(ROOT / "infer.py"), *args]
        if warm:
            self.child: Any = OnTerminal([sys.executable, *command], rows, columns, env)
        else:
            how: dict[str, Any] = {"encoding": "utf-8", "codec_errors": "replace"}
            self.child = pexpect.spawn(sys.executable, command, dimensions=(rows, columns), env=env, **how)
        self.child.delaybeforesend = None
        self.screen.reply = self.child.send

    def read(self, seconds: float = 0.05) -> None:
        """Take in what has come so far."""
        end = time.monotonic() + seconds
        while True:
            try:
                text = self.child.read_nonblocking(65536, timeout=max(0.0, end - time.monotonic()))
            except (pexpect.TIMEOUT, pexpect.EOF):
                return
            self.raw += text
            self.stream.feed(text)
            if time.monotonic() >= end:
                return

    @property
    def lines(self) -> list[str]:
        """The screen as it looks now."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def wait(self, found: str | Callable[[], bool], seconds: float = 60.0) -> None:
        """Until the screen shows a text (or a condition holds)."""
        held = (lambda: found in self.text) if isinstance(found, str) else found
        end = time.monotonic() + seconds
        while not held():
            assert time.monotonic() < end, f"not within {seconds:g} s: {found!r}\n{self.text}"
            assert self.child.isalive() or held(), f"ended early\n{self.text}"
            self.read()

    def quiet(self, seconds: float = 0.3, at_most: float = 20.0) -> None:
        """Until nothing has been written for a while."""
        end = time.monotonic() + at_most
        while time.monotonic() < end:
            before = len(self.raw)
            self.read(seconds)
            if len(self.raw) == before:
                return

    def type(self, text: str, until: str | Callable[[], bool] | None = None, seconds: float = 60.0) -> None:
        """Send a text and, where `until` is given, wait for that."""
        self.child.send(text)
        if until is not None:
            self.wait(until, seconds)

    def enter(self, text: str = "", until: str | Callable[[], bool] | None = None, seconds: float = 60.0) -> None:
        self.type(text + "\r", until, seconds)

    def paste(self, text: str) -> None:
        self.child.send(PASTE_ON + text + PASTE_OFF)

    def interrupt(self) -> None:
        """Ctrl-C at the keyboard."""
        self.child.send("\x03")

    def signal(self) -> None:
        """Ctrl-C as a signal, from elsewhere."""
        os.kill(self.child.pid, signal.SIGINT)

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def mark(self) -> int:
        """A place in what was written, for :meth:`since`."""
        self.quiet()
        return len(self.raw)

    @property
    def at_prompt(self) -> bool:
        """Whether the last line with a prompt sign is where the cursor is."""
        return self.screen.display[self.screen.cursor.y].startswith(("›", ">")) and self.screen.cursor.x >= 2

    def end(self) -> int:
        """Wait for the program to end; its exit code."""
        deadline = time.monotonic() + 20
        while self.child.isalive() and time.monotonic() < deadline:
            self.read()
        self.read(0.2)
        self.child.close(force=True)
        return self.child.exitstatus if self.child.exitstatus is not None else -(self.child.signalstatus or 0)


_UNSET = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "EDITOR", "VISUAL"}
