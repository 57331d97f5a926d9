"""A target writes training text: many chats at once, one token of each a pass, a finished row given to the next chat.

The noise of a token is keyed by (seed, chat, position), so that a chat's text depends neither on the chats beside it
nor on where a run was resumed (up to rounding: a pass over other rows may add up differently). Token i of a row lies in
slot i of a cache of fixed size, whatever the other rows hold. training/text/dialogues.py makes the chats,
training/text/self_text.py keeps them. Knows no files and no screen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sampling.models.cache import Buffer, SlotCache
from sampling.models.fused import FusedNetwork
from sampling.models.network import network_of
from sampling.rows import common_prefix
from sampling.sampler import stream_key, uniforms
from sampling.types import Network
from training.text.dialogues import Ask, Chat, Line, Source
from utils.errors import UserError
from utils.progress import never

_STREAM = 16  # the noise's streams: this one for a chat's first continuation, the next for its second …
_ONE_BY_ONE = 8  # waiting tokens that are fed with the batch; more are read in a separate pass
KEPT = torch.bfloat16  # states that are kept
_FRUITLESS = 200  # chats without an answer in a row, of an endless source

Ended = tuple[int, list[Line]]
"""The number of a chat and its lines; none if it has no answer."""
Keep = Callable[[Sequence[int], int, Tensor], None]
"""Receives each line as its chat ends: ids, where the answer starts, the target's last hidden states [T, H]."""


class RowCache(SlotCache):
    """`rows` sequences of at most `capacity` tokens through `layers` layers; a pass feeds the first N rows."""

    def __init__(self, network: Network, rows: int, capacity: int) -> None:
        super().__init__(network.layers)
        self._rows, self._capacity, self._dtype = rows, capacity, network.dtype
        self._slots = torch.empty(0, dtype=torch.long)

    def at(self, slots: Tensor) -> Tensor:
        """Put row i's next token into slot slots[i] [N]; return the mask [N, 1, 1, S] of that pass."""
        self._slots, width = slots, int(slots.max()) + 1
        for buffer in self.buffers:
            buffer.length = width - 1
        unseen = torch.arange(width, device=slots.device)[None] > slots[:, None]
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=slots.device)
        return mask.masked_fill_(unseen, torch.finfo(mask.dtype).min)[:, None, None]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write [N, heads, 1, D] each into the rows' own slots; return views of the first N rows' slots in use."""
        rows = torch.arange(len(self._slots), device=key.device)
        for buffer, new in ((self.keys[layer], key), (self.values[layer], value)):
            self._allocated(buffer, new)[rows, :, self._slots] = new[:, :, 0]
            buffer.length += 1
        return self.keys[layer].view()[: len(rows)], self.values[layer].view()[: len(rows)]

    def fill(self, row: int, content: SlotCache) -> None:
        """Begin a row with the first row of `content`."""
        for layer, buffers in enumerate(zip(self.keys, self.values, strict=True)):
            for buffer, new in zip(buffers, content.layer(layer), strict=True):
                self._allocated(buffer, new)[row, :, : new.shape[2]] = new[0]

    def move(self, row: int, to: int, length: int) -> None:
        """Copy the first `length` slots of `row` to row `to`."""
        for buffer in self.buffers:
            if buffer.data is not None:
                buffer.data[to, :, :length] = buffer.data[row, :, :length]

    def _allocated(self, buffer: Buffer, like: Tensor) -> Tensor:
        """Return the buffer's data [rows, heads, capacity, D], allocated when its first part comes."""
        if buffer.data is None:
            buffer.data = like.new_zeros((self._rows, like.shape[1], self._capacity, like.shape[3]))
        return buffer.data


@dataclass(frozen=True)
class TextWriter:
    """A causal model (or Network) that writes `batch` rows at once, and the ids that end a turn.

    Only the first `vocab_size` ids are ever drawn. `model` may have any dtype; on the CPU quantised weights in the
    compiled pass are the fastest, then float32 with packed ones (utils.kernels.packed_linear). With `keep` each
    answer's last token is fed too, so that every token has its state.
    """

    model: Any
    vocab_size: int
    stop_ids: frozenset[int]
    source: Source
    seed: int = 42
    batch: int = 32
    keep: Keep | None = None

    def chats(self, done: Container[int] = (), interrupt: Callable[[], bool] = never) -> Iterator[Ended]:
        """Yield each chat as it finishes, but those `done`.

        Ends when the source does, or at the next token after an interrupt. Raises UserError if the chats of an endless
        source have no answers.
        """
        return _Batch(self, done).run(interrupt)


@dataclass(eq=False)
class _Row:
    """A chat; the cache holds the first `fed` of its `ids`."""

    number: int
    chat: Chat
    ask: Ask = field(init=False)
    ids: list[int] = field(default_factory=list)
    fed: int = 0
    continuations: int = -1  # before this one
    answer: list[int] = field(default_factory=list)
    states: Tensor | None = None  # [capacity, H] of what was fed
    answered: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # ids → their states, at each answer's end


