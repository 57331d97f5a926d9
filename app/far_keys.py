"""Ctrl-C on a terminal whose signals reach another process: torchrun starts this one in a session of its own.

There a key is only a byte, so it is looked for between two rounds; what else was typed is kept for the next prompt.
Knows no prompt and no models.
"""

from __future__ import annotations

import os
import select
import signal

_CTRL_C = b"\x03"


def is_far(descriptor: int) -> bool:
    """Whether this is a terminal, and not the one that this process gets its signals from."""
    if not os.isatty(descriptor):
        return False
    try:
        os.tcgetpgrp(descriptor)
    except OSError:
        return True
    return False


class FarKeys:
    """The keys of a far terminal; of any other :meth:`look` leaves them alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._typed = b""
        self.watching = False  # between two prompts

    def look(self) -> None:
        """Take what was typed; a Ctrl-C among it becomes the signal it would have been."""
        while self.watching and select.select([self._descriptor], [], [], 0)[0]:
            if not (data := os.read(self._descriptor, 1024)):
                return
            self._typed += data.replace(_CTRL_C, b"")
            for _ in range(data.count(_CTRL_C)):
                signal.raise_signal(signal.SIGINT)

    def taken(self) -> str:
        """What was typed meanwhile, once."""
        typed, self._typed = self._typed, b""
        return typed.decode("utf-8", "replace")


FAR = FarKeys(0)
