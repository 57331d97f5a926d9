"""Collectives on the CPU that stop waiting when a process of the run has been lost.

gloo wakes who waits to receive from a process that has died, but not always who waits for what it sent itself
(`UnboundBuffer::waitSend`; three processes in an endless all-reduce, one killed: one run in twenty hangs, torch
2.13): such a wait lasts until the group's timeout. So a wait is taken in slices, and between two of them somebody is
asked whether all are there. Functional collectives and those on an accelerator are left alone: NCCL has a watchdog of
its own. Knows no ranks and prints nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

SLICE = timedelta(seconds=0.25)
WATCHED = ("all_reduce", "broadcast", "all_gather", "gather")


def watch(lost: Callable[[], str]) -> None:
    """From now on these functions of torch.distributed raise DistNetworkError once `lost()` says who is missing.

    It is asked only by who waits longer than a slice, and must say so twice: gloo's own error comes first if it comes.
    """
    for name in WATCHED:
        act = _watched(getattr(c10d, name), lost)
        setattr(c10d, name, act)  # where collectives of Python objects look
        setattr(dist, name, act)


def _watched(collective: Callable[..., Any], lost: Callable[[], str]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def act(*args: Any, async_op: bool = False, **named: Any) -> Any:
        if async_op or any(isinstance(one, torch.Tensor) and one.is_cuda for one in (*args, *named.values())):
            return collective(*args, async_op=async_op, **named)
        if (work := collective(*args, async_op=True, **named)) is not None:
            _wait(work, lost)

    return act


def _wait(work: Any, lost: Callable[[], str]) -> None:
    missing = 0
    while not work.is_completed():
        with contextlib.suppress(RuntimeError):  # the slice is over, or the work has failed and says so again below
            work.wait(SLICE)
        if not work.is_completed() and (said := lost()):
            missing += 1
            if missing > 1:
                raise dist.DistNetworkError(f"connection lost: {said}")
    work.wait()
