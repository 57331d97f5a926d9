"""KV caches: buffers that grow, with crop / shift / select / fork. Nothing else imports cache_utils.

A slot is one position of the buffer. All rows share the number of filled slots; which slot holds
which token of which row is the session's business. Knows no tokens and no models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

GROW = 256  # slots added at least, whenever a buffer is full


class Buffer:
    """One growing tensor [B, heads, capacity, D] of which the first `length` slots are filled."""

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.length = 0

    def append(self, new: Tensor) -> Tensor:
        """Write `new` [B, heads, T, D] behind the filled slots; a view of all filled slots."""
        end = self.length + new.shape[2]
        if self.data is None or self.data.shape[2] < end:
            self._grow(new, end)
        assert self.data is not None
        self.data[:, :, self.length : end] = new
        self.length = end
        return self.data[:, :, :end]

    def _grow(self, like: Tensor, needed: int) -> None:
        capacity = max(needed + GROW, needed + needed // 4)
        rows, heads, _, size = like.shape
        grown = like.new_empty((rows, heads, capacity, size))
        if self.data is not None and self.length:
            grown[:, :, : self.length] = self.data[:, :, : self.length]
        self.data = grown

    def view(self) -> Tensor:
        """The filled slots [B, heads, length, D]; a view, to be read only."""
        if self.data is None:
            raise ValueError("the cache is empty: nothing has been scored yet")
        return self.data[:, :, : self.length]

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def shift(self, moves: Tensor, length: int) -> None:
        """Slot moves[2] of row moves[0] becomes what slot moves[1] was, moves [3, K]; then the first `length` stay."""
        if self.data is not None:
            rows, old, new = moves.to(self.data.device)
            self.data[rows, :, new] = self.data[rows, :, old]
        self.length = length

    def select(self, rows: Tensor) -> None:
        if self.data is None:
            return
        chosen = self.data.new_empty((len(rows), *self.data.shape[1:]))
        for place, row in enumerate(rows.tolist()):  # one copy, of what is filled: a row's room is larger
            chosen[place, :, : self.length] = self.data[row, :, : self.length]
        self.data = chosen

    def fork(self) -> Buffer:
        twin = Buffer()
        if self.data is not None and self.length:
            twin._grow(self.data, self.length)
            assert twin.data is not None
            twin.data[:, :, : self.length] = self.data[:, :, : self.length]
        twin.length = self.length
        return twin


class SlotCache:
    """K and V buffers of `layers` layers; satisfies :class:`sampling.types.KVCache`."""

    def __init__(self, layers: int) -> None:
        self.keys = [Buffer() for _ in range(layers)]
        self.values = [Buffer() for _ in range(layers)]

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.keys, *self.values]

    @property
    def length(self) -> int:
        return self.keys[0].length

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new slots of one layer, [B, H_kv, T, D] each; views of all filled slots."""
        return self.keys[layer].append(key), self.values[layer].append(value)

    def crop(self, length: int) -> None:
        for buffer in self.buffers:
            buffer.crop(length)

    def shift(self, moves: Tensor, length: int) -> None:
        for buffer in self.buffers:
            moves = moves if buffer.data is None else moves.to(buffer.data.device)
            buffer.shift(moves, length)

    def select(self, rows: Tensor) -> None:
        for buffer in self.buffers:
            buffer.select(rows)

    def fork(self) -> SlotCache:
        twin = SlotCache(0)
        twin.keys = [buffer.fork() for buffer in self.keys]
        twin.values = [buffer.fork() for buffer in self.values]
        return twin

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index].view(), self.values[index].view()


@dataclass
class Encoded:
    """What a decoder reads beside its own tokens: the encoder's states [B, S, H], and which of them are tokens
    [B, S] bool (None: all). `keys` and `values` [B, heads, S, D], one a layer, are made by the first pass.
    """

    states: Tensor
    mask: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def select(self, rows: Tensor) -> Encoded:
        """The same of these rows [B']."""
        chosen = rows.to(self.states.device)
        keys, values = ([one.index_select(0, chosen) for one in held] for held in (self.keys, self.values))
        return Encoded(self.states[chosen], None if self.mask is None else self.mask[chosen], keys, values)

    def bare(self) -> Encoded:
        """The encoder's part alone, as before the first pass."""
        return Encoded(self.states, self.mask)


class CrossCache(SlotCache):
    """The slots of a decoder, and beside them what its encoder made of the prompts; that is never cropped."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.encoded: Encoded | None = None

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.encoded is not None:
            self.encoded = self.encoded.select(rows)

    def fork(self) -> CrossCache:
        """An independent copy. Tensors of the encoder are shared: nothing writes into them."""
        twin = CrossCache(0)
        twin.keys, twin.values = ([buffer.fork() for buffer in held] for held in (self.keys, self.values))
        if (known := self.encoded) is not None:
            twin.encoded = Encoded(known.states, known.mask, list(known.keys), list(known.values))
        return twin


def as_transformers_cache(slots: SlotCache) -> Any:
    """A transformers cache that writes into `slots`: every layer keeps every position, also layers
    with a sliding window (their mask hides what is outside), so that any crop is possible."""
    from transformers.cache_utils import Cache, DynamicLayer

    class SlotLayer(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return slots.append(self.index, key_states, value_states)

        def get_seq_length(self) -> int:
            return slots.keys[self.index].length

    return Cache(layers=[SlotLayer(index) for index in range(len(slots.keys))])


def as_encoder_decoder_cache(slots: CrossCache) -> Any:
    """A transformers cache of both parts: a layer's cross-attention is computed once and kept in `slots.encoded`."""
    from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

    assert slots.encoded is not None
    encoded: Encoded = slots.encoded
    known = len(encoded.keys)

    class CrossLayer(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            if index < known:
                self.keys, self.values = encoded.keys[index], encoded.values[index]

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            encoded.keys.append(key_states)
            encoded.values.append(value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states

        def get_seq_length(self) -> int:
            return 0 if self.keys is None else self.keys.shape[-2]

    cross = Cache(layers=[CrossLayer(index) for index in range(len(slots.keys))])
    return EncoderDecoderCache(as_transformers_cache(slots), cross)
