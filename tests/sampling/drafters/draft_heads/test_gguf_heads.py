"""Draft heads in GGUF files, as llama.cpp's converter lays them out, draft what the same heads in safetensors draft."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.lanes.drafters import moved
from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.dflash import BlockLM
from sampling.drafters.draft_heads.eagle import FeatureLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.mtp import MtpLM, load_layer
from sampling.drafters.draft_model import ModelDrafter
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.sampling.drafters.draft_heads import test_published as eagle
from tests.sampling.drafters.draft_heads.test_exact import EXACT, OffByOne, enumerated, itself
from tests.support import blocks, mtp
from tests.support.blocks import BlockCase
from tests.support.gguf_heads import write_assistant, write_head, write_layer
from tests.support.quantized import keep_code, quantised
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.refusals import refused
from tests.support.runs import answers, decode, greedy, sampler
from tests.support.students import PrefixLM, close, fed, make_target, text
from utils.catalogue.catalogue import head_kind
from utils.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear
from utils.loading.build import admit_readers
from utils.loading.gguf import write_folder

ENTERS = blocks.ENTERS
EAGLES = {
    "EAGLE-3, Llama 3's positions": eagle.Case("midlayer", "whole"),
    "EAGLE-3, its own embedding": eagle.Case("speculators", "whole", {"norm_before_residual": True}, embedding=eagle.G),
    "EAGLE-3, normed states, all ids": eagle.Case("speculators", "whole", {"norm_before_fc": True}, short=False),
    "EAGLE-3, layers in another order": eagle.Case("speculators", "whole", order=(5, 2, 4)),
}
MARKOV = {"markov_rank": 6}
BLOCKS = {
    "DFlash": BlockCase("dflash", "z-lab"),
    "JetSpec": BlockCase("jetspec", "z-lab", {"causal_head": True}),
    "DFlash, windows": BlockCase("dflash", "z-lab", sliding=(True, False)),
    "DSpark": BlockCase("dspark", "DeepSpec", MARKOV, own=True),
    "DSpark, a reduced vocabulary": BlockCase("dspark", options=MARKOV, short=True),
    "DSpark, not from the anchor": BlockCase("dspark", options={**MARKOV, "sample_from_anchor": False}),
    "DFlash2": BlockCase(
        "dflash2", "z-lab", {"selector_rank": 6, "selector_top_k": 4, "conv_group_size": 8, "conv_kernel_size": 2}
    ),
}


def in_float32(head: tuple[dict[str, Any], dict[str, Tensor]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The head with an epsilon that a file can hold."""
    config, tensors = head
    inner = config.get("transformer_layer_config", config)
    inner["rms_norm_eps"] = float(np.float32(inner["rms_norm_eps"]))
    return config, tensors


def in_both(name: str, folder: Path, **more: Any) -> tuple[Path, Path]:
    """The same head in a folder as it is published, and in one that was made from a GGUF file."""
    if name in EAGLES:
        case = EAGLES[name]
        config, tensors = in_float32(eagle.published(case))
        there, enters = eagle.written(folder / "published", config, tensors, case), case.order
    else:
        config, tensors = in_float32(blocks.published(BLOCKS[name]))
        there, enters = blocks.written(folder / "published", config, tensors), ENTERS
    file = write_head(folder / "head.gguf", config, tensors, enters, **more)
    made = folder / "made"
    made.mkdir()
    write_folder(file, made, lambda fraction: None)
    return there, made


def lm_of(head: DraftHead) -> Any:
    return (FeatureLM if head.config.kind == "eagle" else BlockLM)(head)


def drafted(plain: CausalLM, prompts: list[list[int]], head: DraftHead) -> list[Any]:
    """The drafts of each round."""
    return [
        event.drafted
        for event in decode(plain, prompts, ModelDrafter(lm_of(head)), greedy(), length=10)
        if hasattr(event, "drafted")
    ]


