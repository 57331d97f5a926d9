"""A fuzz of model files: tensors and metadata keys are dropped, renamed and reshaped. Each time the model gives the
logits of the untouched one, or is refused in one line; it is never another model without a word.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    modeling_gguf_pytorch_utils as legacy,
)

from tests.support.refusals import refused
from utils.catalogue.specs import gguf_parts, spec_from_argument
from utils.errors import UnfitError, UserError
from utils.gguf.header import read_header
from utils.loading.build import load_model
from utils.loading.gguf import gguf_digest, write_folder
from utils.loading.loaded import LoadOptions
from utils.loading.packed_gguf import config_in, packed_entry, packed_model

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 272, "rms_norm_eps": 1e-3}
SIZES |= {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


REFUSED = r"does not fit its configuration: |is damaged: "


def random_model(family: str) -> Any:
    """A small model whose weights, norms and biases are all random: one that is not read is noticed."""
    torch.manual_seed(0)
    kind, config = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[family]
    model = kind(config(**SIZES)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.requires_grad_(False)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 70, 80, 90, 100, 20, 7]])).logits.float()


@dataclass
class Contents:
    """What a GGUF file holds: metadata with its types, tensors with theirs."""

    metadata: dict[str, tuple[Any, gguf.GGUFValueType]] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    kind: str = "F32"  # of the matrices

    def write(self, file: Path) -> Path:
        writer = gguf.GGUFWriter(file, "?")
        writer.kv_data[0].clear()
        writer.data_alignment = self.metadata.get("general.alignment", (32,))[0]
        for key, (value, kind) in self.metadata.items():
            inner = gguf.GGUFValueType.STRING if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, kind, sub_type=inner)
        for name, values in self.tensors.items():
            if self.kind == "F32" or values.ndim == 1 or values.shape[-1] % 32:
                writer.add_tensor(name, values)
            else:
                kind = gguf.GGMLQuantizationType[self.kind]
                writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        return file


def contents_of(model: Any, family: str, kind: str = "F32") -> Contents:
    """The model as llama.cpp's converter writes it."""
    config, types = model.config, gguf.GGUFValueType
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": 32,
        "vocab_size": config.vocab_size,
    }
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"x{i}" for i in range(config.vocab_size - len(tokens))]
    metadata = {
        "general.architecture": (family, types.STRING),
        **{f"{family}.{key}": (value, types.UINT32) for key, value in numbers.items()},
        f"{family}.attention.layer_norm_rms_epsilon": (config.rms_norm_eps, types.FLOAT32),
        f"{family}.rope.freq_base": (5e5, types.FLOAT32),
        "tokenizer.ggml.model": ("gpt2", types.STRING),
        "tokenizer.ggml.tokens": (tokens, types.ARRAY),
        "tokenizer.ggml.merges": (["x 0"], types.ARRAY),
        "tokenizer.ggml.eos_token_id": (2, types.UINT32),
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and family == "llama":
            weight = weight.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        stem, _, part = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{part}"] = weight.contiguous().numpy()
    return Contents(metadata, tensors, kind)


pytestmark = pytest.mark.usefixtures("cache")


def convert(file: Path, folder: Path, *, weights: bool, report: Callable[[float], None] = lambda _: None) -> None:
    """As the converter does in a process of its own; the functions that it watches are put back."""
    folder.mkdir()
    watched = {gguf: ("GGUFReader", "get_tensor_name_map"), legacy: ("tqdm", "get_gguf_hf_weights_map")}
    with pytest.MonkeyPatch.context() as patch:
        for module, names in watched.items():
            for name in names:
                patch.setattr(module, name, getattr(module, name))
        write_folder(file, folder, report, weights=weights)


def converted_logits(file: Path, folder: Path) -> Tensor:
    """The logits of the file's float32 conversion, made in this process."""
    convert(file, folder, weights=True)
    return logits_of(load_model(spec_from_argument(str(folder)), folder, LoadOptions(), "cpu", "none").model)


def packed_logits(file: Path, folder: Path) -> Tensor:
    """The logits of the file's own bits; of their conversion where nothing computes with them."""
    convert(file, folder, weights=False)
    try:
        entry = packed_entry(lambda: file, gguf_digest(file))
    except UnfitError:
        return converted_logits(file, folder.with_name(f"{folder.name} in float32"))
    said = config_in(folder)
    assert said is not None
    return logits_of(packed_model(said, entry, folder, "m").unpacked())


def changes(tensors: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what is done, to which tensor, the tensors then): of each kind of tensor in the first layer and outside."""
    for name, values in tensors.items():
        if ".1." in name:
            continue
        others = {other: value for other, value in tensors.items() if other != name}
        yield "drop", name, others
        yield "rename", name, {**others, f"new.{name}": values}
        yield "reshape", name, {**tensors, name: values[:-1] if len(values) > 1 else values[None]}


def refusal(error: UserError) -> str:
    """The line, which is one, and short enough to be read."""
    line = str(error)
    assert "\n" not in line
    assert len(line) < 400, line
    return line


def logits_or_line(logits: Callable[[], Tensor]) -> Tensor | str:
    """The logits, or the line that refuses the model. What the converter's process fails with is such a line too."""
    try:
        return logits()
    except UserError as error:
        return refusal(error)
    except (KeyError, TypeError, ValueError) as error:
        return repr(error)


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("family", "kind"), [("llama", "F32"), ("qwen2", "Q8_0")])
def test_a_gguf_file_with_other_tensors_is_refused_by_name(family: str, kind: str, step: int, tmp_path: Path) -> None:
    """Every tensor in one way or two, each way for half of them; all in the exhaustive run."""
    contents = contents_of(random_model(family), family, kind)
    logits = converted_logits if kind == "F32" else packed_logits
    untouched = logits(contents.write(tmp_path / "whole.gguf"), tmp_path / "whole")
    if kind == "F32":
        assert torch.allclose(untouched, logits_of(random_model(family)), atol=2e-5)
    for number, (change, name, tensors) in enumerate(islice(changes(contents.tensors), 0, None, step)):
        file = Contents(contents.metadata, tensors, kind).write(tmp_path / f"{number}.gguf")
        if (change, name) == ("drop", "output.weight"):  # says in this format that the head is the embedding
            model = random_model(family)
            model.lm_head.weight = model.model.embed_tokens.weight
            if kind == "F32":
                assert torch.allclose(logits(file, tmp_path / f"{number}"), logits_of(model), atol=2e-5)
            continue
        outcome = logits_or_line(partial(logits, file, tmp_path / f"{number}"))
        assert isinstance(outcome, str), (change, name)
        assert re.search(f"{REFUSED}|cannot reshape", outcome)
        assert outcome.count(".weight") <= 3, (change, name)


