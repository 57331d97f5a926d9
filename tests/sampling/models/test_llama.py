"""The hand-written Llama pass gives transformers' own logits: whole, in pieces, ragged, in trees, packed or not.

The oracle is a second transformers model with the same weights, run with eager attention.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sampling.models import llama
from sampling.models.llama import LlamaNetwork
from tests.support.runs import crossed
from utils.kernels.build import instruction_set
from utils.kernels.quantized_linear import pack

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def llama_of(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))


MODELS: dict[str, Any] = {
    "llama": llama_of,
    "tied": lambda: llama_of(tie_word_embeddings=True),
    "one kv head": lambda: llama_of(num_key_value_heads=1),
    "no groups": lambda: llama_of(num_key_value_heads=6),
    "wide heads": lambda: llama_of(head_dim=16),
    "biases": lambda: llama_of(attention_bias=True, mlp_bias=True),
    "llama3 rope": lambda: llama_of(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "yarn rope": lambda: llama_of(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "linear rope": lambda: llama_of(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, LlamaNetwork]:
    """The oracle and the network of one and the same random model, with lively weights and norms."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.25)
    oracle = copy.deepcopy(model).to(dtype)
    oracle.set_attn_implementation("eager")
    return oracle, LlamaNetwork(model.to(dtype))


def some_ids(rows: int, count: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, count), generator=torch.Generator().manual_seed(1))


def places(rows: int, count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count).expand(rows, -1)


