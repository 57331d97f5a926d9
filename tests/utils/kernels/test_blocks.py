"""Blocks of a GGUF file are read without rounding: what they mean is what gguf's own reader says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from utils.kernels.blocks import COLUMNS, GROUP, LAYOUTS, TYPES, Codes, dequantised, lossless, pack, read_blocks


def bytes_of(kind: str, rows: int, groups: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type: any byte is a valid code, scales are small numbers."""
    size, width, _ = TYPES[kind]
    count = groups * GROUP // size
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, count, width), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        halves = rng.normal(0, 0.02, (rows, count)).astype(np.float16)
        data[..., place : place + 2] = halves[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", TYPES)
def test_a_block_means_what_gguf_says(kind: str) -> None:
    data = bytes_of(kind, 5, 16)
    weight = read_blocks(kind, data)
    expected = quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(weight.dequantised(), expected)
    assert lossless(weight)
    assert weight.codes.min() >= (0 if weight.layout.bits == 4 else -128)


@pytest.mark.parametrize("kind", TYPES)
def test_packing_loses_nothing_and_fills_up_with_zeros(kind: str) -> None:
    weight = read_blocks(kind, bytes_of(kind, COLUMNS + 3, 16))
    assert np.array_equal(unpacked(weight.layout, pack(weight), COLUMNS + 3), weight.dequantised())
    assert np.array_equal(dequantised(pack(weight), weight.layout, COLUMNS + 3), weight.dequantised())
    assert not unpacked(weight.layout, pack(weight), 2 * COLUMNS)[COLUMNS + 3 :].any()


def unpacked(layout: object, packed: np.ndarray, count: int) -> np.ndarray:
    """Group by group and column by column, straight from the description."""
    kind = LAYOUTS[LAYOUTS.index(layout)]  # type: ignore[arg-type]
    blocks, groups, _ = packed.shape
    reals = np.ascontiguousarray(packed[..., : kind.header]).view(kind.real).reshape(blocks, groups, -1, COLUMNS)
    lines = np.ascontiguousarray(packed[..., kind.header :]).reshape(blocks, groups, -1, COLUMNS, 4)
    out = np.zeros((count, groups * GROUP), np.float32)
    for column in range(count):
        block, lane = divmod(column, COLUMNS)
        for group in range(groups):
            octets = lines[block, group, :, lane].reshape(-1)
            codes = np.concatenate([octets & 15, octets >> 4]).astype(int) if kind.bits == 4 else octets.view(np.int8)
            scales = np.repeat(reals[block, group, : kind.scales, lane].astype(np.float32), GROUP // kind.scales)
            least = reals[block, group, kind.scales, lane].astype(np.float32) if kind.minimum else np.float32(0)
            out[column, GROUP * group : GROUP * (group + 1)] = scales * codes.astype(np.float32) + least
    return out


def test_a_scale_that_16_bits_cannot_hold_is_noticed() -> None:
    good = read_blocks("Q8_0", bytes_of("Q8_0", 2, 1))
    assert not lossless(Codes(good.layout, good.codes, good.scales * np.float32(1.0001)))
    assert not lossless(Codes(LAYOUTS[0], good.codes, good.scales, np.full((2, 1), 1e6, np.float32)))
    assert not lossless(Codes(good.layout, good.codes, np.full((2, 1), np.nan, np.float32)))
