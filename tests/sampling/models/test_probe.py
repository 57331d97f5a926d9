"""Models of families that no other test covers: right with drafts, trees, windows and batches, or refused in a line."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sampling.models import probe
from sampling.models.encoder_decoder import lm_of
from sampling.models.network import TransformersNetwork
from sampling.models.probe import small, twin
from tests.support.architectures import architecture, differing
from tests.support.refusals import refused

REFUSED = {
    "openai-gpt": {},  # keeps no cache
    "bert": {"is_decoder": False},  # every token sees every other
    "xlnet": {},
    "rwkv": {"attention_hidden_size": 64, "hidden_size": 64, "intermediate_size": 64},
    "recurrent_gemma": {},
    "minimax": {},  # keeps a cache of its own
    "fsmt": {},  # takes one token at a time
    "prophetnet": {},
}
RIGHT: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True},
    "llama4_text": {},  # attention in chunks
    "gpt_neo": {},  # a window that the mask does not hold
    "switch_transformers": {},
    "lfm2": {},  # convolutions
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_is_wrong_in_pieces_is_refused_in_one_line(name: str) -> None:
    model = architecture(name, **REFUSED[name])
    refused(lm_of, model, match=rf"^{type(model).__name__} (is not supported: |keeps a state)[^\n]+$")


@pytest.mark.parametrize("name", RIGHT)
def test_beyond_windows_and_in_batches_the_text_is_the_models_own(name: str) -> None:
    model = architecture(name, **RIGHT[name])
    assert not lm_of(model).takes_trees
    assert differing(model, model, ["tree"]) == []


def large(name: str, **config: Any) -> Any:
    """A model of a real size, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config))


@pytest.mark.parametrize(
    ("name", "config", "trees"),
    [
        ("gpt_neox", {}, True),
        ("phi3", {"sliding_window": 2047}, False),
        ("phi3", {"sliding_window": 4096}, True),  # its context ends before the window does
        ("gemma3_text", {}, False),
        ("mpt", {}, False),
    ],
)
def test_trees_are_drafted_where_masks_hold_at_any_length(name: str, config: dict[str, Any], trees: bool) -> None:
    assert TransformersNetwork(large(name, **config)).takes_trees == trees


def kinds(config: Any) -> list[set[str]]:
    """The kinds of layers that a configuration names."""
    return [set(getattr(config, name, None) or []) for name in ("layer_types", "mlp_layer_types")]


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "deepseek_v3", "falcon"])
def test_a_twin_has_every_kind_of_layer_and_few_parameters(name: str) -> None:
    model = large(name)
    config = small(model.config)
    assert kinds(config) == kinds(model.config)
    assert sum(weight.numel() for weight in twin(model, config).parameters()) < 20_000_000


def test_what_was_tried_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = TransformersNetwork(large("gpt_bigcode", n_positions=1024))
    monkeypatch.setattr(probe, "twin", lambda *_: pytest.fail("tried twice"))
    assert TransformersNetwork(large("gpt_bigcode", n_positions=1024, vocab_size=700)).takes_trees == first.takes_trees
