"""An EAGLE-3 head is trained on what its target computes as it goes, goes on where it was stopped, and is written as
its publishers write theirs.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.drafters.draft_heads.checkpoint import WEIGHTS, load_student, save_student
from sampling.drafters.draft_heads.eagle import FeatureLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.models.network import network_of
from sampling.types import Draft
from tests.support import speculators
from tests.support.refusals import refused
from tests.support.students import close, fed, make_target, text
from training.draft_heads.build import continued, new_draft_head, shape_for
from training.draft_heads.features import StoredExamples, StreamedExamples, make_batch
from training.draft_heads.losses import drafted_states
from training.draft_heads.train import Training, TrainingJob, teacher_for
from training.tables.build import Passage
from utils.catalogue.catalogue import head_kind
from utils.progress import never

V, SHORT = 40, [0, 2, 3, 5, 8, 13, 21, 34, 39]
TEXTS = [Passage(tuple(text(seed, 9 + seed % 5, V)), 3) for seed in range(24)]
JOB = TrainingJob(
    epochs=6.0, lr=0.01, batch_tokens=64, steps=3, single=0.3, precise=True, save_every=1e9, patience=99, evaluations=4
)


def large(layers: int = 8) -> Any:
    return make_target(V, seed=10, num_hidden_layers=layers)


def new(target: Any, short: list[int] | None = SHORT) -> DraftHead:
    return new_draft_head(
        shape_for(target, "eagle", short_list=len(short or ()), intermediate_size=32), target, short or [], seed=1
    )


def streamed(target: Any, texts: list[Passage] = TEXTS) -> StreamedExamples:
    return StreamedExamples(network_of(target), texts, (2, 4, 5))


def train(folder: Path, interrupt: Callable[[], bool] = never, texts: list[Passage] = TEXTS) -> Training:
    target = large()
    head = new(target)
    parts = streamed(target, texts[4:]), streamed(target, texts[:4])
    training = Training(head, teacher_for(target, head), *parts, [], JOB, folder)
    training.run({"target": "large"}, lambda *_: None, interrupt)
    return training


def test_what_is_streamed_are_the_targets_states_whatever_is_taken_with_them() -> None:
    target = large()
    source = streamed(target)
    assert source.lengths == [len(one.ids) for one in TEXTS]
    for place, one in zip((7, 2, 11), source.take([7, 2, 11]), strict=True):
        ids = torch.tensor([TEXTS[place].ids])
        with torch.no_grad():
            wanted = target(input_ids=ids, output_hidden_states=True).hidden_states
        assert torch.equal(one.ids, ids[0])
        assert one.start == 3
        assert one.read is not None
        reading = torch.cat([wanted[at][0] for at in (2, 4, 5)], dim=-1)
        torch.testing.assert_close(one.read.float(), reading, rtol=1e-2, atol=1e-2)  # kept in 16 bit
        torch.testing.assert_close(one.hidden.float(), wanted[-1][0], rtol=1e-2, atol=1e-2)


def test_one_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    steps = iter([False] * 5)
    assert train(tmp_path / "stopped", lambda: next(steps, True)).step == 5
    resumed, whole = train(tmp_path / "stopped"), train(tmp_path / "whole")
    assert resumed.step == whole.step > 5
    torch.testing.assert_close(resumed.trained, whole.trained, rtol=0, atol=0)


def rounded(head: DraftHead) -> DraftHead:
    """The same head with its weights as 16 bit keep them."""
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "embed_tokens" not in name:
                weight.copy_(weight.bfloat16().float())
    return head


def test_it_is_written_in_the_published_format_and_read_back(tmp_path: Path) -> None:
    target = large()
    head = rounded(new(target))
    save_student(tmp_path, head, {"verifier": {"name_or_path": "org/Large", "architectures": ["X"]}, "tokenizer": "t"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert head_kind(tmp_path) == "eagle"
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "org/Large", "architectures": ["X"]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["draft_vocab_size"] == len(SHORT)
    read = load_student(tmp_path, target, "t")
    glides = {"large_num_attention_heads", "large_head_dim"}  # which an EAGLE head does not store
    ours, theirs = (asdict(one.config) for one in (head, read))
    assert {name for name in ours if ours[name] != theirs[name]} <= glides
    assert read.ids.tolist() == SHORT
    batch = make_batch(streamed(target).take([0, 1, 2]), [], 0.3)
    torch.testing.assert_close(drafted_states(read, batch, 3), drafted_states(head, batch, 3), rtol=0, atol=0)
    refused(load_student, tmp_path, target, "other", match="made for another tokenizer")
    weights = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    refused(load_student, tmp_path, target, "t", match="their checksum is wrong")


HELD = 7  # tokens that the target has read


def drafted(folder: Path, target: Any, features: Tensor, ids: list[int]) -> list[Tensor]:
    """By what drafts with it: [n] of each of three drafts behind the tokens that the target has read."""
    lm = FeatureLM(load_student(folder, target), "eagle")
    session = lm.open([ids[: HELD + 1]], target=fed(target, [ids], [HELD], hidden=lm.reads_hidden))
    return [session.score([ids[:end]], Draft.empty(1))[0, 0][SHORT] for end in [HELD + 1, HELD + 2, HELD + 3]]


def theirs(folder: Path, target: Any, features: Tensor, ids: list[int]) -> list[Tensor]:
    """The same by *speculators*, which takes the embedding from the target that the head names."""
    target.save_pretrained(folder / "target")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
    (folder / "config.json").write_text(json.dumps(config))
    return [one[HELD - 1] for one in speculators.steps(speculators.read(folder), features, ids, 3)]


@pytest.mark.parametrize("reader", [drafted, theirs] if speculators.IMPORTABLE else [drafted])
def test_its_readers_compute_what_was_trained(reader: Any, tmp_path: Path) -> None:
    train(tmp_path)
    target, ids = large(), list(TEXTS[4].ids)
    with torch.no_grad():
        states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[at][0] for at in (2, 4, 5)], dim=-1)
        found = reader(tmp_path, target, features, ids)
        head = load_student(tmp_path, target)
        wanted = [head.lm_head(one)[0] for one in head.states(torch.tensor([ids]), features[None], steps=3)]
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        close(one, other[HELD + step])


@pytest.mark.parametrize(("about", "stored"), [({"verifier": {"layers": 8}}, [2, 5, 8]), ({}, None)])
def test_the_last_layers_output_is_numbered_where_the_layers_are_known(
    about: dict[str, Any], stored: list[int] | None, tmp_path: Path
) -> None:
    """Without that number the head stays in this program's own format, and is read back all the same."""
    target = large()
    head = rounded(new_draft_head(replace(new(target).config, reads=(2, 5, -1)), target, SHORT, seed=1))
    save_student(tmp_path, head, about)
    assert json.loads((tmp_path / "config.json").read_text()).get("eagle_aux_hidden_state_layer_ids") == stored
    read = load_student(tmp_path, target)
    assert read.config.reads == (2, 5, -1)
    assert torch.equal(read.model.fc.weight, head.model.fc.weight)


def test_without_a_reduced_vocabulary_nothing_says_which_ids_are_drafted(tmp_path: Path) -> None:
    target = large()
    head = new(target, None)
    save_student(tmp_path, head)
    read = load_student(tmp_path, target)
    assert not len(read.ids)
    torch.testing.assert_close(read.lm_head.weight, head.lm_head.weight.bfloat16().float())


def test_one_that_is_trained_further_begins_as_what_it_was(tmp_path: Path) -> None:
    train(tmp_path)
    target = large()
    old = load_student(tmp_path, target)
    further = continued(old, old.config, torch.device("cpu"))
    assert not further.model.embed_tokens.weight.requires_grad
    assert all(one.requires_grad for name, one in further.named_parameters() if "embed_tokens" not in name)
    batch = make_batch(StoredExamples(streamed(target).take([0, 1])).take([1, 0]), [], 0.3)
    torch.testing.assert_close(drafted_states(old, batch, 3), drafted_states(further, batch, 3), rtol=0, atol=0)


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_a_target_of_few_layers_has_no_three_states_to_read(layers: int) -> None:
    refused(shape_for, large(layers), "eagle", match=f"one of {layers} layers has too few: it needs 7")
    assert shape_for(large(7), "eagle").reads == (2, 3, 4)