@pytest.mark.parametrize("change", ["drop", "rename"])
def test_a_gguf_file_that_says_less_is_the_same_model_or_refused(change: str, tmp_path: Path) -> None:
    contents = contents_of(random_model("llama"), "llama")
    untouched = converted_logits(contents.write(tmp_path / "whole.gguf"), tmp_path / "whole")
    refused_keys = set()
    for number, key in enumerate(contents.metadata):
        metadata = {name: value for name, value in contents.metadata.items() if name != key}
        if change == "rename":
            metadata[f"{key}x"] = contents.metadata[key]
        file = Contents(metadata, contents.tensors).write(tmp_path / f"{number}.gguf")
        outcome = logits_or_line(partial(converted_logits, file, tmp_path / f"{number}"))
        if isinstance(outcome, str):
            assert key in outcome or "does not fit" in outcome or key.startswith("tokenizer."), (key, outcome)
            refused_keys.add(key.partition(".")[2])
        else:
            assert torch.equal(outcome, untouched), key
    assert refused_keys >= {"architecture", "block_count", "attention.layer_norm_rms_epsilon", "rope.freq_base"}


@pytest.mark.parametrize(
    ("part", "name", "value", "told"),
    [
        *(
            ("metadata", name, (272, gguf.GGUFValueType.UINT32), f"m.gguf has 272 tokens, and {name} is 272")
            for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
            for name in [f"tokenizer.ggml.{role}_token_id"]
        ),
        (
            "tensors",
            "rope_freqs.weight",
            np.ones(16, np.float16),
            "m.gguf: rope_freqs.weight is F16, where factors of positions are F32",
        ),
    ],
)
def test_ids_beyond_the_vocabulary_and_factors_of_positions_in_another_type_are_refused(
    part: str, name: str, value: Any, told: str, tmp_path: Path
) -> None:
    contents = contents_of(random_model("llama"), "llama")
    getattr(contents, part)[name] = value
    refused(convert, contents.write(tmp_path / "m.gguf"), tmp_path / "m", weights=False, match=f"^{told}$")


