"""The record of a compiled pass (utils/kernels/kernels.h): a model's facts and weights, working memory, rows.

Holds every tensor whose address is in the record. Its owner runs one pass at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.families import LLAMA, Family
from utils.kernels.bindings import (
    CODES,
    FEW,
    FLOATS,
    GROUP,
    PASS,
    PICK,
    ROW,
    STEP,
    TILE,
    Expert,
    Layer,
    Pass,
    Step,
    Weight,
    run,
)
from utils.kernels.quantized_linear import PackedWeight, QuantizedExperts, QuantizedLinear

BLOCK = 16  # slots whose keys lie side by side
STEP_OF_SCORES = 128  # slots by which the memory for scores grows


def linears(layer: Any) -> dict[str, Any]:
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
    """A :class:`Pass` or :class:`Step` and the memory that its addresses point to.

    `sizes`: numbers of a hidden state and of the inner one, heads, key heads, numbers of a head. `codes`: more fields
    for rows of codes, and the numbers of a row.
    """

    def __init__(
        self, kind: type[Pass | Step], sizes: tuple[int, int, int, int, int], codes: dict[str, int] | None = None
    ) -> None:
        self.record: Any = kind()
        self.held: list[Any] = []
        self._floats = False  # whether some weights are floats, whose products read float activations
        self._work = STEP if issubclass(kind, Step) else PASS
        self._sizes, self._codes = sizes, codes or {}
        self._scratch: dict[str, Tensor] = {}
        self._prepared: tuple[int, ...] = ()
        self._more = np.zeros(0, np.int64)
        hidden, inner, heads, shared, size = sizes
        ones = {"embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
        self.set(hidden=hidden, inner=inner, heads=heads, shared=shared, size=size, turned=size, **ones)

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.record, name, value)

    def run_over(self, cache: Any, sizes: tuple[int, int, int], rows: int, logits: Tensor, begin: int = 0) -> None:
        """Run the pass over the rows at the address `rows` and the slots of a `FusedCache` from `begin` on.

        `sizes`: sequences, rows fed of each, rows of each that get logits.
        """
        record, skipped = self.record, begin * cache.size * cache.keys.element_size()
        count, record.fed, record.kept = sizes
        record.rows, record.row, record.logits = count * record.fed, rows, logits.data_ptr()
        record.batch, record.slots = cache.keys.shape[1], cache.slots
        record.keys, record.values = cache.keys.data_ptr() + skipped, cache.values.data_ptr() + skipped
        run(self._work, record, torch.get_num_threads())

    def address(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor's numbers in float32; None for None."""
        if tensor is None:
            return None
        self.held.append(tensor.detach().to(torch.float32).contiguous())
        address: int = self.held[-1].data_ptr()
        return address

    def gain(self, norm: Any, family: Family) -> int | None:
        """The address of a norm's gains; None for None."""
        weight = getattr(norm, "weight", None)
        return self.address(1 + weight if family.gain_above_one and weight is not None else weight)

    def weight(self, linear: QuantizedLinear | Any) -> Weight:
        """The record of a layer's weight and bias; a weight that is not packed is packed as floats."""
        packed = getattr(linear, "packed", None) or PackedWeight.floats(linear.weight.float())
        return self.packed(packed, self.address(getattr(linear, "bias", None)))

    def packed(self, weight: PackedWeight, bias: int | None = None) -> Weight:
        """The record of a packed weight."""
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
        """Set the decoder `layers`, whose linear maps `take` packs, and the head; the layers' table."""
        table = (Layer * len(layers))()
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
        if self._prepared == (rows, threads, line):
            return
        self._prepared = rows, threads, line
        hidden, inner, heads, shared, size = self._sizes
        queries = TILE * (heads // shared)
        scores, buffer = (TILE + 1) * (heads // shared) * line, max(queries * size, 4 * BLOCK * TILE)
        normed = rows * hidden // GROUP
        self.set(
            scores_row=line, scores_size=scores, buffer_size=buffer, normed_codes=normed, normed_floats=rows * hidden
        )
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
        """The records of rows, and the most slots that a row sees.

        ids [B · T]; positions [B, T] and slots, the same for all sequences [T] or [B, T]; mask [B or 1, 1, T, S] and
        sequences [B] as in :class:`sampling.types.Network`. The rows point to a list that lives until the next call.
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
