"""Collectives on the CPU that stop waiting when a process of the run has been lost.

gloo wakes who waits to receive from a process that has died, but not always who waits for what it sent itself
(`UnboundBuffer::waitSend`; three processes in an endless all-reduce, one killed: one run in twenty hangs, torch
2.13): such a wait lasts until the group's timeout. So a wait is taken in slices, and between two of them somebody is
asked whether all are there. Collectives on an accelerator are left alone: NCCL has a watchdog of its own. Knows no
ranks and prints nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

SLICE = 0.25  # seconds
WATCHED = ("all_reduce", "broadcast", "all_gather", "gather")


def watch(lost: Callable[[], str]) -> None:
    """From now on these functions of torch.distributed, and waits for what functional collectives (those of DTensors)
    yield, raise DistNetworkError once `lost()` says who is missing.

    It is asked only by who waits longer than a slice, and must say so twice: gloo's own error comes first if it comes.
    """
    functional.wait_tensor = _watched_wait(functional.wait_tensor, lost)
    for name in WATCHED:
        act = _watched(getattr(c10d, name), lost)
        setattr(c10d, name, act)  # where collectives of Python objects look
        setattr(dist, name, act)


def _watched(collective: Callable[..., Any], lost: Callable[[], str]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def act(*args: Any, async_op: bool = False, **named: Any) -> Any:
        if async_op or any(isinstance(one, Tensor) and one.is_cuda for one in (*args, *named.values())):
            return collective(*args, async_op=async_op, **named)
        work = collective(*args, async_op=True, **named)
        if work is not None:
            _until(work.is_completed, lambda: work.wait(timedelta(seconds=SLICE)), lost)
            work.wait()  # raises what went wrong
        return None

    return act


def _watched_wait(wait: Callable[[Tensor], Tensor], lost: Callable[[], str]) -> Callable[[Tensor], Tensor]:
    """This wait has no end of its own: it is left to a thread, which is left behind where it does not come back."""
    threads = ThreadPoolExecutor(1, "waiting")

    @torch.inference_mode()
    def finish(tensor: Tensor) -> None:
        wait(tensor)

    @functools.wraps(wait)
    def act(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not torch.compiler.is_compiling():
            waiting: Future[None] = threads.submit(finish, tensor)
            _until(waiting.done, lambda: waiting.exception(SLICE), lost)
            waiting.result()
        return wait(tensor)

    return act


def _until(done: Callable[[], bool], slice_: Callable[[], object], lost: Callable[[], str]) -> None:
    missing = 0
    while not done():
        with contextlib.suppress(RuntimeError, TimeoutError):  # the slice is over, or what is waited for has failed
            slice_()
        if not done() and (said := lost()):
            missing += 1
            if missing > 1:
                raise dist.DistNetworkError(f"connection lost: {said}")
