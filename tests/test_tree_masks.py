"""Models that take no mask of ours decode chains and refuse trees: by name, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sampling.causal import CausalLM
from sampling.drafters import ModelDrafter
from sampling.drafters.expand import Expansion
from sampling.network import TransformersNetwork
from sampling.sampler import KeyedSampler
from sampling.types import Draft
from tests.runs import answers
from tests.test_cache_audit import build
from utils.errors import UserError
from utils.logits_processors import make_processor


def without_mask() -> Any:
    """Runs with an attention that nobody knows to take a mask."""
    transformers.AttentionInterface.register("unknown", sdpa_attention_forward)
    AttentionMaskInterface.register("unknown", sdpa_mask)
    model = build("qwen2", torch.float32)
    model.config._attn_implementation = "unknown"
    return model


def without_positions() -> Any:
    """Knows positions by the columns of its mask alone."""
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BloomForCausalLM(config).eval()


CASES = {"Qwen2ForCausalLM": (without_mask, "4-D mask"), "BloomForCausalLM": (without_positions, "position_ids")}


@pytest.mark.parametrize("name", CASES)
def test_trees_are_refused_and_chains_are_not(name: str) -> None:
    make, lacks = CASES[name]
    network = TransformersNetwork(make())
    lm, helper = CausalLM(network), CausalLM(network, "drafter")
    greedy = KeyedSampler(make_processor(0.0))
    alone = answers(lm, [[3, 4, 5]], None, greedy, length=8)
    assert answers(lm, [[3, 4, 5]], ModelDrafter(helper), greedy, length=8) == alone
    with pytest.raises(UserError, match=f"{name} .*{lacks}") as error:
        answers(lm, [[3, 4, 5]], ModelDrafter(helper, expansion=Expansion(12)), greedy, length=8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_a_refused_tree_leaves_a_session_that_goes_on(name: str) -> None:
    lm = CausalLM(TransformersNetwork(CASES[name][0]()))
    session, row = lm.open([[3, 4, 5]]), [3, 4, 5]
    wanted = session.score([row], Draft.empty(1))
    with pytest.raises(UserError, match=name):
        session.score([row], Draft(torch.tensor([[6, 7]]), parents=torch.tensor([-1, -1])))
    torch.testing.assert_close(session.score([row], Draft.empty(1)), wanted)
