"""A cache of fixed size for independent sequences: token i of a row lies in slot i, whatever the other rows hold.

One token of every row is fed at a time; a row is emptied by starting again at slot 0. Knows no tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.cache import Buffer, SlotCache


class RowBuffer(Buffer):
    """[rows, heads, capacity, D], allocated when its shape is first seen."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows, self.capacity = rows, capacity
        self.slots = torch.empty(0, dtype=torch.long)

    def append(self, new: Tensor) -> Tensor:
        """Write new [N, heads, 1, D] into each row's own slot; a view of the first N rows' slots in use."""
        data = self._allocated(new)
        count = len(self.slots)
        data[torch.arange(count, device=data.device), :, self.slots] = new[:, :, 0]
        self.length += 1
        return data[:count, :, : self.length]

    def fill(self, row: int, content: Tensor) -> None:
        """The row's first slots become content [heads, T, D]."""
        self._allocated(content[None])[row, :, : content.shape[1]] = content

    def move(self, row: int, to: int, length: int) -> None:
        if self.data is not None:
            self.data[to, :, :length] = self.data[row, :, :length]

    def _allocated(self, like: Tensor) -> Tensor:
        if self.data is None:
            self.data = like.new_zeros((self.rows, like.shape[1], self.capacity, like.shape[3]))
        return self.data


class RowCache(SlotCache):
    """`rows` sequences of at most `capacity` tokens through `layers` layers; a pass feeds the first N rows."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        super().__init__(0)
        self.capacity = capacity
        self._keys = [RowBuffer(rows, capacity) for _ in range(layers)]
        self._values = [RowBuffer(rows, capacity) for _ in range(layers)]
        self.keys, self.values = list[Buffer](self._keys), list[Buffer](self._values)

    def at(self, slots: Tensor) -> int:
        """Row i's next token goes to slot slots[i] [N]; how many slots that pass then shows of every row."""
        width = int(slots.max()) + 1
        for buffer in (*self._keys, *self._values):
            buffer.slots, buffer.length = slots, width - 1
        return width

    def fill(self, row: int, content: SlotCache) -> None:
        """Begin a row with the first row of `content`."""
        for layer in range(len(self._keys)):
            key, value = content.layer(layer)
            self._keys[layer].fill(row, key[0])
            self._values[layer].fill(row, value[0])

    def move(self, row: int, to: int, length: int) -> None:
        """Row `to` becomes the first `length` slots of `row`."""
        for buffer in (*self._keys, *self._values):
            buffer.move(row, to, length)
