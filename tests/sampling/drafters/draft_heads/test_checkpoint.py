"""Students on disk: whole or not at all, the published names, and one line for every folder that does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sampling.drafters.draft_heads.checkpoint import CONFIG, WEIGHTS, load_student, save_student
from sampling.drafters.draft_heads.eagle import FeatureLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.types import Draft
from tests.support import refusals
from tests.support.quantized import put_weights
from tests.support.students import KINDS, STATES, fed, make_student, make_target, text
from utils.catalogue.catalogue import head_kind
from utils.kernels.quantized_linear import PackedWeight

SHORT = [1, 2, 3, 8, 13, 21, 34, 39]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def states(student: DraftHead, target: Any) -> Tensor:
    """What the student makes of a text, its target's cache included."""
    ids = text(1, 12)
    session = fed(target, [ids], [12], hidden=STATES)
    if student.config.kind == "eagle":
        return FeatureLM(student, "eagle").open([ids], target=session).score([ids], Draft.empty(1))
    kv = [session.kv(layer)[:2] for layer in student.target_layers(3)] or None
    hidden = session.hidden(student.config.reads or (-1,)) if student.config.kind == "feature" else None
    return student.lm_head(student.states(torch.tensor([ids]), hidden=hidden, kv=kv)[0])


def rounded(student: DraftHead) -> DraftHead:
    """The student as sixteen bits keep it."""
    for parameter in student.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return student


@pytest.mark.parametrize(("kind", "several"), [*((kind, kind == "eagle") for kind in KINDS), ("feature", True)])
def test_what_was_saved_is_what_is_loaded(tmp_path: Path, kind: str, several: bool) -> None:
    target = make_target()
    more: Any = {"reads": (-1, 0, 1)} if several else {}  # no published format has the last state's number
    student = rounded(make_student(kind, target, short=SHORT, num_hidden_layers=2, **more))
    size = save_student(tmp_path / "it", student, {"tokenizer": "abc", "target": "tiny"})
    assert (tmp_path / "it" / WEIGHTS).stat().st_size == size
    assert head_kind(tmp_path / "it") is not None
    loaded = load_student(tmp_path / "it", target, "abc")
    assert loaded.config == student.config
    assert loaded.reduced_ids.tolist() == SHORT
    assert torch.equal(states(loaded, target), states(student, target))


def test_what_is_the_targets_is_not_stored_but_taken_from_it(tmp_path: Path) -> None:
    target = make_target()
    target.lm_head.weight.data = target.lm_head.weight.data.clone()
    options = {"hidden_size": 24, "shared_embedding": True, "shared_head": True}
    student = rounded(make_student("glide", target, short=SHORT, **options))
    student.model.embed_tokens.weight.data = target.model.embed_tokens.weight.data
    student.lm_head.weight.data = target.lm_head.weight.data[SHORT]
    save_student(tmp_path, student)
    assert {"model.embed_tokens.weight", "lm_head.weight"}.isdisjoint(load_file(tmp_path / WEIGHTS))
    loaded = load_student(tmp_path, target)
    assert loaded.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert torch.equal(states(loaded, target), states(student, target))
    refusals.refused(load_student, tmp_path, match="shares its target's embedding")


def test_a_packed_table_is_taken_as_it_lies_and_never_made_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(hidden_size=64)
    save_student(tmp_path, make_student("feature", target, short=SHORT, **WIDE, shared_embedding=True))
    put_weights(target, {"model.embed_tokens": PackedWeight.rounded(target.model.embed_tokens.weight, "q8")})
    monkeypatch.setattr(PackedWeight, "dense", lambda _: pytest.fail("a dense copy is made"))
    loaded = load_student(tmp_path, target)
    assert loaded.model.embed_tokens is target.get_input_embeddings()
    assert not any(part.is_meta for part in (*loaded.parameters(), *loaded.buffers()))


def test_matrices_in_four_bits_come_back_as_they_were_rounded(tmp_path: Path) -> None:
    target = make_target(hidden_size=64)
    student = rounded(make_student("feature", target, short=SHORT, **WIDE))
    assert save_student(tmp_path / "4", student, {"bits": 4}) < 0.4 * save_student(tmp_path / "16", student)
    loaded = load_student(tmp_path / "4", target)
    for name, value in student.state_dict().items():
        four = PackedWeight.rounded(value, "q4").dense() if value.dim() == 2 else value
        assert torch.equal(loaded.state_dict()[name], four)


def test_a_packed_targets_rows_are_the_heads_own(tmp_path: Path) -> None:
    target = make_target(hidden_size=64)
    save_student(
        tmp_path, make_student("feature", target, short=SHORT, **WIDE, shared_embedding=True, shared_head=True)
    )
    put_weights(target, {"lm_head": PackedWeight.rounded(target.lm_head.weight, "q8")})
    assert torch.equal(load_student(tmp_path, target).lm_head.weight, target.lm_head.weight[SHORT])


# -- the published format, by its names alone -------------------------------------------------------


