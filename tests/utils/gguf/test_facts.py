"""Small random GGUF files of each family: positions, ends and templates are those of the model that was written."""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as legacy

from sampling.drafters.draft_heads.mtp import MtpLayer, load_layer
from sampling.models.fused import FusedNetwork, supports
from tests.support.gguf_files import (
    CONTEXT,
    FAMILIES,
    HYBRIDS,
    MIXTURES,
    llama3_factors,
    random_model,
    write_gguf,
)
from tests.support.quantized import keep_code
from tests.support.refusals import refused
from utils.catalogue.catalogue import ships_mtp
from utils.gguf.header import read_header
from utils.gguf.vocabulary import end_ids
from utils.loading.build import load_tokenizer, stop_ids
from utils.loading.gguf import write_folder
from utils.loading.loaded import LoadOptions
from utils.loading.packed_gguf import config_in, packed_entry, packed_model

keep_code()

IDS = torch.tensor([[0, *range(8, 48)]])


def converted(folder: Path, family: str, model: Any, **more: Any) -> Any:
    """`model` after its way through a file; the folder then holds what the program loads."""
    out, file = folder / "converted", write_gguf(folder / "model.gguf", family, model, **more)
    with pytest.MonkeyPatch.context() as patch:  # what the converter changes of the libraries in its own process
        patch.setattr(legacy, "get_gguf_hf_weights_map", legacy.get_gguf_hf_weights_map)
        for library, name in [(gguf, "GGUFReader"), (gguf, "get_tensor_name_map"), (legacy, "tqdm")]:
            patch.setattr(library, name, getattr(library, name))
        write_folder(file, out, lambda _: None)
    return transformers.AutoModelForCausalLM.from_pretrained(str(out)).eval()


