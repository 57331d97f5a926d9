"""A plain student as an ordinary transformers model: same logits, in memory and from a folder; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sampling.student import Student
from sampling.student_config import StudentConfig
from sampling.student_file import save_student
from tests.tiny import tiny_tokenizer
from training.export import export_plain, llama_of
from utils.errors import UserError

IDS = torch.tensor([[1, 40, 7, 200, 9, 9, 33], [5, 4, 3, 2, 1, 0, 299]])


def student(short_list: list[int] | None = None, **changes: Any) -> Student:
    """A random student whose head dim is not hidden size / heads, so that nothing is right by accident."""
    shape: dict[str, Any] = {
        "kind": "plain",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-4,
        "rope_theta": 5000.0,
        "short_list": len(short_list or ()),
    }
    ids = None if short_list is None else torch.tensor(short_list)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = Student(StudentConfig(**{**shape, **changes}), ids).eval().requires_grad_(False)
        for name, weight in made.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


def logits(made: Student, ids: torch.Tensor) -> torch.Tensor:
    """[B, T, rows of the head]."""
    with torch.no_grad():
        return made.lm_head(made.states(ids)[0])


@pytest.mark.parametrize("project", [False, True])
def test_the_network_is_the_same_in_transformers_code(project: bool, untouched_global_noise: None) -> None:
    made = student(project=project)
    with torch.no_grad():
        found = llama_of(made)(IDS).logits
    torch.testing.assert_close(found, logits(made, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("project", [False, True])
def test_ids_outside_a_short_list_have_probability_zero(project: bool) -> None:
    known = [0, 2, 7, 150, 299]
    made = student(known, project=project)
    with torch.no_grad():
        found = llama_of(made)(IDS).logits
    assert found.shape == (2, 7, 300)
    torch.testing.assert_close(found[..., known], logits(made, IDS), rtol=1e-4, atol=1e-4)
    assert set(torch.isfinite(found).all(dim=(0, 1)).nonzero().flatten().tolist()) == set(known)
    assert float(found.softmax(-1)[..., 1].max()) == 0.0


def test_the_embedding_is_shared_not_copied() -> None:
    made = student([1, 2, 3])
    model: Any = llama_of(made)
    assert model.model.embed_tokens.weight.data_ptr() == made.model.embed_tokens.weight.data_ptr()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_folder_is_an_ordinary_model(tmp_path: Path, tied: bool) -> None:
    made = student(project=not tied)
    if tied:
        made.lm_head.weight.copy_(made.model.embed_tokens.weight)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    size = export_plain(made, tmp_path / "plain", tiny_tokenizer())
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("llama", tied)
    assert size == sum(file.stat().st_size for file in (tmp_path / "plain").glob("*.safetensors"))
    assert not list((tmp_path / "plain").glob(".export-*"))
    found: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        there, here = found(IDS).logits, logits(made, IDS)
    assert float((there - here).norm() / here.norm()) < 0.02  # 16 bit
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").decode([3]) == tiny_tokenizer().decode([3])


def test_exporting_again_replaces(tmp_path: Path) -> None:
    export_plain(student(), tmp_path)
    export_plain(student(num_hidden_layers=1), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 1


def test_what_no_transformers_folder_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the drafter's head covers 3 of 300 ids") as caught:
        export_plain(student([1, 2, 3]), tmp_path / "short")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="a feature drafter reads its target's hidden states"):
        export_plain(student(kind="feature", large_hidden_size=16), tmp_path / "feature")
    assert not list(tmp_path.iterdir())
    save_student(tmp_path / "own", student())
    kept = (tmp_path / "own" / "config.json").read_text()
    with pytest.raises(UserError, match="holds a student that would be overwritten"):
        export_plain(student(), tmp_path / "own")
    assert (tmp_path / "own" / "config.json").read_text() == kept


def test_a_full_disk_leaves_the_last_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_plain(student(), tmp_path)
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(self: Any, folder: str, **_: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(UserError, match="No space left on device"):
        export_plain(student(num_hidden_layers=1), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept
