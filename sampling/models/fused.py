"""A Llama-like model over quantised weights as a `Network` whose pass is one compiled call.

**Row invariance** is its contract: the logits, states, keys and values of a token are bit for bit the same whatever
else is in the pass, however the tokens before it were fed, whatever the tree and the threads. So the text cannot
depend on how much was drafted. It holds for one build of the kernels and one processor's instructions; the pass itself
is sampling/models/compiled_pass.py. Knows neither sessions nor sampling.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampling.models import llama
from sampling.types import Hidden, KVCache, states_of
from utils.kernels.blocks import COLUMNS, GROUP
from utils.kernels.compiler import put_away
from utils.kernels.instruction_sets import instruction_set
from utils.kernels.quantized_linear import PackedWeight, QuantizedEmbedding, QuantizedLinear
from utils.kernels.team import introduce, run
from utils.loading.packed_gguf import PackedModel, head_size

FAMILIES = (*llama.FAMILIES, "Qwen3ForCausalLM")
BLOCK = 16  # slots whose keys lie side by side
GROW = 128  # slots added at least, whenever the cache is full; positions whose angles are worked out at once
CACHE_DTYPES = (torch.float16, torch.float32)  # the first unless a model says otherwise
_PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


def supports(model: Any) -> bool:
    """Whether `FusedNetwork` computes what `model` does: a model of the families whose every product has packed
    weights, without biases but those of queries, keys and values."""
    if instruction_set() is None or not (isinstance(model, PackedModel) or llama.supports(model, FAMILIES)):
        return False
    trunk = model.model
    size = head_size(model.config)
    linears = [_linears(layer) for layer in trunk.layers]
    packed = [model.lm_head, *(one for each in linears for one in each.values())]
    biased = [model.lm_head, *(each[name] for each in linears for name in ("o", "gate", "up", "down"))]
    return (
        isinstance(trunk.embed_tokens, QuantizedEmbedding)
        and all(isinstance(one, QuantizedLinear) for one in packed)
        and all(one.bias is None for one in biased)
        and size % GROUP == 0
        and model.config.hidden_size % GROUP == 0
        and linears[0]["gate"].out_features % GROUP == 0
    )


def _linears(layer: Any) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    parents = {name: mlp if name in ("gate", "up", "down") else attention for name in _PROJECTIONS}
    return {name: getattr(parent, f"{name}_proj") for name, parent in parents.items()}


class FusedCache:
    """Keys [L, B, H, S/16, D, 16] and values [L, B, H, S, D] in float32 or float16; a :class:`sampling.types.KVCache`.

    Its number of rows is that of the first pass.
    """

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype) -> None:
        self.layers, self.heads, self.size, self.dtype = layers, heads, size, dtype
        self.length = 0
        self.keys = self._empty(0, 0, (size, BLOCK))
        self.values = self._empty(0, 0, (BLOCK, size))

    def _empty(self, rows: int, blocks: int, block: tuple[int, int]) -> Tensor:
        return torch.zeros((self.layers, rows, self.heads, blocks, *block), dtype=self.dtype)

    @property
    def slots(self) -> int:
        """How many tokens of a row there is room for."""
        return self.keys.shape[3] * BLOCK

    def reserve(self, rows: int, length: int) -> None:
        """Room for `length` slots of each of `rows` rows."""
        if self.slots >= length and self.keys.shape[1] == rows:
            return
        filled = -(-self.length // BLOCK)
        blocks = -(-max(length + GROW, length + length // 4) // BLOCK)
        keys, values = self._empty(rows, blocks, (self.size, BLOCK)), self._empty(rows, blocks, (BLOCK, self.size))
        if filled:
            keys[:, :, :, :filled] = self.keys[:, :, :, :filled]
            values[:, :, :, :filled] = self.values[:, :, :, :filled]
        self.keys, self.values = keys, values

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def shift(self, moves: Tensor, length: int) -> None:
        """Slot moves[2] of row moves[0] becomes what slot moves[1] was, moves [3, K]; then the first `length` stay."""
        rows, old, new = moves
        keys = self.keys[:, rows, :, old // BLOCK, :, old % BLOCK]
        values = self.values[:, rows, :, old // BLOCK, old % BLOCK]
        self.keys[:, rows, :, new // BLOCK, :, new % BLOCK] = keys
        self.values[:, rows, :, new // BLOCK, new % BLOCK] = values
        self.length = length

    def select(self, rows: Tensor) -> None:
        if self.slots:
            self.keys, self.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)

    def fork(self) -> FusedCache:
        twin = FusedCache(self.layers, self.heads, self.size, self.dtype)
        twin.keys, twin.values, twin.length = self.keys.clone(), self.values.clone(), self.length
        return twin

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K, V [B, H_kv, length, D] in float32, to be read only."""
        if not self.slots:
            raise ValueError("the cache is empty: nothing has been scored yet")
        filled = -(-self.length // BLOCK)
        keys, values = self.keys[index, :, :, :filled].transpose(3, 4), self.values[index, :, :, :filled]
        found = [part.flatten(2, 3)[:, :, : self.length].float() for part in (keys, values)]
        return found[0], found[1]


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

    takes_trees = True
    short_list: Tensor | None = None  # logits of all ids
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, model: Any, cache_dtype: torch.dtype | None = None) -> None:
        if not supports(model):
            raise ValueError(f"{type(model).__name__} has no compiled pass: its weights or its shape do not fit")
        from sampling.models.compiled_pass import LAYER, PASS, mix_entry, score_entry, whole_pass
        from utils.kernels.products import columns_entry, narrow_columns_entry

        config, trunk = model.config, model.model
        cache_dtype = cache_dtype or getattr(model, "kv_dtype", None) or CACHE_DTYPES[0]
        self.model, self.cache_dtype = model, cache_dtype
        narrow = bool(model.lm_head.narrow)
        self.layers, self.vocab_size = len(trunk.layers), int(model.lm_head.out_features)
        self.context = int(config.max_position_embeddings)
        attention = trunk.layers[0].self_attn
        self._size = head_size(config)
        self._heads = attention.q_proj.out_features // self._size
        self._shared = attention.k_proj.out_features // self._size
        self._hidden, self._inner = int(config.hidden_size), trunk.layers[0].mlp.gate_proj.out_features
        self._rotary = trunk.rotary_emb
        self._one_at_a_time = threading.Lock()
        _networks.add(self)
        self._held: list[Any] = []  # what the addresses below point to
        self._scratch: dict[str, Tensor] = {}
        self._turns = torch.empty(0, self._size)
        self._function = whole_pass.address
        self._record = np.zeros(1, PASS)
        self._values, self._places = self._record.view(np.int64), {name: at for at, name in enumerate(PASS.names or ())}
        self._prepared: tuple[int, ...] = ()
        introduce(self._record)
        head, embed = model.lm_head.packed, trunk.embed_tokens.packed
        self._table = table = np.zeros(self.layers, LAYER)
        for entry, layer in zip(table, trunk.layers, strict=True):
            self._describe(entry, layer)
        constants = np.array([config.rms_norm_eps, self._size**-0.5], np.float32)
        self._held += [constants, head, embed]
        self._set(
            layers=self.layers,
            hidden=self._hidden,
            inner=self._inner,
            heads=self._heads,
            shared=self._shared,
            size=self._size,
            vocab_blocks=len(head.data),
            half=int(cache_dtype == torch.float16),
            wide=cache_dtype.itemsize,
            table=table.ctypes.data,
            embed=embed.address,
            embed_layout=embed.number,
            head=head.address,
            head_layout=head.number,
            norm=self._address(trunk.norm.weight),
            epsilon=constants.ctypes.data,
            scale=constants.ctypes.data + 4,
            narrow=int(narrow),
            columns=(narrow_columns_entry if narrow else columns_entry).address,
            score=score_entry.address,
            mix=mix_entry.address,
        )
        put_away()

    def _describe(self, entry: Any, layer: Any) -> None:
        attention = layer.self_attn
        entry["before"] = self._address(layer.input_layernorm.weight)
        entry["after"] = self._address(layer.post_attention_layernorm.weight)
        for name, linear in _linears(layer).items():
            packed: PackedWeight = linear.packed
            self._held.append(packed)
            entry[name], entry[f"{name}_layout"] = packed.address, packed.number
            if name in ("q", "k", "v"):
                entry[f"{name}_bias"] = self._address(linear.bias)
        for name in ("q_norm", "k_norm"):
            entry[name] = self._address(getattr(getattr(attention, name, None), "weight", None))

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._held.append(tensor.detach().to(torch.float32).contiguous())
        address: int = self._held[-1].data_ptr()
        return address

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self._values[self._places[name]] = value

    def new_cache(self, rows: int) -> FusedCache:
        """An empty cache; it takes the number of rows from what is first fed."""
        return FusedCache(self.layers, self._shared, self._size, self.cache_dtype)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`."""
        assert isinstance(cache, FusedCache)
        assert cache.dtype == self.cache_dtype
        count, fed = ids.shape
        tokens, depths = ids.numpy().reshape(-1), positions.numpy().reshape(-1)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise IndexError(f"ids must lie in 0 … {self.vocab_size - 1}")
        with self._one_at_a_time:
            cache.reserve(count, cache.length + fed)
            rows, seen = self._rows(tokens, depths, fed, mask, cache.length)
            width = int(self._values[self._places["vocab_blocks"]]) * COLUMNS
            logits = torch.empty(count, keep, width)
            wanted = states_of(hidden)
            states = torch.empty(count, fed, len(wanted) * self._hidden) if wanted else None
            places = (
                {}
                if states is None
                else {one: states.data_ptr() + 4 * self._hidden * place for place, one in enumerate(wanted)}
            )
            self._table["states"] = [places.get(layer, 0) for layer in range(self.layers)]
            self._prepare(count * fed, count * keep, int(depths.max()) + 1, seen)
            self._set(
                rows=count * fed,
                kept=keep,
                fed=fed,
                batch=count,
                slots=cache.slots,
                row=rows.ctypes.data,
                keys=cache.keys.data_ptr(),
                values=cache.values.data_ptr(),
                logits=logits.data_ptr(),
                states=places.get(-1, 0),
                states_row=len(wanted) * self._hidden,
            )
            run(self._function, self._record, torch.get_num_threads())
            cache.length += fed
        return logits[..., : self.vocab_size], states

    def _rows(
        self, ids: np.ndarray, positions: np.ndarray, fed: int, mask: Tensor | None, start: int
    ) -> tuple[np.ndarray, int]:
        """What the pass must know of each row, `fed` of each sequence, and the most slots that one of them sees."""
        from sampling.models.compiled_pass import ROW

        count = len(ids) // fed
        rows = np.zeros(len(ids), ROW)
        by_sequence = rows.reshape(count, fed)
        rows["id"], rows["position"] = ids, positions
        by_sequence["sequence"] = np.arange(count)[:, None]
        by_sequence["slot"] = np.arange(start, start + fed)
        if mask is None:
            by_sequence["seen"] = np.arange(start + 1, start + fed + 1)
            return rows, start + fed
        open_ = (mask > torch.finfo(mask.dtype).min / 2).expand(count, 1, fed, -1).reshape(count * fed, -1).numpy()
        first = np.where(open_.all(axis=1), open_.shape[1], open_.argmin(axis=1))
        rows["seen"] = first
        behind = open_ & (np.arange(open_.shape[1]) >= first[:, None])
        rows["count"] = behind.sum(axis=1)
        more = np.nonzero(behind)[1].astype(np.int64)
        self._more = more  # kept until the next pass
        rows["more"] = more.ctypes.data + 8 * (np.cumsum(rows["count"]) - rows["count"])
        return rows, int((rows["seen"] + rows["count"]).max())

    def _prepare(self, rows: int, kept: int, positions: int, seen: int) -> None:
        """Memory for a pass of so many rows, at these positions, of which one sees so many slots."""
        threads, line = torch.get_num_threads(), 4 * (-(-seen // BLOCK) + 1) * BLOCK
        if self._prepared != (rows, kept, threads, line):
            self._prepared = rows, kept, threads, line
            self._take_memory(rows, kept, threads, line)
        if positions > len(self._turns):
            self._turns = torch.cat([self._turns, *self._angles(len(self._turns), positions)])
        self._set(turns=self._turns.data_ptr())

    def _take_memory(self, rows: int, kept: int, threads: int, line: int) -> None:
        """The same, where a query's scores take `line` bytes."""
        from sampling.models.compiled_pass import memory_of

        shape = self._hidden, self._inner, self._heads, self._shared, self._size
        told, sizes = memory_of(rows, kept, threads, line, *shape)
        self._set(**told)
        for name, size in sizes.items():
            if name not in self._scratch or self._scratch[name].numel() < size:
                self._scratch[name] = torch.zeros(size + size // 4, dtype=torch.uint8)
            self._set(**{name: self._scratch[name].data_ptr()})

    def _angles(self, first: int, last: int) -> list[Tensor]:
        """cos and sin [n, D], halves side by side, in whole blocks of positions: their bits must depend on a position
        alone, and torch rounds differently at the end of a tensor."""
        found = []
        for start in range(first, last, GROW):
            angle = torch.arange(start, start + GROW)[:, None].float() * self._rotary.inv_freq
            scaling = self._rotary.attention_scaling
            found.append(torch.cat([angle.cos() * scaling, angle.sin() * scaling], dim=1))
        return found
