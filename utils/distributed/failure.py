"""What became of the other processes of a run: who has died, what was the reason, and who is to say it.

The reason that was noticed first counts: those who end because of it must not be taken for its cause. It lies in the
run's store, which torchrun's own process keeps. Knows no orders and prints nothing.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil
import torch.distributed as dist

from utils.distributed.world import World
from utils.errors import UserError

GRACE = 1.0  # seconds in which whoever knows what went wrong can say so


class FailureReport:
    """`others` are host and process id of every rank."""

    def __init__(self, world: World, store: Any, others: list[tuple[str, int]]) -> None:
        self.world, self._store, self._others = world, store, others

    @property
    def left(self) -> bool:
        """Whether rank 0 has gone on purpose."""
        return bool(self._published("left"))

    def lost(self) -> str:
        """The processes of this machine that have died, in words; "" if none has."""
        named = [f"rank {rank} (process {self._others[rank][1]})" for rank in self._gone()]
        return f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'} died" if named else ""

    def missed(self) -> str:
        """What another rank has found to have ended the run, else who has died here; "" while all is well."""
        return self._published("why") or self.lost()

    def speaks(self) -> bool:
        """Whether it is for this rank to say what went wrong: rank 0, else the first to ask. To be asked once."""
        if self.world.rank == 0:
            return True
        until = time.monotonic() + GRACE
        while 0 not in self._gone():
            if self._published("told"):
                return False
            if time.monotonic() > until:  # rank 0 lives and will notice, or nobody here can tell
                return self._others[0][0] != self._others[self.world.rank][0] and self.world.local_rank == 0
            time.sleep(0.05)
        if self._published("told"):
            return False
        with contextlib.suppress(Exception):
            return bool(self._store.add("asked", 1) == 1)
        gone = self._gone()  # the store has died with rank 0
        return self.world.rank == min(rank for rank in range(self.world.size) if rank not in gone)

    def _gone(self) -> list[int]:
        here = self._others[self.world.rank][0]
        return [rank for rank, (host, process) in enumerate(self._others) if host == here and not _lives(process)]

    def why(self, error: Exception) -> str:
        """One line on what broke the run, as whoever noticed first found it; waits a moment for those who know."""
        if not _of_the_line(error):
            return self._agreed(f"rank {self.world.rank}: {line_of(error)}")
        until = time.monotonic() + GRACE
        while time.monotonic() < until and not self.left:
            if said := self.missed():
                return self._agreed(said)
            time.sleep(0.05)
        return f"a process of this run cannot be reached any more ({line_of(error)[:120]})"

    def _agreed(self, text: str) -> str:
        with contextlib.suppress(Exception):
            return str(self._store.compare_set("why", "", text).decode())
        return text

    def publish(self, key: str, text: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone with its process
            self._store.set(key, text)

    def _published(self, key: str) -> str:
        with contextlib.suppress(Exception):
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        return ""


def _lives(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _of_the_line(error: Exception) -> bool:
    """Whether the error is about reaching the others, not about what is done here."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection", "socket"))


def line_of(error: Exception) -> str:
    """An error in one line; one that is no UserError says its kind."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
