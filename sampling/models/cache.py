"""KV caches: buffers that grow, with crop / shift / select / fork; positions and masks of the tokens fed. Only this
file, recurrent.py and encoder_decoder.py import transformers' cache_utils.

A slot is one position of the buffer. All rows share the number of filled slots; a session knows which slot holds which
token of which row. Knows no models.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from ctypes import memmove
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from sampling.rows import put
from sampling.types import DraftTree, Moves, Network, Rows

GROW = 256  # slots added at least, whenever a buffer is full
# Decorates functions whose tensors can be written to in inference mode and outside it. Sessions keep only such tensors:
# some passes run in that mode, which costs less around every operator, others are compiled and run outside.
outside_inference_mode = torch.inference_mode(False)


@dataclass(eq=False)
class Buffer:
    """One growing tensor [B, heads, capacity, D] of which the first `length` slots are filled."""

    data: Tensor | None = None
    length: int = 0

    def append(self, new: Tensor) -> Tensor:
        """Write `new` [B, heads, T, D] after the filled slots; return a view of all filled slots."""
        start, end = self.length, self.length + new.shape[2]
        data = self._with_room(new, end)
        data[:, :, start:end] = new
        return data[:, :, :end]

    def allocate(self, count: int, size: int) -> int:
        """Add `count` slots to a single row and head; return the address of [count, size] float32, which the caller
        writes."""
        start = self.length
        data = self._with_room(torch.empty(1, 1, 1, size) if self.data is None else self.data, start + count)
        return data.data_ptr() + 4 * size * start

    def place(self, new: Tensor, slots: Tensor, rows: Tensor, of: int) -> None:
        """Write `new` [N, 1, T, D] to these rows [N] of the buffer's `of` rows, each to its own slots [N, T]."""
        data = self._with_room(new[:1].expand(of, -1, -1, -1), max(self.length, int(slots.max()) + 1))
        capacity, size = data.shape[2:]
        slots = slots + capacity * rows[:, None]  # of all rows, one after the other
        data.view(-1, size).index_copy_(0, put(slots.flatten(), new.device), new.reshape(-1, size))

    def _with_room(self, like: Tensor, end: int) -> Tensor:
        """Return the tensor, with `end` slots counted as filled; a larger one if these need more room."""
        if self.data is None or self.data.shape[2] < end:
            self.data = self._grown(like, end)
        self.length = end
        return self.data

    @outside_inference_mode
    def _grown(self, like: Tensor, needed: int) -> Tensor:
        rows, heads, _, size = like.shape
        grown = like.new_empty((rows, heads, max(needed + GROW, needed + needed // 4), size))
        if self.data is not None and self.length:
            grown[:, :, : self.length] = self.data[:, :, : self.length]
        return grown

    def view(self) -> Tensor:
        """Return the filled slots [B, heads, length, D]; a view, to be read only. ValueError before the first pass."""
        if self.data is None:
            raise ValueError("the cache is empty: nothing has been scored yet")
        return self.data[:, :, : self.length]

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def shift(self, moves: Moves, length: int, index: Tensor | None = None) -> None:
        """Make the moves, then keep the first `length` slots. `index` [3, K]: the moves as a tensor."""
        if self.data is not None and index is None and self.data.is_cpu and self.data.shape[1] == 1:
            size, slots, first = self.data.element_size() * self.data.shape[3], self.data.shape[2], self.data.data_ptr()
            for row, old, new in moves:  # tensors of so few numbers would take longer
                memmove(first + size * (slots * row + new), first + size * (slots * row + old), size)
        elif self.data is not None:
            rows, olds, news = put(torch.tensor(moves).T if index is None else index, self.data.device)
            self.data[rows, :, news] = self.data[rows, :, olds]
        self.length = length

    @outside_inference_mode
    def select(self, rows: Tensor) -> None:
        if self.data is not None:
            self.data = self.data.index_select(0, put(rows, self.data.device))

    def fork(self) -> "Buffer":
        return Buffer(None if self.data is None else self._grown(self.data, self.length), self.length)


class RowStates(NamedTuple):
    """A row's states in float32 on the host: the address of the first token's state, the bytes of a state, the tensor
    that holds them, which may begin with a later token.
    """

    address: int = 0
    step: int = 0
    held: Tensor | None = None

    @staticmethod
    def of(held: Tensor, first: int = 0) -> "RowStates":
        """Return the states `held` [..., S, G], contiguous, of tokens `first` and later ones."""
        step = 4 * held.shape[-1]
        return RowStates(held.data_ptr() - step * first, step, held)


def joined(states: list[Tensor]) -> Tensor:
    """Concatenate K states [B, T, H] to [B, T, K·H], on the device of the first."""
    first = states[0]
    return first if len(states) == 1 else torch.cat([state.to(first.device) for state in states], dim=-1)


class SlotCache:
    """K and V buffers of `layers` layers; satisfies :class:`sampling.types.KVCache`.

    `lengths`: the length of each row's text, if its rotary angles depend on that (sampling/models/network.py); empty:
    the number of tokens fed.
    """

    lengths: Sequence[int] = ()

    def __init__(self, layers: int) -> None:
        self.keys = [Buffer() for _ in range(layers)]
        self.values = [Buffer() for _ in range(layers)]
        self.indexed: dict[int, Buffer] = {}  # by layer, the keys of an indexer, which chooses the slots attention sees

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.keys, *self.values, *self.indexed.values()]

    @property
    def length(self) -> int:
        return self.keys[0].length

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new slots of one layer, [B, H_kv, T, D] each; return views of all filled slots."""
        return self.keys[layer].append(key), self.values[layer].append(value)

    def crop(self, length: int) -> None:
        for buffer in self.buffers:
            buffer.crop(length)

    def shift(self, moves: Moves, length: int) -> None:
        index = torch.tensor(moves).T
        for buffer in self.buffers:
            index = index if buffer.data is None else put(index, buffer.data.device)
            buffer.shift(moves, length, index)

    def select(self, rows: Tensor) -> None:
        for buffer in self.buffers:
            buffer.select(rows)

    def fork(self) -> Self:
        """Return an independent copy. A :class:`CrossCache` shares the encoder's states: nothing writes into them."""
        twin = copy(self)
        twin.keys, twin.values = ([buffer.fork() for buffer in held] for held in (self.keys, self.values))
        twin.indexed = {layer: buffer.fork() for layer, buffer in self.indexed.items()}
        return twin

    def resume(self, length: int) -> int:
        return length

    def reading(self, fed: int, drafted: int, singly: bool) -> AbstractContextManager[None]:
        """Surround a pass that feeds `fed` tokens, the last `drafted` of them drafts; `singly`: recurrent layers read
        one token at a time."""
        return nullcontext()

    def layers(self) -> list[Any]:
        """Return the layers of a transformers cache that writes into these slots."""
        return [slot_layer()(self, index) for index in range(len(self.keys))]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index].view(), self.values[index].view()


@dataclass
class EncodedSource:
    """An encoder's states [B, S, H], and which of them are tokens [B, S] bool (None: all). `cross`: transformers' cache
    of their keys and values (K, V of each layer so far), which the first pass fills.
    """

    states: Tensor
    mask: Tensor | None = None
    cross: Any = None

    def __post_init__(self) -> None:
        from transformers.cache_utils import DynamicCache

        self.cross = DynamicCache(self.cross)

    def select(self, rows: Tensor) -> "EncodedSource":
        """Return the states of these rows, by their indices [B']."""
        chosen = put(rows, self.states.device)
        cross = [(layer.keys[chosen], layer.values[chosen]) for layer in self.cross.layers]
        return EncodedSource(self.states[chosen], None if self.mask is None else self.mask[chosen], cross)


class CrossCache(SlotCache):
    """The slots of a decoder, and the encoder's states of the prompts, which are never cropped."""

    encoded: EncodedSource | None = None

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.encoded is not None:
            self.encoded = self.encoded.select(rows)


@cache
def slot_layer() -> Any:
    """The class of a transformers cache layer that writes into slots: SlotLayer(slots, index). It keeps every position,
    even with a sliding window (the mask hides those outside), so that any crop is possible."""
    from transformers.cache_utils import DynamicLayer

    class SlotLayer(DynamicLayer):
        def __init__(self, slots: SlotCache, index: int) -> None:
            super().__init__()
            self.slots, self.index = slots, index

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return self.slots.append(self.index, key_states, value_states)

        def update_indexer(self, keys: Tensor) -> Tensor:
            return self.slots.indexed.setdefault(self.index, Buffer()).append(keys[:, None])[:, 0]

        def get_seq_length(self) -> int:
            return self.slots.keys[self.index].length

    return SlotLayer


def as_transformers_cache(slots: SlotCache) -> Any:
    """A transformers cache that writes into `slots`."""
    from transformers.cache_utils import Cache

    return Cache(layers=slots.layers())


# -- positions and masks of fed tokens, for ragged rows and trees ------------------------------------------

_OPEN, _SHUT = np.float32(0), np.finfo(np.float32).min


def ancestors(tree: DraftTree, count: int) -> np.ndarray:
    """Return [N, N] bool, N = `count`: whether node j is node i or one of its ancestors. The tree may have fewer
    nodes."""
    seen = np.eye(count, dtype=bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def places(
    lengths: list[int], feed: Rows, trees: Sequence[DraftTree], start: int, width: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return the positions [B, T] of the fed columns, and which slots each may see [B, T, S+T] bool.

    Columns: the missing committed tokens, padded on the left to `width`, then the nodes. A padding
    column sees itself alone and is seen by no other.
    """
    if len(feed) == 1 and lengths[0] == start:
        return _of_one_row(trees[0], start, width)
    before = torch.tensor(lengths)[:, None]
    pads = torch.tensor([width - len(new) for new in feed])[:, None]
    column = torch.arange(width)[None]
    seen = torch.from_numpy(np.stack([ancestors(tree, count) for tree in trees]))
    ends = torch.tensor([length + len(new) for length, new in zip(lengths, feed, strict=True)])[:, None]
    positions = torch.cat([(before + column - pads).clamp(min=0), ends + seen.sum(dim=2) - 1], dim=1)
    mask = torch.zeros(len(feed), width + count, start + width + count, dtype=torch.bool)
    mask[:, :, :start] = (torch.arange(start)[None] < before)[:, None]
    real = column >= pads  # [B, width]
    mask[:, :width, start : start + width] = torch.ones(width, width, dtype=torch.bool).tril()[None] & real[:, None]
    mask[:, width:, start : start + width] = real[:, None]
    mask[:, width:, start + width :] = seen
    mask[:, :width, :] &= real[..., None]
    mask |= torch.eye(width + count, start + width + count, dtype=torch.bool).roll(start, dims=1)[None]
    return positions, mask


def _of_one_row(tree: DraftTree, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return `places` of one row whose token i lies in slot i; lists are faster than tensors of a few elements."""
    first, count = start + width, len(tree.tokens)
    mask = np.ones((width + count, first + count), dtype=bool)
    if width:
        mask[:width, start:] = np.tri(width, width + count, dtype=bool)
    mask[width:, first:] = ancestors(tree, count)
    positions = [*range(start, first), *(first + depth - 1 for depth in tree.depths)]
    return torch.tensor([positions]), torch.from_numpy(mask)[None]


def additive(mask: Tensor, network: Network) -> Tensor:
    """Map [B, T, S] bool to [B, 1, T, S] of 0 and the most negative number, in the model's dtype."""
    if network.device.type == "cpu" and network.dtype == torch.float32:
        return torch.from_numpy(np.where(mask.numpy(), _OPEN, _SHUT))[:, None]
    shut = torch.zeros_like(mask, dtype=network.dtype).masked_fill_(~mask, torch.finfo(network.dtype).min)
    return put(shut[:, None], network.device)
