"""The compiled pass is transformers' own pass for every family of the table, each fact on and off: small random models
with float32 weights, float activations and a float32 cache."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sampling.models.fused import FusedNetwork, supports
from sampling.types import DraftTree
from tests.support.quantized import keep_code, needs_kernels, put_weights
from utils.families import FAMILIES
from utils.kernels.quantized_linear import PackedWeight

pytestmark = needs_kernels

keep_code()

SIZES = {"vocab_size": 203, "hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 20, "num_experts_per_tok": 5, "moe_intermediate_size": 96}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("Mistral", {"sliding_window": 16}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": SLIDING}),
    ("Qwen3", {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 16}),
    ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "attention_multiplier": 0.02},
    ),
    ("Granite", {"attention_multiplier": 0.125}),
    ("Olmo2", {}),
    ("Phi3", {"head_dim": 32, "original_max_position_embeddings": 4096}),
    ("Phi3", {"sliding_window": 16, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default"}}),
    ("Gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 48}),
    ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("Gemma3", {"sliding_window": 16, "query_pre_attn_scalar": 48, "layer_types": SLIDING}),
    ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "sliding_window": 16, "use_sliding_window": True}),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 128, "norm_topk_prob": False}),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": True, "num_experts": 32}),
    ("Olmoe", {**EXPERTS, "head_dim": 32, "num_key_value_heads": 6}),
]


def random_model(family: str, changes: dict[str, Any]) -> Any:
    """A random model, whose norms do something."""
    torch.manual_seed(1)
    name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    config = getattr(transformers, name)(**{**SIZES, **HEADS, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float().requires_grad_(False)
    mean = 0.0 if FAMILIES[config.model_type].gain_above_one else 1.0
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(mean + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    return model


def packed(model: Any) -> Any:
    """The same with its float32 weights in the kernels' layout."""
    twin = copy.deepcopy(model)
    weights = {
        name.removesuffix(".weight"): PackedWeight.of("F32", part.flatten(0, -2).numpy().view(np.uint8))
        for name, part in twin.named_parameters()
        if part.ndim > 1 and not name.endswith("mlp.gate.weight")  # a router's is read as it is
    }
    if twin.config.tie_word_embeddings:
        weights["lm_head"] = weights["model.embed_tokens"]
    put_weights(twin, weights)
    return twin


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_family_is_computed_as_transformers_does_and_each_row_by_itself(family: str, changes: dict[str, Any]) -> None:
    plain = random_model(family, changes)
    model = packed(plain)
    assert supports(model)
    network = FusedNetwork(model, torch.float32)
    ids = torch.randint(3, 203, (2, 60), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(60).expand(2, -1)
    logits, _ = network.forward(ids, positions, None, network.new_cache(2), 60)
    assert float((logits - plain(ids).logits).abs().max()) < 2e-5
    cache = network.new_cache(1)
    alone = [network.forward(ids[:1, at : at + 1], positions[:1, at : at + 1], None, cache, 1)[0] for at in range(60)]
    assert torch.equal(torch.cat(alone, dim=1)[0], logits[0])


def test_a_node_of_a_tree_is_the_same_as_in_its_own_text_under_a_window() -> None:
    """Also where the window begins among the tree's own nodes."""
    network = FusedNetwork(packed(random_model("Mistral", {"sliding_window": 5})))
    chance = random.Random(4)
    for cached in (1, 4, 21, 150):
        text, ids = chance.choices(range(203), k=cached), chance.choices(range(203), k=14)
        parents = [chance.randrange(max(-1, node - 3), node) for node in range(len(ids))]
        logits = network.of_one_row(text, DraftTree.of(ids, parents), network.new_cache(1))[0]
        for node in range(len(ids)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            whole = torch.tensor([[*text, *(ids[step] for step in path)]])
            own = network.forward(whole, torch.arange(whole.shape[1])[None], None, network.new_cache(1), 1)[0]
            assert torch.equal(logits[node + 1], own[0, 0]), (cached, node)


def test_every_family_of_the_table_has_a_case() -> None:
    configurations = {"Gemma3": transformers.Gemma3TextConfig}
    kinds = {configurations.get(family) or getattr(transformers, f"{family}Config") for family, _ in CASES}
    assert {kind.model_type for kind in kinds} == set(FAMILIES)