@pytest.mark.parametrize("name", [*EAGLES, *BLOCKS])
def test_a_file_is_the_head_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    """Every weight, the shape, the layers read and the turned positions; and drafts and text."""
    folder, made = in_both(name, tmp_path)
    target = eagle.large() if name in EAGLES else blocks.target_of("Qwen3")
    theirs, own = load_student(folder, target), load_student(made, target)
    assert head_kind(made) == head_kind(folder) == own.config.kind
    same: dict[str, Any] = {"rope": {}}
    if not any(getattr(own.config, "windows", ())):
        same |= {"causal": False} if name in BLOCKS else {}  # it is of layers with a window
    assert replace(own.config, **same) == replace(theirs.config, **same)
    turned, wanted = own.rotary(torch.arange(40)[None]), theirs.rotary(torch.arange(40)[None])
    for part, other in zip(turned, wanted, strict=True):
        close(part, other, 1e-6)
    assert torch.equal(own.ids, theirs.ids)
    values = own.state_dict()
    assert values.keys() == theirs.state_dict().keys()
    assert all(torch.equal(values[key], value) for key, value in theirs.state_dict().items())
    if name in ("EAGLE-3, its own embedding", "DSpark, a reduced vocabulary", "JetSpec"):
        prompts, plain = [text(5, 9)], CausalLM(target)
        assert drafted(plain, prompts, own) == drafted(plain, prompts, theirs)


WIDE = {
    "EAGLE-3": BlockCase("peagle", own=True, sliding=(False,)),  # without its mask, an EAGLE-3 head
    "DFlash": BlockCase("dflash", "z-lab"),
    "DSpark": BlockCase("dspark", "DeepSpec", {"markov_rank": 32}, own=True),
}


def of_bits(name: str, bits: str, folder: Path, vocab: int) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """A file of a head of width 32 whose matrices have the type `bits`, and the same head in floats."""
    config, tensors = in_float32(blocks.published(WIDE[name], vocab, 32))
    config = {**config, "mask_token_id": vocab - 1} if WIDE[name].style != "z-lab" else config
    if name == "EAGLE-3":
        del tensors["mask_hidden"]
        config["speculators_model_type"] = "eagle3"
    else:
        config.setdefault("dflash_config", {}).update(mask_token_id=vocab - 1)
        config = config if name == "DFlash" else {key: value for key, value in config.items() if key != "dflash_config"}
    file = write_head(folder / f"{name}.gguf", config, tensors, ENTERS, bits)
    kind = gguf.GGMLQuantizationType[bits]
    rounded = {
        key: torch.from_numpy(gguf.dequantize(quantised(value.numpy(), bits), kind))
        if value.dim() == 2 and len(value) > 1
        else value
        for key, value in tensors.items()
    }
    return file, config, rounded


