"""A Llama-like model over quantised weights as a `Network` whose pass is one compiled call.

**Row invariance** is its contract: the logits, states, keys and values of a token are bit for bit the same whatever
else is in the pass, however the tokens before it were fed, whatever the tree and the threads. So the text cannot
depend on how much was drafted. It holds for one build of the kernels and one processor's instructions; the pass itself
is utils/kernels/pass.c. Knows neither sessions nor sampling.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampling.models.cache import in_order, lasting
from sampling.models.pass_record import BLOCK, PassRecord, linears
from sampling.types import Hidden, KVCache, Room, states_of
from utils.families import UnfitError, facts_of, head_size
from utils.kernels.bindings import ROW, Pass, load
from utils.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear
from utils.loading.packed_gguf import PackedModel
from utils.rotary import table

MOST_QUERIES = 64  # that share a key
GROW = 128  # slots added at least, whenever the cache is full
CACHE_DTYPES = (torch.float16, torch.float32)  # the first unless a model says otherwise


def supports(model: Any) -> bool:
    """Whether `FusedNetwork` computes what `model` does: its facts are known and every product has packed weights."""
    trunk: Any = getattr(model, "model", None)
    ours = isinstance(model, PackedModel) or type(model).__module__.startswith("transformers.")
    if not ours or not isinstance(getattr(trunk, "embed_tokens", None), QuantizedEmbedding):
        return False
    maps = [linears(layer) for layer in trunk.layers]
    try:
        facts_of(text_config(model))
    except UnfitError:
        return False
    return (
        all(maps)
        and all(isinstance(part, QuantizedLinear) for part in [model.lm_head, *chain(*map(dict.values, maps))])
        and maps[0]["q"].out_features <= MOST_QUERIES * maps[0]["k"].out_features
        and len(set((getattr(model, "hf_device_map", None) or {}).values())) <= 1
        and load()
    )


def text_config(model: Any) -> Any:
    """The configuration of what decodes."""
    return model.config.get_text_config(decoder=True)


def release_memory() -> None:
    """Give back what the heap holds unused once everything is loaded."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


