"""Runs a helper process that can be watched and stopped. Knows nothing of what it does."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from utils.progress import check


def run_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    on_tick: Callable[[], None],
    cancelled: Callable[[], bool],
    on_line: Callable[[str], None] = lambda line: None,
) -> tuple[int, str]:
    """Run `command` until it ends; (exit status, what it wrote to stderr).

    `on_line` gets each line of its stdout (from another thread), `on_tick` is called at once and every 0.1 s, and
    `cancelled` is asked behind each of these, however soon the process ends. When it says so, or on any exception, the
    process is killed. It has a session of its own, so a Ctrl-C in the terminal does not reach it.
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
    said: list[str] = []
    readers = [
        threading.Thread(target=_drain, args=(process.stdout, on_line), daemon=True),
        threading.Thread(target=_drain, args=(process.stderr, said.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        running = True
        while running:
            on_tick()
            check(cancelled)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                running = False
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        deadline = time.monotonic() + 2
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
    return process.returncode, "".join(said)


def _drain(pipe: object, sink: Callable[[str], None]) -> None:
    for line in pipe:  # type: ignore[attr-defined]
        sink(line)
