"""What a console does when it must end: the conversation is saved first, and the last line says where.

Knows what to write and where, not how the console reads and answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.console.prompt import state_folder
from utils.errors import UserError
from utils.files import write_text

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


class ChatRescue:
    """A context in which TERM, HUP and QUIT end the console in order: with 128 + their number, after `leave()`.

    `text` gives the conversation, or raises UserError if there is none. It is written as soon as a signal comes, which
    Python tells between two operations, and again when the answer in hand has been stopped; further signals change
    nothing. What is ignored when the console begins (nohup) stays so.
    """

    def __init__(self, text: Callable[[], str], leave: Callable[[], None]) -> None:
        self._text, self._leave = text, leave
        self.code = 0  # of the signal that came
        self.ending = False
        self.file: Path | None = None
        self.problem = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> ChatRescue:
        with contextlib.suppress(ValueError):  # no signals outside the main thread
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():  # whoever sends another one shall still read our exit code
            signal.signal(number, signal.SIG_IGN if self.ending else before)

    def _on_signal(self, number: int, _: object) -> None:
        if self.ending:
            return
        self.ending, self.code = True, 128 + number
        self.save()
        self._leave()

    def save(self) -> None:
        """Write the conversation, if there is one, to a file of its own; every time to the same. This is the end."""
        self.ending = True
        try:
            text = self._text()
        except UserError:
            return
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            return
        for place in (_in_state, _in_temporary):
            try:
                file = self.file or place()
                write_text(file, text)
            except Exception as error:
                self.problem = str(error)
            else:
                self.file, self.problem = file, ""
                return

    def __str__(self) -> str:
        """The last line; "" if there was nothing to save."""
        if self.file is not None:
            return f"the conversation was saved, it goes on with: /load {self.file}"
        return f"error: the conversation could not be saved: {self.problem}" if self.problem else ""


def _in_state() -> Path:
    folder = state_folder() / "chats"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"


def _in_temporary() -> Path:
    """Where the state folder cannot be written, as on a read-only home."""
    return Path(tempfile.mkdtemp(prefix="speculative-console-")) / "chat.json"
