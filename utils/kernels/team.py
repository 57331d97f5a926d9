"""Compiled functions on torch's own team of threads: libgomp's, so that no second pool competes for the cores.

A compiled function is a C function of one pointer; every thread of the team runs it, finds its number through the
addresses in :data:`TEAM` and meets the others at barriers (utils/kernels/vectors.py). Threads that wait for each other
collapse as soon as another process wants a core, so a team gives way to one thread for a while (:class:`Pace`): results
do not depend on their number. Knows nothing of what they compute.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

# What a record of every compiled function begins with: where threads ask for their number and meet.
TEAM: list[tuple[str, type]] = [
    ("thread_number", np.int64),
    ("team_size", np.int64),
    ("sleep", np.int64),
    ("meeting", np.int64),
]

NAP = 70e-6  # seconds that a sleep at a barrier takes, about
HELD_UP = 1 / 3  # of a run's time spent asleep: threads were taken off their cores
SHORTEST, LONGEST = 0.25, 4.0  # seconds with one thread before the team is tried again
CALM = 4  # runs without trouble after which trouble counts as new

_alone = False  # in a process that was forked: libgomp's threads stayed behind, and it would wait for them


@functools.cache
def openmp() -> Any | None:
    """The OpenMP runtime that torch itself has loaded; None where it has another. A copy loaded by its path could be
    a second one, with threads of its own."""
    import torch

    for name in ("libgomp.so.1", *map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except (OSError, AttributeError):
            continue
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
        return library
    return None


class Pace:
    """How many threads the next run takes.

    It is told of every run of a team how often a thread slept at a barrier, which on a quiet machine hardly happens:
    two runs in a row that were held up bring one thread for a while, longer each time that a new try fails.
    """

    def __init__(self) -> None:
        self.trouble, self.pause, self.until = 0, SHORTEST, 0.0

    def threads(self, team: int, now: float) -> int:
        """Of a run that begins `now`, in seconds."""
        return 1 if now < self.until else team

    def ran(self, naps: int, seconds: float, now: float) -> None:
        """A team's run of so many seconds has ended, its threads have slept so often."""
        if naps * NAP < HELD_UP * seconds:
            self.trouble -= 1
            if self.trouble <= -CALM:
                self.trouble, self.pause = -CALM, SHORTEST
            return
        self.trouble = max(0, self.trouble) + 1
        if self.trouble > 1:
            self.trouble, self.until, self.pause = 1, now + self.pause, min(2 * self.pause, LONGEST)


_pace = Pace()


@functools.cache
def _addresses() -> tuple[int | None, ...]:
    library: Any = openmp()
    functions = library.omp_get_thread_num, library.omp_get_num_threads, ctypes.CDLL(None).usleep
    return tuple(ctypes.cast(one, ctypes.c_void_p).value for one in functions)


class Team:
    """Runs compiled functions on `record`, whose TEAM fields it fills; one at a time: that is its owner's affair."""

    def __init__(self, record: np.ndarray) -> None:
        self._meeting = np.zeros(16, np.int64)  # who has come, naps taken: cache lines of their own
        self._record, self._address = record, record.ctypes.data
        record["thread_number"], record["team_size"], record["sleep"] = _addresses()
        record["meeting"] = self._meeting.ctypes.data

    def run(self, function: int, threads: int) -> None:
        """Run the compiled `function` (its address) on up to `threads` threads; returns when all are done.

        The interpreter's lock is given back meanwhile.
        """
        self._meeting.fill(0)
        began = time.perf_counter()
        if _alone or _pace.threads(threads, began) == 1:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(self._address)
            return
        openmp().GOMP_parallel(function, self._address, threads, 0)  # type: ignore[union-attr]
        ended = time.perf_counter()
        _pace.ran(int(self._meeting[8]), ended - began, ended)


def _forked() -> None:
    global _alone
    _alone = True


os.register_at_fork(after_in_child=_forked)