class _Batch:
    """The rows being written. Row i of the cache is rows[i]."""

    def __init__(self, writer: TextWriter, done: Container[int]) -> None:
        self.writer = writer
        self.network = network_of(writer.model)
        self.capacity = min(self.network.context, writer.source.longest)
        network, room = self.network, (writer.batch, self.capacity)
        self.cache: Any = network.ragged_cache(*room) if isinstance(network, FusedNetwork) else RowCache(network, *room)
        self.waiting = _chats(writer.source, done)
        self.rows: list[_Row] = []
        self.fruitless = 0
        self._read: tuple[list[int], SlotCache, Tensor | None] | None = None  # the last prompt read in a separate pass

    def run(self, interrupt: Callable[[], bool]) -> Iterator[Ended]:
        while True:
            while len(self.rows) < self.writer.batch and (row := next(self.waiting, None)):
                self.rows.append(row)
                yield from self._advance(row, None)
            if not self.rows or interrupt():
                return
            self._step()
            for row in [row for row in self.rows if self._complete(row)]:
                yield from self._advance(row, row.answer)

    def _advance(self, row: _Row, answer: list[int] | None) -> Iterator[Ended]:
        """Hand a chat its answer (None: it begins) and begin its next request; yield a chat that ends."""
        if answer and row.states is not None:
            row.answered[tuple(row.ids)] = row.states[: len(row.ids)].clone()
        try:
            ask = row.chat.send(answer)  # type: ignore[arg-type]  # None begins a generator
            while len(ask.prompt) >= self.capacity or not ask.prompt:
                ask = row.chat.send([])
        except StopIteration as ended:
            self._drop(row)
            self.fruitless = 0 if ended.value else self.fruitless + 1
            if self.fruitless >= _FRUITLESS and self.writer.source.endless:
                raise UserError("the target's user turns do not end: give it files or prompts") from None
            if self.writer.keep is not None:
                for line in ended.value:
                    self.writer.keep(line["ids"], line["start"], row.answered[tuple(line["ids"])])
            yield row.number, list(ended.value)
            return
        row.fed = min(common_prefix(row.ids[: row.fed], ask.prompt), len(ask.prompt) - 1)
        row.ask, row.ids, row.answer = ask, list(ask.prompt), []
        row.continuations += 1
        if row.fed == 0 and len(ask.prompt) > _ONE_BY_ONE:
            self._read_prompt(row)

    def _read_prompt(self, row: _Row) -> None:
        """Fill the row's cache with all of its prompt but the last token."""
        ids = row.ids[:-1]
        if self._read is None or self._read[0] != ids:
            fresh: Any = self.network.new_cache(1)
            fed = torch.tensor([ids], device=self.network.device)
            positions = torch.arange(len(ids), device=self.network.device)[None]
            _, hidden = self.network.forward(fed, positions, None, fresh, 1, hidden=self.writer.keep is not None)
            self._read = (ids, fresh, hidden)
        self.cache.fill(self.rows.index(row), self._read[1])
        if self._read[2] is not None:
            self._note(row, self._read[2][0])
        row.fed = len(ids)

    def _note(self, row: _Row, states: Tensor) -> None:
        """Keep the states [T, H] of the row's tokens from the first that is not fed on."""
        if row.states is None:
            row.states = states.new_empty((self.capacity, states.shape[-1]), dtype=KEPT)
        row.states[row.fed : row.fed + len(states)] = states

    @torch.no_grad()
    def _step(self) -> None:
        """Feed every row its next token; rows without one draw one."""
        device = self.network.device
        slots = torch.tensor([row.fed for row in self.rows], device=device)
        fed = torch.tensor([[row.ids[row.fed]] for row in self.rows], device=device)
        mask, kept = self.cache.at(slots), self.writer.keep is not None
        logits, hidden = self.network.forward(fed, slots[:, None], mask, self.cache, 1, hidden=kept)
        for index, row in enumerate(self.rows):
            if hidden is not None:
                self._note(row, hidden[index])
            row.fed += 1
        due = [index for index, row in enumerate(self.rows) if row.fed == len(row.ids) and not self._ended(row)]
        if due:
            chosen = [self.rows[index] for index in due]
            drawn = draw(
                logits[due, 0, : self.writer.vocab_size].float(),
                [row.ask.temperature for row in chosen],
                [stream_key(self.writer.seed, _STREAM + row.continuations, row.number, len(row.ids)) for row in chosen],
            )
            for row, token in zip(chosen, drawn, strict=True):
                row.ids.append(token)
                row.answer.append(token)

    def _complete(self, row: _Row) -> bool:
        """Return whether the row's continuation has ended and all that is kept of it is known."""
        return self._ended(row) and (self.writer.keep is None or row.fed == len(row.ids))

    def _ended(self, row: _Row) -> bool:
        """Return whether the row's continuation has its last token."""
        full = len(row.answer) >= row.ask.limit or len(row.ids) >= self.capacity
        return bool(row.answer) and (full or row.answer[-1] in self.writer.stop_ids)

    def _drop(self, row: _Row) -> None:
        """Remove the row; the last one takes its index."""
        index, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.cache.move(len(self.rows), index, last.fed)
            self.rows[index] = last


def _chats(source: Source, done: Container[int]) -> Iterator[_Row]:
    """Yield the source's chats but those `done`, each as a row that has not begun."""
    for number in count():
        if number not in done:
            chat = source.chat(number)
            if chat is None:
                return
            yield _Row(number, chat)


def draw(logits: Tensor, temperatures: list[float], keys: list[int]) -> list[int]:
    """Return one id a row: [M, V] float32 logits, each row at its temperature (0: the likeliest), by its key's noise.

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
    point = (uniforms([keys[row] for row in warm], 1, logits.device) * total.double()).float()
    point = point.minimum(total.nextafter(torch.zeros_like(total)))
    # The first id whose mass reaches beyond the point: it lies below the total, so no id of probability 0 is drawn.
    for row, token in zip(warm, torch.searchsorted(mass, point, right=True)[:, 0].tolist(), strict=True):
        chosen[row] = token
    return chosen