@pytest.mark.parametrize(("split", "known"), [("llama-bpe", True), ("gpt-2", True), ("foo", False), ("falcon", False)])
def test_a_way_to_split_text_is_known_or_the_gguf_file_is_refused(split: str, known: bool, tmp_path: Path) -> None:
    contents = contents_of(random_model("llama"), "llama")
    contents.metadata["tokenizer.ggml.pre"] = (split, gguf.GGUFValueType.STRING)
    outcome = logits_or_line(partial(converted_logits, contents.write(tmp_path / "m.gguf"), tmp_path / "m"))
    assert isinstance(outcome, Tensor) == known
    assert known or f"tokenizer.ggml.pre is '{split}'" in str(outcome)


@pytest.mark.parametrize("key", ["general.alignment", "split.count"])
def test_a_gguf_file_whose_numbers_are_text_is_refused(key: str, tmp_path: Path) -> None:
    file = contents_of(random_model("llama"), "llama")
    file.metadata["general.source.url"] = ("x", gguf.GGUFValueType.STRING)
    path = file.write(tmp_path / "m.gguf")
    held = path.read_bytes()
    padded = len(b"general.source.url") - len(key)
    new = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, 1 + padded) + b"x" * (1 + padded)
    path.write_bytes(held.replace(struct.pack("<Q", 18) + b"general.source.url" + struct.pack("<IQ", 8, 1) + b"x", new))
    refused(read_header, path, match=f"m.gguf is damaged: {key} is 'x+'$")


# -- split files ---------------------------------------------------------------------------------------------


def split(contents: Contents, folder: Path, count: int = 3) -> list[Path]:
    """The file in parts, as llama.cpp splits it: all metadata in the first one, the tensors in turn."""
    types, names = gguf.GGUFValueType, list(contents.tensors)
    parts, each = [], -(-len(names) // count)
    for number in range(count):
        said = {"split.no": (number, types.UINT16), "split.count": (count, types.UINT16)}
        said["split.tensors.count"] = (len(names), types.INT32)
        metadata = {**(contents.metadata if number == 0 else {}), **said}
        held = {name: contents.tensors[name] for name in names[number * each : (number + 1) * each]}
        parts.append(Contents(metadata, held, contents.kind).write(folder / f"m-{number + 1:05}-of-{count:05}.gguf"))
    return parts


@pytest.mark.parametrize(("family", "kind"), [("llama", "F32"), ("qwen2", "Q8_0")])
def test_a_split_file_is_loaded_whole_from_any_of_its_parts(family: str, kind: str, tmp_path: Path) -> None:
    contents = contents_of(random_model(family), family, kind)
    logits = converted_logits if kind == "F32" else packed_logits
    untouched = logits(contents.write(tmp_path / "whole.gguf"), tmp_path / "whole")
    parts = split(contents, tmp_path)
    assert gguf_parts(parts[1]) == tuple(parts)
    for part in parts[::2]:
        assert torch.equal(logits(part, tmp_path / f"from {part.stem}"), untouched)
        assert spec_from_argument(str(part)).name == "m"
    assert len({gguf_digest(part) for part in parts}) == 1


def test_parts_of_a_split_file_are_all_there_or_it_is_refused(tmp_path: Path) -> None:
    first, second, third = split(contents_of(random_model("llama"), "llama"), tmp_path)
    held = second.read_bytes()
    second.unlink()
    for part in (first, third):
        refused(read_header, part, match=rf"^{part.name} is one of 3 parts, and {second} is missing$")
    second.write_bytes(third.read_bytes())
    refused(read_header, first, match=r"m-00002-of-00003.gguf is not part 2 of 3, as its name says$")
    second.write_bytes(held[:-5000])
    refused(read_header, first, match=r"m-00002-of-00003.gguf is incomplete: 5,000 of \d+,\d+ bytes are missing$")
    second.write_bytes(held)
    first.rename(tmp_path / "model.gguf")
    refused(
        read_header,
        tmp_path / "model.gguf",
        match=r"model.gguf is one of 3 parts: name it …-00001-of-00003.gguf, as it was$",
    )


@pytest.mark.parametrize("weights", [False, True])
def test_a_gguf_file_is_read_with_progress(weights: bool, tmp_path: Path) -> None:
    reports: list[float] = []
    file = contents_of(random_model("llama"), "llama").write(tmp_path / "m.gguf")
    convert(file, tmp_path / "m", weights=weights, report=reports.append)
    assert len(reports) >= 3
    assert reports == sorted(reports)
    assert all(0 <= done < 1 for done in reports)