@pytest.mark.parametrize("bits", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", WIDE)
def test_the_matrices_of_a_file_keep_their_bits(name: str, bits: str, tmp_path: Path) -> None:
    """They are multiplied as they are, and the logits are those of the same numbers in float32."""
    keep_code()
    target, row = make_target(64, seed=11, hidden_size=32, num_hidden_layers=8), text(1, 12, 64)
    file, config, rounded = of_bits(name, bits, tmp_path, 64)
    (made := tmp_path / "made").mkdir()
    write_folder(file, made, lambda fraction: None)
    own, theirs = load_student(made, target), load_student(blocks.written(tmp_path / "floats", config, rounded), target)
    maps = [part for part in own.modules() if isinstance(part, QuantizedLinear | QuantizedEmbedding)]
    assert len(maps) >= 8
    assert {part.packed.kind for part in maps} == {bits}
    logits = []
    for head in (own, theirs):
        lm = lm_of(head)
        session: Any = lm.open([row], target=fed(target, [row], [11], hidden=lm.reads_hidden))
        if name == "EAGLE-3":
            logits.append(session.score([row], Draft.empty(1))[0, 0])
        else:
            session.draft_block([row], lm.block)
            logits.append(torch.cat([session.logits_after([0], [[row[-1], 5, 17][:depth]]) for depth in (1, 2, 3)]))
    close(*logits, 3e-3)


def test_elsewhere_than_on_the_cpu_a_head_has_the_numbers_of_its_bits(tmp_path: Path) -> None:
    keep_code()
    target = make_target(64, seed=11, hidden_size=32, num_hidden_layers=8)
    file, *_ = of_bits("DSpark", "Q4_0", tmp_path, 64)
    head = load_student(made_of(file), target)
    there = moved(load_student(file.with_suffix(""), target), torch.device("cpu"), torch.bfloat16, target)
    assert not any(isinstance(part, QuantizedLinear | QuantizedEmbedding) for part in there.modules())
    values = there.state_dict()
    assert {value.dtype for value in values.values()} == {torch.bfloat16}
    assert all(torch.equal(values[key], value.bfloat16()) for key, value in head.state_dict().items())


def small(name: str, folder: Path) -> DraftHead:
    """A head from a file for the target of `enumerated`: four ids, three layers."""
    config, tensors = blocks.published(WIDE[name]._replace(block=3), 4, 24, (0, 1, 2), 3)
    config |= {"mask_token_id": 2, "dflash_config": {"target_layer_ids": [-1, 0, 1], "mask_token_id": 2}}
    if name != "DFlash":
        del config["dflash_config"]
    if name == "EAGLE-3":
        del tensors["mask_hidden"]
        config["speculators_model_type"] = "eagle3"
    file = write_head(folder / f"{name}.gguf", config, tensors, (0, 1, 2))
    return load_student(made_of(file), make_target(4, seed=3, dtype=torch.float64)).double()


@pytest.mark.parametrize(
    "name", ["DFlash", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("EAGLE-3", "DSpark"))]
)
def test_the_emitted_law_is_the_targets_to_the_last_digit(name: str, tmp_path: Path) -> None:
    """And a head that passes up another law than the one drawn from is seen."""
    head = small(name, tmp_path)
    for mutant, least, most in ((itself, 0.0, EXACT), (OffByOne, 1e-4, 1.0)):
        assert least <= enumerated("dflash", partial(_instead, mutant, head), "law", NaiveLaw(top_k=2), length=3) < most


def _instead(mutant: Any, head: DraftHead, _: ModelDrafter) -> ModelDrafter:
    changed: ModelDrafter = mutant(ModelDrafter(lm_of(head)))
    return changed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WIDE)
def test_sampled_text_has_the_targets_law(name: str, tmp_path: Path) -> None:
    keep_code()
    target = make_target(8, seed=10, hidden_size=32, num_hidden_layers=8)
    file, *_ = of_bits(name, "Q4_0", tmp_path, 8)
    lm, prompt, found = lm_of(load_student(made_of(file), target)), text(3, 5, 8), Counter[tuple[int, ...]]()
    for seed in range(300):
        said = answers(CausalLM(target), [prompt], ModelDrafter(lm), sampler(1.0, seed, top_k=2), length=4, gamma=2)[0]
        found[tuple(said[:3])] += 1
    assert chi_square_p(found, exact_law(PrefixLM(target), prompt, NaiveLaw(top_k=2), 3)) > 1e-6
    assert chi_square_p(found, exact_law(PrefixLM(target), prompt, NaiveLaw(temperature=9.0, top_k=2), 3)) < 1e-6, (
        "so many samples see another law"
    )


def test_llama_cpp_itself_reads_the_files_of_these_tests(tmp_path: Path) -> None:
    """Names, shapes and keys are those that its loader wants, of each architecture."""
    library = pytest.importorskip("llama_cpp")
    files = [
        write_head(tmp_path / f"{index}.gguf", *eagle.published(case), case.order)
        for index, case in enumerate(EAGLES.values())
    ]
    files += [
        write_head(tmp_path / f"block-{index}.gguf", *blocks.published(case), ENTERS)
        for index, case in enumerate(BLOCKS.values())
    ]
    folder, name = mtp.assistant_folder(tmp_path / "assistant"), "qwen3_5_text"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    files.append(write_assistant(tmp_path / "assistant.gguf", config, tensors))
    files.append(write_layer(tmp_path / "mtp.gguf", mtp.shipped(name)[0].config, mtp.tensors(name)))
    library.llama_backend_init()
    for file in files:
        model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        assert model, file
        library.llama_model_free(model)


