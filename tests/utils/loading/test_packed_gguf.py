"""A GGUF file loaded as it is: the same weights as its conversion to float32, kept in the cache, or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from app.lanes.pairing import catalogue_in
from sampling.api import autoregressive_generate, ngram_assisted_speculative_generate, speculative_generate
from sampling.models.causal import CausalLM
from sampling.models.fused import FusedNetwork, supports
from tests.support.quantized import add_tensor, closed, keep_code, needs_kernels
from tests.support.refusals import refused
from utils.catalogue.specs import spec_from_argument
from utils.errors import UnfitError
from utils.gguf.header import module_name
from utils.kernels import quantized_linear
from utils.kernels.quantized_linear import PackedWeight, QuantizedLinear, quantize, unpacked_copy
from utils.loading.build import load_model
from utils.loading.cache import cache_folder
from utils.loading.loaded import LoadedModel, LoadOptions
from utils.loading.packed_gguf import (
    FileConfig,
    PackedModel,
    config_in,
    entry_of as entry_for,
    packed_entry,
    packed_model,
)
from utils.loading.sources import model_folder

pytestmark = needs_kernels
keep_code()

CATALOGUE = Path(__file__).parents[3] / "models.yaml"


def loaded(quantization: str, activations: str = "q16") -> LoadedModel:
    spec, options = catalogue_in(CATALOGUE).pair("smollm2").target, LoadOptions(device="cpu", activations=activations)
    return load_model(spec, model_folder(spec, options), options, "cpu", quantization)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return loaded("auto")


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    return loaded("none")


def test_the_default_model_keeps_its_four_bits(target: LoadedModel, plain: LoadedModel) -> None:
    assert (target.quantization, target.dtype) == ("Q4_1", torch.float32)
    assert (target.parameters, target.context, target.vocab_size) == (plain.parameters, plain.context, plain.vocab_size)
    assert target.bytes < 100e6 < plain.bytes
    assert plain.quantization == "none"
    assert len([part for part in target.model.modules() if isinstance(part, QuantizedLinear)]) == 7 * 30 + 1


def test_its_weights_are_those_of_the_conversion(target: LoadedModel, plain: LoadedModel) -> None:
    converted = unpacked_copy(plain.model).state_dict()
    assert all(torch.equal(value, converted[name]) for name, value in target.model.unpacked().state_dict().items())


@pytest.mark.parametrize(("activations", "most", "same"), [("q16", 1e-5, 1.0), ("q8", 0.01, 0.9)])
def test_its_laws_are_nearly_those_of_float32(plain: LoadedModel, activations: str, most: float, same: float) -> None:
    ids = torch.tensor([list(range(500, 628))])
    positions, found = torch.arange(ids.shape[1])[None], []
    for model in (plain.model, loaded("auto", activations).model):
        network = CausalLM(model).network
        found.append(network.forward(ids, positions, None, network.new_cache(1), ids.shape[1])[0][0].log_softmax(-1))
    assert isinstance(network, FusedNetwork)
    assert float((found[0].exp() * (found[0] - found[1])).sum(-1).mean()) < most
    assert float((found[0].argmax(-1) == found[1].argmax(-1)).float().mean()) >= same


def test_its_own_forward_computes_with_the_same_layers(target: LoadedModel) -> None:
    ids = torch.tensor([[5, 600, 7000, 80]])
    with torch.no_grad():
        logits, expected = target.model(ids).logits, unpacked_copy(target.model)(ids).logits
    assert torch.allclose(logits, expected, atol=0.1)


def small_parts(tmp_path: Path, **changes: Any) -> tuple[FileConfig, dict[str, PackedWeight], dict[str, torch.Tensor]]:
    """The configuration, weights and vectors of a random model of eleven layers, none in order."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 11, "vocab_size": 60, "head_dim": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **changes)
    config.save_pretrained(str(tmp_path))
    shuffled = sorted(transformers.LlamaForCausalLM(config).named_parameters(), key=lambda one: one[0], reverse=True)
    weights = {
        name.removesuffix(".weight"): PackedWeight.rounded(part, "q8") for name, part in shuffled if part.ndim == 2
    }
    said = config_in(tmp_path)
    assert said is not None
    return said, weights, {name: part.detach() for name, part in shuffled if part.ndim == 1}


def test_layers_stand_in_order_whatever_the_files_order(tmp_path: Path) -> None:
    config, weights, vectors = small_parts(tmp_path)
    model: Any = PackedModel(config, FileConfig(), tmp_path, weights, vectors)
    assert [layer.self_attn.q_proj.packed for layer in model.model.layers] == [
        weights[f"model.layers.{layer}.self_attn.q_proj"] for layer in range(11)
    ]
    assert "whole" not in vars(model)  # transformers' model was not needed
    network, ids = FusedNetwork(model), torch.tensor([[5, 7, 9]])
    logits = network.forward(ids, torch.arange(3)[None], None, network.new_cache(1), 3)[0]
    with torch.no_grad():
        assert torch.allclose(logits, unpacked_copy(model)(ids).logits, atol=1e-2)


def test_stretched_positions_are_those_of_transformers(tmp_path: Path) -> None:
    config, weights, vectors = small_parts(
        tmp_path, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    )
    model: Any = PackedModel(config, FileConfig(), tmp_path, weights, vectors)
    plain = 1.0 / 1e4 ** (torch.arange(0, 32, 2).float() / 32)
    assert torch.allclose(model.model.rotary_emb.inv_freq, plain / 4)
    assert supports(model)


