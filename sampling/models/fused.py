"""A Llama-like model over quantised weights as a `Network` whose pass is one compiled call.

**Row invariance** is its contract: the logits, states, keys and values of a token are bit for bit the same whatever
else is in the pass, however the tokens before it were fed, whatever the tree and the threads. So the text cannot
depend on how much was drafted. The pass itself is utils/kernels/pass.c; its record (utils/kernels/kernels.h) has a
model's facts and weights, working memory and rows. Knows neither sessions nor sampling.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampling.models.cache import outside_inference_mode
from sampling.types import Allocate, DraftTree, Hidden, KVCache, Moves, states_of
from utils.errors import UnfitError
from utils.families import LLAMA, Family, facts_of, head_size, rotation_of, table
from utils.kernels.bindings import (
    CODES,
    FEW,
    FLOATS,
    GROUP,
    PASS,
    PICK,
    ROW,
    ROW_FIELDS,
    STEP,
    TILE,
    Expert,
    LayerStruct,
    PassStruct,
    StepStruct,
    Structure,
    load,
    packer,
    run,
)
from utils.kernels.quantized_linear import PackedWeight, QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from utils.loading.packed_gguf import PackedModel
from utils.objects import HfModel

BLOCK = 16  # slots whose keys lie side by side
STEP_OF_SCORES = 128  # slots by which the memory for scores grows
NO_MOVES = array("q")
MORE = slice(ROW_FIELDS.index("more"), None, len(ROW_FIELDS))  # of the fields of rows
CALL = packer("Pass", "rows", "states_row")  # what differs from pass to pass


def linears(layer: HfModel) -> dict[str, Any]:
    """A decoder layer's linear maps by their fields in the pass; {} for a layer that lacks one."""
    attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
    maps = {name: getattr(attention, f"{name}_proj", None) for name in "qkvo"}
    joined = getattr(attention, "qkv_proj", None), getattr(mlp, "gate_up_proj", None)
    if isinstance(joined[0], QuantizedLinear) and maps["o"] is not None:
        queries = maps["o"].in_features
        keys = (joined[0].out_features - queries) // 2
        maps |= zip("qkv", joined[0].parts(queries, keys, keys), strict=False)
    if isinstance(getattr(mlp, "experts", None), QuantizedExperts):
        return maps if None not in maps.values() else {}
    maps |= {name: getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")}
    if isinstance(joined[1], QuantizedLinear):
        inner = joined[1].out_features // 2
        maps |= zip(("gate", "up"), joined[1].parts(inner, inner), strict=False)
    return maps if None not in maps.values() else {}


class PassRecord:
    """A :class:`PassStruct` or :class:`StepStruct` and the memory that its addresses point to; one pass runs at a time.

    `sizes`: width of a hidden state, width inside the MLP, heads of queries, heads of keys, size of a head. `codes`:
    further fields that need memory for rows of activations as integer codes, with the width of a row.
    """

    def __init__(
        self,
        kind: type[Structure],
        sizes: tuple[int, int, int, int, int],
        codes: dict[str, int] | None = None,
    ) -> None:
        self.record: Any = kind()
        self.held: list[Any] = []
        self._floats = False  # whether some weights are floats, whose products read float activations
        self._work = STEP if issubclass(kind, StepStruct) else PASS
        self._sizes, self._codes = sizes, codes or {}
        self._scratch: dict[str, Tensor] = {}
        self._prepared: tuple[int, ...] = ()
        self._sizes_of: dict[tuple[int, ...], dict[str, int]] = {}  # the fields of each earlier `_prepared`
        self._more = np.zeros(0, np.int64)
        hidden, inner, heads, shared, size = sizes
        unscaled = {"embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
        self.set(hidden=hidden, inner=inner, heads=heads, shared=shared, size=size, rotary_dim=size, **unscaled)

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.record, name, value)

    def run_over(
        self,
        cache: "FusedCache",
        sizes: tuple[int, int, int],
        rows: int,
        logits: Tensor,
        states: int = 0,
        states_row: int = 0,
        begin: int = 0,
    ) -> None:
        """Make the noted moves of the cache and run the pass over the rows at the address `rows` and the slots from
        `begin` on.

        `sizes`: B sequences, rows fed of each, rows of each that get logits. `logits` [B, keep, n] are written, and
        states, `states_row` numbers a row, at the address `states`; 0: nowhere.
        """
        skipped, (keys, values), (count, fed, kept) = begin * cache.size * cache.dtype.itemsize, cache.addresses, sizes
        moves = array("q", chain(*cache.moves)) if cache.moves else NO_MOVES
        moved, numbers = (len(cache.moves), moves.buffer_info()[0]), (logits.data_ptr(), states, states_row)
        memory = cache.batch, cache.slots, keys + skipped, values + skipped
        CALL.pack_into(self.record, PassStruct.rows.offset, count * fed, fed, kept, rows, *memory, *moved, *numbers)
        run(self._work, self.record, torch.get_num_threads())
        cache.moves.clear()

    def address(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor's numbers, of any shape, in float32; None for None."""
        if tensor is None:
            return None
        self.held.append(tensor.detach().to(torch.float32).contiguous())
        return int(self.held[-1].data_ptr())

    def gain(self, norm: Any, family: Family) -> int | None:
        """Return the address of a norm's gains; None for None."""
        weight = getattr(norm, "weight", None)
        return self.address(1 + weight if family.gain_above_one and weight is not None else weight)

    def weight(self, linear: Any) -> Structure:
        """Return the record of a layer's weight and bias; a weight that is not packed is packed as floats."""
        packed = getattr(linear, "packed", None) or PackedWeight.floats(linear.weight.float())
        return self.packed(packed, self.address(getattr(linear, "bias", None)))

    def packed(self, weight: PackedWeight, bias: int | None = None) -> Structure:
        """Return the record of a packed weight."""
        self.held.append(weight)
        self._floats |= weight.kind in FLOATS
        return weight.described(bias)

    def mixture(self, entry: Any, mlp: Any) -> None:
        """Set a layer's experts, the shared one after the others, its gate and the router."""
        shared = getattr(mlp, "shared_expert", None)
        table = (Expert * (len(mlp.experts.experts) + (shared is not None)))()
        for expert, weights in zip(table, mlp.experts.experts, strict=False):
            expert.gate, expert.up, expert.down = map(self.packed, weights)
        if shared is not None:
            for name in ("gate", "up", "down"):
                setattr(table[-1], name, self.weight(getattr(shared, f"{name}_proj")))
            entry.shared_gate = self.weight(mlp.shared_expert_gate)
        entry.router = self.weight(mlp.gate)
        self.held.append(table)
        self.set(expert_inner=max(self.record.expert_inner, *(expert.gate.rows for expert in table)))
        entry.experts = ctypes.addressof(table)

    def describe(
        self,
        layers: Any,
        head: QuantizedLinear,
        take: Callable[[Any], QuantizedLinear] = lambda linear: linear,
        family: Family = LLAMA,
    ) -> Any:
        """Set the decoder `layers`, whose linear maps `take` packs, and the head; return the layers' table."""
        table = (LayerStruct * len(layers))()
        for entry, layer in zip(table, layers, strict=True):
            for name, linear in linears(layer).items():
                setattr(entry, name, self.weight(take(linear)))
            if hasattr(layer.mlp, "experts"):
                self.mixture(entry, layer.mlp)
            entry.wide_norm = family.qk_norm == "all"
            for name, norm in family.norms.items():
                setattr(entry, name, self.gain(getattr(layer, norm), family))
            for name in ("q_norm", "k_norm"):
                setattr(entry, name, self.gain(getattr(layer.self_attn, name, None), family))
        self.held.append(table)
        self.set(layers=len(table), layer=ctypes.addressof(table), head=self.weight(head))
        return table

    def prepare(self, rows: int, kept: int, seen: int) -> None:
        """Get memory for a pass of `rows` rows, `kept` of them with logits, that see up to `seen` slots.

        Sizes are rounded up, so that most later passes need no new memory.
        """
        rows = -(-max(rows, kept) // FEW) * FEW
        threads, line = torch.get_num_threads(), -(-seen // STEP_OF_SCORES) * STEP_OF_SCORES + BLOCK
        key = rows, threads, line
        if self._prepared == key:
            return
        self._prepared = key
        if key in self._sizes_of:  # its memory is there
            self.set(**self._sizes_of[key])
            return
        hidden, inner, heads, shared, size = self._sizes
        queries = TILE * (heads // shared)
        scores, buffer = (TILE + 1) * (heads // shared) * line, max(queries * size, 4 * BLOCK * TILE)
        normed = rows * hidden // GROUP
        sizes = {"scores_row": line, "scores_size": scores, "buffer_size": buffer}
        self._sizes_of[key] = sizes | {"normed_codes": normed, "normed_floats": rows * hidden}
        self.set(**self._sizes_of[key])
        needed = {
            **dict.fromkeys(("x", "side"), 4 * rows * hidden),
            "qkv": 4 * rows * (heads + 2 * shared) * size,
            "scores": 4 * threads * scores,
            "buffer": 4 * threads * buffer,
            **{name: rows * width // GROUP * CODES for name, width in self._codes.items()},
        }
        inputs = {"normed": normed * (threads if rows <= FEW else 1) * GROUP, "mixed": rows * heads * size}
        if experts := self.record.experts:
            each = self.record.chosen + bool(self.record.common)
            needed |= {"route": 4 * rows * (experts + 2 * BLOCK), "first": 8 * (experts + 2)}
            needed |= {"picks": PICK * rows * each}
            inputs |= {"routed": rows * each * hidden}
            inner = max(inner, each * self.record.expert_inner)
        for name, numbers in {**inputs, "gated": rows * inner}.items():
            needed |= {f"{name}.codes": numbers // GROUP * CODES, f"{name}.floats": 4 * numbers * self._floats}
        for name, count in needed.items():
            if name not in self._scratch or self._scratch[name].numel() < count:
                self._scratch[name] = torch.zeros(count + count // 4, dtype=torch.uint8)
                field, _, part = name.partition(".")
                owner = getattr(self.record, field) if part else self.record
                setattr(owner, part or field, self._scratch[name].data_ptr())

    def rows(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        mask: Tensor | None,
        slots: np.ndarray,
        sequences: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int]:
        """Return the records of rows, and the most slots that a row sees.

        ids [B · T]; positions [B, T]; slots [T], the same for all sequences, or [B, T]; mask [B or 1, 1, T, S] and
        sequences [B] as in :class:`sampling.types.RaggedNetwork`. The rows point to a list that lives until the next
        call.
        """
        count, fed = positions.shape
        rows = np.zeros(len(ids), ROW)
        by_sequence = rows.reshape(count, fed)
        rows["id"], by_sequence["position"] = ids, positions
        by_sequence["sequence"] = (np.arange(count) if sequences is None else sequences)[:, None]
        by_sequence["slot"] = slots
        if mask is None:
            rows["seen"] = rows["slot"] + 1
            return rows, int(rows["seen"].max())
        seen = (mask > torch.finfo(mask.dtype).min / 2).expand(count, 1, fed, -1).reshape(count * fed, -1).numpy()
        rows["seen"] = np.where(seen.all(axis=1), seen.shape[1], seen.argmin(axis=1))
        others = seen & (np.arange(seen.shape[1]) >= rows["seen"][:, None])
        rows["count"] = others.sum(axis=1)
        self._more = np.nonzero(others)[1].astype(np.int64)
        rows["more"] = self._more.ctypes.data + 8 * (np.cumsum(rows["count"]) - rows["count"])
        return rows, int((rows["seen"] + rows["count"]).max())


MOST_QUERIES = 64  # the most heads of queries that share a head of keys
GROW = 256  # slots added at least, whenever the cache is full
TURNED = 256  # positions by which rotary tables grow at least
CACHE_DTYPES = (torch.float16, torch.float32)  # the first unless a model says otherwise


def supports(model: HfModel) -> bool:
    """Whether `FusedNetwork` computes `model`: its facts are known and every product has packed weights."""
    trunk: HfModel = getattr(model, "model", None)
    ours = isinstance(model, PackedModel) or type(model).__module__.startswith("transformers.")
    if not ours or not isinstance(getattr(trunk, "embed_tokens", None), QuantizedEmbedding):
        return False
    maps = [linears(layer) for layer in trunk.layers]
    try:
        facts_of(model.config.get_text_config(decoder=True))
    except UnfitError:
        return False
    return (
        all(maps)
        and all(isinstance(part, QuantizedLinear) for part in [model.lm_head, *chain(*map(dict.values, maps))])
        and maps[0]["q"].out_features <= MOST_QUERIES * maps[0]["k"].out_features
        and len(set((getattr(model, "hf_device_map", None) or {}).values())) <= 1
        and load()
    )


class FusedCache:
    """Keys [L, B, H, S/16, D, 16] and values [L, B, H, S/16, 16, D] in float32 or float16, of L layers and H heads of
    keys; a :class:`sampling.types.KVCache`.

    :meth:`shift` only notes its moves in `moves` (row, from, to). The next pass makes them just before it writes;
    :meth:`settle` makes them before the tensors are read or copied.
    """

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, rows: int = 0) -> None:
        self.layers, self.heads, self.size, self.dtype = layers, heads, size, dtype
        self.length, self.rows = 0, rows
        self.moves = list[tuple[int, int, int]]()
        self._hold(self._empty(0, 0, (size, BLOCK)), self._empty(0, 0, (BLOCK, size)))

    @outside_inference_mode
    def _empty(self, rows: int, blocks: int, block: tuple[int, int]) -> Tensor:
        return torch.zeros((self.layers, rows, self.heads, blocks, *block), dtype=self.dtype)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        """Keep these tensors, which have room for `batch` rows of `slots` tokens, and their addresses."""
        self.keys, self.values, self.addresses = keys, values, (keys.data_ptr(), values.data_ptr())
        self.batch, self.slots = keys.shape[1], keys.shape[3] * BLOCK

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `length` slots of each of `rows` rows."""
        if self.slots >= length and self.rows == rows:
            return
        self.settle()
        filled = -(-self.length // BLOCK)
        blocks = -(-max(length + GROW, length + length // 4) // BLOCK)
        keys, values = self._empty(rows, blocks, (self.size, BLOCK)), self._empty(rows, blocks, (BLOCK, self.size))
        if filled:
            keys[:, :, :, :filled] = self.keys[:, : self.rows, :, :filled]
            values[:, :, :, :filled] = self.values[:, : self.rows, :, :filled]
        self._hold(keys, values)
        self.rows = rows

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def resume(self, length: int) -> int:
        return length

    def shift(self, moves: Moves, length: int) -> None:
        """Note the moves, which are made one after the other; keep the first `length` slots."""
        self.moves += moves
        self.length = length

    def settle(self) -> None:
        """Make the noted moves."""
        waiting, self.moves = self.moves, []
        for row, old, new in waiting:
            keys, values = self.keys[:, row], self.values[:, row]
            keys[:, :, new // BLOCK, :, new % BLOCK] = keys[:, :, old // BLOCK, :, old % BLOCK]
            values[:, :, new // BLOCK, new % BLOCK] = values[:, :, old // BLOCK, old % BLOCK]

    @outside_inference_mode
    def select(self, rows: Tensor) -> None:
        self.settle()
        self.rows = len(rows)
        if self.slots:
            self._hold(self.keys.index_select(1, rows), self.values.index_select(1, rows))

    @outside_inference_mode
    def fork(self) -> "FusedCache":
        self.settle()
        twin = FusedCache(self.layers, self.heads, self.size, self.dtype)
        twin._hold(self.keys[:, : self.rows].clone(), self.values[:, : self.rows].clone())
        twin.length, twin.rows = self.length, self.rows
        return twin

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return K, V [B, H_kv, length, D] in float32, to be read only. ValueError before the first pass."""
        if not self.slots:
            raise ValueError("the cache is empty: nothing has been scored yet")
        self.settle()
        filled = -(-self.length // BLOCK)
        keys, values = self.keys[index, : self.rows, :, :filled], self.values[index, : self.rows, :, :filled]
        keys, values = (part.flatten(2, 3)[:, :, : self.length].float() for part in (keys.transpose(3, 4), values))
        return keys, values


class FusedNetwork:
    """A model that :func:`supports` takes. One pass runs at a time; other threads of the interpreter wait for it.

    It uses the model's packed weights in place. Its cache is in `cache_dtype`, else in the model's `kv_dtype`, else in
    float16. Activations have 8 bits instead of 16 if the head's layer is `narrow`.

    Raises:
        ValueError: `supports` refuses the model.
    """

    takes_trees = True
    reduced_ids: Tensor | None = None  # logits of all ids
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, model: HfModel, cache_dtype: torch.dtype | None = None) -> None:
        if not supports(model):
            raise ValueError(f"{type(model).__name__} has no compiled pass: its weights or its shape do not fit")
        config, trunk, head = model.config.get_text_config(decoder=True), model.model, model.lm_head
        facts, maps = facts_of(config), linears(trunk.layers[0])
        self.model, self.cache_dtype = model, cache_dtype or getattr(model, "kv_dtype", None) or CACHE_DTYPES[0]
        self.layers, self.vocab_size = len(trunk.layers), int(head.out_features)
        self.context, self._width = int(config.max_position_embeddings), head.packed.width
        self._hidden, self._size = int(config.hidden_size), head_size(config)
        heads, self._shared = (maps[name].out_features // self._size for name in "qk")
        kinds = [kind for kind in dict.fromkeys(facts.kinds) if kind is not None]
        self._rotary = [rotation_of(trunk.rotary_emb, kind) for kind in kinds]
        self._angles = [torch.empty(0, 2 * len(frequency)) for frequency, _ in self._rotary]
        self._positions = 0  # of these tables
        self._kept: dict[int, int] = {}  # layers before which the last pass kept states, and the addresses of these
        self._one_at_a_time = threading.Lock()
        self._record = PassRecord(
            PassStruct, (self._hidden, int(config.intermediate_size), heads, self._shared, self._size)
        )
        self._record.set(
            **facts.scalars,
            half=self.cache_dtype == torch.float16,
            embed=self._record.weight(trunk.embed_tokens),
            norm=self._record.gain(trunk.norm, facts.family),
            narrow=bool(head.narrow),
        )
        self._table = [*self._record.describe(trunk.layers, head, family=facts.family)]  # each made once
        for layer, window, kind in zip(self._table, facts.windows, facts.kinds, strict=True):
            layer.window, layer.table = window, -1 if kind is None else kinds.index(kind)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc: return unused heap memory to the system
            libc.malloc_trim(0)

    @property
    def ragged(self) -> "FusedNetwork":
        """Return the network itself: rows may begin at different slots."""
        return self

    def new_cache(self, rows: int) -> FusedCache:
        """An empty cache."""
        return FusedCache(self.layers, self._shared, self._size, self.cache_dtype, rows)

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
        """Run as :class:`sampling.types.RaggedNetwork` says. `sequences` [B]: the rows of the cache that these are;
        None: all."""
        assert isinstance(cache, FusedCache)
        count, fed = ids.shape
        tokens, depths = ids.numpy().reshape(-1), positions.numpy()
        last = int(depths.max())
        slots, end = depths, max(cache.length, last + 1)
        if mask is not None:
            slots, end = cache.length + np.arange(fed), cache.length + fed
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise IndexError(f"ids must lie in 0 … {self.vocab_size - 1}")
        wanted, numbers = states_of(hidden), None if sequences is None else sequences.numpy()
        states = torch.empty(count, fed, len(wanted) * self._hidden) if wanted else None
        with self._one_at_a_time:
            cache.reserve(count if sequences is None else cache.rows, end)
            rows, seen = self._record.rows(tokens, depths, mask, slots, numbers)
            address = None if states is None else states.data_ptr()
            logits = self._run(rows.ctypes.data, (count, fed, keep), seen, last, cache, wanted, address)
            cache.length = end
        return logits, states

    def of_one_row(
        self,
        new: list[int],
        tree: DraftTree,
        cache: KVCache,
        hidden: Hidden = False,
        states: Allocate | None = None,
    ) -> Tensor:
        """Run a pass over the next tokens of one row and the N nodes of its draft → logits [1, N+1, n].

        `states` gives memory for the hidden states. Lists are faster than tensors of a few elements.
        """
        assert isinstance(cache, FusedCache)
        first, count = cache.length, len(new) + len(tree.tokens)
        end, fields, others = first + len(new), list[int](), list[int]()
        for slot, token in enumerate(new, start=first):
            fields += (token, slot, 0, slot, slot + 1, 0, 0)
        # of each node: how many of the first slots it sees, and which others, of which `others` is the list
        paths = list[tuple[int, list[int]]]()
        for slot, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=end):
            seen, more = (end, []) if parent < 0 else paths[parent]
            seen, more = (slot + 1, more) if slot == seen and not more else (seen, [*more, slot])
            paths.append((seen, more))
            fields += (token, seen + len(more) - 1, 0, slot, seen, 8 * len(others), len(more))
            others += more
        slots = array("q", others)
        if others:
            fields[MORE] = [slots.buffer_info()[0] + offset for offset in fields[MORE]]
        rows = array("q", fields)
        wanted = () if states is None else states_of(hidden)
        with self._one_at_a_time:
            cache.reserve(1, first + count)
            kept = states(count, len(wanted) * self._hidden) if states is not None and wanted else None
            sizes = 1, count, len(tree.tokens) + 1
            logits = self._run(rows.buffer_info()[0], sizes, first + count, first + count - 1, cache, wanted, kept)
            cache.length = first + count
        return logits

    def _turn(self, positions: int) -> None:
        """Extend the rotary tables to `positions` + TURNED."""
        positions += TURNED
        for index, (angles, rotation) in enumerate(zip(self._angles, self._rotary, strict=True)):
            self._angles[index] = torch.cat([angles, table(*rotation, len(angles), positions)])
            self._record.record.tables[index] = self._angles[index].data_ptr()
        self._positions = min(map(len, self._angles), default=positions)

    def _run(
        self,
        rows: int,
        sizes: tuple[int, int, int],
        seen: int,
        last: int,
        cache: FusedCache,
        wanted: tuple[int, ...],
        states: int | None,
    ) -> Tensor:
        """Run the pass over the rows at the address `rows`; return logits [B, keep, n]. The wanted states are written
        to the address `states`.

        `sizes`: sequences B, rows fed of each, the last rows of each that get logits; `seen`: the most slots that a row
        sees; `last`: the last position.
        """
        assert cache.dtype == self.cache_dtype
        count, fed, keep = sizes
        logits, size = torch.empty(count, keep, self._width), 4 * self._hidden
        addresses = {} if states is None else {layer: states + size * at for at, layer in enumerate(wanted)}
        last_states = addresses.pop(-1, 0)
        for layer in {**self._kept, **addresses}:
            self._table[layer].states = addresses.get(layer)
        self._kept = addresses
        if last >= self._positions:
            self._turn(last + 1)
        self._record.prepare(count * fed, count * keep, seen)
        self._record.run_over(cache, sizes, rows, logits, last_states, len(wanted) * self._hidden)
        return logits if self._width == self.vocab_size else logits[..., : self.vocab_size]
