"""Blocks of a GGUF file are laid out without rounding: what they mean is what gguf's own reader says, at its size."""

import gguf
import numpy as np
import pytest
from gguf import quants

from tests.support.quantized import keep_code, needs_kernels
from utils.kernels.bindings import COLUMNS, FLOATS, TYPES
from utils.kernels.quantized_linear import FILE_BLOCKS, PackedWeight, pack_rows

pytestmark = needs_kernels

keep_code()

_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}
_HALVES["Q3_K"] = (108,)


def bytes_of(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type: any byte is a valid code, scales are small numbers."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return quants.quantize(
            rng.normal(0, 0.3, (rows, width)).astype(np.float32), gguf.GGMLQuantizationType[kind]
        ).view(np.uint8)
    numbers, size = FILE_BLOCKS[kind]
    data = rng.integers(0, 256, (rows, width // numbers, size), dtype=np.uint8)
    for place in _HALVES.get(kind, (0,)):
        halves = rng.normal(0, 0.02, (rows, width // numbers)).astype(np.float16)
        data[..., place : place + 2] = halves[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [1, 37])
def test_a_packed_weight_means_what_gguf_says(kind: str, count: int) -> None:
    data = bytes_of(kind, count, 768)
    expected = quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    weight = PackedWeight.of(kind, data)
    assert (weight.out_features, weight.in_features) == (count, 768)
    assert np.array_equal(weight.dense().numpy(), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_no_type_takes_over_a_twentieth_more_than_in_its_file(kind: str) -> None:
    data = bytes_of(kind, 3 * COLUMNS, 512)
    assert data.nbytes <= pack_rows(kind, data).nbytes <= 1.05 * data.nbytes
