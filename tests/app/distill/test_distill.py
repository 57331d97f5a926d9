"""`distill` as a whole, on a toy target that can be learned from: it learns, goes on, refuses and tells."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import app.distill.distill
import training.draft_heads.train
import training.text.synthesize
from app.command_line.main import main
from app.distill.distill import draft_head_for
from app.distill.options import DISTILL_FIELDS, distill_args
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.checkpoint import read_config
from tests.support.distilling import counting_target, deepened
from tests.support.places import largest_file
from tests.support.tiny import VOCAB, tiny_pair, write_prompts
from tests.support.warm import Warm
from training.draft_heads.features import (
    Examples,
    StoredExamples,
    StreamedExamples,
    extract,
    grouped,
    load_shard,
    make_batch,
)
from training.draft_heads.losses import held_out
from training.draft_heads.train import load_checkpoint, teacher_for
from training.text.dialogues import TASKS
from training.text.synthesize import read_texts, split, written
from utils.progress import never

QUICK = ["--epochs", "6", "--lr", "0.006", "--batch-tokens", "1024"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_target(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module")
def deep(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of as many layers as EAGLE-3 needs."""
    return deepened(target, tmp_path_factory.mktemp("deep") / "target")


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain drafter, from nothing but its target."""
    out = tmp_path_factory.mktemp("made") / "plain"
    assert main(words(target, out, "--tokens", "5000", *QUICK)) == 0
    return out


@pytest.fixture(scope="module")
def data(plain: Path) -> Path:
    """What the target has written for the plain one."""
    return plain / "text.jsonl"


def words(target: Path, out: Path, *more: str) -> list[str]:
    flags = ["--target", str(target), "--device", "cpu", "--dtype", "float32", "--out", str(out), "--quiet"]
    return ["distill", *flags, *more]


def report(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "report.json").read_text()))


def untrained_alpha(target: Path, data: Path, kind: str, folder: Path) -> float:
    """The agreement of a student that has learned nothing, on the same held-out texts."""
    engine = load_engine(Settings(quiet=True), ModelOptions(target=str(target), drafter="none", device="cpu"), never)
    learned, held = split(read_texts([data], VOCAB, 512), DISTILL_FIELDS["held"].default)
    student = draft_head_for(engine, distill_args({"out": "d", "student": kind}), learned, 42)
    layers = student.target_layers(engine.target.network.layers)
    if kind == "eagle3":
        examples: Examples = StreamedExamples(engine.target.network, held, student.config.reads)
    else:
        files = extract(engine.target.network, {}, held, layers, folder, lambda *_: None)
        examples = StoredExamples([example for file in files for example in load_shard(file)])
    batches = [make_batch(examples.take(one), layers, 0.3) for one in grouped(examples.lengths, 1024, 0)]
    return held_out(student, teacher_for(engine.loaded.target.model, student), batches, 1).alpha[0]


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.exhaustive), "feature", "glide --recency on"])
def test_a_drafter_learns_its_target_and_drafts_for_it(
    kind: str, target: Path, plain: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = plain
    kind, *more = kind.split()
    if kind != "plain":
        out = tmp_path / kind
        longer = [*more, "--epochs", "10"] if kind == "feature" else more
        assert main(words(target, out, "--data", str(data), "--student", kind, *QUICK, *longer)) == 0
        printed = capsys.readouterr().out
        assert re.search(r"alpha by position 0\.\d\d .* costs c = \d+\.\d+ of", printed, re.DOTALL)
        assert f"use it: python infer.py --target {target} --drafter {out}\n" in printed
    found = report(out)
    assert untrained_alpha(target, data, kind, tmp_path / "features") < 0.3
    assert found["best"]["held"]["alpha"][0] > 0.6
    assert found["student"]["kind"] == kind
    assert read_config(out)["recency"] == ("--recency" in more)
    assert found["c"] > 0
    assert len(found["expected"]) == 8
    assert (out / "README.md").read_text().startswith(f"# {kind} drafter for target\n")
    assert "python infer.py distill" in (out / "README.md").read_text()
    assert "| 8 |" in (out / "README.md").read_text()
    drafts_well(target, out, capsys)


def drafts_well(target: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new drafter saves passes of its target and changes no token."""
    run = ["run", "three", "--json", "--target", str(target), "--drafter", str(out), "--device", "cpu", "--gamma", "3"]
    assert main([*run, "--temperature", "0"]) == 0
    ar, spec = json.loads(capsys.readouterr().out)["results"]
    assert spec["ids"] == ar["ids"]
    assert spec["alpha"] > 0.6
    assert spec["target_passes"] < ar["target_passes"]


