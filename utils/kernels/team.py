"""Compiled functions on torch's own team of threads: libgomp's, so that no second pool competes for the cores.

A compiled function is a C function of one pointer; every thread of the team runs it, finds its number through the
addresses in :data:`TEAM` and meets the others at barriers (utils/kernels/vectors.py). Knows nothing of what
they compute.
"""

from __future__ import annotations

import ctypes
import functools
import os
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


def introduce(record: np.ndarray) -> None:
    """Fill a record's TEAM fields. `meeting` is memory of its own, a cache line, kept as long as the record's owner
    keeps what :func:`meeting_place` gave."""
    library = openmp()
    libc = ctypes.CDLL(None)
    record["thread_number"] = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value  # type: ignore[union-attr]
    record["team_size"] = ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value  # type: ignore[union-attr]
    record["sleep"] = ctypes.cast(libc.usleep, ctypes.c_void_p).value


def run(function: int, record: np.ndarray, threads: int) -> None:
    """Run the compiled `function` (its address) on a team of up to `threads` threads; returns when all are done.

    The interpreter's lock is given back meanwhile. One run at a time of one record: that is its owner's affair.
    """
    if threads <= 1 or _alone:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(record.ctypes.data)
        return
    openmp().GOMP_parallel(function, record.ctypes.data, threads, 0)  # type: ignore[union-attr]


def _forked() -> None:
    global _alone
    _alone = True


os.register_at_fork(after_in_child=_forked)