def test_text_with_drafts_is_plain_decoding(target: LoadedModel, plain: LoadedModel) -> None:
    network = FusedNetwork(target.model)
    prompt = list(range(1000, 1040)) * 2
    text = autoregressive_generate(prompt, network, max_gen_len=48)
    assert speculative_generate(prompt, plain.model, network, gamma=4, max_gen_len=48)[0] == text
    assert ngram_assisted_speculative_generate(prompt, None, network, gamma=6, max_gen_len=48)[0] == text


def test_a_second_load_reads_what_the_first_has_written(target: LoadedModel) -> None:
    digest = str(catalogue_in(CATALOGUE).pair("smollm2").target.sha256)
    entry = packed_entry(lambda: pytest.fail("the file is read again"), digest)
    assert entry == cache_folder() / "packed" / digest[:16]
    assert json.loads((entry / "index.json").read_text())["type"] == "Q4_1"


def test_a_cache_that_is_emptied_does_no_harm_to_a_loaded_model(target: LoadedModel, tmp_path: Path) -> None:
    digest = str(catalogue_in(CATALOGUE).pair("smollm2").target.sha256)
    entry = Path(shutil.copytree(cache_folder() / "packed" / digest[:16], tmp_path / "entry"))
    model = packed_model(target.model.config, entry, tmp_path, "the model")
    os.truncate(entry / "weights.bin", 0)
    prompt = list(range(1000, 1040))
    ours, theirs = (
        autoregressive_generate(prompt, FusedNetwork(each), max_gen_len=8) for each in (model, target.model)
    )
    assert ours == theirs


# -- files of other kinds --------------------------------------------------------------------------------


def written(path: Path, kinds: dict[str, str], architecture: str = "llama") -> Path:
    """A GGUF file of two heads and one layer; `kinds`: the type of a tensor, Q8_0 where none is said."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    rng = np.random.default_rng(0)
    for name, shape in {"token_embd": (48, 64), "blk.0.attn_q": (64, 64), "blk.0.attn_output": (64, 64)}.items():
        add_tensor(writer, f"{name}.weight", rng.normal(size=shape).astype(np.float32), kinds.get(name, "Q8_0"))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    return closed(writer, path)


def entry_of(path: Path, digest: str) -> Any:
    return packed_entry(lambda: path, digest)


def test_a_file_with_a_type_that_no_kernel_knows_is_left_to_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path))
    good = entry_of(written(tmp_path / "good.gguf", {"blk.0.attn_q": "Q5_0", "token_embd": "F32"}), "a" * 64)
    assert set(json.loads((good / "index.json").read_text())["weights"]) == {
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.o_proj",
    }
    for name, kinds, family, why in [
        ("type", {"blk.0.attn_q": "MXFP4"}, "llama", "no kernel for MXFP4, the type of blk.0.attn_q.weight"),
        ("kind", {}, "gemma", "no compiled pass computes gemma"),
    ]:
        refused(entry_of, written(tmp_path / f"{name}.gguf", kinds, family), name[0] * 64, kind=UnfitError, match=why)
    assert not list((tmp_path / "packed").glob("*.partial-*"))


def test_an_unfit_file_is_refused_by_its_header_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every start: neither are all tokens made objects nor is anything packed for nothing."""

    def never_done(*_: Any) -> None:
        raise AssertionError("for nothing")

    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gguf, "GGUFReader", never_done)
    monkeypatch.setattr(quantized_linear, "pack_rows", never_done)
    refused(
        entry_of,
        written(tmp_path / "late.gguf", {"blk.0.attn_output": "MXFP4"}),
        "a" * 64,
        kind=UnfitError,
        match="no kernel for MXFP4",
    )
    refused(entry_of, written(tmp_path / "good.gguf", {}), "b" * 64, kind=AssertionError, match="for nothing")


@pytest.mark.parametrize(
    ("family", "changes", "fits"),
    [
        ("Llama", {}, True),
        ("Llama", {"head_dim": 80}, False),
        ("Llama", {"hidden_size": 144, "head_dim": 32}, False),
        ("Llama", {"intermediate_size": 168}, False),
        ("Llama", {"attention_bias": True}, True),
        ("Llama", {"mlp_bias": True}, True),
        ("Llama", {"hidden_act": "gelu"}, False),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
        ("Qwen2", {}, True),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, True),
        ("Qwen3", {"head_dim": 128}, True),
        ("Mistral", {"sliding_window": None}, True),
        ("Mistral", {}, True),
        ("Gemma", {}, False),
    ],
)
def test_only_what_the_compiled_pass_takes_stays_packed(family: str, changes: dict[str, Any], fits: bool) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 1, "vocab_size": 60}
    config = getattr(transformers, f"{family}Config")(
        **sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    quantize(model, "q8", tables=True)
    assert supports(model) == fits
    spec = spec_from_argument("no.gguf")
    if not fits:  # its file is not even looked for
        refused(entry_for, spec, config, LoadOptions(), kind=UnfitError, match=r"no compiled pass computes|one table")


@pytest.mark.parametrize(
    ("tensor", "module", "parameter"),
    [
        (("blk.11.ffn_gate.weight",), "model.layers.11.mlp.gate_proj", "weight"),
        (("blk.3.attn_q.bias",), "model.layers.3.self_attn.q_proj", "bias"),
        (("blk.0.ffn_norm.weight", "gemma2"), "model.layers.0.pre_feedforward_layernorm", "weight"),
    ],
)
def test_names_of_tensors_have_their_places(tensor: tuple[str, ...], module: str, parameter: str) -> None:
    assert module_name(*tensor) == (module, parameter)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate.0.weight", "token_types.weight", "output.scale"])
def test_names_that_have_no_place_are_unfit(name: str) -> None:
    refused(module_name, name, kind=UnfitError)
