"""Which layers lie where: in order, the ends on the first device, and an error where nothing holds it."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.refusals import refused
from utils.device_map import COPIED, device_map

LAYERS = 8
ENDS = 2 * 300 * 64 * 4  # bytes of embedding and head
LAYER = (64 * 64 * 3 + 64 * 128 * 3 + 2 * 64) * 4
WHOLE = ENDS + LAYERS * LAYER + 64 * 4 + 2 * 8 * 4  # the last norm, and how rotary angles turn
PLENTY = 1 << 40


def mapped(room: dict[Any, int], kind: str = "none", **config: Any) -> dict[str, Any] | None:
    return device_map(
        "large",
        AutoModelForCausalLM,
        LlamaConfig(
            **{
                **LlamaConfig(
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=LAYERS,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    vocab_size=300,
                    tie_word_embeddings=False,
                ).to_dict(),
                **config,
            }
        ),
        torch.float32,
        kind,
        room,
    )


def test_what_the_first_device_holds_stays_there() -> None:
    assert mapped({0: WHOLE, 1: PLENTY}) is None
    assert mapped({0: WHOLE - 1, 1: PLENTY}) is not None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [3, 5])
def test_layers_follow_each_other_and_the_ends_stay_on_the_first(layers: int, tied: bool) -> None:
    found = mapped({0: ENDS + layers * LAYER, 1: 4 * LAYER, "cpu": PLENTY}, tie_word_embeddings=tied)
    assert found is not None
    assert found["model.embed_tokens"] == found["lm_head"] == 0
    order = [0, 1, "cpu", "disk"]
    each = [order.index(found[f"model.layers.{index}"]) for index in range(LAYERS)]
    assert each == sorted(each)
    assert each[0] == 0
    assert each.count(0) <= layers + tied * ENDS // LAYER


def test_what_the_cpu_does_not_hold_goes_to_the_disk() -> None:
    found = mapped({"cpu": ENDS + 4 * LAYER, "disk": PLENTY})
    assert found is not None
    assert set(found.values()) == {"cpu", "disk"}
    assert found["lm_head"] == found["model.embed_tokens"] == "cpu"


def test_quantized_weights_count_as_small_as_they_are_and_stay_on_gpus() -> None:
    assert mapped({0: WHOLE // 8 + 1, "cpu": PLENTY}, "nf4") is None
    found = mapped({0: ENDS + LAYER, 1: WHOLE, "cpu": PLENTY}, "int8")
    assert found is None or not set(found.values()) & set(COPIED)
    refused(
        mapped,
        {0: ENDS + 1, "cpu": PLENTY},
        "int8",
        num_hidden_layers=40,
        match=r"large needs 0\.0 GB, 0\.0 GB are free: try --quantization nf4 or a smaller",
    )


def test_ends_that_do_not_fit_are_refused() -> None:
    refused(mapped, {0: ENDS // 2, "cpu": PLENTY}, match="large needs")
