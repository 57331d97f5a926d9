"""A feature head's pass as one compiled function: token and state before it, layers, and the logits of the last rows.

Of the stages all but the first and the last are those of a target's pass (sampling/models/compiled_pass.py). First the
token's row of the embedding and the state one position before it, the target's or the head's own, are normed and go
through their products into x; last x itself is kept, which is the head's own state. Knows neither sessions nor drafts.
Imports numba; sampling/drafters/draft_heads/network.py imports it where the head's products are compiled ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numba import float32
from torch import Tensor

from sampling.drafters.draft_heads.modules import NONE, OWN, THEIRS, DraftHead
from sampling.models.cache import Buffer
from sampling.models.compiled_pass import (
    added,
    head,
    inverse_rms,
    layers,
    mix_entry,
    score_entry,
)
from sampling.models.fused import FusedCache
from sampling.models.pass_record import BLOCK, PASS, ROW, PassRecord
from utils.kernels.blocks import COLUMNS, GROUP
from utils.kernels.compiler import Entry
from utils.kernels.products import SIZES, columns, columns_entry, look_up, quantise
from utils.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear
from utils.kernels.vectors import asked, compiled, get64, get_float, load, meet, mul, record_at, share, splat, store

_FIELDS = (
    *("states_at", "kinds", "any_theirs", "any_own", "large", "theirs", "own", "entered"),
    *("embed_norm", "theirs_norm", "own_norm"),
    *("join", "join_layout", "join_theirs", "theirs_layout", "join_own", "own_layout"),
)
STEP = np.dtype([*((name, PASS[name]) for name in PASS.names or ()), *((name, np.int64) for name in _FIELDS)])
_CHANGING = (
    *("rows", "kept", "fed", "batch", "slots", "row", "keys", "values", "logits", "states"),
    *("kinds", "states_at", "any_theirs", "any_own"),
)
_step_at, _pass_at, _row_at = record_at(STEP), record_at(PASS), record_at(ROW)
_ROW_SIZE = ROW.itemsize


@compiled
def normed(x: int, weight: int, size: int, epsilon: Any, to: int, row: int) -> None:
    """x / rms(x) · weight, quantised."""
    by = inverse_rms(x, size, epsilon)
    for group in range(size // GROUP):
        at = 4 * GROUP * group
        low, high = (
            mul(mul(load(x + at), by), load(weight + at)),
            mul(mul(load(x + at + 64), by), load(weight + at + 64)),
        )
        quantise(low, high, to, row, group, size // GROUP, 0)


@compiled
def nothing(to: int, row: int, groups: int) -> None:
    none = splat(float32(0.0))
    for group in range(groups):
        quantise(none, none, to, row, group, groups, 0)


@compiled
def enter(p: Any, thread: int, team: int) -> None:
    """Of every row the token's embedding and the state before it, normed; of another's state zeros."""
    first, last = share(p.rows, thread, team)
    for row in range(first, last):
        kind, state = get64(p.kinds + 8 * row), get64(p.states_at + 8 * row)
        token, embedded = _row_at(p.row + row * _ROW_SIZE).id, p.x + 4 * row * p.hidden
        if p.embed_layout < 0:
            embedded = p.embed + 4 * p.hidden * token
        else:
            look_up(p.embed_layout, p.embed, token, embedded, p.hidden // GROUP)
        normed(embedded, p.embed_norm, p.hidden, get_float(p.epsilon), p.entered, row)
        if p.any_theirs:
            if kind == THEIRS:
                normed(state, p.theirs_norm, p.large, get_float(p.epsilon), p.theirs, row)
            else:
                nothing(p.theirs, row, p.large // GROUP)
        if p.any_own:
            if kind == OWN:
                normed(state, p.own_norm, p.hidden, get_float(p.epsilon), p.own, row)
            else:
                nothing(p.own, row, p.hidden // GROUP)


@compiled
def join(p: Any, whole: Any, thread: int, team: int) -> None:
    """x = the sum of the products; units of 16 columns, of each product the same ones."""
    groups = p.hidden // GROUP
    first, last = share(p.hidden // COLUMNS, thread, team)
    for unit in range(first, last):
        block = p.join + unit * groups * SIZES[p.join_layout]
        columns(p.columns, p.join_layout, block, p.entered, p.x + 4 * COLUMNS * unit, groups, p.hidden, p.rows)
    if p.any_theirs:
        added(whole, p.join_theirs, p.theirs_layout, p.theirs, p.large // GROUP, thread, team)
    if p.any_own:
        added(whole, p.join_own, p.own_layout, p.own, groups, thread, team)


@compiled
def leave(p: Any, thread: int, team: int) -> None:
    """x of every row into the states; of those that get logits normed and quantised."""
    first, last = share(p.rows, thread, team)
    for row in range(first, last):
        x, sequence, place = p.x + 4 * row * p.hidden, row // p.fed, row % p.fed - (p.fed - p.kept)
        for at in range(0, 4 * p.hidden, 64):
            store(p.states + 4 * row * p.hidden + at, load(x + at))
        if place >= 0:
            normed(x, p.norm, p.hidden, get_float(p.epsilon), p.normed, sequence * p.kept + place)


def _step(record: int) -> None:
    p, whole = _step_at(record), _pass_at(record)  # a step's record begins as a pass's
    thread, team, at = asked(p.thread_number), asked(p.team_size), 0
    enter(p, thread, team)
    at = meet(p.meeting, team, at, p.sleep)
    join(p, whole, thread, team)
    at = meet(p.meeting, team, at, p.sleep)
    at = layers(whole, thread, team, at)
    leave(p, thread, team)
    at = meet(p.meeting, team, at, p.sleep)
    head(whole, thread, team)


step_entry = Entry(_step)


class CompiledStep:
    """A feature head whose pass is one compiled call; one runs at a time. The embedding is used where it lies, of its
    linear maps `take` makes packed ones. `angles`: positions [n] → cos and sin [n, D], halves side by side."""

    def __init__(
        self, student: DraftHead, take: Callable[[Any], QuantizedLinear], angles: Callable[[Tensor], Tensor]
    ) -> None:
        config, trunk = student.config, cast(Any, student.model)
        attention_ = trunk.layers[0].self_attn
        self.layers, self.window = len(trunk.layers), config.window
        self._size = int(attention_.head_dim)
        self._hidden, self._shared = config.hidden_size, config.num_key_value_heads
        self._angles, self._turns = angles, torch.empty(0, self._size)
        self._one_at_a_time = threading.Lock()
        self._function = step_entry.address
        widths = {"entered": self._hidden, "theirs": config.large_hidden_size, "own": self._hidden}
        sizes = self._hidden, config.intermediate_size, config.num_attention_heads, self._shared, self._size
        self._record = PassRecord(STEP, sizes, widths)
        out = take(student.lm_head)
        self._record.describe(trunk.layers, out, take)
        self._out, self._width = out.out_features, len(out.packed.data) * COLUMNS
        self._changing = np.array([self._record.places[name] for name in _CHANGING])
        constants = np.array([config.rms_norm_eps, attention_.scaling], np.float32)
        theirs, own = take(trunk.join_feature), take(trunk.join_state)
        self._record.held += [constants, theirs.packed, own.packed]
        self._record.set(
            large=config.large_hidden_size,
            half=1,
            wide=2,
            **self._embedding(trunk.embed_tokens),
            norm=self._record.address(trunk.norm.weight),
            epsilon=constants.ctypes.data,
            scale=constants.ctypes.data + 4,
            columns=columns_entry.address,
            score=score_entry.address,
            mix=mix_entry.address,
            embed_norm=self._record.address(trunk.embed_norm.weight),
            theirs_norm=self._record.address(trunk.feature_norm.weight),
            own_norm=self._record.address(trunk.state_norm.weight),
            **self._record.weight("join", take(trunk.join_embed)),
            join_theirs=theirs.packed.address,
            theirs_layout=theirs.packed.number,
            join_own=own.packed.address,
            own_layout=own.packed.number,
        )

    def _embedding(self, embedding: Any) -> dict[str, int]:
        """The embedding where it lies: a target's packed one, or numbers as they are."""
        if isinstance(embedding, QuantizedEmbedding):
            return self._record.weight("embed", embedding)
        return {"embed": self._record.address(embedding.weight), "embed_layout": -1}

    def new_cache(self) -> FusedCache:
        """An empty cache, in 16 bits."""
        return FusedCache(self.layers, self._shared, self._size, torch.float16)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: FusedCache,
        keep: int,
        kinds: np.ndarray,
        states: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [B, T] behind what `cache` holds → logits [B, keep, n] of the last `keep` and own states
        [B, T, H].

        mask as in :class:`sampling.types.Network`; of each token whose state stands before it (`kinds` [B · T]) and the
        address of its numbers (`states` [B · T]).
        """
        (count, fed), before = ids.shape, cache.length
        depths = positions.numpy()
        with self._one_at_a_time:
            cache.settle()
            cache.reserve(count, before + fed)
            begin = max(0, before - self.window) // BLOCK * BLOCK if self.window else 0  # slots too far back to be seen
            visible = None if mask is None else mask[..., begin:]
            rows, seen = self._record.rows(ids.numpy().reshape(-1), depths, visible, before - begin + np.arange(fed))
            self._prepare(count * fed, count * keep, int(depths.max()) + 1, seen)
            logits, own = torch.empty(count, keep, self._width), torch.empty(count, fed, self._hidden)
            shift = 2 * begin * self._size
            self._record.values[self._changing] = (
                *(count * fed, keep, fed, cache.keys.shape[1], cache.slots, rows.ctypes.data),
                *(cache.keys.data_ptr() + shift, cache.values.data_ptr() + shift, logits.data_ptr(), own.data_ptr()),
                *(kinds.ctypes.data, states.ctypes.data, (kinds == THEIRS).any(), (kinds == OWN).any()),
            )
            self._record.run(self._function, torch.get_num_threads())
            cache.length += fed
        return logits[..., : self._out], own

    def of_one_row(
        self,
        tokens: list[int],
        first: int,
        theirs: Tensor | None,
        valid: int,
        own: Buffer,
        cache: FusedCache,
    ) -> Tensor:
        """The same of one row's tokens from position `first` on → logits [n] of the last; their states go to `own`.

        `theirs` [S, G] are the target's states in any dtype, the first `valid` of them there; behind them the head's
        `own` [S, H] stand, of which there are `first`.
        """
        fed = len(tokens)
        made = own.room(fed, self._hidden)
        width = 4 * self._hidden
        mine = made.data_ptr() - width * first
        begin = max(0, first - self.window) // BLOCK * BLOCK if self.window else 0
        there, step = 0, 0
        if theirs is not None:
            new = theirs[max(0, first - 1) : valid].to(
                "cpu", torch.float32
            )  # as it is where it is so; held till the end
            step = 4 * new.stride(0)
            there = new.data_ptr() - step * max(0, first - 1)
        fields: list[int] = []  # of each token its row, then whose state stands before each, then where
        before = list[tuple[int, int]]()
        for at, token in enumerate(tokens, start=first):
            fields += (token, at, 0, at - begin, at - begin + 1, 0, 0)
            state = (THEIRS, there + step * (at - 1)) if at <= valid else (OWN, mine + width * (at - 1))
            before.append(state if at else (NONE, 0))
        numbers = np.array([*fields, *(kind for kind, _ in before), *(place for _, place in before)], np.int64)
        rows = numbers.ctypes.data
        kinds = rows + fed * _ROW_SIZE
        with self._one_at_a_time:
            cache.settle()
            cache.reserve(1, first + fed)
            self._prepare(fed, 1, first + fed, first + fed - begin)
            logits, shift = torch.empty(self._width), 2 * begin * self._size
            self._record.values[self._changing] = (
                *(fed, 1, fed, cache.keys.shape[1], cache.slots, rows),
                *(cache.keys.data_ptr() + shift, cache.values.data_ptr() + shift, logits.data_ptr(), made.data_ptr()),
                *(kinds, kinds + 8 * fed, first + fed - 1 > 0 and first <= valid, first > valid),
            )
            self._record.run(self._function, torch.get_num_threads())
            cache.length = first + fed
        return logits[: self._out]

    def _prepare(self, rows: int, kept: int, positions: int, seen: int) -> None:
        """Memory for a pass of so many rows, at these positions, of which one sees so many slots."""
        if positions > len(self._turns):
            self._turns = self._angles(torch.arange(-(-positions // 256) * 256))
            self._record.set(turns=self._turns.data_ptr())
        self._record.prepare(rows, kept, seen)
