"""8 and 4 bit weights: the default model on the CPU, its real memory, and nothing on the screen."""

from pathlib import Path

import pytest
import torch

from app.lanes.lane import PairEngine
from app.lanes.pairing import catalogue_in
from app.settings.table import Settings
from sampling.models.fused import FusedNetwork
from tests.support.refusals import refused
from tests.support.tiny import tiny_model, tiny_pair
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.errors import UsageError
from utils.kernels.build import instruction_set, why_not
from utils.kernels.quantized_linear import QuantizedLinear
from utils.loading.build import held_bytes, quantization_config
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair


def answer(pair, tokens: int) -> str:
    ids = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    out = pair.target.model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return pair.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(("kind", "megabytes"), [("int8", 220), ("nf4", 173)])
def test_the_default_model_answers_quantized_and_floods_nothing(kind, megabytes, capfd):
    pair = load_pair(
        catalogue_in(Path(__file__).parents[3] / "models.yaml").pair("smollm2"),
        LoadOptions(device="cpu", quantization=kind),
    )
    assert "Paris" in answer(pair, 8)
    assert capfd.readouterr() == ("", "")
    target = pair.target
    assert (target.quantization, target.parameters) == (kind, 134_515_008)
    assert target.bytes / 1e6 == pytest.approx(megabytes, abs=2)
    assert not any(isinstance(module, QuantizedLinear) for module in target.model.modules())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("tiny"), hidden=64)


def test_target_and_drafter_are_quantized_separately(tiny):
    spec = PairSpec(
        name="tiny", target=spec_from_argument(str(tiny.target)), drafter=spec_from_argument(str(tiny.drafter))
    )
    pair = load_pair(spec, LoadOptions(device="cpu", drafter_quantization="fp4"))
    assert pair.drafter is not None
    assert (pair.target.quantization, pair.drafter.quantization) == ("none", "fp4")
    assert pair.drafter.parameters == pair.target.parameters
    assert pair.drafter.bytes < pair.target.bytes
    pair = load_pair(spec, LoadOptions(device="cpu", quantization="int8"))
    assert pair.drafter is not None
    assert (pair.target.quantization, pair.drafter.quantization) == ("int8", "none")


def test_none_takes_back_what_the_pair_says_and_auto_leaves_it(tiny):
    target = spec_from_argument(str(tiny.target)).model_copy(update={"quantization": "int8"})
    spec = PairSpec(name="tiny", target=target)
    found = {q: load_pair(spec, LoadOptions(device="cpu", quantization=q)).target for q in ("none", "auto")}
    assert {asked: target.quantization for asked, target in found.items()} == {"none": "none", "auto": "int8"}


def test_shared_weights_are_counted_once():
    tied = tiny_model()
    apart_bytes = held_bytes(tied)
    head = tied.lm_head.weight.numel()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert held_bytes(tied) == apart_bytes - 4 * head


def test_a_device_without_quantization_is_a_usage_error():
    refused(
        quantization_config,
        "nf4",
        torch.device("mps"),
        torch.float16,
        match=r"quantization nf4 runs on cpu and cuda, not on mps: use --quantization none",
        kind=UsageError,
    )
    assert quantization_config("none", torch.device("mps"), torch.float16) is None


compiled = pytest.mark.skipif(instruction_set() is None, reason=f"nothing is compiled here: {why_not()}")


@compiled
def test_our_own_kinds_are_made_at_load_and_run_as_one_pass(tmp_path):
    folders = tiny_pair(tmp_path, hidden=128)
    spec = PairSpec(
        name="tiny", target=spec_from_argument(str(folders.target)), drafter=spec_from_argument(str(folders.drafter))
    )
    options = LoadOptions(device="cpu", quantization="q4", drafter_quantization="q8", kv_dtype="float32")
    pair, plain = load_pair(spec, options), load_pair(spec, LoadOptions(device="cpu"))
    assert pair.drafter is not None
    assert plain.drafter is not None
    assert (pair.target.quantization, pair.drafter.quantization) == ("q4", "q8")
    assert (pair.target.parameters, pair.drafter.parameters) == (plain.target.parameters, plain.drafter.parameters)
    assert pair.target.bytes < pair.drafter.bytes < plain.drafter.bytes / 3
    engine = PairEngine(pair)
    assert isinstance(engine.target.network, FusedNetwork)
    assert isinstance(engine.drafters.model.network, FusedNetwork)
    assert engine.target.network.cache_dtype == torch.float32
    settings = Settings(compare=("ar", "spec"), max_new_tokens=40)
    texts = [
        [id for step in engine.lane(name, settings).run([5, 9, 40, 7]) for id in getattr(step, "ids", [])]
        for name in ("ar", "spec")
    ]
    assert texts[0] == texts[1]


@compiled
@pytest.mark.parametrize(
    ("kind", "device", "dtype", "told"),
    [
        ("q4", "cpu", torch.bfloat16, "q4 computes in float32 on the cpu, got bfloat16 on cpu"),
        ("q8", "cuda", torch.float32, "q8 computes in float32 on the cpu, got float32 on cuda"),
    ],
)
def test_our_own_kinds_say_where_they_do_not_run(kind, device, dtype, told):
    refused(quantization_config, kind, torch.device(device), dtype, match=told, kind=UsageError)
