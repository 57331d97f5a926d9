"""A GGUF file's quantised blocks as they are: read without rounding, and laid out anew for the kernels.

A weight [N, K] is codes, small integers, with a scale and for some types a minimum for each group along K:
w = scale · code + minimum. Four-bit types stay four-bit; those between four and eight bits become bytes. What the
kernels read (utils/kernels/products.py) has 16 columns (outputs) side by side, so that one vector serves 16 of them:

    [N / 16][K / 32] groups, each: 16 scales (twice 16 where a scale speaks for 16 codes), 16 minimums if there are
    any, then 16-word lines. Of a byte type word j of a column has codes 4j to 4j + 3, of a nibble type codes
    4j to 4j + 3 in its low nibbles and 16 + 4j to 16 + 4j + 3 in its high ones.

Knows numpy alone. :meth:`Codes.dequantised` is the naive twin that every kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

COLUMNS, GROUP = 16, 32  # outputs that lie side by side; codes of a group


@dataclass(frozen=True)
class Layout:
    """How a group of 16 columns is laid out. Its place in :data:`LAYOUTS` is its number in compiled code."""

    name: str
    bits: int
    real: type[np.floating]  # what scales and minimums are kept as: always exactly what the file means
    scales: int = 1  # of a group of 32 codes
    minimum: bool = False

    @property
    def header(self) -> int:
        """Bytes of a group before its codes."""
        return COLUMNS * (self.scales + self.minimum) * np.dtype(self.real).itemsize

    @property
    def size(self) -> int:
        """Bytes of a group."""
        return self.header + COLUMNS * GROUP * self.bits // 8


LAYOUTS = (
    Layout("4 bits", 4, np.float16, minimum=True),  # Q4_0, Q4_1
    Layout("4 bits, wide scales", 4, np.float32, minimum=True),  # Q4_K
    Layout("8 bits", 8, np.float16),  # Q8_0, Q5_0
    Layout("8 bits, wide scales", 8, np.float32, scales=2),  # Q6_K
)


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] without rounding: `codes` [N, K] int8, `scales` [N, K/32 · layout.scales] float32 and `minimums`
    [N, K/32] float32 where the layout has them."""

    layout: Layout
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None

    def dequantised(self) -> np.ndarray:
        """float32 [N, K]."""
        wide = np.repeat(self.scales, GROUP // self.layout.scales, axis=1) * self.codes.astype(np.float32)
        return wide if self.minimums is None else wide + np.repeat(self.minimums, GROUP, axis=1)


# -- the file's types ------------------------------------------------------------------------------------


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 16-bit float at byte `at` of each block [..., bytes] → float32 [...]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Bytes [..., n] → their low nibbles, then their high ones [..., 2n]."""
    return np.concatenate([data & 15, data >> 4], axis=-1).astype(np.int8)


def _rows(parts: np.ndarray) -> np.ndarray:
    """[N, blocks, ...] → [N, the rest as one]."""
    return np.ascontiguousarray(parts).reshape(len(parts), -1)


def _q4_0(blocks: np.ndarray) -> Codes:
    scale = _half(blocks, 0)
    return Codes(LAYOUTS[0], _rows(_nibbles(blocks[..., 2:])), scale, -8 * scale)


def _q4_1(blocks: np.ndarray) -> Codes:
    return Codes(LAYOUTS[0], _rows(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: np.ndarray) -> Codes:
    packed, data = blocks[..., 4:16], blocks[..., 16:]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    codes = _nibbles(data.reshape(*data.shape[:-1], 4, 32))  # 64 at a time: low nibbles, high nibbles
    wide = _half(blocks, 0)[..., None] * scales.astype(np.float32)
    least = _half(blocks, 2)[..., None] * minimums.astype(np.float32)
    return Codes(LAYOUTS[1], _rows(codes), _rows(wide), _rows(-least))


def _q5_0(blocks: np.ndarray) -> Codes:
    fifth = np.unpackbits(np.ascontiguousarray(blocks[..., 2:6]), axis=-1, bitorder="little").astype(np.int8)
    return Codes(LAYOUTS[2], _rows(_nibbles(blocks[..., 6:]) + 16 * fifth - 16), _half(blocks, 0))


def _q8_0(blocks: np.ndarray) -> Codes:
    return Codes(LAYOUTS[2], _rows(blocks[..., 2:].view(np.int8)), _half(blocks, 0))


def _q6_k(blocks: np.ndarray) -> Codes:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64))
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = low.reshape(*pairs.shape) + ((pairs & 3) << 4).astype(np.int8) - 32
    scales = _half(blocks, 208)[..., None] * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return Codes(LAYOUTS[3], _rows(codes), _rows(scales))


TYPES: dict[str, tuple[int, int, Callable[[np.ndarray], Codes]]] = {  # name: codes and bytes of a block, reader
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q8_0": (32, 34, _q8_0),
    "Q5_0": (32, 22, _q5_0),
    "Q4_K": (256, 144, _q4_k),
    "Q6_K": (256, 210, _q6_k),
}


def read_blocks(kind: str, data: np.ndarray) -> Codes:
    """The weight of type `kind` (a name of :data:`TYPES`) whose bytes are `data` [N, bytes of a row]."""
    _, size, reader = TYPES[kind]
    return reader(np.ascontiguousarray(data).reshape(len(data), -1, size))


# -- the kernels' layout ----------------------------------------------------------------------------------


def pack(weight: Codes) -> np.ndarray:
    """uint8 [N / 16 rounded up, K / 32, bytes of a group]; columns that there are not are zeros."""
    layout, (count, width) = weight.layout, weight.codes.shape
    groups, blocks = width // GROUP, -(-count // COLUMNS)
    out = np.empty((blocks, groups, layout.size), np.uint8)

    def aside(values: np.ndarray) -> np.ndarray:
        """[N, groups · n] → [blocks, groups, n, 16 columns]."""
        full = np.zeros((blocks * COLUMNS, values.shape[1]), values.dtype)
        full[:count] = values
        return full.reshape(blocks, COLUMNS, groups, -1).transpose(0, 2, 3, 1)

    reals = [aside(part) for part in (weight.scales, weight.minimums) if part is not None]
    header = np.ascontiguousarray(np.concatenate(reals, axis=2).astype(layout.real))
    out[..., : layout.header] = header.view(np.uint8).reshape(blocks, groups, -1)
    codes: np.ndarray = weight.codes.view(np.uint8).reshape(count, groups, GROUP)
    if layout.bits == 4:
        codes = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    words = np.ascontiguousarray(codes).reshape(count, -1).view(np.uint32)
    out[..., layout.header :] = np.ascontiguousarray(aside(words)).view(np.uint8).reshape(blocks, groups, -1)
    return out


def lossless(weight: Codes) -> bool:
    """Whether its layout holds scales and minimums exactly, and all are numbers."""
    reals = [part for part in (weight.scales, weight.minimums) if part is not None]
    with np.errstate(over="ignore"):
        return all(np.array_equal(part.astype(weight.layout.real).astype(np.float32), part) for part in reals)


def dequantised(packed: np.ndarray, layout: Layout, count: int) -> np.ndarray:
    """float32 [count, K] of what :func:`pack` made."""
    blocks, groups, _ = packed.shape
    reals = np.ascontiguousarray(packed[..., : layout.header]).view(layout.real).reshape(blocks, groups, -1, COLUMNS)
    octets = packed[..., layout.header :].reshape(blocks, groups, -1, COLUMNS, 4).transpose(0, 3, 1, 2, 4)

    def beside(values: np.ndarray) -> np.ndarray:
        """[blocks, groups, n, 16 columns] → [N, groups · n] float32."""
        return values.transpose(0, 3, 1, 2).reshape(blocks * COLUMNS, -1)[:count].astype(np.float32)

    codes = octets.reshape(blocks * COLUMNS, groups, -1)[:count]
    codes = _nibbles(codes) if layout.bits == 4 else codes.view(np.int8)
    least = beside(reals[:, :, layout.scales :]) if layout.minimum else None
    return Codes(layout, codes.reshape(count, -1), beside(reals[:, :, : layout.scales]), least).dequantised()
