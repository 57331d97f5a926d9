"""How many threads a run of the kernels takes.

Threads that wait for each other collapse as soon as another process wants a core, so a team (team.c) gives way to one
thread for a while (:class:`Pace`): results do not depend on their number. Knows nothing of what they compute.
"""

from __future__ import annotations

import ctypes
import time

from utils.kernels.bindings import kernels

HELD_UP = 1 / 3  # of a run's time that a thread slept at barriers: others were taken off their cores
SHORTEST, LONGEST = 0.25, 4.0  # seconds with one thread before the team is tried again
CALM = 4  # runs without trouble after which trouble counts as new


class Pace:
    """How many threads the next run takes.

    It learns from every run of a team how long the threads slept at barriers, which on a quiet machine is next to
    nothing: two runs in a row that were held up bring one thread for a while, longer each time that a new try fails.
    """

    def __init__(self) -> None:
        self.trouble, self.pause, self.until = 0, SHORTEST, 0.0

    def threads(self, team: int, now: float) -> int:
        """Of a run that begins `now`, in seconds."""
        return 1 if now < self.until else team

    def ran(self, slept: float, seconds: float, now: float) -> None:
        """A team's run of so many seconds has ended, in which its threads slept so long altogether."""
        if slept < HELD_UP * seconds:
            self.trouble -= 1
            if self.trouble <= -CALM:
                self.trouble, self.pause = -CALM, SHORTEST
            return
        self.trouble = max(0, self.trouble) + 1
        if self.trouble > 1:
            self.trouble, self.until, self.pause = 1, now + self.pause, min(2 * self.pause, LONGEST)


_pace = Pace()


def run(work: int, record: ctypes.Structure, threads: int) -> None:
    """Do this work (a number of utils/kernels/bindings.py) on up to `threads` threads; returns when all are done.

    The interpreter's lock is given back meanwhile.
    """
    began = time.perf_counter()
    threads = _pace.threads(threads, began)
    slept = kernels().run(work, ctypes.addressof(record), threads)
    if threads > 1:
        ended = time.perf_counter()
        _pace.ran(slept * 1e-9, ended - began, ended)
