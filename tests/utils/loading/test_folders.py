"""Folders with changed tensors, configurations and parts: the logits of the untouched model, or one line."""

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.refusals import refused
from tests.support.tiny import tiny_pair
from tests.utils.loading.test_completeness import (
    REFUSED,
    SIZES,
    changes,
    logits_of,
    logits_or_line,
    random_model,
)
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.loading.build import load_model
from utils.loading.completeness import check_written
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_drafter, load_pair, own_head
from utils.loading.sources import model_folder


def loaded_logits(folder: Path) -> Tensor:
    spec = spec_from_argument(str(folder))
    model_folder(spec, LoadOptions())
    return logits_of(load_model(spec, folder, LoadOptions(), "cpu", "none").model)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_with_other_tensors_is_refused_by_name(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    file, untouched = tmp_path / "model.safetensors", loaded_logits(tmp_path)
    assert torch.allclose(untouched, logits_of(random_model(family)), atol=2e-5)
    whole = load_file(file)
    for change, name, tensors in islice(changes(whole), 0, None, 2):  # in a GGUF file all are, in the exhaustive run
        save_file({name: value.contiguous() for name, value in tensors.items()}, file)
        assert name in refused(loaded_logits, tmp_path, match=REFUSED), change
    save_file({f"other.{name}": value for name, value in whole.items()}, file)
    refused(loaded_logits, tmp_path, match=r"it lacks lm_head.weight; it lacks .*; it lacks .* \(and \d+ more\)$")
    save_file({name.removeprefix("model."): value for name, value in whole.items()}, file)
    assert torch.equal(loaded_logits(tmp_path), untouched)  # transformers knows this spelling


@pytest.mark.parametrize("change", ["drop", "rename"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_that_says_less_is_the_same_model_or_refused(family: str, change: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    file, untouched, refused_keys = tmp_path / "config.json", loaded_logits(tmp_path), set()
    stored = json.loads(file.read_text())
    for key, value in stored.items():
        said = {name: kept for name, kept in stored.items() if name != key}
        file.write_text(json.dumps({**said, f"{key}x": value} if change == "rename" else said))
        outcome = logits_or_line(partial(loaded_logits, tmp_path))
        assert isinstance(outcome, str) or torch.equal(outcome, untouched), key
        refused_keys |= {key} if isinstance(outcome, str) else set()
    assert refused_keys >= {"model_type", "num_hidden_layers", "rms_norm_eps", "rope_parameters", "intermediate_size"}


SCALARS: dict[str, tuple[str, dict[str, Any]]] = {
    "Granite": ("GraniteConfig", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "Cohere": ("CohereConfig", {"logit_scale": 0.5, "layer_norm_eps": 1e-3}),
    "Gemma2": ("Gemma2Config", {"sliding_window": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3TextConfig", {"sliding_window": 4, "query_pre_attn_scalar": 16}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "SmolLM3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
}


@pytest.mark.parametrize("family", SCALARS)
def test_numbers_that_no_shape_tells_are_said_or_the_folder_is_refused(family: str, tmp_path: Path) -> None:
    config, scalars = SCALARS[family]
    sizes = {key: value for key, value in SIZES.items() if key not in ("rope_parameters", "rms_norm_eps", "head_dim")}
    getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, config)(**sizes | scalars, pad_token_id=0)
    ).float().eval().save_pretrained(tmp_path)
    loaded_logits(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    for key in scalars.keys() - {"num_local_experts"}:
        file.write_text(json.dumps({name: kept for name, kept in stored.items() if name != key}))
        refused(loaded_logits, tmp_path, match=f"does not say {key}$")


ROPE = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # beside the usual keys
    "gpt_neox": ("GPTNeoX", {"use_parallel_residual": False, "rope_parameters": ROPE}),
    "phi": ("Phi", {"rope_parameters": ROPE}),
    "stablelm": ("StableLm", {"use_parallel_residual": True, "rope_parameters": ROPE}),
    "gemma3_text": ("Gemma3", {"sliding_window": 4, "final_logit_softcapping": 2.0}),
    "olmo": ("Olmo", {"clip_qkv": 0.1}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}),
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_folder_of_another_family_that_says_less_is_the_same_model_or_refused(family: str, tmp_path: Path) -> None:
    prefix, scalars = OTHERS[family]
    sizes = {key: value for key, value in SIZES.items() if key in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    kind = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
    kind(kind.config_class(**sizes | scalars)).float().eval().save_pretrained(tmp_path)
    file, untouched, refused_keys = tmp_path / "config.json", loaded_logits(tmp_path), set()

    stored = json.loads(file.read_text())
    for key in stored:
        file.write_text(json.dumps({name: kept for name, kept in stored.items() if name != key}))
        outcome = logits_or_line(partial(loaded_logits, tmp_path))
        assert isinstance(outcome, str) or torch.equal(outcome, untouched), key
        refused_keys.update({key} if isinstance(outcome, str) else ())
    assert refused_keys >= scalars.keys()
    rope = stored.pop("rope_parameters", {})
    for key in ("rope_theta", "partial_rotary_factor") if "rope_parameters" in scalars else ():
        file.write_text(json.dumps({**stored, "rope_parameters": {k: v for k, v in rope.items() if k != key}}))
        refused(loaded_logits, tmp_path, match=f"does not say {key}$")


def test_a_model_of_several_parts_says_its_text(tmp_path: Path) -> None:
    config = transformers.Gemma3Config()
    stored = json.loads(config.to_json_string())
    check_written("m", stored, config)
    for version in ("5.0.0", "4.50.0"):
        without = {key: value for key, value in stored.items() if key != "text_config"}
        refused(
            check_written, "m", without | {"transformers_version": version}, config, match=r"does not say text_config$"
        )


INTEGERS = {"int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_numbers_that_mean_nothing_without_their_scales_are_refused(dtype: str, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    whole = load_file(file)
    save_file({**whole, name: (50 * whole[name]).to(INTEGERS[dtype])}, file)
    refused(loaded_logits, tmp_path, match=f"{name} is .*, and config.json has no quantization_config to read it by$")
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "unheard of"}})
    )
    refused(loaded_logits, tmp_path, match="is quantized in a way that transformers does not know")


def pickled(folder: Path) -> None:
    """Turn the folder's weights into .bin files."""
    for file in [*folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")]:
        name = file.name.replace("model", "pytorch_model").replace("safetensors", "bin")
        if file.suffix == ".json":
            (folder / name).write_text(
                file.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            )
        else:
            torch.save(load_file(file), folder / name)
        file.unlink()


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_tensor_in_two_parts_is_refused(form: str, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    if form == "bin":
        pickled(tmp_path)
        assert torch.allclose(loaded_logits(tmp_path), logits_of(random_model("llama")), atol=2e-5)
    first, *_, last = sorted(tmp_path.glob(f"*model-*.{form}"))
    read, write = (load_file, save_file) if form == "safetensors" else (torch.load, torch.save)
    name, value = read(first).popitem()
    write({**read(last), name: value + 1}, last)
    refused(loaded_logits, tmp_path, match=f"{name} is in two parts, {first.name} and {last.name}$")
    last.write_bytes(last.read_bytes()[:1000])
    refused(loaded_logits, tmp_path, match=f"{last} is incomplete or damaged: ")


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_not_left_out(beside: bool, tmp_path: Path) -> None:
    if beside:
        random_model("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(loaded_logits, tmp_path, match=r"holds an adapter \(LoRA\), which is not read: merge it into its model")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_generation_config_is_refused_with_the_ends_it_names(text: str, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    refused(loaded_logits, tmp_path, match=r"generation_config.json: (no JSON|must be a JSON object)")


def test_a_tied_head_may_be_left_out(tmp_path: Path) -> None:
    model = tied(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.allclose(loaded_logits(tmp_path), logits_of(model), atol=2e-5)


def test_parts_of_a_folder_are_all_there_or_it_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 2
    untouched = loaded_logits(tmp_path)
    assert torch.allclose(untouched, logits_of(random_model("llama")), atol=2e-5)
    tensors = load_file(parts[1])
    name, value = tensors.popitem()
    save_file(tensors, parts[1])
    refused(loaded_logits, tmp_path, match=f"does not fit its configuration: it lacks {name}$")
    save_file({**tensors, name: value}, parts[1])
    assert torch.equal(loaded_logits(tmp_path), untouched)
    parts[1].unlink()
    refused(loaded_logits, tmp_path, match=f"^{tmp_path} is incomplete: {parts[1].name} is missing$")


def test_a_drafter_with_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    folders = tiny_pair(tmp_path)
    file = folders.drafter / "model.safetensors"
    whole = load_file(file)
    pair = load_pair(PairSpec(name="x", target=spec_from_argument(str(folders.target)), drafter="none"), LoadOptions())
    for _, name, tensors in [*changes(whole)][::5]:
        save_file({name: value.contiguous() for name, value in tensors.items()}, file)
        refused(
            load_drafter,
            pair,
            pair.spec.model_copy(update={"drafter": spec_from_argument(str(folders.drafter))}),
            LoadOptions(),
            match=f"^drafter does not fit its configuration: .*{name}",
        )


@pytest.mark.parametrize("weights", [True, False])
def test_a_tensor_in_two_parts_is_refused_however_the_folder_is_loaded(weights: bool, tmp_path: Path) -> None:
    """`--quantization auto` expands nothing, and reads the same files."""
    random_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    name, value = load_file(first).popitem()
    save_file({**load_file(last), name: value + 1}, last)
    spec = spec_from_argument(str(tmp_path))
    refused(
        lambda: model_folder(spec, LoadOptions(), weights=weights),
        match=f"{name} is in two parts, {first.name} and {last.name}$",
    )
    assert model_folder(spec, LoadOptions(), weights=False, tokenizer_only=True) == tmp_path


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_a_head_beside_an_embedding_that_is_said_to_be_it_is_used_and_said(quantization: str, tmp_path: Path) -> None:
    """In torch and in the compiled pass alike."""
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    stored, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    head = torch.randn(stored["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file({**stored, "lm_head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    loaded = load_model(spec_from_argument(str(tmp_path)), tmp_path, LoadOptions(), "cpu", quantization)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(head)
    assert torch.allclose(logits_of(loaded.model), logits_of(model), atol=1e-3)
    (line,) = own_head(loaded)
    assert "the file's head is used" in line
    tied(tmp_path / "tied")
    assert not own_head(
        load_model(spec_from_argument(str(tmp_path)), tmp_path / "tied", LoadOptions(), "cpu", quantization)
    )


def tied(folder: Path) -> Any:
    """A model in a folder whose head is its embedding, and says so."""
    model = random_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def test_t5_without_its_shared_embedding_has_those_of_its_file(tmp_path: Path) -> None:
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shared = stored.pop("shared.weight")
    names = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    save_file({**stored, **{name: shared.clone() for name in names}}, tmp_path / "model.safetensors")
    model = load_model(spec_from_argument(str(tmp_path)), tmp_path, LoadOptions(), "cpu", "none").model
    assert all(torch.equal(part.weight, shared) for part in (model.shared, model.encoder.embed_tokens))
    assert torch.equal(model.decoder.embed_tokens.weight, shared)
