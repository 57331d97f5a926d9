"""What a compiled pass is handed: one record of numbers and addresses, the memory that it works in, its rows.

The fields are those that sampling/models/compiled_pass.py reads; a pass with further ones of its own is
sampling/drafters/draft_heads/compiled_step.py. Keeps alive whatever it gives the address of. Knows no models; one pass
at a time is its owner's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.kernels.quantized_linear import QuantizedLinear
from utils.kernels.team import TEAM, Team

BLOCK = 16  # slots whose keys lie side by side
FEW = 4  # rows that every thread norms for itself
MORE = 128  # slots whose scores there is room for at once


def _fields(names: str, first: list[tuple[str, type]] | None = None) -> np.dtype:
    return np.dtype([*(first or []), *((name, np.int64) for name in names.split())])


# Sizes, then addresses. Of a weight: its address and the number of its layout. `states` of the pass are what the head
# reads, of a layer what enters it, 0 where they are not wanted; `states_row`: numbers of a row of them.
PASS = _fields(
    "rows kept fed layers hidden inner heads shared size vocab_blocks "  # fed: rows of one sequence; kept: with logits
    "batch slots half wide moves moved "  # of the cache, wide: bytes of one of its numbers; its moves and how many
    "row table embed embed_layout head head_layout norm turns keys values "
    "x qkv normed normed_size mixed gated buffer buffer_size scores scores_size scores_row logits states states_row "
    "epsilon scale narrow columns score mix",
    TEAM,
)
LAYER = _fields(
    "before after q q_layout k k_layout v v_layout o o_layout gate gate_layout up up_layout down down_layout "
    "q_bias k_bias v_bias q_norm k_norm states"
)
ROW = _fields("id position sequence slot seen more count")  # sees the first `seen` slots, then those in the list `more`


def linears(layer: Any) -> dict[str, Any]:
    """A decoder layer's linear maps by what they make."""
    attention, mlp = layer.self_attn, layer.mlp
    reading = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
    return {**reading, "o": attention.o_proj, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}


class PassRecord:
    """A record of `fields`: :data:`PASS` or a dtype that begins with it. `sizes` are what the pass's memory depends on:
    numbers of a hidden state, of the inner one, heads, key heads and numbers of a head; `quantised`: further places for
    quantised rows and how many numbers a row of them has."""

    def __init__(
        self, fields: np.dtype, sizes: tuple[int, int, int, int, int], quantised: dict[str, int] | None = None
    ) -> None:
        self.record = np.zeros(1, fields)
        self.values, self.places = self.record.view(np.int64), {name: at for at, name in enumerate(fields.names or ())}
        self.held: list[Any] = []  # what the addresses point to
        self._sizes, self._quantised = sizes, quantised or {}
        self._scratch: dict[str, Tensor] = {}
        self._prepared: tuple[int, ...] = ()
        self._more = np.zeros(0, np.int64)
        self.run = Team(self.record).run
        hidden, inner, heads, shared, size = sizes
        self.set(hidden=hidden, inner=inner, heads=heads, shared=shared, size=size)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self.values[self.places[name]] = value

    def address(self, tensor: Tensor | None) -> int:
        """Of its numbers in float32; 0 of None."""
        if tensor is None:
            return 0
        self.held.append(tensor.detach().to(torch.float32).contiguous())
        address: int = self.held[-1].data_ptr()
        return address

    def weight(self, name: str, linear: QuantizedLinear | Any) -> dict[str, int]:
        """What packed weights say in the fields `name` and `name`_layout."""
        self.held.append(linear.packed)
        return {name: linear.packed.address, f"{name}_layout": linear.packed.number}

    def describe(
        self, layers: Any, head: QuantizedLinear, take: Callable[[Any], QuantizedLinear] | None = None
    ) -> np.ndarray:
        """Set decoder `layers`, of whose linear maps `take` makes packed ones, and the head; the layers' table."""
        table = np.zeros(len(layers), LAYER)
        for entry, layer in zip(table, layers, strict=True):
            named = {"before": layer.input_layernorm.weight, "after": layer.post_attention_layernorm.weight}
            for name, linear in linears(layer).items():
                packed = linear if take is None else take(linear)
                for field, value in self.weight(name, packed).items():
                    entry[field] = value
                if name in ("q", "k", "v"):
                    named[f"{name}_bias"] = packed.bias
            for name in ("q_norm", "k_norm"):
                named[name] = getattr(getattr(layer.self_attn, name, None), "weight", None)
            for name, tensor in named.items():
                entry[name] = self.address(tensor)
        self.held.append(table)
        self.set(layers=len(table), table=table.ctypes.data, vocab_blocks=len(head.packed.data))
        self.set(**self.weight("head", head))
        return table

    def prepare(self, rows: int, kept: int, seen: int) -> None:
        """Memory for a pass of so many rows, `kept` of them with logits, of which one sees so many slots.

        Sizes are rounded up, so that most later passes need no new layout.
        """
        rows = -(-max(rows, kept) // FEW) * FEW
        threads, line = torch.get_num_threads(), 4 * (-(-seen // MORE) * MORE + BLOCK)
        if self._prepared == (rows, threads, line):
            return
        from utils.kernels.products import ROWS, room

        self._prepared = rows, threads, line
        hidden, inner, heads, shared, size = self._sizes
        group = heads // shared
        scores, normed = (ROWS + 1) * group * line, room(rows, hidden)
        buffer = -(-(4 * ROWS * group * (size + 1) + 256 * ROWS) // 64) * 64
        self.set(scores_row=line, scores_size=scores, buffer_size=buffer, normed_size=normed)
        places = {
            "x": 4 * rows * hidden,
            "qkv": 4 * rows * (heads + 2 * shared) * size,
            "normed": normed * (threads if rows <= FEW else 1),
            "mixed": room(rows, heads * size),
            "gated": room(rows, inner),
            "scores": threads * scores,
            "buffer": threads * buffer,
            **{name: room(rows, width) for name, width in self._quantised.items()},
        }
        for name, needed in places.items():
            if name not in self._scratch or self._scratch[name].numel() < needed:
                self._scratch[name] = torch.zeros(needed + needed // 4, dtype=torch.uint8)
            self.set(**{name: self._scratch[name].data_ptr()})

    def rows(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        mask: Tensor | None,
        slots: np.ndarray,
        sequences: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int]:
        """What the pass must know of each row, and the most slots that one of them sees.

        ids [B · T]; positions [B, T] and slots, the same for all sequences [T] or [B, T]; mask [B or 1, 1, T, S] and
        sequences [B] as in :class:`sampling.types.Network`. Rows point to a list that is kept until the next call.
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
        behind = seen & (np.arange(seen.shape[1]) >= rows["seen"][:, None])
        rows["count"] = behind.sum(axis=1)
        self._more = more = np.nonzero(behind)[1].astype(np.int64)
        rows["more"] = more.ctypes.data + 8 * (np.cumsum(rows["count"]) - rows["count"])
        return rows, int((rows["seen"] + rows["count"]).max())
