"""A target writes training text: many chats at once, one token of each a pass, a finished row given to the next chat.

The noise of a token is keyed by (seed, chat, position), so what a chat says depends neither on the chats
beside it nor on where a run was taken up again (up to rounding: a pass over other rows may add up differently).
Token i of a row lies in slot i of a cache of fixed size, whatever the other rows hold. What is asked is
training/text/dialogues.py's business, what is kept training/text/self_text.py's. Knows no files and no screen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sampling.loop import never
from sampling.models.cache import Buffer, SlotCache
from sampling.models.network import network_of
from sampling.rows import common_prefix
from sampling.sampler import stream_key, uniforms
from training.text.dialogues import Ask, Chat, Line, Source
from utils.errors import UserError

_STREAM = 16  # the noise's streams: this one for a chat's first continuation, the next for its second …
_ONE_BY_ONE = 8  # waiting tokens that are fed with the batch; more are read in a pass of their own
_FRUITLESS = 200  # chats in a row that came to nothing


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


@dataclass(frozen=True)
class Writer:
    """What writes: a causal model (or Network), the ids that end a turn, `batch` rows at once.

    Only the first `vocab_size` ids are ever drawn. `model` may have any dtype; on the CPU float32 with packed weights
    (utils.kernels.packed_linear) is the fastest.
    """

    model: Any
    vocab_size: int
    stop_ids: frozenset[int]
    source: Source
    seed: int = 42
    batch: int = 32

    def chats(
        self, done: Container[int] = (), interrupt: Callable[[], bool] = never
    ) -> Iterator[tuple[int, list[Line]]]:
        """(number, lines) of each chat as it finishes, but those `done`; no lines where a chat came to nothing.

        Ends when the source does, or at the next token after an interrupt. Raises UserError if no chat comes to
        anything.
        """
        return _Batch(self, done).run(interrupt)


@dataclass(eq=False)
class _Row:
    """A chat and what of it the cache holds: the first `fed` of `ids`."""

    number: int
    chat: Chat
    ask: Ask
    ids: list[int]
    fed: int = 0
    asked: int = 0  # continuations so far
    answer: list[int] = field(default_factory=list)


class _Batch:
    """The rows being written. Row i of the cache is rows[i]."""

    def __init__(self, writer: Writer, done: Container[int]) -> None:
        self.writer, self.done = writer, done
        self.network = network_of(writer.model)
        self.capacity = min(self.network.context, writer.source.longest)
        self.cache = RowCache(self.network.layers, writer.batch, self.capacity)
        self.rows: list[_Row] = []
        self.next = 0
        self.dry = False  # the source has no more
        self.fruitless = 0
        self._read: tuple[list[int], SlotCache] | None = None  # the last prompt read in a pass of its own

    def run(self, interrupt: Callable[[], bool]) -> Iterator[tuple[int, list[Line]]]:
        while True:
            yield from self._admit()
            if not self.rows or interrupt():
                return
            self._step()
            for row in [row for row in self.rows if self._complete(row)]:
                lines = self._go_on(row)
                if lines is not None:
                    self._drop(row)
                    yield self._told(row.number, lines)

    def _admit(self) -> Iterator[tuple[int, list[Line]]]:
        """Give free rows to new chats; yields those that end at once."""
        while len(self.rows) < self.writer.batch and not self.dry:
            number, self.next = self.next, self.next + 1
            if number in self.done:
                continue
            chat = self.writer.source.chat(number)
            if chat is None:
                self.dry = True
                return
            try:
                row = _Row(number, chat, next(chat), [])
            except StopIteration as ended:
                yield self._told(number, ended.value)
                continue
            self.rows.append(row)
            lines = self._take_up(row, row.ask)
            if lines is not None:
                self._drop(row)
                yield self._told(number, lines)

    def _told(self, number: int, lines: list[Line]) -> tuple[int, list[Line]]:
        self.fruitless = 0 if lines else self.fruitless + 1
        if self.fruitless >= _FRUITLESS:
            raise UserError("the target's user turns do not end: give it files or prompts")
        return number, lines

    def _take_up(self, row: _Row, ask: Ask) -> list[Line] | None:
        """Begin a continuation; the chat's lines if it has no room for any."""
        while len(ask.prompt) >= self.capacity or not ask.prompt:
            try:
                ask = row.chat.send([])
            except StopIteration as ended:
                return list(ended.value)
        row.fed = min(common_prefix(row.ids[: row.fed], ask.prompt), len(ask.prompt) - 1)
        row.ask, row.ids, row.answer = ask, list(ask.prompt), []
        if row.fed == 0 and len(ask.prompt) > _ONE_BY_ONE:
            self._read_prompt(row)
        return None

    def _read_prompt(self, row: _Row) -> None:
        """Fill the row's cache with all of its prompt but the last token."""
        ids = row.ids[:-1]
        if self._read is None or self._read[0] != ids:
            fresh = self.network.new_cache(1)
            fed = torch.tensor([ids], device=self.network.device)
            positions = torch.arange(len(ids), device=self.network.device)[None]
            self.network.forward(fed, positions, None, fresh, 1)
            assert isinstance(fresh, SlotCache)
            self._read = (ids, fresh)
        self.cache.fill(self.rows.index(row), self._read[1])
        row.fed = len(ids)

    @torch.no_grad()
    def _step(self) -> None:
        """Feed every row its next token; those that have none left to feed draw one."""
        device = self.network.device
        slots = torch.tensor([row.fed for row in self.rows], device=device)
        width = self.cache.at(slots)
        unseen = torch.arange(width, device=device)[None] > slots[:, None]
        mask = torch.zeros(unseen.shape, dtype=self.network.dtype, device=device)
        mask.masked_fill_(unseen, torch.finfo(mask.dtype).min)
        fed = torch.tensor([[row.ids[row.fed]] for row in self.rows], device=device)
        logits, _ = self.network.forward(fed, slots[:, None], mask[:, None, None], self.cache, 1)
        for row in self.rows:
            row.fed += 1
        due = [index for index, row in enumerate(self.rows) if row.fed == len(row.ids)]
        if due:
            chosen = [self.rows[index] for index in due]
            drawn = draw(
                logits[due, 0, : self.writer.vocab_size].float(),
                [row.ask.temperature for row in chosen],
                [stream_key(self.writer.seed, _STREAM + row.asked, row.number, len(row.ids)) for row in chosen],
            )
            for row, token in zip(chosen, drawn, strict=True):
                row.ids.append(token)
                row.answer.append(token)

    def _complete(self, row: _Row) -> bool:
        """Whether the row's continuation has ended."""
        if not row.answer or row.fed == len(row.ids):
            return False
        full = len(row.answer) >= row.ask.limit or len(row.ids) >= self.capacity
        return full or row.answer[-1] in self.writer.stop_ids

    def _go_on(self, row: _Row) -> list[Line] | None:
        """Hand the continuation to its chat; the lines if that was the last."""
        try:
            ask = row.chat.send(row.answer)
        except StopIteration as ended:
            return list(ended.value)
        row.asked += 1
        return self._take_up(row, ask)

    def _drop(self, row: _Row) -> None:
        """Take the row out; the last one moves into its place."""
        place, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.cache.move(len(self.rows), place, last.fed)
            self.rows[place] = last


def draw(logits: Tensor, temperatures: list[float], keys: list[int]) -> list[int]:
    """One id a row: [M, V] float32 logits, each row at its own temperature (0: the likeliest), by its key's noise.

    The inverse of the distribution function: one uniform number a row instead of one an id.
    """
    best = logits.max(dim=-1)
    chosen: list[int] = best.indices.tolist()
    warm = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not warm:
        return chosen
    heat = torch.tensor([temperatures[row] for row in warm], device=logits.device)[:, None]
    mass = (logits[warm] - best.values[warm, None]).div_(heat).exp_().cumsum(dim=-1)
    total = mass[:, -1:]
    place = (uniforms([keys[row] for row in warm], 1, logits.device) * total.double()).float()
    place = place.minimum(total.nextafter(torch.zeros_like(total)))
    # The first id whose mass reaches beyond the point: it lies below the total, so ids of probability 0 are never met.
    for row, token in zip(warm, torch.searchsorted(mass, place, right=True)[:, 0].tolist(), strict=True):
        chosen[row] = token
    return chosen
