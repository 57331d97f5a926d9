"""Several processes that share a target under torchrun: the rank of this one, and the decisions of the first.

Every process runs the same program; transformers splits the target's layers (its tensor-parallel plan). The first
process drafts and chooses, and :func:`broadcast` sends its choice to the others through torchrun's store, which waits
while the first one drafts. The parts of a pass are joined by torch.distributed. When a process dies torchrun ends the
others on its machine; on other machines their pass fails after :data:`PASS_TIMEOUT` at the latest. Knows no models and
prints nothing.
"""

import functools
import itertools
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, NoReturn, TypeVar

from utils.errors import UsageError, raise_first

T = TypeVar("T")
PASS_TIMEOUT, BARRIER_TIMEOUT, STORE_TIMEOUT = timedelta(seconds=50), timedelta(minutes=30), timedelta(days=365)
_NUMBERS = {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes; `local_rank` of the `local_world_size` on its machine (torchrun's words)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @staticmethod
    def of(environ: Mapping[str, str]) -> "Process":
        """Return the process that torchrun's variables describe; alone if one is missing."""
        numbers = [environ.get(name, default) for name, default in _NUMBERS.items()]
        given = all(environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        return Process(*map(int, numbers)) if given and all(map(str.isdigit, numbers)) else Process()


@functools.cache
def this_process() -> Process:
    """Return this process, as torchrun's variables describe it."""
    return Process.of(os.environ)


def is_first_process() -> bool:
    """Return whether this process decides and writes: it is alone, or rank 0 of several."""
    return this_process().rank == 0


def broadcast(value: T) -> T:
    """Return rank 0's value on every process; all call it in the same order."""
    if this_process().world_size == 1:
        return value
    number = next(_messages)
    if is_first_process():
        _store().set(f"said/{number}", pickle.dumps(value))
        _store().delete_key(f"said/{number - 64}")  # all have read it: each pass since then waited for all
        return value
    return pickle.loads(_store().get(f"said/{number}"))  # type: ignore[no-any-return]


_messages = itertools.count()


def barrier(name: str) -> None:
    """Wait until every process calls this with the same name."""
    _store().set(f"{name}/{this_process().rank}", "")
    _store().wait([f"{name}/{rank}" for rank in range(this_process().world_size)], BARRIER_TIMEOUT)


@functools.cache
def _store() -> Any:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", this_process().rank, this_process().world_size, timeout=BARRIER_TIMEOUT))
    store.set_timeout(STORE_TIMEOUT)
    return PrefixStore("infer", store)


def join(device: str) -> str:
    """Join the process group and return this process's device: its own GPU, or the CPU.

    UsageError for a device that several processes cannot share.
    """
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = this_process().local_world_size
    raise_first(
        {
            f"device must be auto, cpu or cuda where processes share a target, got '{device}'": (
                device not in ("auto", "cpu", "cuda") or (device == "cuda" and not have)
            ),
            f"{local} processes on a machine with {have} GPUs: one GPU each, or --device cpu": (
                device != "cpu" and 0 < have < local
            ),
        }
    )
    own = f"cuda:{this_process().local_rank}" if have and device != "cpu" else "cpu"
    if not torch.distributed.is_initialized():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(max(1, cores // local))
        torch.distributed.init_process_group(
            "gloo" if own == "cpu" else "cpu:gloo,cuda:nccl",
            store=_store(),
            rank=this_process().rank,
            world_size=this_process().world_size,
            timeout=PASS_TIMEOUT,
            device_id=None if own == "cpu" else torch.device(own),
        )
    return own


def check_command(command: str) -> None:
    """Raise UsageError for a sub-command that several processes cannot run."""
    if (count := this_process().world_size) > 1 and command not in ("run", "bench"):
        raise UsageError(f"{command} runs in one process, torchrun started {count} (run and bench share a target)")


def hush(verbose: bool) -> IO[str]:
    """Close input and output of a process that is not the first; `verbose` keeps its standard error.

    The returned file still writes to standard error, for a last message.
    """
    last_message = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if verbose else (0, 1, 2):
        os.dup2(nothing, descriptor)
    return last_message


def leave_at_once(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown, which waits for threads that cannot be stopped, such as
    gloo's with the last collective (pytorch pull request 179291)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
