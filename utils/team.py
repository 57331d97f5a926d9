"""Several processes that act as one: orders go from rank 0 to all, and whoever is lost is noticed and named.

Every rank runs the same operations in the same order, so their collectives meet: rank 0 tells an order and carries
it out, the others hear it and do the same. An error that all ranks meet alike (a UserError) leaves them in step; any
other breaks the run for good. Knows no models and prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from utils.errors import UsageError, UserError
from utils.world import World

T = TypeVar("T")
LEAVE = "leave"
WITHIN_A_PASS = timedelta(minutes=10)  # how long one rank may keep the others waiting inside a pass
BETWEEN_ORDERS = timedelta(days=365)  # rank 0 may sit at its prompt, or a machine may fetch a large model
_GRACE = 1.0  # seconds in which whoever knows what went wrong can say so
_JOINING = 60.0


class LostError(UserError):
    """The processes are no longer in step: nothing can be done but to end."""


class Team:
    """This process and the others. Make it with :func:`joined`."""

    def __init__(self, world: World, store: Any) -> None:
        self.world, self._store = world, store
        self._talk: Any = dist.new_group(backend="gloo", timeout=BETWEEN_ORDERS)
        self._lock = threading.RLock()
        self.broken = ""  # what ended the run
        self.numbers = 0  # given out so far, see `number`
        self._others: list[tuple[str, int]] = self.gather((socket.gethostname(), os.getpid()))

    # -- orders -------------------------------------------------------------------------------

    @contextmanager
    def order(self, *message: Any) -> Iterator[None]:
        """Rank 0: all ranks do what `message` says; this one does it in the context. LostError if that cannot be."""
        with self._lock:
            if self.broken:
                raise LostError(self.broken)
            with self.in_step():
                dist.broadcast_object_list([message], src=0, group=self._talk)
                yield

    def hear(self) -> Any:
        """The other ranks: the next order. LostError if none can come any more."""
        heard: list[Any] = [None]
        with self.in_step():
            dist.broadcast_object_list(heard, src=0, group=self._talk)
        return heard[0]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What all ranks do. UserErrors, which all meet alike, pass; any other error becomes a LostError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self.broken = self._why(error)
            if self.world.rank == 0:
                self._publish("told", self.broken)
            raise LostError(self.broken) from error
        except BaseException:
            self.broken = "stopped"
            raise

    def number(self) -> int:
        """A number that was not given before."""
        self.numbers += 1
        return self.numbers

    # -- agreement ----------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value, group=self._talk)
        return found

    def together(self, act: Callable[[], T]) -> T:
        """`act()` here and on every rank at once; what went wrong on one of them is raised on all."""
        error: Exception | None = None
        try:
            done = act()
        except Exception as caught:
            error = caught
        told = None if error is None else (isinstance(error, UsageError), _line(error))
        said = [(rank, *one) for rank, one in enumerate(self.gather(told)) if one is not None]
        if isinstance(error, UserError):
            raise error
        if said:
            rank, usage, text = said[0]
            raise (UsageError if usage else UserError)(text if rank == self.world.rank else f"rank {rank}: {text}")
        return done

    def in_turn(self, act: Callable[[], T]) -> T:
        """`act()` by the first process of each machine, then by the rest: what the first made lies ready for them."""
        first = self.world.local_rank == 0
        made = self.together(lambda: act() if first else None)
        rest = self.together(lambda: None if first else act())
        return made if first else rest  # type: ignore[return-value]

    # -- ends ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """Rank 0: the others may go; if they are out of step, they are left to notice."""
        self._publish("left", "yes")
        if self._lock.acquire(timeout=_GRACE):
            try:
                if not self.broken:
                    with contextlib.suppress(LostError), self.order(LEAVE):
                        pass
                    self.broken = "left"
            finally:
                self._lock.release()

    @property
    def left(self) -> bool:
        """Whether rank 0 has gone on purpose."""
        return bool(self._published("left"))

    def lost(self) -> str:
        """The processes of this machine that have died, in words; "" if none has."""
        named = [f"rank {rank} (process {self._others[rank][1]})" for rank in self._gone()]
        return f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'} died" if named else ""

    def speaks(self) -> bool:
        """Whether it is for this rank to say what went wrong: rank 0, else the first that lives on its machine."""
        if self.world.rank == 0:
            return True
        if self._published("told"):
            return False
        here, gone = self._others[self.world.rank][0], self._gone()
        living = [rank for rank, (host, _) in enumerate(self._others) if host == here and rank not in gone]
        return self.world.rank == living[0]

    def _gone(self) -> list[int]:
        here = self._others[self.world.rank][0]
        return [rank for rank, (host, process) in enumerate(self._others) if host == here and not _lives(process)]

    def _why(self, error: Exception) -> str:
        """One line on what broke the run; waits a moment for those who know."""
        if not _of_the_line(error):
            return self._publish("failed", f"rank {self.world.rank}: {_line(error)}")
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and not self.left:
            if said := self._published("failed") or self.lost():
                return said
            time.sleep(0.05)
        return f"a process of this run cannot be reached any more ({_line(error)[:120]})"

    def _publish(self, key: str, text: str) -> str:
        with contextlib.suppress(Exception):  # the store may be gone with its process
            self._store.set(key, text)
        return text

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


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


_joined: list[Team] = []
_joining = threading.Lock()


def joined(world: World, device: str = "auto") -> Team:
    """The team, once all its processes have come; the same one every time."""
    if not _joining.acquire(timeout=_JOINING):
        raise LostError("the other processes do not come")
    try:
        if not _joined:
            _joined.append(_join(world, device))
        return _joined[0]
    finally:
        _joining.release()


def known() -> Team | None:
    """The team, if it has been joined."""
    return _joined[0] if _joined else None


def _join(world: World, device: str) -> Team:
    cuda = device != "cpu" and torch.cuda.is_available()
    place = None
    if cuda:
        place = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(place)
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=WITHIN_A_PASS))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=WITHIN_A_PASS,
            device_id=place,
        )
        return Team(world, PrefixStore("team", store))
    except RuntimeError as error:
        raise LostError(f"the processes of this run do not find each other: {_line(error)[:160]}") from error
