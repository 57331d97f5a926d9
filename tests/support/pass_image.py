"""A compiled pass as bytes for the driver (kernel_driver.c): its record and all memory that the record leads to."""

import ctypes
from typing import Any

import numpy as np

from utils.kernels.bindings import (
    CODES,
    COLUMNS,
    FEW,
    GROUP,
    PICK,
    ROW,
    Expert,
    LayerStruct,
    PassStruct,
    Weight,
    kernels,
)


class Image:
    """Blocks of memory, each exactly as large as the record says, and the addresses between them."""

    def __init__(self, record: PassStruct, threads: int) -> None:
        self.blocks: list[bytes] = []
        self.links: list[tuple[int, int, int]] = []
        self.threads, self._seen = threads, dict[tuple[int, int], int]()
        self._add(ctypes.addressof(record), ctypes.sizeof(PassStruct))
        self.results = self._follow(record)

    def bytes(self) -> bytes:
        """What the driver reads."""
        parts = [
            np.array([-1, len(self.blocks), len(self.links), len(self.results), self.threads, 0], np.int64).tobytes()
        ]
        parts += [np.int64(len(block)).tobytes() + block for block in self.blocks]
        return b"".join([*parts, np.array(self.links, np.int64).tobytes(), np.array(self.results, np.int64).tobytes()])

    def _add(self, address: int, size: int) -> int:
        key = address, size
        if key not in self._seen:
            self._seen[key] = len(self.blocks)
            self.blocks.append(ctypes.string_at(address, size))
        return self._seen[key]

    def _link(self, block: int, offset: int, address: int | None, size: int) -> int:
        if not address:
            return -1
        target = self._add(address, size)
        self.links.append((block, offset, target))
        return target

    def _weight(self, block: int, offset: int, weight: Weight) -> None:
        size = kernels().packed_size(weight.type, weight.rows, weight.width)
        self._link(block, offset + Weight.data.offset, weight.data, size)
        self._link(block, offset + Weight.bias.offset, weight.bias, 4 * weight.rows)

    def _follow(self, p: Any) -> list[int]:
        """Links all that the record leads to; the blocks in which results stand."""
        real, heads = 4, p.heads * p.size

        def link(name: str, size: int, inside: str = "") -> int:
            address, offset = getattr(p, name), getattr(PassStruct, name).offset
            if inside:
                offset += getattr(type(address), inside).offset
                address = getattr(address, inside)
            return self._link(0, offset, address, size)

        self._weight(0, PassStruct.embed.offset, p.embed)
        self._weight(0, PassStruct.head.offset, p.head)
        link("norm", real * p.hidden)
        layers = link("layer", ctypes.sizeof(LayerStruct) * p.layers)
        for index, layer in enumerate((LayerStruct * p.layers).from_address(p.layer)):
            self._layer(p, layers, ctypes.sizeof(LayerStruct) * index, layer)
        rows = np.frombuffer(ctypes.string_at(p.row, ROW.itemsize * p.rows), ROW)
        for number, table in enumerate(p.tables):
            size = real * p.rotary_dim * (int(rows["position"].max()) + 1)
            self._link(0, PassStruct.tables.offset + 8 * number, table, size)
        row = link("row", ROW.itemsize * p.rows)
        for number, (more, count) in enumerate(zip(rows["more"], rows["count"], strict=True)):
            if count:
                self._link(row, ROW.itemsize * number + ROW.fields["more"][1], int(more), 8 * int(count))
        number = 2 if p.half else 4
        cache = number * p.layers * p.batch * p.shared * p.slots * p.size
        keys, values = link("keys", cache), link("values", cache)
        link("moves", 24 * p.moved)
        logits = link("logits", real * p.kept * (p.rows // p.fed) * (-(-p.head.rows // COLUMNS) * COLUMNS))
        for name, size in {
            **{"x": p.rows * p.hidden, "side": p.rows * p.hidden},
            "qkv": p.rows * (heads + 2 * p.shared * p.size),
            **{"scores": self.threads * p.scores_size, "buffer": self.threads * p.buffer_size},
            "route": p.rows * (-(-p.experts // COLUMNS) + 1) * COLUMNS,
        }.items():
            link(name, real * size)
        picks = p.rows * (p.chosen + bool(p.common))
        link("picks", PICK * picks)
        link("first", 8 * (p.experts + 2))
        inner = max(p.rows * p.inner, picks * p.expert_inner)
        normed = p.rows * p.hidden if p.rows > FEW else self.threads * p.normed_floats
        for name, size in {
            "normed": normed,
            "mixed": p.rows * heads,
            "gated": inner,
            "routed": picks * p.hidden,
        }.items():
            link(name, size // GROUP * CODES, "codes")
            link(name, real * size, "floats")
        return [logits, keys, values]

    def _layer(self, p: Any, block: int, offset: int, layer: Any) -> None:
        every = {"q_norm": p.heads * p.size, "k_norm": p.shared * p.size} if layer.wide_norm else {}
        sizes = {**dict.fromkeys(("q_norm", "k_norm"), p.size), **every}
        for name, kind in LayerStruct._fields_:
            value, at = getattr(layer, name), offset + getattr(LayerStruct, name).offset
            if kind is Weight:
                if value.data:
                    self._weight(block, at, value)
            elif name == "experts" and value:
                count = p.experts + bool(p.common)
                table = self._link(block, at, value, ctypes.sizeof(Expert) * count)
                for number, expert in enumerate((Expert * count).from_address(value)):
                    for part, _ in Expert._fields_:
                        self._weight(
                            table, ctypes.sizeof(Expert) * number + getattr(Expert, part).offset, getattr(expert, part)
                        )
            elif kind is ctypes.c_void_p and name not in ("experts", "states"):
                self._link(block, at, value, 4 * sizes.get(name, p.hidden))
