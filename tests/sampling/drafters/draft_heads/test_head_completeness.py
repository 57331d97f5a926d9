"""A fuzz of draft heads on disk: tensors and keys are dropped, renamed and reshaped. Each time the head computes what
the untouched one does, or is refused in one line; it is never another head without a word.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sampling.drafters.draft_heads.checkpoint import CONFIG, WEIGHTS, load_student, save_student
from sampling.drafters.draft_heads.modules import DraftHead
from tests.sampling.drafters.draft_heads.test_published import CASES, Case, large, published, written
from tests.support import blocks
from tests.support.students import KINDS, make_student, make_target
from utils.errors import UserError


def changes(values: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what is done, to which, all values then)."""
    for name, value in values.items():
        others = {other: kept for other, kept in values.items() if other != name}
        yield "drop", name, others
        yield "rename", name, {**others, f"new.{name}": value}
        if isinstance(value, Tensor):
            yield "reshape", name, {**others, name: value[:-1].clone() if len(value) > 1 else value[None]}


def loaded(folder: Path, target: Any) -> DraftHead | str:
    """The head, or the line that refuses it."""
    try:
        return load_student(folder, target, "abc")
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    assert str(folder) in line
    return line


def same(head: DraftHead | str, other: DraftHead | str) -> bool:
    """Whether both compute the same: the configuration, and every weight."""
    assert isinstance(head, DraftHead)
    assert isinstance(other, DraftHead)
    ours, theirs = head.state_dict(), other.state_dict()
    same_ids = head.ids is other.ids or torch.equal(head.ids, other.ids)
    return same_ids and head.config == other.config and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_ours_is_the_same_or_refused(kind: str, tmp_path: Path) -> None:
    target = make_target()
    more: Any = {"reads": (-1, 0, 1)} if kind == "eagle" else {}  # no published format has the last state's number
    save_student(tmp_path, make_student(kind, target, short=[0, 2, 3, 5, 8, 13, 21, 34], **more), {"tokenizer": "abc"})
    tensors, config = load_file(tmp_path / WEIGHTS), json.loads((tmp_path / CONFIG).read_text())
    untouched, refused = loaded(tmp_path, target), set()
    plain = {name: value for name, value in config.items() if name not in ("crc32", "bytes")}
    for change, name, changed in changes(tensors):
        save_file(changed, tmp_path / WEIGHTS)
        (tmp_path / CONFIG).write_text(json.dumps(plain))
        assert isinstance(loaded(tmp_path, target), str), (change, name)
        (tmp_path / CONFIG).write_text(json.dumps(config))
        assert "checksum" in str(loaded(tmp_path, target))
    save_file(tensors, tmp_path / WEIGHTS)
    for change, name, changed in changes(plain):
        (tmp_path / CONFIG).write_text(json.dumps(changed))
        head = loaded(tmp_path, target)
        assert isinstance(head, str) or same(head, untouched), (change, name)
        refused |= {name} if isinstance(head, str) else set()
    assert refused >= {"student", "kind", "rms_norm_eps", "rope_theta", "window", "recency", "hidden_size"}


# In the published formats these follow from the target where they are not stored.
TAKEN = ("embed_tokens.weight", "lm_head.weight")


def check_tensors(tensors: dict[str, Tensor], target: Any, write: Callable[[dict[str, Tensor], str], Path]) -> None:
    """With each tensor changed the head that `write` puts into a folder is the same or refused."""
    untouched = loaded(write(tensors, "whole"), target)
    for number, (change, tensor, changed) in enumerate(changes(tensors)):
        head = loaded(write(changed, f"{number}"), target)
        taken = change == "drop" and tensor in TAKEN
        assert isinstance(head, str) or taken or same(head, untouched), (change, tensor)


@pytest.mark.parametrize("name", CASES)
def test_a_published_head_is_the_same_or_refused(name: str, tmp_path: Path) -> None:
    target, case = large(), CASES[name]._replace(store="whole")
    config, tensors = published(case)
    config |= {"bias": case.bias} if case.style == "one" else {}
    check_tensors(tensors, target, lambda changed, folder: written(tmp_path / folder, config, changed, case))
    untouched = loaded(tmp_path / "whole", target)
    inner = config.get("transformer_layer_config", config)
    for change, key, changed in changes(dict(inner)):
        if key in ("rope_theta", "rope_scaling"):  # without them positions are those of the format's default
            continue
        said = {**config, "transformer_layer_config": changed} if inner is not config else changed
        head = loaded(written(tmp_path / f"{change} {key}", said, tensors, case), target)
        assert isinstance(head, str) or same(head, untouched), (change, key)


@pytest.mark.parametrize("name", [*blocks.CASES][1::2])
def test_a_block_head_is_the_same_or_refused(name: str, tmp_path: Path) -> None:
    target, (config, tensors) = blocks.target_of("Llama"), blocks.published(blocks.CASES[name])
    check_tensors(tensors, target, lambda changed, folder: blocks.written(tmp_path / folder, config, changed))


def test_an_embedding_that_was_trained_is_stored(tmp_path: Path) -> None:
    case = Case("speculators", "whole", {"embed_requires_grad": True})
    config, tensors = published(case)
    line = loaded(written(tmp_path / "head", config, tensors, case), large())
    assert str(line).endswith("it lacks embed_tokens.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_mean_nothing_without_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_student(tmp_path / "ours", make_student("feature", make_target()), {})
    config = json.loads((tmp_path / "ours" / CONFIG).read_text())
    (tmp_path / "ours" / CONFIG).write_text(
        json.dumps({name: value for name, value in config.items() if name not in ("crc32", "bytes")})
    )
    file = tmp_path / "ours" / WEIGHTS
    save_file({name: (50 * value).to(dtype) for name, value in load_file(file).items()}, file)
    assert "has no quantization_config to read it by" in str(loaded(tmp_path / "ours", make_target()))
    case = Case("speculators", "whole", {})
    theirs, tensors = published(case)
    folder = written(tmp_path / "theirs", theirs, {name: value.to(dtype) for name, value in tensors.items()}, case)
    assert "has no quantization_config to read it by" in str(loaded(folder, large()))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    case = Case("speculators", "whole", {})
    config, tensors = published(case)
    folder = written(tmp_path / "head", config, tensors, case)
    name = next(name for name in tensors if name.endswith("weight"))
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    save_file({name: tensors[name] + 1}, folder / "b.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"weight_map": {**dict.fromkeys(tensors, "a.safetensors"), name: "b.safetensors"}})
    )
    assert f"{name} is in two parts" in str(loaded(folder, large()))
