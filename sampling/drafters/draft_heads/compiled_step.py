"""A feature head's pass as one compiled call: token and state before it, layers, and the logits of the last rows.

Of the stages all but the first and the last are those of a target's pass (utils/kernels/pass.c). First the token's row
of the embedding and the state one position before it, the target's or the head's own, are normed and go through their
products into x; last x itself is kept, which is the head's own state. Knows neither sessions nor drafts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sampling.drafters.draft_heads.modules import NONE, OWN, THEIRS, DraftHead
from sampling.models.cache import Buffer
from sampling.models.fused import FusedCache
from sampling.models.pass_record import BLOCK, PassRecord
from utils.kernels.bindings import ROW, Step
from utils.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear


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
        widths = {"entered": self._hidden, "theirs": config.large_hidden_size, "own": self._hidden}
        sizes = self._hidden, config.intermediate_size, config.num_attention_heads, self._shared, self._size
        self._record = PassRecord(Step, sizes, widths)
        out = take(student.lm_head)
        self._record.describe(trunk.layers, out, take)
        self._out, self._width = out.out_features, out.packed.width
        embedding = trunk.embed_tokens  # where it lies: a target's packed one, or numbers as they are
        if isinstance(embedding, QuantizedEmbedding):
            self._record.set(embed=self._record.weight(embedding))
        else:
            self._record.set(table=self._record.address(embedding.weight))
        self._record.set(
            large=config.large_hidden_size,
            half=True,
            norm=self._record.address(trunk.norm.weight),
            epsilon=config.rms_norm_eps,
            scale=attention_.scaling,
            embed_norm=self._record.address(trunk.embed_norm.weight),
            theirs_norm=self._record.address(trunk.feature_norm.weight),
            own_norm=self._record.address(trunk.state_norm.weight),
            join=self._record.weight(take(trunk.join_embed)),
            join_theirs=self._record.weight(take(trunk.join_feature)),
            join_own=self._record.weight(take(trunk.join_state)),
        )

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
            self._tell(count * fed, fed, keep, rows.ctypes.data, cache, begin, logits, own)
            record = self._record.record
            record.kinds, record.states_before = kinds.ctypes.data, states.ctypes.data
            record.any_theirs, record.any_own = bool((kinds == THEIRS).any()), bool((kinds == OWN).any())
            self._record.run(torch.get_num_threads())
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
        kinds = rows + fed * ROW.itemsize
        with self._one_at_a_time:
            cache.settle()
            cache.reserve(1, first + fed)
            self._prepare(fed, 1, first + fed, first + fed - begin)
            logits = torch.empty(self._width)
            self._tell(fed, fed, 1, rows, cache, begin, logits, made)
            record = self._record.record
            record.kinds, record.states_before = kinds, kinds + 8 * fed
            record.any_theirs, record.any_own = first + fed - 1 > 0 and first <= valid, first > valid
            self._record.run(torch.get_num_threads())
            cache.length = first + fed
        return logits[: self._out]

    def _prepare(self, rows: int, kept: int, positions: int, seen: int) -> None:
        """Memory for a pass of so many rows, at these positions, of which one sees so many slots."""
        if positions > len(self._turns):
            self._turns = self._angles(torch.arange(-(-positions // 256) * 256))
            self._record.record.tables[0] = self._turns.data_ptr()
        self._record.prepare(rows, kept, seen)

    def _tell(
        self, rows: int, fed: int, kept: int, row: int, cache: FusedCache, begin: int, logits: Tensor, own: Tensor
    ) -> None:
        """The record's fields of one pass, over the cache from slot `begin` on; `row` is an address."""
        record, skipped = self._record.record, 2 * begin * self._size
        record.rows, record.fed, record.kept, record.row = rows, fed, kept, row
        record.batch, record.slots = cache.keys.shape[1], cache.slots
        record.keys, record.values = cache.keys.data_ptr() + skipped, cache.values.data_ptr() + skipped
        record.logits, record.states = logits.data_ptr(), own.data_ptr()
