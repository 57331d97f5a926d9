"""The whole pass of a Llama-like model as one compiled function, run by every thread of a team; barriers part its
stages.

The stages of a layer: norm | q, k, v, rotary, keys and values into the cache | attention | o, added to x | norm |
gate, up, SwiGLU | down, added to x. Each ends in quantised activations where a product follows. What is computed for a
row never depends on the other rows, the threads or the slots that its tokens lie in, but on the row's tokens in their
order: sums over what it sees run in that order. A few rows are normed by every thread for itself, which costs less
than a barrier. Imports numba; sampling/models/fused.py calls it.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import float32

from sampling.models.pass_record import FEW, LAYER, PASS, ROW
from utils.kernels.blocks import COLUMNS, GROUP
from utils.kernels.compiler import Entry
from utils.kernels.products import ROWS, SIZES, UNIT, columns, look_up, quantise
from utils.kernels.vectors import (
    F16,
    F32,
    LANES,
    WIDTH,
    Body,
    F,
    add,
    asked,
    calling,
    compiled,
    copy_half,
    div,
    exponential,
    fetch,
    fma,
    get64,
    get_float,
    larger,
    largest,
    load,
    loop,
    meet,
    moved,
    mul,
    number,
    one_of,
    put_float,
    put_half,
    read,
    record_at,
    share,
    splat,
    spread,
    store,
    store_half,
    sub,
    times_plus,
    total,
    write,
)

_pass_at, _layer_at, _row_at = record_at(PASS), record_at(LAYER), record_at(ROW)
_LAYER_SIZE, _ROW_SIZE = LAYER.itemsize, ROW.itemsize

HEADS = 4  # queries that share one reading of a key
STEP = 16  # dimensions of a head taken in one turn of a loop
PARTS = LANES // 8  # vectors of a head's values whose sums run beside each other
CHUNK = 4  # blocks of 16 slots that stay in the first cache for all rows of a tile
LOWEST = -1e30  # the score of what is not there


# -- attention's inner loops --------------------------------------------------------------------------------


def scores_of(heads: int, half: bool) -> Body:
    """(keys, queries, scores, blocks, bytes between two queries' scores, size): query · key for 16 slots a block.

    Keys lie [block][size][16 slots], queries one after another. The sums over even and odd dimensions run apart.
    """
    size_of = 2 if half else 4
    line = ir.VectorType(F16 if half else F32, WIDTH)

    def body(builder: Any, keys: Any, queries: Any, scores: Any, blocks: Any, between: Any, size: Any) -> None:
        ahead = builder.mul(size, number(CHUNK * WIDTH * size_of))

        def block(index: Any, _: list[Any]) -> list[Any]:
            first = builder.add(keys, builder.mul(index, builder.mul(size, number(WIDTH * size_of))))

            def dimensions(step: Any, sums: list[Any]) -> list[Any]:
                place = moved(builder, first, step, STEP * WIDTH * size_of)
                query, new = moved(builder, queries, step, 4 * STEP), list(sums)
                for at in range(0, STEP * WIDTH * size_of, 64):  # what comes a chunk later
                    fetch(builder, builder.add(place, builder.add(ahead, number(at))))
                for at in range(STEP):
                    key = read(builder, place, line, at * WIDTH * size_of)
                    key = builder.fpext(key, F) if half else key
                    for head in range(heads):
                        by = spread(builder, read(builder, moved(builder, query, size, 4 * head), F32, 4 * at))
                        chain = 2 * head + at % 2
                        new[chain] = times_plus(builder, key, by, new[chain])
                return new

            sums = loop(builder, builder.udiv(size, number(STEP)), [ir.Constant(F, None)] * heads * 2, dimensions)
            out = moved(builder, scores, index, 4 * WIDTH)
            for head in range(heads):
                write(builder, builder.fadd(*sums[2 * head : 2 * head + 2]), out)
                out = builder.add(out, between)
            return []

        loop(builder, blocks, [], block)

    return body


def mixture_of(heads: int, half: bool) -> Body:
    """(values, weights, sums, slots, bytes between queries' weights, size): sums += weight · value, slot after slot.

    Values lie [slot][size], sums [query][size].
    """
    size_of = 2 if half else 4
    line = ir.VectorType(F16 if half else F32, WIDTH)

    def body(builder: Any, values: Any, weights: Any, sums: Any, slots: Any, between: Any, size: Any) -> None:
        ahead = builder.mul(size, number(CHUNK * WIDTH * size_of))

        def part(index: Any, _: list[Any]) -> list[Any]:
            first, start = (
                moved(builder, values, index, PARTS * WIDTH * size_of),
                moved(builder, sums, index, 64 * PARTS),
            )
            begins = [moved(builder, start, size, 4 * head) for head in range(heads)]

            def one(slot: Any, held: list[Any]) -> list[Any]:
                at = moved(builder, weights, slot, 4)
                new: list[Any] = []
                row = builder.add(first, builder.mul(slot, builder.mul(size, number(size_of))))
                for place in range(0, PARTS * WIDTH * size_of, 64):  # what comes a chunk later
                    fetch(builder, builder.add(row, builder.add(ahead, number(place))))
                found = [read(builder, row, line, part * WIDTH * size_of) for part in range(PARTS)]
                found = [builder.fpext(value, F) for value in found] if half else found
                for head in range(heads):
                    by = spread(builder, read(builder, builder.add(at, builder.mul(between, number(head))), F32))
                    new += [times_plus(builder, by, value, held[len(new) + part]) for part, value in enumerate(found)]
                return new

            begun = [read(builder, at, F, 64 * part) for at in begins for part in range(PARTS)]
            done = loop(builder, slots, begun, one)
            for head, at in enumerate(begins):
                for part in range(PARTS):
                    write(builder, done[head * PARTS + part], at, 64 * part)
            return []

        loop(builder, builder.udiv(size, number(WIDTH * PARTS)), [], part)

    return body


_KINDS = [(heads, half) for half in (False, True) for heads in range(1, HEADS + 1)]
_scores = one_of("scores", [scores_of(heads, half) for heads, half in _KINDS], 6)
_mixture = one_of("mixture", [mixture_of(heads, half) for heads, half in _KINDS], 6)


def _score(kind: int, keys: int, queries: int, scores: int, blocks: int, between: int, size: int) -> None:
    _scores(kind, keys, queries, scores, blocks, between, size)


def _mix(kind: int, values: int, weights: int, sums: int, slots: int, between: int, size: int) -> None:
    _mixture(kind, values, weights, sums, slots, between, size)


score_entry, mix_entry, _call = Entry(_score, 7), Entry(_mix, 7), calling(7)


@compiled
def score(p: Any, keys: int, queries: int, scores: int, blocks: int) -> None:
    """Scores of all queries that share these keys, for the slots of so many blocks."""
    group = p.heads // p.shared
    for first in range(0, group, HEADS):
        kind = p.half * HEADS + min(HEADS, group - first) - 1
        out = scores + first * p.scores_row
        _call(p.score, kind, keys, queries + 4 * first * p.size, out, blocks, p.scores_row, p.size)


@compiled
def mix(p: Any, values: int, weights: int, sums: int, slots: int) -> None:
    """Adds so many slots' values, weighted, to the sums of all queries that share them."""
    group = p.heads // p.shared
    for first in range(0, group, HEADS):
        kind = p.half * HEADS + min(HEADS, group - first) - 1
        at, out = weights + first * p.scores_row, sums + 4 * first * p.size
        _call(p.mix, kind, values, at, out, slots, p.scores_row, p.size)


# -- the stages -------------------------------------------------------------------------------------------------


@compiled
def embed(p: Any, thread: int, team: int) -> None:
    first, last = share(p.rows, thread, team)
    for row in range(first, last):
        token = _row_at(p.row + row * _ROW_SIZE).id
        look_up(p.embed_layout, p.embed, token, p.x + 4 * row * p.hidden, p.hidden // GROUP)


@compiled
def inverse_rms(x: int, size: int, epsilon: float) -> Any:
    squares = splat(float32(0.0))
    for at in range(0, 4 * size, 4 * WIDTH):
        part = load(x + at)
        squares = fma(part, part, squares)
    return splat(float32(1.0) / math.sqrt(total(squares) / float32(size) + epsilon))


@compiled
def norm_row(p: Any, row: int, weight: int, normed: int, place: int, states: int) -> None:
    """x / rms(x) · weight of a row, quantised as row `place` of `normed`; into the row's states too, where that is an
    address."""
    groups, x = p.hidden // GROUP, p.x + 4 * row * p.hidden
    by = inverse_rms(x, p.hidden, get_float(p.epsilon))
    for group in range(groups):
        at = 4 * GROUP * group
        low, high = (
            mul(mul(load(x + at), by), load(weight + at)),
            mul(mul(load(x + at + 64), by), load(weight + at + 64)),
        )
        if normed:
            quantise(low, high, normed, place, group, groups, p.narrow)
        if states:
            store(states + 4 * row * p.states_row + at, low)
            store(states + 4 * row * p.states_row + at + 64, high)


@compiled
def norm(p: Any, weight: int, thread: int, team: int, at: int) -> tuple[int, int]:
    """Every row normed: where, and the next turn of :func:`meet`."""
    if p.rows <= FEW:
        normed = p.normed + thread * p.normed_size
        for row in range(p.rows):
            norm_row(p, row, weight, normed, row, 0)
        return normed, at
    first, last = share(p.rows, thread, team)
    for row in range(first, last):
        norm_row(p, row, weight, p.normed, row, 0)
    return p.normed, meet(p.meeting, team, at, p.sleep)


@compiled
def last_norm(p: Any, thread: int, team: int) -> None:
    """The same of the rows that get logits; of all rows where their states are asked for."""
    first, last = share(p.rows, thread, team)
    for row in range(first, last):
        sequence, place = row // p.fed, row % p.fed - (p.fed - p.kept)
        if place >= 0:
            norm_row(p, row, p.norm, p.normed, sequence * p.kept + place, p.states)
        elif p.states:
            norm_row(p, row, p.norm, 0, 0, p.states)


@compiled
def keep_states(p: Any, states: int, thread: int, team: int) -> None:
    """What enters a layer, where it is asked for."""
    first, last = share(p.rows, thread, team)
    for row in range(first, last):
        for at in range(0, 4 * p.hidden, 4 * WIDTH):
            store(states + 4 * row * p.states_row + at, load(p.x + 4 * row * p.hidden + at))


@compiled
def add_bias(x: int, bias: int, size: int) -> None:
    if bias:
        for at in range(0, 4 * size, 4 * WIDTH):
            store(x + at, add(load(x + at), load(bias + at)))


@compiled
def turn(p: Any, x: int, position: int, scale: Any, first: int, last: int) -> None:
    """Rotary embedding and the scale of one head of a query or key, in place: of the pairs in bytes `first` to `last`
    of either half."""
    half, by = 2 * p.size, splat(scale)  # half: bytes of half a head
    turns = p.turns + 2 * half * position
    for at in range(first, last, 4 * WIDTH):
        a, b, cos, sin = load(x + at), load(x + half + at), load(turns + at), load(turns + half + at)
        store(x + at, mul(sub(mul(a, cos), mul(b, sin)), by))
        store(x + half + at, mul(add(mul(b, cos), mul(a, sin)), by))


@compiled
def norm_head(p: Any, x: int, weight: int) -> None:
    """A head's own norm, in place, where the model has one."""
    if weight:
        inverse = inverse_rms(x, p.size, get_float(p.epsilon))
        for at in range(0, 4 * p.size, 4 * WIDTH):
            store(x + at, mul(mul(load(x + at), inverse), load(weight + at)))


@compiled
def cached(p: Any, index: int, sequence: int, head: int) -> Any:
    """Where the slots of a layer, sequence and head begin, counted in bytes from the cache's first."""
    return ((index * p.batch + sequence) * p.shared + head) * p.slots * p.size * p.wide


@compiled
def key_at(p: Any, index: int, sequence: int, head: int, slot: int) -> Any:
    """Where a slot's key begins; its numbers lie WIDTH apart, since 16 slots lie side by side."""
    return p.keys + cached(p, index, sequence, head) + p.wide * (slot // WIDTH * WIDTH * p.size + slot % WIDTH)


@compiled
def value_at(p: Any, index: int, sequence: int, head: int, slot: int) -> Any:
    """Where a slot's value begins."""
    return p.values + cached(p, index, sequence, head) + p.wide * slot * p.size


@compiled
def put_key(p: Any, key: int, x: int) -> None:
    """16 dimensions of a key into its slot: 16 slots lie side by side."""
    for at in range(WIDTH):
        if p.half:
            put_half(key + 2 * WIDTH * at, get_float(x + 4 * at))
        else:
            put_float(key + 4 * WIDTH * at, get_float(x + 4 * at))


@compiled
def place(p: Any, layer: Any, index: int, row: int, head: int, first: int, last: int) -> None:
    """What the products made of one head of a row, in bytes `first` to `last` of either half: queries and keys turned
    to their position, keys and values written to their slots."""
    of = _row_at(p.row + row * _ROW_SIZE)
    half = 2 * p.size
    x = p.qkv + 4 * (row * (p.heads + 2 * p.shared) + head) * p.size
    if head < p.heads:
        norm_head(p, x, layer.q_norm)
        turn(p, x, of.position, get_float(p.scale), first, last)
    elif head < p.heads + p.shared:
        norm_head(p, x, layer.k_norm)
        turn(p, x, of.position, float32(1.0), first, last)
        key = key_at(p, index, of.sequence, head - p.heads, of.slot)
        for at in range(first, last, 4 * WIDTH):
            put_key(p, key + p.wide * WIDTH * (at // 4), x + at)
            put_key(p, key + p.wide * WIDTH * ((half + at) // 4), x + half + at)
    else:
        value = value_at(p, index, of.sequence, head - p.heads - p.shared, of.slot)
        for side in range(0, 2 * half, half):
            for at in range(side + first, side + last, 4 * WIDTH):
                if p.half:
                    store_half(value + at // 2, load(x + at))
                else:
                    store(value + at, load(x + at))


@compiled
def carry(p: Any, index: int, head: int, first: int, last: int) -> None:
    """Moves accepted tokens' keys or values of one head to their final slots, before `place` writes new ones: bytes
    `first` to `last` of either half of its float32 numbers."""
    half = 2 * p.size
    for move in range(p.moved):
        at = p.moves + 24 * move
        sequence, old, new = get64(at), get64(at + 8), get64(at + 16)
        if head < p.heads + p.shared:
            own, line = head - p.heads, p.wide * WIDTH
            there, here = key_at(p, index, sequence, own, old), key_at(p, index, sequence, own, new)
        else:
            own, line = head - p.heads - p.shared, p.wide
            there, here = value_at(p, index, sequence, own, old), value_at(p, index, sequence, own, new)
        for side in range(0, 2 * half, half):
            for dimension in range((side + first) // 4, (side + last) // 4):
                if p.half:
                    copy_half(there + line * dimension, here + line * dimension)
                else:
                    put_float(here + line * dimension, get_float(there + line * dimension))


@compiled
def project(p: Any, layer: Any, index: int, normed: int, thread: int, team: int) -> None:
    """Queries, keys and values of all rows. Units are the pairs of 16 columns that a rotation takes together; whole
    heads where these have a norm of their own. The first is in the midst of the keys, which take longest to write: two
    threads get as many of them each."""
    groups, every = p.hidden // GROUP, p.heads + 2 * p.shared
    pairs = p.size // GROUP
    parts = 1 if layer.q_norm else pairs
    units, middle = every * parts, p.heads * parts + p.shared * parts // 2
    first, last = share(units, thread, team)
    for nth in range(first, last):
        unit = (nth + middle) % units
        head, part = unit // parts, unit % parts
        weight, layout, bias, own = layer.q, layer.q_layout, layer.q_bias, head
        if head >= p.heads + p.shared:
            weight, layout, bias, own = layer.v, layer.v_layout, layer.v_bias, head - p.heads - p.shared
        elif head >= p.heads:
            weight, layout, bias, own = layer.k, layer.k_layout, layer.k_bias, head - p.heads
        for pair in range(part * pairs // parts, (part + 1) * pairs // parts):
            for half in range(2):
                at = half * pairs + pair  # of a head's blocks of 16 columns
                block = weight + (own * 2 * pairs + at) * groups * SIZES[layout]
                y = p.qkv + 4 * (head * p.size + COLUMNS * at)
                columns(p.columns, layout, block, normed, y, groups, every * p.size, p.rows)
                for row in range(p.rows):
                    x = y + 4 * row * every * p.size
                    add_bias(x, bias + 4 * (own * p.size + COLUMNS * at) if bias else 0, COLUMNS)
        start, end = 4 * COLUMNS * (part * pairs // parts), 4 * COLUMNS * ((part + 1) * pairs // parts)
        if p.moved and head >= p.heads:
            carry(p, index, head, start, end)
        for row in range(p.rows):
            place(p, layer, index, row, head, start, end)


@compiled
def softmax(scores: int, count: int) -> Any:
    """e to the power of each score less the largest, in place; 1 / their sum."""
    for place in range(count, (count + WIDTH - 1) // WIDTH * WIDTH):
        put_float(scores + 4 * place, float32(LOWEST))
    top = load(scores)
    for place in range(WIDTH, count, WIDTH):
        top = larger(top, load(scores + 4 * place))
    most, sums = splat(largest(top)), splat(float32(0.0))
    for place in range(0, count, WIDTH):
        part = exponential(sub(load(scores + 4 * place), most))
        store(scores + 4 * place, part)
        sums = add(sums, part)
    return float32(1.0) / total(sums)


@compiled
def attention(p: Any, index: int, thread: int, team: int) -> None:
    """Softmax(query · keys) · values, quantised; units are (head of keys, row), rows of one sequence in tiles."""
    group, every, chunk = p.heads // p.shared, p.heads + 2 * p.shared, CHUNK * WIDTH
    groups = p.heads * p.size // GROUP
    sums, memory = p.buffer + thread * p.buffer_size, p.scores + thread * p.scores_size
    of_row, one = group * p.scores_row, 4 * group * p.size  # bytes of a row's scores, of its sums
    first, last = share(p.shared * p.rows, thread, team)
    unit = first
    while unit < last:
        head, start = unit // p.rows, unit % p.rows
        tile = min(ROWS, p.rows - start, last - unit, p.fed - start % p.fed)
        unit += tile
        at = cached(p, index, _row_at(p.row + start * _ROW_SIZE).sequence, head)
        keys, values = p.keys + at, p.values + at
        most = 0
        for row in range(tile):
            most = max(most, _row_at(p.row + (start + row) * _ROW_SIZE).seen)
        for block in range(0, (most + WIDTH - 1) // WIDTH, CHUNK):
            for row in range(tile):
                seen = _row_at(p.row + (start + row) * _ROW_SIZE).seen
                blocks = min(CHUNK, (seen + WIDTH - 1) // WIDTH - block)
                if blocks > 0:
                    query = p.qkv + 4 * ((start + row) * every + head * group) * p.size
                    place = memory + row * of_row + 4 * WIDTH * block
                    score(p, keys + p.wide * block * WIDTH * p.size, query, place, blocks)
        for row in range(tile):
            of = _row_at(p.row + (start + row) * _ROW_SIZE)
            query, scores = p.qkv + 4 * ((start + row) * every + head * group) * p.size, memory + row * of_row
            spare = memory + ROWS * of_row  # the scores of a block, of which one slot is seen
            for more in range(of.count):
                slot = get64(of.more + 8 * more)
                score(p, keys + p.wide * (slot // WIDTH) * WIDTH * p.size, query, spare, 1)
                for other in range(group):
                    at = other * p.scores_row
                    put_float(scores + at + 4 * (of.seen + more), get_float(spare + at + 4 * (slot % WIDTH)))
            for other in range(group):
                by = softmax(scores + other * p.scores_row, of.seen + of.count)
                put_float(sums + ROWS * one + 64 + 4 * (row * group + other), by)
            for place in range(0, one, 4 * WIDTH):
                store(sums + row * one + place, splat(float32(0.0)))
        for slot in range(0, most, chunk):
            for row in range(tile):
                slots = min(chunk, _row_at(p.row + (start + row) * _ROW_SIZE).seen - slot)
                if slots > 0:
                    mix(p, values + p.wide * slot * p.size, memory + row * of_row + 4 * slot, sums + row * one, slots)
        for row in range(tile):
            of = _row_at(p.row + (start + row) * _ROW_SIZE)
            for more in range(of.count):
                value = values + p.wide * get64(of.more + 8 * more) * p.size
                mix(p, value, memory + row * of_row + 4 * (of.seen + more), sums + row * one, 1)
            for other in range(group):
                by = splat(get_float(sums + ROWS * one + 64 + 4 * (row * group + other)))
                for part in range(p.size // GROUP):
                    x = sums + row * one + 4 * (other * p.size + GROUP * part)
                    place = (head * group + other) * p.size // GROUP + part
                    quantise(mul(load(x), by), mul(load(x + 64), by), p.mixed, start + row, place, groups, p.narrow)


@compiled
def added(p: Any, weight: int, layout: int, activations: int, groups: int, thread: int, team: int) -> None:
    """x += the product; units of 16 columns."""
    buffer = p.buffer + thread * p.buffer_size
    first, last = share(p.hidden // COLUMNS, thread, team)
    for unit in range(first, last):
        block = weight + unit * groups * SIZES[layout]
        for start in range(0, p.rows, ROWS):
            rows = min(ROWS, p.rows - start)
            columns(
                p.columns, layout, block, activations + start // ROWS * groups * UNIT, buffer, groups, COLUMNS, rows
            )
            for row in range(rows):
                x = p.x + 4 * ((start + row) * p.hidden + COLUMNS * unit)
                store(x, add(load(x), load(buffer + 4 * COLUMNS * row)))


@compiled
def swiglu(gate: Any, up: Any) -> Any:
    return mul(div(gate, add(splat(float32(1.0)), exponential(sub(splat(float32(0.0)), gate)))), up)


@compiled
def gate_up(p: Any, layer: Any, normed: int, thread: int, team: int) -> None:
    """SwiGLU of two products, quantised; units of 32 columns of each: one group of activations."""
    groups, buffer = p.hidden // GROUP, p.buffer + thread * p.buffer_size
    first, last = share(p.inner // GROUP, thread, team)
    for unit in range(first, last):
        gate = layer.gate + 2 * unit * groups * SIZES[layer.gate_layout]
        up = layer.up + 2 * unit * groups * SIZES[layer.up_layout]
        for start in range(0, p.rows, ROWS):
            rows, x = min(ROWS, p.rows - start), normed + start // ROWS * groups * UNIT
            for half in range(2):
                block = half * groups * SIZES[layer.gate_layout]
                columns(p.columns, layer.gate_layout, gate + block, x, buffer + 64 * half, groups, 64, rows)
                block = half * groups * SIZES[layer.up_layout]
                columns(p.columns, layer.up_layout, up + block, x, buffer + 128 + 64 * half, groups, 64, rows)
            for row in range(rows):
                y = buffer + 256 * row
                low, high = swiglu(load(y), load(y + 128)), swiglu(load(y + 64), load(y + 192))
                quantise(low, high, p.gated, start + row, unit, p.inner // GROUP, p.narrow)


@compiled
def head(p: Any, thread: int, team: int) -> None:
    groups, rows = p.hidden // GROUP, p.kept * (p.rows // p.fed)
    first, last = share(p.vocab_blocks, thread, team)
    for unit in range(first, last):
        block = p.head + unit * groups * SIZES[p.head_layout]
        y = p.logits + 4 * COLUMNS * unit
        columns(p.columns, p.head_layout, block, p.normed, y, groups, COLUMNS * p.vocab_blocks, rows)


@compiled
def layers(p: Any, thread: int, team: int, at: int) -> int:
    """All layers over x; the next turn of :func:`meet`."""
    for index in range(p.layers):
        layer = _layer_at(p.table + index * _LAYER_SIZE)
        if layer.states:
            keep_states(p, layer.states, thread, team)
        normed, at = norm(p, layer.before, thread, team, at)
        project(p, layer, index, normed, thread, team)
        at = meet(p.meeting, team, at, p.sleep)
        attention(p, index, thread, team)
        at = meet(p.meeting, team, at, p.sleep)
        added(p, layer.o, layer.o_layout, p.mixed, p.heads * p.size // GROUP, thread, team)
        at = meet(p.meeting, team, at, p.sleep)
        normed, at = norm(p, layer.after, thread, team, at)
        gate_up(p, layer, normed, thread, team)
        at = meet(p.meeting, team, at, p.sleep)
        added(p, layer.down, layer.down_layout, p.gated, p.inner // GROUP, thread, team)
        at = meet(p.meeting, team, at, p.sleep)
    return at


def _pass(record: int) -> None:
    p = _pass_at(record)
    thread, team, at = asked(p.thread_number), asked(p.team_size), 0
    embed(p, thread, team)
    at = meet(p.meeting, team, at, p.sleep)
    at = layers(p, thread, team, at)
    last_norm(p, thread, team)
    at = meet(p.meeting, team, at, p.sleep)
    head(p, thread, team)


whole_pass = Entry(_pass)