def made_of(file: Path) -> Path:
    """The folder that a file is converted to."""
    folder = file.with_suffix("")
    folder.mkdir()
    write_folder(file, folder, lambda fraction: None)
    return folder


# -- layers for multi-token prediction that a file holds alone --------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3_next", "qwen3_5_moe_text")),
    ],
)
def test_a_layer_in_a_file_of_its_own_is_the_targets(name: str, tmp_path: Path) -> None:
    target = CausalLM(mtp.target_of(name))
    made = made_of(write_layer(tmp_path / "mtp-small.gguf", mtp.shipped(name)[0].config, mtp.tensors(name)))
    assert head_kind(made) == "mtp"
    own, theirs = (
        load_layer(target.network.model, folder, torch.device("cpu"), torch.float64).state_dict()
        for folder in (made, mtp.folder_of(name))
    )
    assert own.keys() == theirs.keys()
    for key, value in theirs.items():
        close(own[key], value, 1e-6)
    prompt = [(7 * at) % 61 + 20 for at in range(9)]
    assert answers(target, [prompt], ModelDrafter(MtpLM(target, made)), greedy(), length=6) == answers(
        target, [prompt], None, greedy(), length=6
    )


def test_a_layer_of_eight_bits_runs_in_eight_bits(tmp_path: Path) -> None:
    keep_code()
    name, row = "qwen3_5_text", [(7 * at) % 61 + 20 for at in range(9)]
    target = CausalLM(mtp.target_of(name))
    made = made_of(write_layer(tmp_path / "mtp-small.gguf", mtp.shipped(name)[0].config, mtp.tensors(name), "Q8_0"))
    layer = load_layer(target.network.model, made, torch.device("cpu"), torch.float32)
    assert {part.packed.kind for part in layer.modules() if isinstance(part, QuantizedLinear)} == {"Q8_0"}
    held, logits = target.open([row], hidden=True), []
    held.score([row[:-1]], Draft.empty(1))
    for folder in (made, None):
        logits.append(MtpLM(target, folder).open([row], target=held).score([row], Draft.empty(1))[0, 0])
    close(*logits, 2e-2)
    assert int(logits[0].argmax()) == int(logits[1].argmax())


# -- Gemma 4's assistants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["F32", "Q8_0"])
def test_an_assistant_in_a_file_is_the_one_in_a_folder(bits: str, tmp_path: Path) -> None:
    folder = mtp.assistant_folder(tmp_path / "assistant")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    made = made_of(write_assistant(tmp_path / "small-assistant.gguf", config, tensors, bits))
    own = json.loads((made / "config.json").read_text())
    assert own["backbone_hidden_size"] == config["backbone_hidden_size"]
    text, wanted = own["text_config"], config["text_config"]
    differ = {key for key in wanted.keys() & text.keys() if text[key] != wanted[key]}
    assert differ <= {"rms_norm_eps", "per_layer_config"}  # a float, and the number of keys too
    models = [read_assistant(place) for place in (made, folder)]
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))  # 3e-2 does not hold for every noise
    states = {"inputs_embeds": noise(1, 1, 2 * own["backbone_hidden_size"]), "position_ids": torch.tensor([[5]])}
    kinds = {"sliding_attention": 256, "full_attention": 512}
    seen = {kind: (noise(1, 2, 6, size), noise(1, 2, 6, size)) for kind, size in kinds.items()}
    logits = [model(**states, shared_kv_states=seen, use_cache=False).logits[0, 0] for model in models]
    close(*logits, 1e-6 if bits == "F32" else 3e-2)


