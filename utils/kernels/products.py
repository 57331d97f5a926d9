"""Products of a few rows of activations with packed weights (utils/kernels/blocks.py), compiled.

An activation is 16-bit integers, x ≈ scale · code, a group of 32 at a time: what two planes of 8 bits hold, the upper
being the codes over 256 (|code| ≤ 127 · 256). Integer sums are exact, and each row's additions of real numbers run
group after group whatever the number of rows: **a row's result depends on the row alone**, bit for bit. A group with
infinity or NaN gets the scale NaN, and so does its row's result.

Activations lie in tiles of `ROWS` rows: [tile][K / 32] groups, each: `ROWS` times 32 codes, `ROWS` scales, `ROWS`
times scale · sum of codes. The codes' order is that of the pairs which the weights' shifts yield.

**Narrow** activations are 8-bit integers (|code| ≤ 127), which is llama.cpp's arithmetic: half the products, and some
hundred times the error. Their 32 codes lie in order in the first half of a row's place, behind them the sums of the
first and of the last 16, for the weights of 8 bits, which are taken as unsigned. Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int64, types

from utils.kernels.blocks import COLUMNS, GROUP, LAYOUTS, Layout
from utils.kernels.compiler import Entry
from utils.kernels.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    SET,
    WHOLES,
    Body,
    call,
    calling,
    compiled,
    count,
    fetch,
    float_of_bits,
    get8,
    get_float,
    get_half,
    greatest_bits,
    loop,
    moved,
    mul,
    number,
    one_of,
    operation,
    put_float,
    read,
    splat,
    spread,
    times_plus,
    whole,
    write,
)

ROWS = SET.rows  # of a tile
UNIT = ROWS * (2 * GROUP + 4 + 4)  # bytes of a tile's group
SCALES, SUMS = ROWS * 2 * GROUP, ROWS * (2 * GROUP + 4)
TOP, NARROW_TOP = 32512.0, 127.0  # the largest code
AHEAD = 10240  # bytes that weights are fetched ahead of their use
TINY = int(np.float32(1e-30).view(np.int32))  # a group of no larger number counts as zeros
INFINITE = int(np.float32(np.inf).view(np.int32))

# The codes of a group in the order that they lie in: pair after pair, as nibbles and bytes of a word are taken apart.
ORDER = [16 * half + 4 * word + odd + 2 * at for word in range(4) for half in (0, 1) for odd in (0, 1) for at in (0, 1)]

OCTETS = ir.VectorType(I8, 4 * LANES)
PAIRS, WORDS = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, LANES)
COLUMN = ir.VectorType(F32, LANES)


# -- activations --------------------------------------------------------------------------------------------


@operation(types.void, int64, WHOLES, WHOLES)
def put_codes(builder: Any, address: Any, low: Any, high: Any) -> None:
    """The 32 codes of a group, 16 and 16, as 16-bit integers in their order."""
    order = ir.Constant(ir.VectorType(I32, GROUP), ORDER)
    write(builder, builder.trunc(builder.shuffle_vector(low, high, order), ir.VectorType(I16, GROUP)), address)


@operation(types.void, int64, WHOLES, WHOLES)
def put_narrow(builder: Any, address: Any, low: Any, high: Any) -> None:
    """The same as 8-bit integers as they come, and behind them the sums of 16 and 16."""
    for half, values in enumerate((low, high)):
        write(builder, builder.trunc(values, ir.VectorType(I8, COLUMNS)), address, COLUMNS * half)
        write(builder, call(builder, "llvm.vector.reduce.add.v16i32", I32, values), address, GROUP + 4 * half)


@compiled
def quantise(low: Any, high: Any, base: int, row: int, group: int, groups: int, narrow: int) -> None:
    """One group of a row's 32 values into the activations at `base`."""
    place = base + (row // ROWS * groups + group) * UNIT
    at = row % ROWS
    most = greatest_bits(low, high)
    scale, inverse = float32(0.0), float32(0.0)
    if most >= INFINITE:
        scale = float32(np.nan)
    elif most > TINY:
        top = float32(NARROW_TOP) if narrow else float32(TOP)
        scale, inverse = float_of_bits(most) / top, top / float_of_bits(most)
    by = splat(inverse)
    first, second = whole(mul(low, by)), whole(mul(high, by))
    if narrow:
        put_narrow(place + 2 * GROUP * at, first, second)
    else:
        put_codes(place + 2 * GROUP * at, first, second)
    put_float(place + SCALES + 4 * at, scale)
    put_float(place + SUMS + 4 * at, float32(count(first, second)) * scale)


def room(rows: int, width: int) -> int:
    """Bytes that the activations of `rows` rows of `width` values take."""
    return -(-rows // ROWS) * (width // GROUP) * UNIT


# -- tiles ---------------------------------------------------------------------------------------------------


def tile(layout: Layout, rows: int, narrow: bool = False) -> Body:
    """The function (weights of a block, activations of a tile, result, groups, bytes between the result's rows), as
    LLVM has it: 16 columns of so many rows, `LANES` columns at a time."""
    line = COLUMNS * np.dtype(layout.real).itemsize
    lanes_of_line = LANES * np.dtype(layout.real).itemsize

    def body(builder: Any, w: Any, x: Any, y: Any, groups: Any, stride: Any) -> None:
        for part in range(COLUMNS // LANES):

            def step(group: Any, sums: list[Any], part: int = part) -> list[Any]:
                place = moved(builder, w, group, layout.size)
                if part == 0:
                    for ahead in range(AHEAD, AHEAD + layout.size, 64):
                        fetch(builder, builder.add(place, number(ahead)))
                header = builder.add(place, number(part * lanes_of_line))
                words = builder.add(place, number(layout.header + 4 * LANES * part))
                return group_sums(builder, layout, header, words, moved(builder, x, group, UNIT), sums)

            totals = loop(builder, groups, [ir.Constant(COLUMN, None)] * rows, step)
            place = builder.add(y, number(4 * LANES * part))
            for total in totals:
                write(builder, total, place)
                place = builder.add(place, stride)

    def group_sums(builder: Any, layout: Layout, header: Any, words: Any, x: Any, sums: list[Any]) -> list[Any]:
        """The rows' running sums with one group of LANES columns added."""
        real = ir.VectorType(F16 if layout.real is np.float16 else F32, LANES)

        def column(place: int) -> Any:
            value = read(builder, header, real, place * line)
            return value if layout.real is np.float32 else builder.fpext(value, COLUMN)

        def of_row(row: int, at: int) -> Any:
            return spread(builder, read(builder, x, F32, at + 4 * row), LANES)

        share = GROUP * layout.bits // 8 // 4 // layout.scales  # words that one scale speaks for
        for scale in range(layout.scales):
            of_scale = range(scale * share, (scale + 1) * share)
            whole = (narrow_sums if narrow else wide_sums)(builder, layout, words, of_scale, x, rows)
            by = column(scale)
            for row in range(rows):
                exact = builder.fmul(builder.sitofp(whole[row], COLUMN), of_row(row, SCALES))
                sums = [*sums[:row], times_plus(builder, exact, by, sums[row]), *sums[row + 1 :]]
        if layout.minimum:
            least = column(layout.scales)
            sums = [times_plus(builder, least, of_row(row, SUMS), one) for row, one in enumerate(sums)]
        return sums

    return body


def wide_sums(builder: Any, layout: Layout, words: Any, of_scale: range, x: Any, rows: int) -> list[Any]:
    """Each row's sums of codes times codes over these words of LANES columns."""
    whole = [ir.Constant(WORDS, None)] * rows
    for word in of_scale:
        for pair, value in pairs_of(builder, layout, words, word):
            for row in range(rows):
                codes = spread(builder, read(builder, x, I32, 2 * GROUP * row + 4 * pair), LANES)
                product = call(builder, SET.dot, WORDS, value, builder.bitcast(codes, PAIRS))
                whole[row] = builder.add(whole[row], product)
    return whole


def narrow_sums(builder: Any, layout: Layout, words: Any, of_scale: range, x: Any, rows: int) -> list[Any]:
    """The same for narrow activations. Bytes are made unsigned by 128, which is taken off each row's sum of codes; two
    of their products fill 16 bits, so that without the instruction for four their nibbles are taken one by one."""

    def sum_of_codes(row: int) -> Any:
        halves = range(2) if len(of_scale) == 8 else (of_scale.start // 4,)
        parts = [read(builder, x, I32, 2 * GROUP * row + GROUP + 4 * half) for half in halves]
        return builder.add(*parts) if len(parts) == 2 else parts[0]

    def times(value: Any, row: int, quad: int, total: Any) -> Any:
        codes = spread(builder, read(builder, x, I32, 2 * GROUP * row + 4 * quad), LANES)
        if SET.whole_quads:
            return call(builder, SET.quads, WORDS, total, value, codes)
        pairs = call(builder, SET.quads, PAIRS, builder.bitcast(value, OCTETS), builder.bitcast(codes, OCTETS))
        return builder.add(total, call(builder, SET.dot, WORDS, pairs, ir.Constant(PAIRS, [1] * 2 * LANES)))

    def shifted(value: Any, how: str, by: int) -> Any:
        return getattr(builder, how)(value, ir.Constant(WORDS, [by] * LANES))

    nibble = ir.Constant(WORDS, [0x0F0F0F0F] * LANES)
    whole, upper = [ir.Constant(WORDS, None)] * rows, [ir.Constant(WORDS, None)] * rows
    for word in of_scale:
        raw = read(builder, words, WORDS, 4 * COLUMNS * word)
        if layout.bits == 4:
            parts = [(word, builder.and_(raw, nibble)), (4 + word, builder.and_(shifted(raw, "lshr", 4), nibble))]
        else:
            raw = builder.xor(raw, ir.Constant(WORDS, [0x80808080] * LANES))
            parts = [(word, raw if SET.whole_quads else builder.and_(raw, nibble))]
            if not SET.whole_quads:
                high = builder.and_(shifted(raw, "lshr", 4), nibble)
                upper = [times(high, row, word, total) for row, total in enumerate(upper)]
        for quad, value in parts:
            whole = [times(value, row, quad, total) for row, total in enumerate(whole)]
    if layout.bits == 8:
        if not SET.whole_quads:
            whole = [builder.add(low, shifted(high, "shl", 4)) for low, high in zip(whole, upper, strict=True)]
        for row in range(rows):
            off = spread(builder, builder.mul(sum_of_codes(row), ir.Constant(I32, 128)), LANES)
            whole[row] = builder.sub(whole[row], off)
    return whole


def pairs_of(builder: Any, layout: Layout, words: Any, word: int) -> list[tuple[int, Any]]:
    """Word `word` of LANES columns as pairs of 16-bit integers, and which pair of the activation meets each."""

    def shifted(value: Any, how: str, by: int) -> Any:
        return getattr(builder, how)(value, ir.Constant(PAIRS, [by] * 2 * LANES)) if by else value

    raw = builder.bitcast(read(builder, words, WORDS, 4 * COLUMNS * word), PAIRS)
    if layout.bits == 8:
        first = word % 4 * 4 + word // 4 * 2
        return [(first, shifted(shifted(raw, "shl", 8), "ashr", 8)), (first + 1, shifted(raw, "ashr", 8))]
    low = ir.Constant(PAIRS, [15] * 2 * LANES)
    parts = [builder.and_(shifted(raw, "lshr", by), low) for by in (0, 8, 4)] + [shifted(raw, "lshr", 12)]
    return [(4 * word + part, value) for part, value in enumerate(parts)]


def _tiles(narrow: bool) -> Any:
    kinds = [tile(layout, rows, narrow) for layout in LAYOUTS for rows in range(1, ROWS + 1)]
    return one_of("narrow_tile" if narrow else "tile", kinds, 5)


_tile, _narrow_tile = _tiles(False), _tiles(True)


def _columns(layout: int, w: int, x: int, y: int, groups: int, stride: int, rows: int) -> None:
    for first in range(0, rows, ROWS):
        now = min(ROWS, rows - first)
        at = x + first // ROWS * groups * UNIT
        _tile(layout * ROWS + now - 1, w, at, y + 4 * first * stride, groups, 4 * stride)


def _narrow_columns(layout: int, w: int, x: int, y: int, groups: int, stride: int, rows: int) -> None:
    for first in range(0, rows, ROWS):
        now = min(ROWS, rows - first)
        at = x + first // ROWS * groups * UNIT
        _narrow_tile(layout * ROWS + now - 1, w, at, y + 4 * first * stride, groups, 4 * stride)


columns_entry, narrow_columns_entry = Entry(_columns, 7), Entry(_narrow_columns, 7)
columns = calling(7)
"""(address of `columns_entry` or `narrow_columns_entry`, layout, w, x, y, groups, floats between the result's rows,
rows): 16 columns of all rows, `w` the block's weights, `x` the activations, `y` the first result."""


# -- rows of a packed table -------------------------------------------------------------------------------------


SIZES = tuple(layout.size for layout in LAYOUTS)
HEADERS = tuple(layout.header for layout in LAYOUTS)


@compiled
def look_up(layout: int, table: int, index: int, y: int, groups: int) -> None:
    """Row `index` of a packed weight, dequantised into `y`: an embedding."""
    nibbles, wide = layout < 2, layout % 2 == 1
    size, header = SIZES[layout], HEADERS[layout]
    lane = index % COLUMNS
    for group in range(groups):
        place = table + (index // COLUMNS * groups + group) * size
        least = float32(0.0)
        if nibbles:
            least = get_float(place + 4 * (COLUMNS + lane)) if wide else get_half(place + 2 * (COLUMNS + lane))
        for code in range(GROUP):
            if nibbles:
                octet = get8(place + header + 4 * (COLUMNS * (code % 16 // 4) + lane) + code % 4)
                value = (octet >> (code // 16 * 4)) & 15
            else:
                value = get8(place + header + 4 * (COLUMNS * (code // 4) + lane) + code % 4)
            scale = code // 16 if layout == 3 else 0
            by = get_float(place + 4 * (COLUMNS * scale + lane)) if wide else get_half(place + 2 * lane)
            put_float(y + 4 * (GROUP * group + code), by * float32(value) + least)