def test_an_eagle_3_head_learns_from_what_is_streamed_and_is_written_as_published(
    deep: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eagle3"
    assert main(words(deep, out, "--data", str(data), "--student", "eagle3", *QUICK, "--epochs", "8")) == 0
    assert f"use it: python infer.py --target {deep} --drafter {out}\n" in capsys.readouterr().out
    assert not (out / "work").exists()
    found = report(out)
    assert untrained_alpha(deep, data, "eagle3", tmp_path) < 0.3
    assert found["best"]["held"]["alpha"][0] > 0.6
    assert found["student"]["kind"] == "eagle"
    assert found["settings"]["steps"] == "3"
    assert (out / "README.md").read_text().startswith("# eagle drafter for target\n")
    config = read_config(out)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(deep),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    drafts_well(deep, out, capsys)
    assert main(["check", "--target", str(deep), "--drafter", str(out), "--device", "cpu", "--for", "vllm"]) == 0
    assert '"method": "eagle3"' in capsys.readouterr().out


def test_a_trained_drafter_is_trained_further(
    target: Path, plain: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "further", ["--data", str(data), "--epochs", "1", "--lr", "0.0001"]
    assert main(words(target, out, *flags, "--start", str(plain))) == 0
    assert report(out)["curve"][0]["held"]["alpha"][0] > report(plain)["best"]["held"]["alpha"][0] - 0.1
    assert f"start {plain}" in (out / "README.md").read_text()
    capsys.readouterr()
    for more, said in (
        (["--hidden", "16"], f"--start {plain}: its hidden_size is 64, the flags say 16"),
        (["--student", "feature"], f"--start {plain}: its kind is plain, the flags say feature"),
        (["--layers", "2"], f"--start {plain}: its num_hidden_layers is 1, the flags say 2"),
    ):
        assert main(words(target, tmp_path / "refused", *flags, "--start", str(plain), *more)) == 2
        assert capsys.readouterr().err.strip().endswith(said)


def test_a_feature_head_goes_on_with_more_of_its_targets_states(
    deep: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, out = tmp_path / "last", tmp_path / "several"
    flags = ["--data", str(data), "--student", "feature", *QUICK]
    assert main(words(deep, first, *flags, "--epochs", "6")) == 0
    assert main(words(deep, out, *flags, "--reads", "several", "--start", str(first), "--epochs", "3")) == 0
    assert (read_config(first)["reads"], read_config(out)["reads"]) == ([], [-1, 2, 3, 4])
    assert report(out)["settings"]["reads"] == "several"
    assert report(out)["best"]["held"]["alpha"][0] > 0.6
    capsys.readouterr()
    drafts_well(deep, out, capsys)


# -- going on -------------------------------------------------------------------------------------


@pytest.fixture
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step, in this process."""
    make = app.distill.distill.job_of
    monkeypatch.setattr(app.distill.distill, "job_of", lambda *given: replace(make(*given), save_every=0.0))


KILLABLE = (
    "import sys; from dataclasses import replace; import app.distill.distill as d;"
    "from app.command_line.main import main; make = d.job_of;"
    "d.job_of = lambda *given: replace(make(*given), save_every=0.0); sys.exit(main(sys.argv[1:]))"
)
LONGER = ["--epochs", "4", "--lr", "0.004", "--batch-tokens", "512", "--patience", "100"]


@pytest.mark.usefixtures("saved_often")
def test_a_killed_training_goes_on_and_ends_where_it_would_have(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words(target, tmp_path / "killed", "--data", str(data), *LONGER)
    process = Warm([sys.executable, "-c", KILLABLE, *line], cwd=Path(__file__).resolve().parents[3])
    until = time.monotonic() + 60
    while (state := load_checkpoint(tmp_path / "killed")) is None or state["step"] < 12:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = load_checkpoint(tmp_path / "killed")
    assert reached is not None
    weights = (tmp_path / "killed" / "checkpoint.pt").read_bytes()
    # Another setting is named, and nothing is touched.
    assert main([*line, "--lr", "0.1"]) == 2
    assert "holds a run with --lr 0.004, now 0.1" in capsys.readouterr().err
    # A full disk is told, and the checkpoint is as it was.
    with largest_file(len(weights) // 2):
        assert main(line) == 1
    assert re.search(
        r"^error: cannot write .*killed.checkpoint.pt: File too large \(nothing was saved, the old content stays\); "
        r".* the same command resumes the run$",
        capsys.readouterr().err,
    )
    assert (tmp_path / "killed" / "checkpoint.pt").read_bytes() == weights
    assert not list((tmp_path / "killed").glob("*.partial"))  # nor what the killed process was writing
    # The same command goes on, and comes to what one run comes to.
    assert main(line) == 0
    assert main(words(target, tmp_path / "whole", "--data", str(data), *LONGER)) == 0
    killed, whole = report(tmp_path / "killed"), report(tmp_path / "whole")
    steps = [mark["step"] for mark in killed["curve"]]
    assert steps == sorted(set(steps)) == [mark["step"] for mark in whole["curve"]]
    assert killed["steps"] == whole["steps"] > reached["step"] >= 12
    for mine, theirs in zip(killed["curve"], whole["curve"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["held"]["loss"] == pytest.approx(theirs["held"]["loss"], abs=1e-3)


def pressed_at(count: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, with a Ctrl-C on the way into its call number `count`."""
    calls = []

    def wrapped(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGINT)
        return act(*arguments, **named)

    return wrapped


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "d"
    line = words(target, out, "--tokens", "2500", *QUICK)
    synthesize, train = training.text.synthesize, training.draft_heads.train
    with monkeypatch.context() as patch:
        patch.setattr(synthesize, "draw", pressed_at(90, synthesize.draw))
        assert main(line) == 130
    told = capsys.readouterr().err
    file = out / "text.jsonl"
    kept = file.read_bytes()
    assert told == f"interrupted: {file} keeps {written(file)[0]:,} tokens, the same command resumes the run\n"
    assert kept.endswith(b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(train, "loss", pressed_at(5, train.loss))
        assert main(line) == 130
    told = capsys.readouterr().err
    assert told == f"interrupted: the checkpoint of step 5 is kept in {out}, the same command resumes the run\n"
    assert file.read_bytes().startswith(kept)
    text = file.read_bytes()
    assert main(line) == 0
    assert file.read_bytes() == text
    assert report(out)["best"]["held"]["alpha"][0] > 0.5


# -- prompts ------------------------------------------------------------------------------


def test_prompts_are_answered_and_none_is_learned_and_held_out(target: Path, tmp_path: Path) -> None:
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": word} for word in numbers])
    out = tmp_path / "d"
    assert main(words(target, out, "--prompts", str(prompts), "--short-list", "0", *QUICK)) == 0
    rows = [json.loads(row) for row in (out / "text.jsonl").read_text().splitlines()]
    assert sorted(row["number"] for row in rows) == list(range(30))
    found = report(out)
    assert found["data"]["text"] == "the target's answers to p.jsonl"
    assert found["data"]["held"] == 6
    assert found["data"]["sequences"] <= 24  # what shares its prompt with a held-out one is left out


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--data", "self", "a.jsonl"], 2, "--data takes self or files, not both"),
        (["--data", "a.jsonl", "--prompts", "b"], 2, "--data FILES and --prompts contradict"),
        (["--kinds", "qa", "--prompts", "b"], 2, "--kinds and --prompts contradict"),
        (["--kinds", "qa", "--data", "a.jsonl"], 2, "--kinds and --data FILES contradict"),
        (["--kinds", "poetry"], 2, f"--kinds must be all or a comma list of {', '.join(TASKS)}, got 'poetry'"),
        (["--stage", "text", "--data", "a.jsonl"], 2, "--stage text writes text, --data FILES reads it"),
        (["--stage", "all"], 2, "--stage must be text, tables or head, got 'all'"),
        (["--max-n", "17"], 2, "--max-n must be a whole number from 1 to 16"),
        (["--steps", "2"], 2, "--steps belongs to --student feature or eagle3, the student is plain"),
        (["--linear-start", "on"], 2, "--linear-start belongs to --student feature, the student is plain"),
        (["--student", "eagle3"], 1, "EAGLE-3 reads three states of its target, one of 2 layers has too few"),
        (["--student", "feature", "--reads", "several"], 1, "a head of several states reads three states of its"),
        (["--reads", "several"], 2, "--reads belongs to --student feature, the student is plain"),
        (["--student", "eagle3", "--lag", "2"], 2, "--lag belongs to --student glide, the student is eagle3"),
        (["--student", "eagle3", "--head", "shared"], 2, "--head shared has no place in a published checkpoint"),
        (["--student", "eagle3", "--features", "f"], 2, "--features: the target's outputs for --student eagle3"),
        (["--student", "feature", "--lag", "2"], 2, "--lag belongs to --student glide, the student is feature"),
        (["--hidden", "30", "--heads", "4"], 2, "--heads 4 does not divide the width 30"),
        (["--heads", "3"], 2, "--heads 3 does not divide the width 64"),
        (["--data", "none.jsonl"], 1, "cannot read none.jsonl"),
        (["--prompts", "none.jsonl"], 2, "no prompt file none.jsonl"),
        (["--prompt", "none.jsonl"], 2, "unknown flag --prompt (did you mean --prompts?)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    more: list[str], code: int, said: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(target, tmp_path / "d", *more)) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_data_of_another_vocabulary_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_prompts(tmp_path / "a.jsonl", [{"ids": [*range(1, 20)]}] * 9 + [{"ids": [1, 2, VOCAB + 7]}])
    assert main(words(target, tmp_path / "d", "--data", str(file))) == 1
    assert f"a.jsonl:10: id {VOCAB + 7} lies outside the vocabulary of {VOCAB} ids" in capsys.readouterr().err


def test_prompts_that_all_lack_room_for_an_answer_are_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one two three four " * 20}] * 70)
    assert main(words(target, tmp_path / "d", "--prompts", str(prompts), "--longest", "64")) == 1
    assert capsys.readouterr().err == "error: every prompt has 64 tokens or more: there is no room for an answer\n"


def test_folders_of_others_are_left_alone(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(words(target, tmp_path / "file")) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert main(words(target, tmp_path)) == 2
    assert "holds other files and no run of distill" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_target_without_a_template_needs_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tiny_pair(tmp_path, chat=False).target, tmp_path / "d")) == 1
    assert "has no chat template to write to itself with: give it files or prompts" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
