"""DFlash, DFlare and DSpark heads are trained in blocks after tokens of their target's text and go on where they were
stopped; DFlash and DSpark heads are written as *speculators* writes them.
"""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.dflash import BlockLM
from sampling.models.network import network_of
from tests.support import speculators
from tests.support.students import close, fed, make_target, text
from training.draft_heads.build import new_draft_head, shape_for
from training.draft_heads.features import StoredExamples, StreamedExamples, extract, load_shard
from training.draft_heads.train import Training, TrainingJob, teacher_for
from training.tables.build import Passage
from utils.catalogue.catalogue import head_kind
from utils.progress import never

pytestmark = pytest.mark.slow

V, SHORT, READS = 40, [0, 2, 3, 5, 8, 13, 21, 34, 39], (2, 4, 5)
TEXTS = [Passage(tuple(text(seed, 9 + seed % 5, V)), 3) for seed in range(16)]
JOB = TrainingJob(
    epochs=6.0, lr=0.01, batch_tokens=64, precise=True, save_every=1e9, patience=99, evaluations=3, depth=3, anchors=6
)


def large() -> Any:
    return make_target(V, seed=10, num_hidden_layers=8)


def train(folder: Path, kind: str = "dflash", interrupt: Callable[[], bool] = never) -> Training:
    target = large()
    shape = shape_for(target, kind, short_list=len(SHORT), intermediate_size=32, num_hidden_layers=2, drafts=3)
    head, source = new_draft_head(shape, target, SHORT, seed=1), network_of(target)
    files = extract(source, {}, TEXTS, (), folder / "states", lambda *_: None, reads=READS)
    examples = [example for file in files for example in load_shard(file, READS)]
    parts = StoredExamples(examples[4:]), StoredExamples(examples[:4])
    training = Training(head, teacher_for(target, head), *parts, [], JOB, folder)
    training.run({"verifier": {"layers": 8}}, lambda *_: None, interrupt)
    return training


def test_what_is_kept_are_the_states_that_it_reads(tmp_path: Path) -> None:
    network = network_of(large())
    files = extract(network, {}, TEXTS[:3], (), tmp_path, lambda *_: None, reads=READS)
    streamed = StreamedExamples(network, TEXTS[:3], READS).take([0, 1, 2])
    for kept, wanted in zip([one for file in files for one in load_shard(file, READS)], streamed, strict=True):
        assert torch.equal(kept.hidden, wanted.hidden)
        assert kept.read is not None
        assert wanted.read is not None
        assert torch.equal(kept.read, wanted.read)


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dspark"])
def test_it_learns_its_target_and_goes_on_where_it_was_stopped(kind: str, tmp_path: Path) -> None:
    whole, looks = train(tmp_path / "whole", kind), count()
    assert whole.curve[-1]["loss"] < whole.curve[0]["loss"]
    assert len(whole.curve[-1]["held"]["alpha"]) == 3
    train(tmp_path / "parts", kind, lambda: next(looks) == 5)
    torch.testing.assert_close(whole.trained, train(tmp_path / "parts", kind).trained, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dspark"])
def test_its_readers_compute_what_was_trained(kind: str, tmp_path: Path) -> None:
    train(tmp_path, kind)
    target, ids, anchor = large(), list(TEXTS[4].ids), 7
    assert head_kind(tmp_path) == kind
    head = load_student(tmp_path, target)
    lm = BlockLM(head)
    session: Any = lm.open([ids[: anchor + 1]], target=fed(target, [ids], [anchor], hidden=lm.reads_hidden))
    session.draft_block([ids[: anchor + 1]], lm.block)
    after = ids[anchor : anchor + 3]
    with torch.no_grad():
        states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[at][0] for at in READS], dim=-1)
        blocks = head.blocks(torch.tensor([ids]), features[None], torch.tensor([3, anchor]))[0, 1, -3:]
        trained = head.logits(blocks, torch.tensor(after))
        chances = head.confidence(blocks, torch.tensor(after)).sigmoid() if kind == "dspark" else None
    for depth in range(3):
        close(session.logits_after([0], [after[: depth + 1]])[0], trained[depth])
        if chances is not None:
            assert session.confidence([0], [after[: depth + 1]]) == pytest.approx([float(chances[depth])], abs=1e-5)
            assert float((trained[depth] - head.lm_head(blocks[depth])).abs().max()) > 1e-3  # the Markov head learned
    if kind != "dflare" and speculators.IMPORTABLE:  # which lacks it
        target.save_pretrained(tmp_path / "target")
        config = json.loads((tmp_path / "config.json").read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")
        (tmp_path / "config.json").write_text(json.dumps(config))
        close(speculators.block(speculators.read(tmp_path), features, ids, anchor, 3)[-3:], trained, 1e-4)


def test_a_teacher_that_must_be_precise_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.draft_heads.train.fast_half", lambda device: True)
    target, hidden = large(), torch.randn(3, 24)
    head = new_draft_head(shape_for(target, "dflash", short_list=len(SHORT)), target, SHORT, seed=1)
    wanted = (hidden @ target.lm_head.weight[SHORT].t()).softmax(-1)
    for precise in (True, False):
        assert torch.equal(teacher_for(target, head, precise=precise).probs(hidden), wanted) == precise


@pytest.mark.parametrize("length", [2, 5])
def test_a_text_of_any_length_has_blocks(length: int) -> None:
    target = large()
    head = new_draft_head(
        shape_for(target, "dflash", short_list=len(SHORT), intermediate_size=32, drafts=3), target, SHORT, seed=1
    )
    states = head.blocks(torch.tensor([text(1, length, V)]), torch.zeros(1, length, 3 * 24), torch.arange(length))
    assert states.shape == (1, length, 4, 24)