def apart(one: Any, other: Any, ids: torch.Tensor = IDS) -> float:
    with torch.no_grad():
        return float((one(ids).logits - other(ids).logits).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_each_family_is_the_model_it_was_written_from(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    assert apart(converted(tmp_path, family, model), model) < 2e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrids_file_keeps_its_multi_token_prediction_layer(family: str, tmp_path: Path) -> None:
    """The layer behind the last, `blk.2.nextn.…`, which transformers leaves out."""
    model = random_model(family)
    noise = torch.Generator().manual_seed(3)
    shapes = {name: weight.shape for name, weight in MtpLayer(model, family.endswith("moe")).state_dict().items()}
    ahead = {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    loaded = converted(tmp_path, family, model, ahead=ahead)
    assert apart(loaded, model) < 2e-5
    folder = tmp_path / "converted"
    assert ships_mtp(folder)
    kept = load_layer(loaded, folder, torch.device("cpu"), torch.float64).state_dict()  # float32 would be packed
    torch.testing.assert_close(kept, {name: weight.double() for name, weight in ahead.items()}, rtol=0, atol=1e-6)


def rope_of(model: Any) -> Any:
    """The part that turns queries and keys."""
    return model.model.rotary_emb


def test_llama_3_turns_by_its_factors(tmp_path: Path) -> None:
    factors = llama3_factors(32, 500000.0, 8.0, 1.0, 4.0, 64)
    assert 1.0 < sorted(set(factors.tolist()))[1] < 8.0  # one of them lies between
    model = random_model(
        "llama3",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    loaded = converted(tmp_path, "llama3", model, factors={"rope_freqs": factors})
    assert apart(loaded, model) < 2e-5 < apart(random_model("llama3"), model)
    naive = torch.tensor([500000.0 ** (-2 * pair / 32) / factors[pair] for pair in range(16)])
    assert torch.allclose(rope_of(loaded).inv_freq, naive, rtol=1e-6)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_linear_stretching_divides_every_frequency(key: str, tmp_path: Path) -> None:
    stretched = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = random_model("qwen2", rope_parameters=stretched)
    loaded = converted(tmp_path, "qwen2", model, metadata={key: 4.0})
    assert apart(loaded, model) < 2e-5 < apart(random_model("qwen2"), model)
    assert loaded.config.rope_parameters == stretched
    assert torch.allclose(rope_of(loaded).inv_freq, torch.tensor([1e4 ** (-2 * i / 32) / 4 for i in range(16)]))


def yarn(size: int, base: float, factor: float, original: int, fast: float, slow: float) -> torch.Tensor:
    """llama.cpp's frequencies: those that turn often stay, those that turn seldom are divided, a ramp between."""

    def pair_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(0.0, math.floor(pair_of(fast))), min(size - 1.0, math.ceil(pair_of(slow)))
    found = []
    for pair in range(size // 2):
        plain = base ** (-2 * pair / size)
        kept = 1 - min(1.0, max(0.0, (pair - first) / max(0.001, last - first)))
        found.append(plain / factor * (1 - kept) + plain * kept)
    return torch.tensor(found)


@pytest.mark.parametrize(("fast", "slow"), [(None, None), (8.0, 2.0)])
def test_yarn_stretches_what_turns_seldom(fast: float | None, slow: float | None, tmp_path: Path) -> None:
    betas = {} if fast is None else {"beta_fast": fast, "beta_slow": slow}
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4, **betas}
    model = random_model("qwen3", rope_parameters=stretched)
    said = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    said |= {f"yarn_{name}": value for name, value in betas.items()}
    loaded = converted(
        tmp_path, "qwen3", model, metadata={f"rope.scaling.{name}": value for name, value in said.items()}
    )
    assert apart(loaded, model) < 2e-5 < apart(random_model("qwen3"), model)
    assert torch.allclose(rope_of(loaded).inv_freq, yarn(64, 1e4, 4.0, 64, fast or 32.0, slow or 1.0), rtol=1e-5)
    assert rope_of(loaded).attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_phi_3_turns_by_the_length_of_the_text(share: float, tmp_path: Path) -> None:
    pairs = int(32 * share) // 2
    short, long = (np.linspace(1.0, most, pairs).astype(np.float32) for most in (1.5, 9.0))
    attention = math.sqrt(1 + math.log(CONTEXT / 32) / math.log(32))
    stretched = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    model = random_model(
        "phi3",
        rope_parameters={**stretched, "rope_theta": 1e4, "partial_rotary_factor": share},
        original_max_position_embeddings=32,
    )
    loaded = converted(
        tmp_path,
        "phi3",
        model,
        metadata={"rope.scaling.attn_factor": attention},
        factors={"rope_factors_short": short, "rope_factors_long": long},
    )
    for length in (20, 32, 33, 40):
        assert apart(loaded, model, IDS[:, :length]) < 2e-5
        assert apart(random_model("phi3"), model, IDS[:, :length]) > 1e-3
        naive = [1e4 ** (-2 * pair / (2 * pairs)) / (short if length <= 32 else long)[pair] for pair in range(pairs)]
        assert torch.allclose(rope_of(loaded).inv_freq, torch.tensor(naive, dtype=torch.float32), rtol=1e-6)
    assert rope_of(loaded).attention_scaling == pytest.approx(attention)


def test_phi_3_looks_as_far_back_as_its_file_says(tmp_path: Path) -> None:
    model = random_model("phi3", sliding_window=16)
    assert apart(converted(tmp_path, "phi3", model), model) < 2e-5 < apart(random_model("phi3"), model)


def test_gemma_3_stretches_the_layers_that_look_at_everything(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    stretched = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    model = random_model("gemma3", rope_parameters={"full_attention": stretched, "sliding_attention": plain})
    loaded = converted(tmp_path, "gemma3", model, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert apart(loaded, model) < 2e-5 < apart(random_model("gemma3"), model)
    assert loaded.config.rope_parameters == model.config.rope_parameters


def test_stretching_of_no_kind_and_factors_of_one_change_nothing(tmp_path: Path) -> None:
    model = random_model("llama3")
    said = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0}
    loaded = converted(tmp_path, "llama3", model, metadata=said, factors={"rope_freqs": np.ones(16)})
    assert apart(loaded, model) < 2e-5
    assert loaded.config.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize(
    ("family", "said", "told"),
    [
        ("llama3", {"expert_count": 8}, "does not say llama.expert_used_count"),
        ("llama3", {"attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
        ("llama3", {"attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping = 30.0"),
        ("llama3", {"attention.key_length": 32, "rope.dimension_count": 16}, "dimension_count is 16, where .* have 32"),
        ("llama3", {"attention.value_length": 16}, "llama.attention.value_length is 16, where its heads have 32"),
        ("qwen2", {"attention.causal": False, "logit_scale": 0.5, "expert_count": 0}, "qwen2.logit_scale = 0.5"),
        ("qwen2", {"rope.scaling.type": "ntk"}, "qwen2.rope.scaling.type is 'ntk': known are linear, longrope"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "rope_factors_long, rope_factors_short. are not all there"),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ("qwen2", {"rope.freq_base": 0.0}, "rope.freq_base is no base and no factor to turn positions by: .0.0."),
        ("qwen2", {"rope.freq_base": math.nan}, "rope.freq_base is no base and no factor"),
        ("qwen3", {"swin_norm": True, "a": 1, "b": 2, "c": 3}, "qwen3.swin_norm = True, qwen3.a = 1, .* and 1 more"),
        ("gemma3", {"attention.clamp_kqv": 3.0}, "gemma3.attention.clamp_kqv = 3.0"),
    ],
)
def test_facts_that_have_no_place_are_refused_by_name(
    family: str, said: dict[str, Any], told: str, tmp_path: Path
) -> None:
    refused(converted, tmp_path, family, random_model(family), metadata=said, match=told)


@pytest.mark.parametrize("left", [(), ("rope_factors_long",)])
def test_a_phi_3_without_all_its_factors_is_refused(left: tuple[str, ...], tmp_path: Path) -> None:
    model = random_model("phi3", original_max_position_embeddings=32)
    refused(
        converted,
        tmp_path,
        "phi3",
        model,
        factors={name: np.ones(16) for name in left},
        match=r"rope_factors_long, rope_factors_short. are not all there",
    )


def test_factors_for_other_heads_are_refused(tmp_path: Path) -> None:
    refused(
        converted,
        tmp_path,
        "llama3",
        random_model("llama3"),
        factors={"rope_freqs": np.full(8, 2.0)},
        match="rope_freqs has 8 factors, where heads have 16 pairs",
    )


# -- the compiled pass over the file's own bits ----------------------------------------------------------

STRETCHES: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray]]] = {
    "llama3": ("llama3", {}, {"rope_freqs": llama3_factors(32, 500000.0, 8.0, 1.0, 4.0, 64)}),
    "louder": ("llama3", {"rope.scaling.attn_factor": 1.5}, {}),
    "linear": ("qwen2", {"rope.scaling.factor": 4.0}, {}),
    "yarn": ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}),
}


def packed(folder: Path, family: str, model: Any, kind: str) -> Any:
    """`model` after its way through a file of `kind`, whose bits stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_CACHE_DIR", str(folder))
        for library, name in [(gguf, "GGUFReader"), (gguf, "get_tensor_name_map"), (legacy, "tqdm")]:
            patch.setattr(library, name, getattr(library, name))
        patch.setattr(legacy, "get_gguf_hf_weights_map", legacy.get_gguf_hf_weights_map)
        file = write_gguf(folder / "model.gguf", family, model, kind=kind)
        write_folder(file, described := folder / "described", lambda _: None, weights=False)
        config = config_in(described)
        assert config is not None
        return packed_model(config, packed_entry(lambda: file, "b" * 64), described, "m")


@pytest.mark.parametrize(("kind", "near"), [("F16", 2e-5), ("Q8_0", 2e-2)])
@pytest.mark.parametrize("family", {**FAMILIES, **MIXTURES})
def test_the_compiled_pass_reads_a_file_of_each_family_at_its_own_size(
    family: str, kind: str, near: float, tmp_path: Path
) -> None:
    """As transformers computes with the same weights dequantised, also where it computes with the packed ones."""
    model = random_model(family)
    for values in model.state_dict().values():  # logits of the size of 1
        if values.ndim > 1:
            values.mul_(0.5)
        elif family.startswith("gemma"):
            values.sub_(1.0)
    loaded, number = packed(tmp_path, family, model, kind), gguf.GGMLQuantizationType[kind]
    for name, values in model.state_dict().items():
        if values.ndim > 1 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            values.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), number), number)))
    assert supports(loaded)
    network, positions = FusedNetwork(loaded, torch.float32), torch.arange(IDS.shape[1])[None]
    logits = network.forward(IDS, positions, None, network.new_cache(1), IDS.shape[1])[0]
    with torch.no_grad():
        assert float((logits - model(IDS).logits).abs().max()) < near
    assert apart(loaded, model) < near
    assert apart(loaded.unpacked(), model) < 2e-5


@pytest.mark.parametrize("stretch", STRETCHES)
def test_the_compiled_pass_turns_by_the_same_frequencies(stretch: str, tmp_path: Path) -> None:
    family, metadata, factors = STRETCHES[stretch]
    more = {"metadata": metadata, "factors": factors, "kind": "Q8_0"}
    loaded, folder = converted(tmp_path, family, random_model(family), **more), tmp_path / "converted"
    config = config_in(folder)
    assert config is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_CACHE_DIR", str(tmp_path))
        entry = packed_entry(lambda: tmp_path / "model.gguf", "a" * 64)
    model: Any = packed_model(config, entry, folder, "m")
    assert torch.equal(rope_of(model).inv_freq, rope_of(loaded).inv_freq)
    assert rope_of(model).attention_scaling == rope_of(loaded).attention_scaling
    network, positions = FusedNetwork(model, torch.float32), torch.arange(IDS.shape[1])[None]
    logits = network.forward(IDS, positions, None, network.new_cache(1), IDS.shape[1])[0]
    plain = {"rope_type": "default", "rope_theta": loaded.config.rope_parameters["rope_theta"]}
    unstretched = type(loaded)(transformers.AutoConfig.from_pretrained(str(folder), rope_parameters=plain)).eval()
    unstretched.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        near, far = (float((logits - model(IDS).logits).abs().max()) for model in (loaded, unstretched))
    assert near < 0.02 < far


# -- ends and templates ----------------------------------------------------------------------------------

ENDS = {
    "llama3": {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"},
    "mistral": {"</s>"},
    "qwen2": {"<|im_end|>", "<|endoftext|>"},
    "qwen3": {"<|im_end|>", "<|endoftext|>"},
    "gemma2": {"<eos>", "<end_of_turn>"},
    "gemma3": {"<eos>", "<end_of_turn>"},
    "phi3": {"<|endoftext|>", "<|end|>"},
    **{family: {"<|im_end|>", "<|endoftext|>"} for family in ("granite", "olmo2", "smollm3")},
}
CHAT = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "b"},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_end_that_a_family_has_ends_an_answer_and_its_template_is_its_own(family: str, tmp_path: Path) -> None:
    loaded, how = converted(tmp_path, family, random_model(family)), FAMILIES[family]
    tokenizer: Any = load_tokenizer(tmp_path / "converted", LoadOptions())
    assert {tokenizer.convert_ids_to_tokens(end) for end in stop_ids(loaded, tokenizer)} == ENDS[family]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    names = {"bos_token": how.tokens[0], "eos_token": how.eos}
    expected = jinja2.Environment().from_string(how.template).render(messages=CHAT, add_generation_prompt=True, **names)
    assert text == expected
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    control = [token for token in re.findall(r"<[^<>\n ]+>|\[INST\]", text) if token in how.tokens]
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token in how.tokens] == control
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    if how.tokenizer == "gpt2":
        alone = family == "llama3"
        assert [len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in ("ab", "bb")] == [1, 2 - alone]


def test_ends_that_the_metadata_names_count_whatever_they_are_called(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "mistral", random_model("mistral"), roles={"eot": 7, "eom": 9})
    assert end_ids(read_header(file)) == [1, 7, 9]
