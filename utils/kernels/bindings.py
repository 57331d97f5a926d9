"""The kernels as Python calls them: the structures of kernels.h, the library, which is loaded once, and its threads.

Threads that wait for each other become far slower than one as soon as another process takes a core, so a team (team.c)
gives way to one thread for a while (:class:`Pace`); results do not depend on their number.
"""

import ctypes
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.kernels import build
from utils.kernels.header import CONSTANTS, FUNCTIONS, LAYOUTS, STRUCTURES, Structure as Structure, packer as packer

if TYPE_CHECKING:
    from torch import Tensor

TYPES, FLOATS = tuple(LAYOUTS), tuple(name for name, row in LAYOUTS.items() if not row[0])  # floats: no codes
FILE_BLOCKS = {name: (row[-2], row[-1]) for name, row in LAYOUTS.items()}  # numbers of a block in a file, and its bytes
ACTIVATIONS = ("silu", "gelu_tanh")
PRODUCT, LOOK_UP, PASS, STEP = (CONSTANTS[name] for name in ("PRODUCT", "LOOK_UP", "PASS", "STEP"))  # kinds of work
COLUMNS, GROUP, TILE, FEW = (CONSTANTS[name] for name in ("COLUMNS", "GROUP", "TILE", "FEW"))
TABLES, MOST_CHOSEN, CONTEXT, OFFERED = (CONSTANTS[name] for name in ("TABLES", "MOST_CHOSEN", "CONTEXT", "OFFERED"))
Weight, Product, LookUp, Expert = (STRUCTURES[name] for name in ("Weight", "Product", "LookUp", "Expert"))
LayerStruct, PassStruct, StepStruct = (STRUCTURES[name] for name in ("Layer", "Pass", "Step"))
Walk, TableLevel, Offers = (STRUCTURES[name] for name in ("Walk", "TableLevel", "Offers"))
_DESCENT = packer("Descent")
_walks = cache(lambda count: Walk * count)  # ctypes makes such a type anew where no one keeps it
CODES, PICK = (ctypes.sizeof(STRUCTURES[name]) for name in ("Codes", "Pick"))  # bytes of 32 activations; of a Pick
ROW_FIELDS = tuple(name for name, _ in STRUCTURES["Row"]._fields_)
ROW = np.dtype([(name, np.int64) for name in ROW_FIELDS])
WALKED = 16  # logits that a walk reads at a time
HELD_UP = 1 / 3  # share of a run's time that its threads, added up, may sleep at barriers before one thread is faster
MOST_LOST = 0.02  # seconds that they may sleep beyond that; a run counts for half of it at most
SHORTEST, LONGEST = 0.25, 4.0  # seconds with one thread before the team is tried again
CALM = 16  # runs in a row without excess sleep after which the pause is the shortest again

_one_at_a_time = threading.Lock()
_libraries: list[ctypes.CDLL] = []  # the library, once it is loaded


def at_hand() -> bool:
    """Return whether the kernels are loaded. Callers to whom they save little time do not compile them."""
    return bool(_libraries)


def kernels() -> ctypes.CDLL:
    """Return the library, loaded and if need be compiled. ValueError if there is none (`build.why_not`)."""
    if not _libraries and not load():
        raise ValueError(build.why_not())
    return _libraries[0]


def load(
    folder: Path | None = None,
    report: Callable[[], None] = lambda: None,
    waits: Callable[[], None] = lambda: None,
) -> bool:
    """Load the kernels and return whether that succeeded. The compiled library is kept in `folder`; `report` is called
    before it is compiled, `waits` while another process compiles it."""
    with _one_at_a_time:
        row = build.instruction_set()
        if not _libraries and row is not None:
            try:
                loaded = build.library(folder, row, report, waits)
            except build.BuildError as error:
                build.failures.append(str(error))
                return False
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
            if hasattr(os, "register_at_fork"):  # not on Windows
                os.register_at_fork(after_in_child=loaded.forget_helpers)
            _libraries.append(loaded)
    return bool(_libraries)


