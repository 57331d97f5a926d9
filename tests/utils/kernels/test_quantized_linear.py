"""Layers over packed blocks: against a naive twin in numpy, and the promise that a row's result is the row's alone."""

import copy
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import quants

from tests.support.quantized import keep_code, needs_kernels
from tests.utils.kernels.test_blocks import bytes_of
from utils.kernels.bindings import FLOATS, GROUP, TYPES
from utils.kernels.quantized_linear import KINDS, PackedWeight, QuantizedEmbedding, QuantizedLinear, quantize

pytestmark = needs_kernels


keep_code()


def weight_of(kind: str, count: int) -> PackedWeight:
    return PackedWeight.of(kind, bytes_of(kind, count, 768))


def rounded(x: np.ndarray, narrow: bool) -> np.ndarray:
    """x in float64, as it enters a product: of each group integers under a scale, narrow ones two, in float32."""
    groups, top = x.reshape(len(x), -1, GROUP // (1 + narrow)).astype(np.float32), np.float32(127 if narrow else 32512)
    most = np.abs(groups).max(-1, keepdims=True)
    safe = np.where(most > 2.0**-49, most, np.float32(1))
    codes = np.rint(groups * (top / safe)) * (most > 2.0**-49)
    return (codes.astype(np.float64) * (safe / top)).reshape(x.shape)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("count", "narrow"), [(16, False), (37, False), (37, True)])
