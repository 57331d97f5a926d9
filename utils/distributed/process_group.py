"""A process group: processes that act as one. Orders go from rank 0 to all, and whoever is lost is noticed and named.

Every rank runs the same operations in the same order, so their collectives meet: rank 0 tells an order and carries
it out, the others hear it and do the same. An error that all ranks meet alike (a UserError) leaves them in step; any
other breaks the run for good. Knows no models and prints nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from utils.distributed.collectives import watch
from utils.distributed.failure import GRACE, FailureReport, line_of
from utils.distributed.world import World
from utils.errors import UsageError, UserError

T = TypeVar("T")
LEAVE = "leave"
WITHIN_A_PASS = timedelta(minutes=10)  # how long one rank may keep the others waiting inside a pass
BETWEEN_ORDERS = timedelta(days=365)  # rank 0 may sit at its prompt, or a machine may fetch a large model
_JOINING = 60.0


class LostError(UserError):
    """The processes are no longer in step: nothing can be done but to end."""


class ProcessGroup:
    """This process and the others. Make it with :func:`joined`."""

    def __init__(self, world: World, store: Any) -> None:
        self.world = world
        self._talk: Any = dist.new_group(backend="gloo", timeout=BETWEEN_ORDERS)
        self._lock = threading.RLock()
        self.broken = ""  # what ended the run
        self.number = itertools.count(1).__next__  # one that was not given before
        self.failure = FailureReport(world, store, self.gather((socket.gethostname(), os.getpid())))
        watch(self.failure.missed)

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
            self.broken = self.failure.why(error)
            if self.world.rank == 0:
                self.failure.publish("told", self.broken)
            raise LostError(self.broken) from error
        except BaseException:
            self.broken = "stopped"
            raise

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
        failed = None if error is None else (isinstance(error, UsageError), line_of(error))
        said = [(rank, *one) for rank, one in enumerate(self.gather(failed)) if one is not None]
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
        if self.broken in ("", "stopped"):
            self.failure.publish("left", "yes")
        if self._lock.acquire(timeout=GRACE):
            try:
                if not self.broken and not self.failure.lost():
                    with contextlib.suppress(LostError), self.order(LEAVE):
                        pass
                    self.broken = "left"
            finally:
                self._lock.release()


_joined: list[ProcessGroup] = []
_joining = threading.Lock()


def joined(world: World, device: str = "auto") -> ProcessGroup:
    """The process group, once all its processes have come; the same one every time."""
    if not _joining.acquire(timeout=_JOINING):
        raise LostError("the other processes do not come")
    try:
        if not _joined:
            _joined.append(_join(world, device))
        return _joined[0]
    finally:
        _joining.release()


def known() -> ProcessGroup | None:
    """The process group, if it has been joined."""
    return _joined[0] if _joined else None


def _join(world: World, device: str) -> ProcessGroup:
    cuda = device != "cpu" and torch.cuda.is_available()
    place = torch.device("cuda", world.local_rank) if cuda else None
    if cuda:
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
        return ProcessGroup(world, PrefixStore("team", store))
    except RuntimeError as error:
        raise LostError(f"the processes of this run do not find each other: {line_of(error)[:160]}") from error
