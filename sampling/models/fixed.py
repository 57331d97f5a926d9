"""Passes of fixed width over a preallocated cache, so that a device can replay them: shapes and addresses never change.

A pass of T tokens runs as the next of WIDTHS, over the first `reach` slots of the cache: tokens beyond T are padding,
whose slots the next pass writes again, and the mask hides absent tokens. Longer passes and several rows run as the
network itself runs them, over the same cache. How a pass is recorded the caller says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.models.cache import Buffer, SlotCache, outside_inference_mode
from sampling.models.llama import LlamaNetwork
from sampling.types import Hidden, KVCache, states_of

WIDTHS = (*range(1, 17), 32)
REACHES = tuple(256 << step for step in range(12))  # slots that attention reads
Passed = tuple[Tensor, Tensor | None]
Capture = Callable[[Callable[[], Passed]], Callable[[], Passed]]


class FixedCache(SlotCache):
    """A cache of one row, and the passes recorded over its buffers; where those are replaced the passes are dropped."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.passes: dict[tuple[int, int, tuple[int, ...]], FixedPass] = {}
        self._recorded: list[Tensor] = []

    @outside_inference_mode
    def prepare(self, like: Tensor, room: int) -> None:
        """Make room for `room` slots in buffers like this [1, heads, 0, D]."""
        for buffer in self.buffers:
            data = buffer.data
            if data is None or data.shape[2] < room:
                buffer.data = like.new_empty((1, like.shape[1], room, like.shape[3]))
                if data is not None:
                    buffer.data[:, :, : buffer.length] = data[:, :, : buffer.length]
        held = [buffer.data for buffer in self.buffers if buffer.data is not None]
        if [*map(id, held)] != [*map(id, self._recorded)]:
            self.passes, self._recorded = {}, held
            for data in held:
                data[:, :, self.length :] = 0  # hidden slots count 0 times what they hold, which must be a number

    def fork(self) -> FixedCache:
        twin = super().fork()
        assert isinstance(twin, FixedCache)
        twin.passes, twin._recorded = {}, []
        return twin


class _Slots(SlotCache):
    """The buffers of a cache as a recorded pass sees them: it writes where `slots` [W] says and reads `reach` slots."""

    def __init__(self, cache: SlotCache, slots: Tensor, reach: int) -> None:
        self.keys, self.values, self.slots, self.reach = cache.keys, cache.values, slots, reach

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._write(self.keys[layer], key), self._write(self.values[layer], value)

    def _write(self, buffer: Buffer, new: Tensor) -> Tensor:
        assert buffer.data is not None
        return buffer.data.index_copy_(2, self.slots, new)[:, :, : self.reach]


class FixedPass(NamedTuple):
    """A recorded pass and the memory that it reads: ids, positions [1, W], slots [W], mask [1, 1, W, reach]."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor
    run: Callable[[], Passed]


class FixedNetwork:
    """A Llama-like network whose passes of few tokens over one row are recorded by `capture`, one for each width."""

    ragged, reduced_ids, takes_trees = False, None, True

    def __init__(self, network: LlamaNetwork, capture: Capture) -> None:
        self.network, self._capture = network, capture
        self.vocab_size, self.context, self.layers = network.vocab_size, network.context, network.layers
        self.device, self.dtype = network.device, network.dtype

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache; passes are recorded over that of one row."""
        return FixedCache(self.layers) if rows == 1 else self.network.new_cache(rows)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> Passed:
        """See :class:`sampling.types.Network`."""
        count, start, wanted = ids.shape[1], cache.length, states_of(hidden)
        width = next((width for width in WIDTHS if width >= count), 0)
        reach = next((reach for reach in REACHES if reach >= start + width), 0)
        if not isinstance(cache, FixedCache) or len(ids) != 1 or not width or not reach:
            return self.network.forward(ids, positions, mask, cache, keep, hidden)
        cache.prepare(torch.empty(1, *self.network.slot, dtype=self.dtype, device=self.device), reach)
        fixed = cache.passes.get((width, reach, wanted))
        buffers = self._empty(width, reach) if fixed is None else fixed
        buffers.ids[:, :count] = ids
        buffers.positions[:, :count] = positions
        buffers.slots.copy_(torch.arange(start, start + width, device=self.device))
        self._hide(buffers.mask, mask, start, count)
        if fixed is None:
            slots, arguments = _Slots(cache, buffers.slots, reach), (buffers.ids, buffers.positions, buffers.mask)
            fixed = buffers._replace(
                run=self._capture(lambda: self.network.forward(*arguments, slots, width, wanted)),
            )
            cache.passes[width, reach, wanted] = fixed
        logits, states = fixed.run()
        for buffer in cache.buffers:
            buffer.length = start + count
        return logits[:, count - keep : count].clone(), None if states is None else states[:, :count].clone()

    def _hide(self, kept: Tensor, mask: Tensor | None, start: int, count: int) -> None:
        """Write what the tokens see, of `mask` [1, 1, T, S+T] (None: all before them) and padding, into `kept`."""
        least = torch.finfo(kept.dtype).min
        kept.fill_(least)
        if mask is None:
            kept[..., :count, : start + count].zero_()
            kept[..., :count, start : start + count].masked_fill_(
                torch.ones(count, count, dtype=torch.bool, device=kept.device).triu(1), least
            )
        else:
            kept[..., :count, : start + count] = mask
        kept[..., count:, 0] = 0  # padding sees something too

    @outside_inference_mode
    def _empty(self, width: int, reach: int) -> FixedPass:
        ids = torch.zeros(1, width, dtype=torch.long, device=self.device)
        mask = torch.zeros(1, 1, width, reach, dtype=self.dtype, device=self.device)
        return FixedPass(ids, ids.clone(), ids[0].clone(), mask, lambda: (mask, None))
