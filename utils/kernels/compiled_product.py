"""The compiled functions of one layer: x Wᵀ of many rows, and rows of a packed table. Imports numba."""

from __future__ import annotations

import numpy as np

from utils.kernels.blocks import COLUMNS, GROUP
from utils.kernels.compiler import Entry
from utils.kernels.products import SIZES, columns, look_up, quantise
from utils.kernels.team import TEAM
from utils.kernels.vectors import asked, compiled, get64, load, meet, record_at, share

_FIELDS = ("rows", "groups", "blocks", "layout", "weights", "x", "activations", "result", "narrow", "columns")
PRODUCT = np.dtype([*TEAM, *((name, np.int64) for name in _FIELDS)])
LOOK_UP = np.dtype([*TEAM, *((name, np.int64) for name in ("rows", "groups", "layout", "weights", "ids", "result"))])

_product_at, _look_up_at = record_at(PRODUCT), record_at(LOOK_UP)


@compiled
def quantise_rows(x: int, activations: int, rows: int, groups: int, narrow: int, thread: int, team: int) -> None:
    """This thread's share of the rows of float32 `x` into `activations`."""
    first, last = share(rows, thread, team)
    for row in range(first, last):
        for group in range(groups):
            place = x + 4 * GROUP * (row * groups + group)
            quantise(load(place), load(place + 2 * GROUP), activations, row, group, groups, narrow)


def _product(record: int) -> None:
    p = _product_at(record)
    thread, team = asked(p.thread_number), asked(p.team_size)
    quantise_rows(p.x, p.activations, p.rows, p.groups, p.narrow, thread, team)
    meet(p.meeting, team, 0, p.sleep)
    first, last = share(p.blocks, thread, team)
    block = p.groups * SIZES[p.layout]
    for at in range(first, last):
        y = p.result + 4 * COLUMNS * at
        columns(p.columns, p.layout, p.weights + at * block, p.activations, y, p.groups, COLUMNS * p.blocks, p.rows)


def _look_up(record: int) -> None:
    p = _look_up_at(record)
    first, last = share(p.rows, asked(p.thread_number), asked(p.team_size))
    for row in range(first, last):
        look_up(p.layout, p.weights, get64(p.ids + 8 * row), p.result + 4 * GROUP * p.groups * row, p.groups)


product, looked_up = Entry(_product), Entry(_look_up)