class Pace:
    """The number of threads of the next run, from how long the threads of earlier runs slept at barriers.

    A terminal that draws takes a core for some milliseconds now and then: even so a team is faster than one thread.
    Once the sleep exceeds its share by MOST_LOST, one thread runs for a while, longer each time that the team fails
    again.
    """

    def __init__(self) -> None:
        self.lost, self.calm, self.pause, self.until = 0.0, 0, SHORTEST, 0.0

    def threads(self, team: int, now: float) -> int:
        """Return the number of threads of a run that begins at `now`, in seconds."""
        return 1 if now < self.until else team

    def ran(self, slept: float, seconds: float, now: float) -> None:
        """Learn from a team's run of `seconds` in which its threads slept for `slept` seconds."""
        excess = slept - HELD_UP * seconds
        self.lost = max(0.0, self.lost + min(excess, MOST_LOST / 2))
        self.calm = self.calm + 1 if excess <= 0 else 0
        if self.calm >= CALM:
            self.pause = SHORTEST
        if self.lost > MOST_LOST:
            self.lost, self.until, self.pause = MOST_LOST / 2, now + self.pause, min(2 * self.pause, LONGEST)


_pace = Pace()


def run(work: int, record: Structure, threads: int) -> None:
    """Do `work`, one of the kinds above, on up to `threads` threads, without the interpreter's lock."""
    began = time.perf_counter()
    threads = _pace.threads(threads, began)
    slept = kernels().run(work, ctypes.addressof(record), threads)
    if threads > 1:
        ended = time.perf_counter()
        _pace.ran(slept * 1e-9, ended - began, ended)


def walkable(logits: "Tensor") -> bool:
    """Return whether :func:`walk` can read logits [..., V]."""
    plain = logits.is_cpu and logits.element_size() == 4 and logits.stride(-1) == 1
    return plain and logits.is_floating_point() and logits.shape[-1] % WALKED == 0


def walk(address: int, count: int, most: int, state: int | None = None, temperature: float = 1.0) -> Structure:
    """Return a Walk (kernels.h): the `most` largest (up to 16) of `count` float32 logits at an address, and the id that
    is drawn at this temperature with the noise of `state`; without a state the largest is drawn. `count` is a multiple
    of 16.

    `mass` is Σ e^(logit − largest); NaN if a logit is NaN or +inf, or all are -inf. `tempered` is the same sum at the
    temperature of a draw, 0 without one. `drawn` is −1 where `mass` is NaN, and where rounding could decide: then the
    sampler draws.
    """
    walked = Walk(address, count, most, state is not None, state or 0, inverse=1 / temperature)
    kernels().walk(ctypes.addressof(walked))
    return walked


def sum_up(walked: Structure) -> float:
    """Return Σ e^(logit − largest) of a walk that has found the largest."""
    kernels().sum_up(ctypes.addressof(walked))
    return float(walked.mass)


def descend(
    logits: "Tensor",
    row: int,
    start: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    most: int,
    noise: tuple[int, int] | None,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[list[int], Sequence[Structure]]:
    """Walk down the draft of a row from node `start` (-1: the root) along the drawn tokens, to the first node of which
    no child is drawn, or whose draw is undecided. Return the nodes on this path, and the Walk of each, N+1 records in
    all; `mass` is left out.

    logits [B, N+1, V], which :func:`walkable` takes; `noise`: the key of the row's and the position of the first draw,
    None: the largest logit is drawn. `most`: see :func:`walk`; the numbers after it are those of a LogitsProcessor.
    """
    (by_row, by_node, _), count = logits.stride(), len(tokens)
    walks = _walks(count + 1)()
    numbers = array("q", [*tokens, *parents, *[0] * (count + 1)])
    address = numbers.buffer_info()[0]
    descent = _DESCENT.pack(
        logits.data_ptr() + 4 * by_row * row,
        by_node,
        logits.shape[-1],
        most,
        noise is not None,
        top_k,
        1 / temperature,
        max(top_p, 1e-30) if top_p < 1 else 0.0,  # 0 stands for no limit
        min_p,
        0.0,
        *(noise or (0, 0)),
        count,
        address,
        address + 8 * count,
        start,
        address + 16 * count,
        ctypes.addressof(walks),
    )
    return numbers[2 * count : 2 * count + kernels().descend(descent)].tolist(), walks


def over_noise(state: int, probs: "Tensor") -> np.ndarray:
    """Return [V] float32: contiguous probs [V] divided by the uniform numbers of the stream in this (signed) state."""
    result = np.empty(len(probs), np.float32)
    kernels().over_noise(state, len(probs), probs.data_ptr(), result.ctypes.data)
    return result
