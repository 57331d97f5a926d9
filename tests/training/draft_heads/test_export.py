"""A plain student as an ordinary transformers model: same logits, in memory and from a folder; what is refused. One
that is trained further begins as what it was.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from tests.sampling.drafters.draft_heads.test_network import target_kv
from tests.support.students import KINDS, make_student, make_target, text
from tests.support.tiny import tiny_tokenizer
from training.draft_heads.build import taken_up
from training.draft_heads.export import export_plain, llama_of
from utils.errors import UserError

IDS = torch.tensor([[1, 40, 7, 200, 9, 9, 33], [5, 4, 3, 2, 1, 0, 299]])

CPU = torch.device("cpu")
SHORT = [1, 2, 3, 8, 13, 21, 34, 39]


def student(short_list: list[int] | None = None, **changes: Any) -> DraftHead:
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
        made = DraftHead(DraftHeadConfig(**{**shape, **changes}), ids).eval().requires_grad_(False)
        for name, weight in made.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


def logits(made: DraftHead, ids: torch.Tensor) -> torch.Tensor:
    """[B, T, rows of the head]."""
    with torch.no_grad():
        return made.lm_head(made.states(ids)[0])


@pytest.mark.parametrize("project", [False, True])
def test_the_network_is_the_same_in_transformers_code(project: bool, untouched_global_noise: None) -> None:
    made = student(project=project)
    with torch.no_grad():
        found = llama_of(made)(IDS).logits
    torch.testing.assert_close(found, logits(made, IDS), rtol=1e-4, atol=1e-4)


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


def inputs(kind: str, target: Any, layers: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = text(3, 20)
    more: dict[str, Any] = {}
    if kind == "glide":
        more["kv"] = [tuple(part.clone() for part in target_kv(target, ids, layer)) for layer in layers]
    if kind == "feature":
        more["hidden"] = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0))
    return torch.tensor([ids]), more


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eagle"])  # published ones are not trained here
def test_it_computes_the_same_and_can_learn(kind: str) -> None:
    target = make_target()
    old = make_student(kind, target, short=SHORT, num_hidden_layers=2)
    ids, more = inputs(kind, target, old.target_layers(3))
    before = old.states(ids, **more)[0]
    new = taken_up(old, replace(old.config, block_size=3, window=9), CPU)
    view = {"lag": 1} if kind == "glide" else {}  # the mask of blocks is another with other blocks
    assert torch.equal(new.states(ids, **more, **view)[0], old.states(ids, **more, **view)[0])
    trained = {name for name, parameter in new.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in new.named_parameters()}  # this student's embedding is its own
    new.states(ids, **more)[0].square().sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in new.parameters():
            if parameter.grad is not None and parameter is not new.model.embed_tokens.weight:
                parameter -= 0.1 * parameter.grad
    assert not torch.allclose(new.states(ids, **more)[0], before)
    assert torch.equal(old.states(ids, **more)[0], before)  # its weights are its own


def test_a_shared_embedding_is_not_copied_and_not_trained() -> None:
    old = make_student("plain", make_target(), hidden_size=24, num_attention_heads=4, head_dim=6)
    new = taken_up(old, replace(old.config, shared_embedding=True), CPU)
    assert new.model.embed_tokens.weight.data_ptr() == old.model.embed_tokens.weight.data_ptr()
    assert not new.model.embed_tokens.weight.requires_grad
    assert new.lm_head.weight.requires_grad


def test_new_recency_changes_nothing_at_first_and_old_one_stays() -> None:
    target = make_target()
    old = make_student("glide", target)
    ids, more = inputs("glide", target, old.target_layers(3))
    leaning = taken_up(old, replace(old.config, recency=True), CPU)
    for lag in (0, 2):
        torch.testing.assert_close(leaning.states(ids, **more, lag=lag)[0], old.states(ids, **more, lag=lag)[0])
    cross: Any = leaning.model.layers[0].cross_attn
    assert cross.recency.requires_grad
    with torch.no_grad():
        cross.recency.fill_(1.5)
    again: Any = taken_up(leaning, leaning.config, CPU).model.layers[0].cross_attn
    assert again.recency.tolist() == [1.5] * 4


@pytest.mark.parametrize("kind", ["plain", "glide"])
def test_further_layers_say_nothing_at_first_and_learn(kind: str) -> None:
    target = make_target()
    old = make_student(kind, target, short=SHORT)
    deeper = taken_up(old, replace(old.config, num_hidden_layers=3), CPU)
    ids, more = inputs(kind, target, deeper.target_layers(3))
    few = {name: value[2:] if name == "kv" else value for name, value in more.items()}  # the last are the old ones
    torch.testing.assert_close(deeper.states(ids, **more)[0], old.states(ids, **few)[0])
    deeper.states(ids, **more)[0].square().sum().backward()  # type: ignore[no-untyped-call]
    own = deeper.model.layers[0]
    assert own.self_attn.o_proj.weight.grad.abs().sum() > 0
    assert own.mlp.down_proj.weight.grad.abs().sum() > 0
    again = taken_up(old, replace(old.config, num_hidden_layers=3), CPU)
    assert torch.equal(again.model.layers[1].mlp.up_proj.weight, deeper.model.layers[1].mlp.up_proj.weight)