@torch.no_grad()
def expected(oracle: PreTrainedModel, ids: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    out = oracle(ids, output_hidden_states=True, **more)
    return out.logits, out.hidden_states[-1]


def fed(
    network: LlamaNetwork, ids: Tensor, pieces: list[int], positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """All logits [B, T, V] of ids fed in pieces."""
    cache, got, start = network.new_cache(ids.shape[0]), [], 0
    positions = places(*ids.shape) if positions is None else positions
    for count in pieces:
        end = start + count
        seen = None if mask is None else mask[:, :, start:end, :end]
        got.append(network.forward(ids[:, start:end], positions[:, start:end], seen, cache, count)[0])
        start = end
    assert cache.length == start == ids.shape[1]
    return torch.cat(got, dim=1)


def close(got: Tensor, wanted: Tensor, relative: float = 1e-4) -> None:
    worst = ((got - wanted).abs().max() / wanted.abs().max()).item()
    assert worst < relative, f"off by {worst:.1e} of the largest value"


@pytest.mark.parametrize(("name", "pieces"), crossed(MODELS, [[70], [60, 8, 1, 1], [1, 3, 40, 26], [35, 35]]))
def test_logits_equal_transformers_however_the_tokens_are_cut(name: str, pieces: list[int]) -> None:
    oracle, network = make(name)
    for rows in (1, 3):
        ids = some_ids(rows, 70)
        close(fed(network, ids, pieces), expected(oracle, ids)[0])


@pytest.mark.parametrize("name", ["llama", "qwen2", "biases"])
def test_the_arithmetic_is_the_same_to_the_last_digits_of_float64(name: str) -> None:
    oracle, network = make(name, torch.float64)
    ids = some_ids(2, 50)
    # the rotary tables and the norms of transformers are float32 whatever the model is
    close(fed(network, ids, [33, 16, 1]), expected(oracle, ids)[0], relative=1e-5)


@pytest.mark.skipif(instruction_set() is None, reason="there are no kernels here")
@pytest.mark.parametrize("name", ["llama", "tied", "biases", "qwen2", "wide heads"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_packed_model_gives_the_same_logits(name: str, order: str) -> None:
    oracle, network = make(name)
    torch.manual_seed(0)
    _, plain = make(name)
    model = copy.deepcopy(oracle)
    ids = some_ids(2, 50)
    if order == "behind":
        network = LlamaNetwork(model)
        pack(model)
        network = LlamaNetwork(model)
    else:
        pack(model)
        network = LlamaNetwork(model)
    close(fed(network, ids, [40, 8, 1, 1]), expected(oracle, ids)[0])
    close(fed(network, ids, [40, 8, 1, 1]), fed(plain, ids, [50]))
    close(expected(model, ids)[0], expected(oracle, ids)[0])  # transformers' own forward goes on working


@pytest.mark.parametrize("keep", [1, 4, 9])
def test_only_the_kept_columns_are_returned(keep: int) -> None:
    oracle, network = make("llama")
    ids = some_ids(2, 9)
    logits, states = network.forward(ids, places(2, 9), None, network.new_cache(2), keep)
    assert states is None
    assert logits.shape == (2, keep, SIZES["vocab_size"])
    close(logits, expected(oracle, ids)[0][:, -keep:])


def test_hidden_states_are_those_the_head_is_applied_to() -> None:
    oracle, network = make("llama")
    ids = some_ids(2, 9)
    logits, states = network.forward(ids, places(2, 9), None, network.new_cache(2), 3, hidden=True)
    assert states is not None
    close(states, expected(oracle, ids)[1])
    close(logits, oracle.lm_head(states[:, -3:]))
    _, several = network.forward(ids, places(2, 9), None, network.new_cache(2), 3, hidden=(2, -1, 0))
    every = oracle(ids, output_hidden_states=True).hidden_states
    assert several is not None
    close(several, torch.cat([every[2], every[-1], every[0]], dim=-1))


def additive(seen: Tensor, lowest: float) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, lowest)[:, None]


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    ("name", "pads", "pieces"),
    [
        ("llama", [0, 2, 5], [6]),
        ("llama", [0, 2, 5], [20, 6]),
        *((name, [row % 7 for row in range(20)], [10, 1, 1, 1, 1]) for name in ("llama", "one kv head", "no groups")),
    ],
)
def test_ragged_rows_equal_each_row_alone(name: str, pads: list[int], pieces: list[int], lowest: float) -> None:
    oracle, network = make(name)
    ids, column, before = some_ids(len(pads), sum(pieces)), torch.arange(sum(pieces)), torch.tensor(pads)[:, None]
    seen = (column[None] >= before)[:, None] & (column[None, :] <= column[:, None])[None]
    seen |= torch.eye(len(column), dtype=torch.bool)[None]
    logits = fed(network, ids, pieces, (column[None] - before).clamp(min=0), additive(seen, lowest))
    for row, pad in enumerate(pads):
        close(logits[row, pad:], expected(oracle, ids[row : row + 1, pad:])[0][0])


def test_each_branch_of_a_tree_equals_its_path_alone() -> None:
    oracle, network = make("llama")
    prompt, nodes = some_ids(1, 12), torch.tensor([[5, 6, 7, 8, 9]])
    parents = [-1, 0, 0, 1, -1]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    seen = torch.zeros(1, 5, 17, dtype=torch.bool)
    seen[..., :12] = True
    for node, path in enumerate(paths):
        seen[0, node, [12 + member for member in path]] = True
    cache = network.new_cache(1)
    network.forward(prompt, places(1, 12), None, cache, 1)
    logits, _ = network.forward(
        nodes, torch.tensor([[11 + len(path) for path in paths]]), additive(seen, float("-inf")), cache, 5
    )
    for node, path in enumerate(paths):
        close(logits[0, node], expected(oracle, torch.cat((prompt, nodes[:, path]), dim=1))[0][0, -1])
    cache.shift([(0, 15, 14)], 15)  # keep the path 0 → 1 → 3
    after, _ = network.forward(some_ids(1, 1), places(1, 1, 15), None, cache, 1)
    close(after[0, -1], expected(oracle, torch.cat((prompt, nodes[:, [0, 1, 3]], some_ids(1, 1)), dim=1))[0][0, -1])


def test_cached_keys_and_values_are_transformers_own() -> None:
    oracle, network = make("llama")
    ids = some_ids(2, 20)
    cache = network.new_cache(2)
    network.forward(ids, places(2, 20), None, cache, 1)
    with torch.no_grad():
        theirs = oracle(ids, use_cache=True).past_key_values
    for index in range(network.layers):
        keys, values = cache.layer(index)
        close(keys, theirs.layers[index].keys)
        close(values, theirs.layers[index].values)


def test_bfloat16_is_as_near_the_float32_truth_as_transformers_is() -> None:
    truth, _ = make("llama")
    oracle, network = make("llama", torch.bfloat16)
    for weight, rounded in zip(truth.parameters(), oracle.parameters(), strict=True):
        weight.data.copy_(rounded.data)
    ids = some_ids(2, 40)
    got, theirs, wanted = fed(network, ids, [39, 1]), expected(oracle, ids)[0], expected(truth, ids)[0]
    assert got.dtype == torch.bfloat16
    assert (got.float() - wanted).square().mean() < 2 * (theirs.float() - wanted).square().mean()


def other_models() -> dict[str, PreTrainedModel]:
    sizes = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8)),
        "mistral with a window": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
        "qwen2 with a window": Qwen2ForCausalLM(
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        ),
        "dynamic rope": llama_of(rope_parameters=dynamic),
        "gelu": llama_of(hidden_act="gelu"),
    }


def test_models_of_another_arithmetic_are_refused() -> None:
    for name, model in other_models().items():
        assert not llama.supports(model), name
        with pytest.raises(ValueError, match="Llama"):
            LlamaNetwork(model)
    assert not llama.supports(object())
    assert all(llama.supports(build()) for build in MODELS.values())