def read_assistant(folder: Path) -> Any:
    config: Any = AutoConfig.from_pretrained(folder)
    admit_readers(type(config.get_text_config()))
    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


# -- what does not fit is one line ------------------------------------------------------------------------------------


def dflash(folder: Path, metadata: dict[str, Any]) -> Path:
    return write_head(folder / "head.gguf", *blocks.published(BLOCKS["DFlash"]), ENTERS, metadata=metadata)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"embedding_length": None}, "head.gguf does not say dflash.embedding_length"),
        ({"target_layers": None}, "head.gguf does not say dflash.target_layers"),
        ({"hyper_connection_count": 4}, "keys that this program does not know: dflash.hyper_connection_count = 4"),
        ({"rope.dimension_count": 4}, "head.gguf turns a part of its heads"),
        ({"rope.scaling.type": "odd"}, "dflash.rope.scaling.type is 'odd'"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(metadata: dict[str, Any], told: str, tmp_path: Path) -> None:
    refused(made_of, dflash(tmp_path, metadata), match=told)


@pytest.mark.parametrize("kind", ["jetspec", "domino", "dflare", "peagle", "pard2"])
def test_a_kind_that_llama_cpp_does_not_define_is_one_line(kind: str, tmp_path: Path) -> None:
    file = write_head(tmp_path / "head.gguf", *blocks.published(BLOCKS["DFlash"]), ENTERS, architecture=kind)
    refused(made_of, file, match=f"^head.gguf says that it is a {kind} head: llama.cpp defines no such file, name the")


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"target_layers": [2, 4, 9]}, r"reads states \[2, 4, 9\]: a target of 8 layers"),
        ({"target_layers": [2, 4]}, r"for a target of hidden size 36 \(Small 1B\), this one has 24"),
    ],
)
def test_a_head_that_does_not_fit_is_one_line(metadata: dict[str, Any], told: str, tmp_path: Path) -> None:
    refused(
        load_student,
        made_of(dflash(tmp_path, {"general.base_model.0.name": "Small 1B", **metadata})),
        blocks.target_of("Llama"),
        match=told,
    )


def test_a_tensor_of_no_head_that_is_read_is_named(tmp_path: Path) -> None:
    config, tensors = blocks.published(BLOCKS["DFlash"])
    names = {**tensors, "layers.0.self_attn.sinks.weight": torch.zeros(4)}  # gpt-oss's
    file = write_head(tmp_path / "head.gguf", config, names, ENTERS)
    refused(made_of, file, match="head.gguf has blk.0.attn_sinks.weight, which no dflash head that is read has")


def test_older_names_are_read(tmp_path: Path) -> None:
    """`dspark` as an architecture, `extract_layers`, and the rows of a list in any order."""
    config, tensors = blocks.published(BLOCKS["DSpark, a reduced vocabulary"])
    order = torch.tensor([3, 0, 2, 1, 8, 7, 5, 6, 4])
    shuffled = {**tensors, "d2t": (tensors["d2t"] + torch.arange(9))[order] - torch.arange(9)}
    shuffled |= {name: tensors[name][order] for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    file = write_head(tmp_path / "head.gguf", config, shuffled, ENTERS, architecture="dspark")
    theirs = load_student(blocks.written(tmp_path / "published", config, tensors), blocks.target_of("Llama"))
    own = load_student(made_of(file), blocks.target_of("Llama"))
    assert own.config.kind == "dspark"
    assert torch.equal(own.ids, theirs.ids)
    assert torch.equal(own.lm_head.weight, theirs.lm_head.weight)
    config, tensors = eagle.published(EAGLES["EAGLE-3, layers in another order"])
    metadata = {"target_layers": None, "extract_layers": [5, 2, 4]}
    file = write_head(tmp_path / "older.gguf", config, tensors, (5, 2, 4), metadata=metadata)
    assert load_student(made_of(file), eagle.large()).config.reads == (5, 2, 4)
