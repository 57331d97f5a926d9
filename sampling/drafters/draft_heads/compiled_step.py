"""A feature head's pass as one compiled call: token and state before it, layers, and the logits of the last rows.

Its stages are those of a target's pass (utils/kernels/pass.c) but for the first and the last. The first norms the
token's row of the embedding and the state one position before it, the target's or the head's own, and maps each by a
matrix; x is the sum. The last keeps x, which is the head's own state. Knows neither sessions nor drafts.
"""

import threading
from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sampling.drafters.draft_heads.modules import NONE, OWN, THEIRS, DraftHead
from sampling.models.cache import Buffer, RowStates
from sampling.models.fused import BLOCK, FusedCache, PassRecord
from utils.kernels.bindings import ROW, StepStruct, packer
from utils.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear

BEFORE, OFFSET = packer("Step", "kinds", "any_own"), StepStruct.kinds.offset  # of the states before the rows


class CompiledStep:
    """A feature head whose pass is one compiled call; one call runs at a time. `take` packs its linear maps; the
    embedding is used in place."""

    def __init__(self, student: DraftHead, take: Callable[[Any], QuantizedLinear]) -> None:
        config, trunk = student.config, cast(Any, student.model)
        attention_ = trunk.layers[0].self_attn
        self.layers, self.window = len(trunk.layers), config.window
        self._size = int(attention_.head_dim)
        self._hidden, self._shared = config.hidden_size, config.num_key_value_heads
        self._rotary, self._table, self._positions = student.rotary, torch.empty(0, self._size), 0  # of the table
        self._one_at_a_time = threading.Lock()
        self._record = PassRecord(
            StepStruct,
            sizes=(self._hidden, config.intermediate_size, config.num_attention_heads, self._shared, self._size),
            codes={"entered": self._hidden, "theirs": trunk.join_feature.in_features, "own": self._hidden},
        )
        out = take(student.lm_head)
        self._record.describe(trunk.layers, out, take)
        self._out, self._width = out.out_features, out.packed.width
        embedding = trunk.embed_tokens  # a target's packed one, or floats
        packed = isinstance(embedding, QuantizedEmbedding)
        own = {"embed": self._record.weight(embedding)} if packed else {"table": self._record.address(embedding.weight)}
        self._record.set(
            **own,
            large=config.large_hidden_size,
            parts=trunk.feature_norm.parts,
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
        """Return an empty cache in float16."""
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
        """Feed ids at positions [B, T] after the tokens of `cache`; return logits [B, keep, n] of the last `keep` and
        the head's own states [B, T, H].

        mask as in :class:`sampling.types.Network`; `kinds` [B · T]: whose state precedes each token (NONE, THEIRS or
        OWN), `states` [B · T]: that state's address.
        """
        (count, fed), before = ids.shape, cache.length
        depths = positions.numpy()
        with self._one_at_a_time:
            cache.settle()
            cache.reserve(count, before + fed)
            begin = self._begin(before)
            visible = None if mask is None else mask[..., begin:]
            rows, seen = self._record.rows(ids.numpy().reshape(-1), depths, visible, before - begin + np.arange(fed))
            self._prepare(count * fed, count * keep, int(depths.max()) + 1, seen)
            logits, own = torch.empty(count, keep, self._width), torch.empty(count, fed, self._hidden)
            both = kinds.ctypes.data, states.ctypes.data
            BEFORE.pack_into(self._record.record, OFFSET, *both, THEIRS in kinds, OWN in kinds)
            self._record.run_over(cache, (count, fed, keep), rows.ctypes.data, logits, own.data_ptr(), begin=begin)
            cache.length += fed
        return logits[..., : self._out], own

    def of_one_row(
        self,
        tokens: list[int],
        first: int,
        theirs: RowStates,
        valid: int,
        own: Buffer,
        cache: FusedCache,
        into: Tensor | None = None,
    ) -> Tensor:
        """Feed one row's tokens from position `first` on; return the logits [1, 1, n] of the last, in the memory `into`
        of an earlier call's if given. The head's states of the tokens are appended to `own`.

        `theirs` are the target's states [S, K·G], of which the first `valid` are known; after these the head's `own`
        [S, H] replace them, of which `first` are known.
        """
        fed, begin, width = len(tokens), self._begin(first), 4 * self._hidden
        states = own.allocate(fed, self._hidden)
        own_address, their_address, step = states - width * first, theirs.address, theirs.step
        fields: list[int] = []  # of each token the fields of ROW: id, position, sequence, slot, seen, more, count
        before = list[tuple[int, int]]()
        for at, token in enumerate(tokens, start=first):
            fields += (token, at, 0, at - begin, at - begin + 1, 0, 0)
            state = (THEIRS, their_address + step * (at - 1)) if at <= valid else (OWN, own_address + width * (at - 1))
            before.append(state if at else (NONE, 0))
        # in one array: the rows, then whose state precedes each token, then the addresses of these states
        numbers = array("q", [*fields, *chain(*zip(*before, strict=True))])
        rows = numbers.buffer_info()[0]
        kinds = rows + fed * ROW.itemsize
        with self._one_at_a_time:
            cache.settle()
            cache.reserve(1, first + fed)
            self._prepare(fed, 1, first + fed, first + fed - begin)
            logits = torch.empty(1, 1, self._width) if into is None else into
            both = first + fed - 1 > 0 and first <= valid, first > valid  # any of the target's, any of its own
            BEFORE.pack_into(self._record.record, OFFSET, kinds, kinds + 8 * fed, *both)
            self._record.run_over(cache, (1, fed, 1), rows, logits, states, begin=begin)
            cache.length = first + fed
        return logits if self._width == self._out else logits[..., : self._out]

    def _begin(self, position: int) -> int:
        """Return the start of the block with the first slot that a token at `position` may see."""
        return max(0, position - self.window) // BLOCK * BLOCK if self.window else 0

    def _prepare(self, rows: int, kept: int, positions: int, seen: int) -> None:
        """Get memory for a pass of `rows` rows, `kept` of them with logits, at positions below `positions`, that see up
        to `seen` slots."""
        if positions > self._positions:
            self._positions = -(-positions // 256) * 256
            halves = [part[:, : self._size // 2] for part in self._rotary(torch.arange(self._positions))]
            self._table = torch.cat(halves, dim=-1)  # [n, D]: cos, then sin
            self._record.record.tables[0] = self._table.data_ptr()
        self._record.prepare(rows, kept, seen)
