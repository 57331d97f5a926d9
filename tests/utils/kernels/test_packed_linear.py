"""Packed layers compute what plain ones compute, and packing a model changes nothing else about it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.quantized import keep_code, needs_kernels
from utils.kernels import quantized_linear
from utils.kernels.quantized_linear import PackedWeight, QuantizedLinear, pack, unpacked_copy

pytestmark = needs_kernels
keep_code()


def linear(out: int, into: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(into, out, bias=bias)


def tiny_llama(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("out", "into"), [(1, 1), (3, 5), (48, 31), (576, 192), (200, 576)])
def test_packed_products_equal_plain_ones_for_every_number_of_tokens(out: int, into: int, bias: bool) -> None:
    plain = linear(out, into, bias=bias)
    packed = QuantizedLinear(PackedWeight.floats(plain.weight), plain.bias)
    for tokens in (*range(1, 18), 256):
        x = torch.randn(tokens, into)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)


def test_weights_of_64_bits_stay() -> None:
    assert pack(nn.Sequential(nn.Linear(4, 4)).double()) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_stay_at_their_size_and_count_as_float32(dtype: torch.dtype) -> None:
    plain, x = linear(40, 31, bias=False).to(dtype), torch.randn(5, 31)
    model = nn.Sequential(copy.deepcopy(plain))
    assert pack(model) == 1
    packed: Any = model[0]
    assert packed.packed.data.nbytes == 2 * 48 * 31
    torch.testing.assert_close(model(x), x @ plain.weight.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_packing_a_model_keeps_its_logits_and_packing_again_does_nothing(tied: bool) -> None:
    model = tiny_llama(tied=tied)
    ids = torch.randint(0, 90, (2, 9))
    with torch.no_grad():
        wanted = model(ids).logits
        embedding = model.model.embed_tokens.weight
        assert pack(model) == 2 * 7 + 1
        assert pack(model) == 0
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-6)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert model.model.embed_tokens.weight is embedding
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_without_kernels_models_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "load", lambda: False)
    model = tiny_llama()
    assert pack(model) == 0
    assert type(model.lm_head) is nn.Linear


def test_an_unpacked_copy_is_the_plain_model_again_and_shares_the_embedding() -> None:
    model, plain = tiny_llama(), tiny_llama()
    ids = torch.randint(0, 90, (2, 9))
    assert unpacked_copy(model) is model
    pack(model)
    twin = unpacked_copy(model)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert type(twin.lm_head) is nn.Linear
    assert twin.model.embed_tokens.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, plain(ids).logits)