def published(folder: Path, target: Any, container: str, **changes: Any) -> dict[str, Tensor]:
    """A GLIDE checkpoint as others write it: Llama keys, `large_…` keys, nothing of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    large, hidden, heads, inner, vocab = target.config, 16, 4, 20, target.config.vocab_size
    wide = large.num_attention_heads * large.head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "large_hidden_size": large.hidden_size,
        "large_num_attention_heads": large.num_attention_heads,
        "max_position_embeddings": 128,
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "vocab_size": vocab,
        **changes,
    }
    noise = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for name in ("q", "k", "v", "o"):
        shapes[f"model.layers.0.self_attn.{name}_proj"] = (hidden, hidden)
    shapes["model.layers.0.cross_attn.q_proj"], shapes["model.layers.0.cross_attn.o_proj"] = (
        (wide, hidden),
        (hidden, wide),
    )
    shapes |= {f"model.layers.0.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes["model.layers.0.mlp.down_proj"] = (hidden, inner)
    shapes |= {f"model.layers.0.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.randn(shape, generator=noise).half() for name, shape in shapes.items()}
    if container == "pytorch_model.bin":
        torch.save(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, folder / container)
    else:
        save_file(tensors, folder / container)
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return tensors


@pytest.mark.parametrize("container", ["pytorch_model.bin", WEIGHTS])
def test_a_published_glide_checkpoint_loads_and_is_written_with_the_same_names(tmp_path: Path, container: str) -> None:
    target = make_target(hidden_size=32)
    tensors = published(tmp_path / "theirs", target, container)
    assert head_kind(tmp_path / "theirs") is not None
    student = load_student(tmp_path / "theirs", target)
    config = student.config
    assert (config.kind, config.num_key_value_heads, config.head_dim, config.large_head_dim) == ("glide", 4, 4, 8)
    assert (config.rope_theta, config.rms_norm_eps, config.block_size, config.short_list) == (10000.0, 1e-6, 5, 0)
    assert student.cross_rotary is not None
    assert torch.equal(student.cross_rotary.inv_freq, target.model.rotary_emb.inv_freq)  # the target's, not its own
    for name, value in student.state_dict().items():
        assert torch.equal(value, tensors[name].float())
    save_student(tmp_path / "ours", student)
    assert load_file(tmp_path / "ours" / WEIGHTS).keys() == tensors.keys()
    again = load_student(tmp_path / "ours", target)
    assert again.config == config
    assert torch.equal(states(again, target), states(rounded(student), target))


def test_optional_keys_of_published_checkpoints_are_read(tmp_path: Path) -> None:
    target = make_target(hidden_size=48)  # heads of 8, not of 48 / 4
    published(tmp_path, target, WEIGHTS, large_head_dim=8, block_size=7, rope_parameters={"rope_theta": 500.0})
    config = load_student(tmp_path, target).config
    assert (config.large_head_dim, config.block_size, config.rope_theta) == (8, 7, 500.0)


@pytest.mark.parametrize("container", ["pytorch_model.bin", WEIGHTS])
def test_shards_load_as_the_whole_does(tmp_path: Path, container: str) -> None:
    target = make_target(hidden_size=32)
    tensors = published(tmp_path / "whole", target, container)
    shards = tmp_path / "shards"
    shards.mkdir()
    stem, ending = container.split(".")
    named = {name: f"{stem}-0000{number % 3 + 1}-of-00003.{ending}" for number, name in enumerate(tensors)}
    for file in set(named.values()):
        part = {name: tensors[name] for name in tensors if named[name] == file}
        torch.save(part, shards / file) if ending == "bin" else save_file(part, shards / file)
    index = shards / f"{container}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": named}))
    (shards / CONFIG).write_text((tmp_path / "whole" / CONFIG).read_text())
    found, whole = (load_student(folder, target).state_dict() for folder in (shards, tmp_path / "whole"))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in found)
    (shards / file).unlink()
    assert f"{file} is missing" in refused(shards, target)
    index.write_text("{}")
    assert f"{index.name} is damaged: no weight_map" in refused(shards, target)


@pytest.mark.parametrize("container", ["pytorch_model.bin", WEIGHTS])
def test_what_a_published_configuration_leaves_out_follows_from_weights_and_target(
    tmp_path: Path, container: str
) -> None:
    target = make_target(hidden_size=48)  # heads of 8, not of 48 / 4
    published(tmp_path, target, container, large_head_dim=8)
    wanted = load_student(tmp_path, target).config
    kept = json.loads((tmp_path / CONFIG).read_text())
    for name in (
        "large_hidden_size",
        "large_num_attention_heads",
        "large_head_dim",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
    ):
        del kept[name]
    (tmp_path / CONFIG).write_text(json.dumps(kept))
    assert load_student(tmp_path, target).config == wanted
    assert head_kind(tmp_path) == "glide"
    assert "has no sizes of its target (large_…): load it with its target" in refused(tmp_path)
    assert "is for a target of 4 heads, this one has 8" in refused(
        tmp_path, make_target(hidden_size=48, num_attention_heads=8)
    )
    assert "no heads of the target's 24" in refused(tmp_path, make_target(hidden_size=48, head_dim=24))


def test_a_head_of_states_that_its_target_lacks_is_refused(tmp_path: Path) -> None:
    save_student(tmp_path, make_student("feature", make_target(), reads=STATES))
    assert "reads the input of its target's layer 2, this one has 2" in refused(
        tmp_path, make_target(num_hidden_layers=2)
    )


def test_weights_of_other_models_are_no_draft_heads(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / WEIGHTS)
    for name, rubbish in (("pytorch_model.bin", b"no archive"), ("tiny.safetensors", b"x"), ("a.index.json", b"{")):
        (tmp_path / name).write_bytes(rubbish)
    assert head_kind(tmp_path) is None


# -- folders that do not fit --------------------------------------------------------------------------


def refused(folder: Path, target: Any = None, fingerprint: str | None = None) -> str:
    """The one line that says why `folder` cannot be used; it names the folder."""
    line = refusals.refused(load_student, folder, target, fingerprint)
    assert str(folder) in line
    return line


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_student(tmp_path / "drafter", make_student("glide", make_target(), short=SHORT), {"tokenizer": "abc"})
    return tmp_path / "drafter"


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | changes
    config = {name: value for name, value in config.items() if value != "gone"}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Other tensors under a configuration that knows no checksum."""
    tensors = {name: value for name, value in load_file(folder / WEIGHTS).items() if name not in changes}
    save_file(tensors | {name: value for name, value in changes.items() if value is not None}, folder / WEIGHTS)
    rewrite(folder, crc32="gone", bytes="gone")


