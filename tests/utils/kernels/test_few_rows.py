"""The second layout, for few rows: the same product, taken only where it is the faster and only up to its size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sampling.models.llama import LlamaNetwork
from tests.support.students import make_target
from utils.kernels import few_rows, packed_linear
from utils.kernels.few_rows import FEW, FewRows
from utils.kernels.packed_linear import PackedLinear, merge, pack, ready

pytestmark = pytest.mark.skipif(not packed_linear.available(), reason="this build of torch cannot pack")
has_operator = pytest.mark.skipif(not hasattr(torch.ops.mkl, "_mkl_linear"), reason="this build of torch has no MKL")


class Dense:
    """Stands for the second layout on processors that have none, and counts its calls."""

    calls = 0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.clone()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        Dense.calls += 1
        return nn.functional.linear(x, self.weight, bias)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> type[Dense]:
    monkeypatch.setattr(few_rows, "available", lambda: True)
    monkeypatch.setattr(packed_linear, "FewRows", Dense)
    Dense.calls = 0
    return Dense


def linear(out: int, into: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(into, out)


def packed_of(plain: nn.Linear, twice: bool = True) -> PackedLinear:
    return PackedLinear(plain.weight.detach(), plain.bias, twice)


@has_operator
@pytest.mark.parametrize(("out", "into"), [(1, 1), (3, 5), (48, 31), (576, 192), (3072, 576)])
def test_the_product_is_right_for_every_number_of_rows(out: int, into: int) -> None:
    plain = linear(out, into)
    product = FewRows(plain.weight.detach())
    with torch.no_grad():
        for rows in range(1, FEW + 1):
            for shape in ((rows, into), (1, rows, into)):
                x = torch.randn(shape)
                torch.testing.assert_close(product(x, plain.bias), plain(x), rtol=1e-5, atol=1e-5)


@has_operator
def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    """Up to rounding in the last place; a wrong stride or a stale buffer would be far off."""
    product, x = FewRows(linear(96, 64).weight.detach()), torch.randn(FEW, 64)
    whole = product(x, None)
    for row in range(FEW):
        torch.testing.assert_close(product(x[row : row + 1], None)[0], whole[row], rtol=1e-6, atol=1e-6)


def test_few_rows_take_the_second_layout_and_many_the_first(dense: type[Dense]) -> None:
    plain = linear(20, 8)
    packed = packed_of(plain)
    for rows, calls in ((FEW + 1, 0), (0, 0), (1, 1), (FEW, 2)):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
        assert dense.calls == calls
    x, other = torch.randn(2, 8), torch.randn(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(packed.plus(x, other), plain(x) + other, rtol=1e-5, atol=1e-5)
    assert dense.calls == 3


def test_no_second_layout_where_it_is_not_wanted(dense: type[Dense]) -> None:
    plain = linear(20, 8)
    packed = packed_of(plain, twice=False)
    with torch.no_grad():
        torch.testing.assert_close(packed(torch.ones(1, 8)), plain(torch.ones(1, 8)), rtol=1e-5, atol=1e-5)
    assert dense.calls == 0


def test_none_where_the_processor_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "available", lambda: False)
    monkeypatch.setattr(packed_linear, "FewRows", None)  # would fail if it were made
    plain = linear(20, 8)
    with torch.no_grad():
        torch.testing.assert_close(packed_of(plain)(torch.ones(1, 8)), plain(torch.ones(1, 8)), rtol=1e-5, atol=1e-5)


def test_merged_layers_have_one_second_layout_together(dense: type[Dense]) -> None:
    first, second, x = linear(20, 8), nn.Linear(8, 12), torch.randn(2, 8)
    parts = [packed_of(first), packed_of(second)]
    with torch.no_grad():
        for part in parts:
            part(x)
        merged = merge(parts)
        both = torch.cat((first(x), second(x)), dim=-1)
        calls = dense.calls
        torch.testing.assert_close(merged(x), both, rtol=1e-5, atol=1e-5)
        assert dense.calls == calls + 1
        torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), both, rtol=1e-5, atol=1e-5)
        assert dense.calls == calls + 1  # the parts compute on the merged layer's first layout
        assert all(part._few is None for part in parts)


def test_a_large_model_keeps_one_copy(dense: type[Dense], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows.psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * 4 * 160))
    assert few_rows.affordable(160)
    assert not few_rows.affordable(161)
    for out, calls in ((20, 1), (21, 1)):  # 160 weights may be there twice, 168 may not
        model = nn.Sequential(linear(out, 8))
        pack(model)
        with torch.no_grad():
            model(torch.randn(1, 8))
        assert dense.calls == calls


def test_networks_have_it_before_their_first_pass(dense: type[Dense]) -> None:
    target = make_target()
    pack(target)
    network = LlamaNetwork(target)
    for layer in network._layers:
        assert all(part._few is not None for part in layer.products)  # type: ignore[attr-defined]
    assert network._head._few is not None
    assert all(
        part._few is None for part in (target.model.layers[0].self_attn.q_proj, target.model.layers[0].mlp.up_proj)
    )
    other = nn.Sequential(linear(20, 8), nn.ReLU())
    pack(other)
    ready(*other.modules())
    assert isinstance(other[0], PackedLinear)
    assert other[0]._few is not None
    assert dense.calls == 0