class FusedCache:
    """Keys [L, B, H, S/16, D, 16] and values [L, B, H, S, D] in float32 or float16; a :class:`sampling.types.KVCache`.

    A pass over all rows says how many there are. :meth:`shift` only notes its moves in `moves` (row, from, to). The
    next pass makes them just before it writes there; :meth:`settle` makes them for whoever reads or copies the tensors
    sooner.
    """

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, rows: int = 0) -> None:
        self.layers, self.heads, self.size, self.dtype = layers, heads, size, dtype
        self.length, self.rows = 0, rows  # there may be room for more
        self.moves: list[list[int]] = []
        self.keys = self._empty(0, 0, (size, BLOCK))
        self.values = self._empty(0, 0, (BLOCK, size))

    @lasting
    def _empty(self, rows: int, blocks: int, block: tuple[int, int]) -> Tensor:
        return torch.zeros((self.layers, rows, self.heads, blocks, *block), dtype=self.dtype)

    @property
    def slots(self) -> int:
        """How many tokens of a row there is room for."""
        return self.keys.shape[3] * BLOCK

    def reserve(self, rows: int, length: int) -> None:
        """Room for `length` slots of each of `rows` rows."""
        if self.slots >= length and self.rows == rows:
            return
        self.settle()
        filled = -(-self.length // BLOCK)
        blocks = -(-max(length + GROW, length + length // 4) // BLOCK)
        keys, values = self._empty(rows, blocks, (self.size, BLOCK)), self._empty(rows, blocks, (BLOCK, self.size))
        if filled:
            keys[:, :, :, :filled] = self.keys[:, : self.rows, :, :filled]
            values[:, :, :, :filled] = self.values[:, : self.rows, :, :filled]
        self.keys, self.values, self.rows = keys, values, rows

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def resume(self, length: int) -> int:
        return length

    def shift(self, moves: Tensor, length: int) -> None:
        """Slot moves[2] of row moves[0] becomes what slot moves[1] was, moves [3, K]; then the first `length` stay.

        One after the other: no move overwrites a slot that a later one reads.
        """
        self.moves += moves.T.tolist()
        self.length = length

    def settle(self) -> None:
        """Make the moves that wait."""
        waiting, self.moves = self.moves, []
        for row, old, new in waiting:
            keys, values = self.keys[:, row], self.values[:, row]
            keys[:, :, new // BLOCK, :, new % BLOCK] = keys[:, :, old // BLOCK, :, old % BLOCK]
            values[:, :, new // BLOCK, new % BLOCK] = values[:, :, old // BLOCK, old % BLOCK]

    @lasting
    def select(self, rows: Tensor) -> None:
        """Rows that go on in their order move up, in the memory that is there; others are copied."""
        self.settle()
        chosen, filled = rows.tolist(), -(-self.length // BLOCK)
        self.rows = len(chosen)
        if not self.slots:
            return
        if in_order(chosen):
            for place, row in enumerate(chosen):
                if place < row:
                    self.keys[:, place, :, :filled] = self.keys[:, row, :, :filled]
                    self.values[:, place, :, :filled] = self.values[:, row, :, :filled]
        else:
            self.keys, self.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)

    @lasting
    def fork(self) -> FusedCache:
        self.settle()
        twin = FusedCache(self.layers, self.heads, self.size, self.dtype)
        twin.keys, twin.values = self.keys[:, : self.rows].clone(), self.values[:, : self.rows].clone()
        twin.length, twin.rows = self.length, self.rows
        return twin

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K, V [B, H_kv, length, D] in float32, to be read only."""
        if not self.slots:
            raise ValueError("the cache is empty: nothing has been scored yet")
        self.settle()
        filled = -(-self.length // BLOCK)
        keys, values = self.keys[index, : self.rows, :, :filled], self.values[index, : self.rows, :, :filled]
        found = [part.flatten(2, 3)[:, :, : self.length].float() for part in (keys.transpose(3, 4), values)]
        return found[0], found[1]


class FusedRows(FusedCache):
    """`rows` sequences of at most `capacity` tokens, each at a length of its own; a pass feeds one token to each of the
    first N."""

    def __init__(self, like: FusedCache, rows: int, capacity: int) -> None:
        super().__init__(like.layers, like.heads, like.size, like.dtype)
        super().reserve(rows, capacity)

    def reserve(self, rows: int, length: int) -> None:
        """All of it was taken at once."""
        assert rows <= self.keys.shape[1]
        assert length <= self.slots

    def at(self, slots: Tensor) -> None:
        """Row i's next token goes to slot slots[i] [N], which is its position: no mask is needed."""

    def fill(self, row: int, content: FusedCache) -> None:
        """Begin a row with the first row of `content`."""
        content.settle()
        filled = -(-content.length // BLOCK)
        self.keys[:, row, :, :filled] = content.keys[:, 0, :, :filled]
        self.values[:, row, :, :filled] = content.values[:, 0, :, :filled]

    def move(self, row: int, to: int, length: int) -> None:
        """Row `to` becomes the first `length` slots of `row`."""
        filled = -(-length // BLOCK)
        for part in (self.keys, self.values):
            part[:, to, :, :filled] = part[:, row, :, :filled]


def _turning(module: Any, kind: str | None) -> tuple[Tensor, float]:
    """Frequencies and factor of one kind of layers."""
    prefix = f"{kind}_" if kind else ""
    return getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")


_networks: weakref.WeakSet[FusedNetwork] = weakref.WeakSet()


def _forked() -> None:
    """The threads that held locks stayed behind."""
    for network in _networks:
        network._one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class FusedNetwork:
    """A model that :func:`supports` takes. One pass runs at a time; other threads of the interpreter wait for it.

    The model's packed weights are used where they lie. Its cache is in `cache_dtype`, else in the dtype that its loader
    left as `kv_dtype` on the model, else in float16. What enters a product has 8 bits instead of 16 where the head's
    layer says so. ValueError for a model that cannot be computed so.
    """

    takes_trees = ragged = True
    reduced_ids: Tensor | None = None  # logits of all ids
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, model: Any, cache_dtype: torch.dtype | None = None) -> None:
        if not supports(model):
            raise ValueError(f"{type(model).__name__} has no compiled pass: its weights or its shape do not fit")
        config, trunk = text_config(model), model.model
        cache_dtype = cache_dtype or getattr(model, "kv_dtype", None) or CACHE_DTYPES[0]
        self.model, self.cache_dtype = model, cache_dtype
        narrow = bool(model.lm_head.narrow)
        self.layers, self.vocab_size = len(trunk.layers), int(model.lm_head.out_features)
        self.context = int(config.max_position_embeddings)
        maps = linears(trunk.layers[0])
        self._size = head_size(config)
        self._heads = maps["q"].out_features // self._size
        self._shared = maps["k"].out_features // self._size
        self._hidden, self._inner = int(config.hidden_size), int(config.intermediate_size)
        facts = facts_of(config)
        names = list(dict.fromkeys(filter(lambda kind: kind is not None, facts.kinds)))
        self._rotary = [_turning(trunk.rotary_emb, kind) for kind in names]
        self._one_at_a_time = threading.Lock()
        _networks.add(self)
        self._turns = [torch.empty(0, 2 * len(frequency)) for frequency, _ in self._rotary]
        self._record = PassRecord(Pass, (self._hidden, self._inner, self._heads, self._shared, self._size))
        self._record.set(**facts.scalars)
        self._table = self._record.describe(trunk.layers, model.lm_head, family=facts.family)
        self._between = False  # whether states between layers are kept
        for layer, window, kind in zip(self._table, facts.windows, facts.kinds, strict=True):
            layer.window, layer.table = window, -1 if kind is None else names.index(kind)
        self._width = model.lm_head.packed.width
        self._record.set(
            half=cache_dtype == torch.float16,
            embed=self._record.weight(trunk.embed_tokens),
            norm=self._record.gain(trunk.norm, facts.family),
            narrow=narrow,
        )
        release_memory()

    def new_cache(self, rows: int) -> FusedCache:
        """An empty cache."""
        return FusedCache(self.layers, self._shared, self._size, self.cache_dtype, rows)

    def ragged_cache(self, rows: int, capacity: int) -> FusedRows:
        """An empty cache of rows that need not be equally long."""
        return FusedRows(self.new_cache(rows), rows, capacity)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        keep: int,
        hidden: Hidden = False,
        sequences: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`."""
        assert isinstance(cache, FusedCache)
        assert cache.dtype == self.cache_dtype
        count, fed = ids.shape
        tokens, depths = ids.numpy().reshape(-1), positions.numpy()
        last = int(depths.max())
        slots, end = depths, max(cache.length, last + 1)
        if mask is not None:
            slots, end = cache.length + np.arange(fed), cache.length + fed
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise IndexError(f"ids must lie in 0 … {self.vocab_size - 1}")
        with self._one_at_a_time:
            cache.reserve(count if sequences is None else cache.rows, end)
            rows, seen = self._record.rows(
                tokens, depths, mask, slots, None if sequences is None else sequences.numpy()
            )
            wanted = states_of(hidden)
            states = torch.empty(count, fed, len(wanted) * self._hidden) if wanted else None
            logits = self._passed(rows.ctypes.data, count, fed, keep, seen, last, cache, wanted, states)
            cache.length = end
        return logits[..., : self.vocab_size], states

    def of_one_row(
        self,
        new: list[int],
        nodes: list[int],
        parents: Sequence[int],
        cache: KVCache,
        hidden: Hidden = False,
        states: Room | None = None,
    ) -> Tensor:
        """See :class:`sampling.types.RaggedNetwork`: without tensors of a few elements."""
        assert isinstance(cache, FusedCache)
        assert cache.dtype == self.cache_dtype
        first, fed = cache.length, len(new)
        end, count = first + fed, fed + len(nodes)
        whole = first + count
        most, fields, behind = self.vocab_size - 1, list[int](), list[int]()
        for slot, token in enumerate(new, start=first):
            fields += (min(max(token, 0), most), slot, 0, slot, slot + 1, 0, 0)
        paths = list[tuple[int, list[int]]]()  # of each node: how many of the first slots it sees, and which beside
        for slot, (token, parent) in enumerate(zip(nodes, parents, strict=True), start=end):
            sees, more = (end, []) if parent < 0 else paths[parent]
            sees, more = (slot + 1, more) if slot == sees and not more else (sees, [*more, slot])
            paths.append((sees, more))
            fields += (min(max(token, 0), most), sees + len(more) - 1, 0, slot, sees, len(behind), len(more))
            behind += more
        numbers = np.array([*fields, *behind], np.int64)
        address = numbers.ctypes.data
        if behind:
            rows = numbers[: -len(behind)].view(ROW)
            rows["more"] = address + rows.nbytes + 8 * rows["more"]
        with self._one_at_a_time:
            cache.reserve(1, whole)
            wanted = () if states is None else states_of(hidden)
            kept = states(count, len(wanted) * self._hidden) if states is not None and wanted else None
            logits = self._passed(address, 1, count, len(nodes) + 1, whole, whole - 1, cache, wanted, kept)
            cache.length = whole
        return logits[..., : self.vocab_size]

    def _passed(
        self,
        rows: int,
        count: int,
        fed: int,
        keep: int,
        seen: int,
        last: int,
        cache: FusedCache,
        wanted: tuple[int, ...],
        states: Tensor | None,
    ) -> Tensor:
        """The pass over `fed` rows each of `count` sequences, which the address `rows` describes: logits of the last
        `keep` [B, keep, n or more]; the states wanted go to `states`. `seen`: the most slots that one sees, `last`: the
        last position."""
        logits = torch.empty(count, keep, self._width)
        places = (
            {}
            if states is None
            else {one: states.data_ptr() + 4 * self._hidden * place for place, one in enumerate(wanted)}
        )
        if self._between or any(layer >= 0 for layer in wanted):
            for index, layer in enumerate(self._table):
                layer.states = places.get(index)
            self._between = True
        self._record.prepare(count * fed, count * keep, seen)
        record = self._record.record
        for index, (turns, rotary) in enumerate(zip(self._turns, self._rotary, strict=True)):
            if last >= len(turns):
                self._turns[index] = torch.cat([turns, table(*rotary, len(turns), last + 1)])
                record.tables[index] = self._turns[index].data_ptr()
        moves = np.array(cache.moves, np.int64)
        record.rows, record.fed, record.kept, record.row = count * fed, fed, keep, rows
        record.batch, record.slots = cache.keys.shape[1], cache.slots
        record.keys, record.values = cache.keys.data_ptr(), cache.values.data_ptr()
        record.moved, record.moves = len(moves), moves.ctypes.data
        record.logits, record.states = logits.data_ptr(), places.get(-1)
        record.states_row = len(wanted) * self._hidden
        self._record.run(torch.get_num_threads())
        cache.moves.clear()
        return logits