def test_damaged_weights_are_named(saved: Path) -> None:
    data = (saved / WEIGHTS).read_bytes()
    half = len(data) // 2
    flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
    for damaged in (data[:half], data[:5], b"", flipped, data + b"x"):
        (saved / WEIGHTS).write_bytes(damaged)
        assert f"{WEIGHTS} is " in refused(saved)
    rewrite(saved, crc32="gone", bytes="gone")  # other people's checkpoints have no checksum
    for damaged in (data[:half], data[:5], b""):
        (saved / WEIGHTS).write_bytes(damaged)
        assert f"{WEIGHTS} is " in refused(saved)
    (saved / WEIGHTS).unlink()
    assert "holds no model" in refused(saved)
    for rubbish in (b"rubbish", data):
        (saved / "pytorch_model.bin").write_bytes(rubbish)
        assert "pytorch_model.bin is incomplete or damaged" in refused(saved)
    torch.save({"model.norm.weight": [1.0]}, saved / "pytorch_model.bin")
    assert "0 ids in the reduced vocabulary" in refused(saved)


def test_weights_that_do_not_fit_their_configuration_are_named(saved: Path) -> None:
    data = (saved / WEIGHTS).read_bytes()
    name = "model.layers.0.cross_attn.q_proj.weight"
    for changes, told in (
        ({name: None}, f"lacks {name}"),
        ({name: torch.zeros(3, 3)}, f"{name} is (3, 3), not (32, 16)"),
        ({"model.more.weight": torch.zeros(1)}, "has model.more.weight, which nothing reads"),
        ({"lm_head.ids": None}, "0 ids in the reduced vocabulary, config.json says 8"),
        ({"lm_head.ids": torch.tensor([*SHORT[:-1], 40])}, "no ascending list of ids"),
        ({"lm_head.ids": torch.tensor(SHORT[::-1])}, "no ascending list of ids"),
    ):
        (saved / WEIGHTS).write_bytes(data)
        change_weights(saved, **changes)
        assert told in refused(saved)


def test_damaged_configurations_are_named(saved: Path) -> None:
    good = (saved / CONFIG).read_text(encoding="utf-8")
    for text_of_it, told in (("{", "no JSON"), ("[1]", "must be a JSON object"), ("\0\0", "no JSON")):
        (saved / CONFIG).write_text(text_of_it, encoding="utf-8")
        assert told in refused(saved)
        assert head_kind(saved) is None
    for changes, told in (
        ({"hidden_size": "gone"}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"kind": "grand"}, "'grand'"),
        ({"large_head_dim": 0}, "large_head_dim"),
        ({"reads": ["x"]}, "reads is ['x']"),
    ):
        (saved / CONFIG).write_text(good, encoding="utf-8")
        rewrite(saved, **changes)
        assert told in refused(saved)
    (saved / CONFIG).unlink()
    assert f"cannot read {saved / CONFIG}" in refused(saved)
    refused(saved / "nowhere")
    assert head_kind(saved) is None


def test_students_of_other_targets_are_refused_with_both_numbers(saved: Path) -> None:
    load_student(saved, make_target(), "abc")
    others = {"vocab": 44, "hidden_size": 28, "num_attention_heads": 8, "head_dim": 12}
    for change, wanted in zip(others, ("40 ids", "size 24", "4 heads", "size 8"), strict=True):
        line = refused(saved, make_target(**{change: others[change]}), "abc")
        assert wanted in line
        assert str(others[change]) in line
    assert "(abc, the target's is xyz)" in refused(saved, make_target(), "xyz")
    assert "(abc, the target's is not given: fingerprint(tokenizer) of" in refused(saved, make_target())
