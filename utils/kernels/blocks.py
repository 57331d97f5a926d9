"""A GGUF file's quantised blocks, laid out for the kernels without rounding: sizes, and packing by C (blocks.c).

kernels.h says how the layout looks. Knows neither layers nor files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from utils.kernels.bindings import COLUMNS, TYPES, kernels

FILE_BLOCKS = {  # numbers of a block in a file, and its bytes
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
}
_PIECE = 1 << 24  # numbers that are packed at a time by one thread


def width_of(kind: str, data: np.ndarray) -> int:
    """How many numbers a row of `data` [N, bytes] has."""
    numbers, size = FILE_BLOCKS[kind]
    return int(data.shape[1]) // size * numbers


def pack(kind: str, data: np.ndarray, check: Callable[[], None] = lambda: None) -> np.ndarray:
    """uint8 [N / 16 rounded up, bytes of 16 columns] of a weight whose rows are `data` [N, bytes of a row] in a file.

    `check` is called now and then, to end the work by an exception.
    """
    data = np.ascontiguousarray(data)
    count, number, width = len(data), TYPES.index(kind), width_of(kind, data)
    blocks, size = -(-count // COLUMNS), kernels().packed_size(number, COLUMNS, width)
    packed = torch.empty((blocks, size), dtype=torch.uint8).numpy()  # begins at a multiple of 64
    step = max(1, _PIECE // (COLUMNS * width))

    def piece(first: int) -> None:
        check()
        last = min(blocks, first + step)
        kernels().pack(number, data.ctypes.data, count, width, packed[first:].ctypes.data, first, last)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(piece, range(0, blocks, step)):
            pass
    return packed