def test_a_product_is_its_naive_twin(kind: str, count: int, narrow: bool) -> None:
    data = bytes_of(kind, count, 768)
    dense = quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float64)
    layer = QuantizedLinear(PackedWeight.of(kind, data), narrow=narrow)
    x = torch.randn(17, 768, generator=torch.Generator().manual_seed(1))
    x[2, :GROUP], x[3] = 0.0, 0.0
    x[4] *= 1e-12
    x[5] *= 1e12
    values = x.double().numpy()
    enters = values if kind in FLOATS else rounded(values, narrow)
    size = np.abs(enters) @ np.abs(dense).T + 1e-30
    for rows in range(1, 18):
        assert (np.abs(layer(x[:rows]).numpy() - enters[:rows] @ dense.T) / size[:rows]).max() < 1e-6
    exact = values @ dense.T
    error = np.abs(layer(x).numpy() - exact).max(1) / np.maximum(np.abs(exact).max(1), 1e-30)
    assert error.max() < (0.05 if narrow else 2e-4)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_does_not_depend_on_its_neighbours_nor_on_the_threads(kind: str, narrow: bool) -> None:
    layer = QuantizedLinear(weight_of(kind, 48), torch.randn(48), narrow)
    x = torch.randn(70, 768, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([layer(row[None]) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (*range(1, 18), 33, 70):
                assert torch.equal(layer(x[:rows]), alone[:rows]), (rows, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_number_spoils_itself_alone(wrong: float) -> None:
    layer = QuantizedLinear(weight_of("Q4_1", 16))
    x = torch.randn(5, 768)
    good = layer(x)
    x[2, 77] = wrong
    got = layer(x)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


def test_any_shape_and_stride_of_the_input_is_read_right() -> None:
    layer = QuantizedLinear(weight_of("Q8_0", 20), torch.randn(20))
    x = torch.randn(768, 3, 2)
    got = layer(x.permute(2, 1, 0))
    assert got.shape == (2, 3, 20)
    assert torch.equal(got[1, 2], layer(x[:, 2, 1].contiguous()))
    assert layer(torch.empty(0, 768)).shape == (0, 20)


def test_other_types_and_gradients_go_torchs_way() -> None:
    layer = QuantizedLinear(weight_of("Q4_0", 20), torch.randn(20))
    x = torch.randn(3, 768)
    assert layer(x.double()).dtype == torch.float64
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    plain = layer.unpacked()
    assert torch.equal(layer.state_dict()["weight"], plain.weight)
    assert torch.allclose(plain(x), layer(x), atol=1e-3)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize("kind", TYPES)
def test_an_embedding_gives_the_rows_that_the_file_means(kind: str) -> None:
    layer, ids = QuantizedEmbedding(weight_of(kind, 40)), torch.tensor([[0, 39, 17], [16, 15, 0]])
    dense = quants.dequantize(bytes_of(kind, 40, 768), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(layer(ids).numpy(), dense[ids.numpy()])
    with pytest.raises(IndexError):
        layer(torch.tensor([40]))


def test_a_forked_process_goes_on_alone(tmp_path: Path) -> None:
    layer = QuantizedLinear(weight_of("Q4_1", 64))
    x = torch.randn(8, 768)
    want = layer(x).numpy().tobytes()
    child = os.fork()
    if child == 0:
        try:
            (tmp_path / "told").write_bytes(layer(x).numpy().tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "told").read_bytes() == want


# -- float weights rounded here --------------------------------------------------------------------------


def rounded_twin(weight: np.ndarray, kind: str) -> np.ndarray:
    """The rounding said plainly, one group after another: float32 [out, in] as it is after it."""
    out = np.empty_like(weight)
    for row in range(len(weight)):
        for at in range(0, weight.shape[1], GROUP):
            group = weight[row, at : at + GROUP]
            low = np.float32(np.float16(group.min())) if kind == "q4" else np.float32(0)
            span = (
                (group.max() - group.min()) / np.float32(15) if kind == "q4" else np.abs(group).max() / np.float32(127)
            )
            scale = np.float32(np.float16(span))
            codes = np.rint((group - low) / (scale if scale else np.float32(1)))
            out[row, at : at + GROUP] = np.clip(codes, *((0, 15) if kind == "q4" else (-127, 127))) * scale + low
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 16, 37, 4099])
def test_rounded_weights_are_those_of_the_naive_twin(kind: str, count: int) -> None:
    weight = torch.randn(count, 96, generator=torch.Generator().manual_seed(count))
    weight[0, :32], weight[0, 32:64] = 0.0, 3.0  # a group without span
    weight[-1, 64:] *= 1e-6  # scales with few bits left
    packed = PackedWeight.rounded(weight, kind)
    dense = packed.dense().numpy()
    assert (packed.out_features, packed.in_features, packed.kind) == (count, 96, {"q4": "Q4_1", "q8": "Q8_0"}[kind])
    assert np.array_equal(dense, rounded_twin(weight.numpy(), kind))
    groups = weight.reshape(-1, GROUP)
    span = (groups.amax(1) - groups.amin(1)) / 15 if kind == "q4" else groups.abs().amax(1) / 127
    assert np.abs(dense - weight.numpy()).max() < 0.6 * float(span.max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_weights_that_cannot_be_rounded_are_refused(kind: str, bad: float) -> None:
    weight = torch.zeros(3, 64)
    weight[1, 40] = bad
    with pytest.raises(ValueError, match="no number, or too large"):
        PackedWeight.rounded(weight, kind)


def test_a_model_of_another_kind_keeps_its_forward_with_our_layers_in_it() -> None:
    """Linear maps with whole groups are rounded, tables and the rest are not; the logits stay near."""
    torch.manual_seed(3)
    shape = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    config = transformers.GemmaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    plain = transformers.GemmaForCausalLM(config).float().eval().requires_grad_(False)
    model = copy.deepcopy(plain)
    quantize(model, "q8", tables=False)
    layer = model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, QuantizedLinear)
    assert type(layer.mlp.down_proj) is torch.nn.Linear  # 80 is no whole number of groups
    assert isinstance(model.model.embed_tokens, torch.nn.Embedding)
    assert isinstance(model.lm_head, QuantizedLinear)  # tied to the table, which stays
    ids = torch.randint(0, 67, (1, 20))
    with torch.inference_mode():
        logits, expected = model(ids).logits, plain(ids).logits
    assert torch.allclose(logits, expected, atol=0.02 * float(expected.abs().max()))
    assert not torch.equal(logits, expected)
