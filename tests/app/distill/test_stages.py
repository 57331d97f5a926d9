"""The stages of `distill` by themselves, with a tiny target: text that goes on and refuses; tables and a head of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.command_line.main import main
from app.distill.distill import load_target
from app.distill.options import distill_args
from app.settings.table import ModelOptions, Settings
from tests.support.tiny import TinyPair, tiny_pair, write_prompts
from training.text.dialogues import TASKS
from training.text.synthesize import written
from utils.progress import never

SHAPE = {"stop": True}


def words(pair: TinyPair, out: Path, *more: str, stage: str = "text") -> list[str]:
    how = ["--stage", stage, "--out", str(out), "--answer-tokens", "24", "--seed", "3"]
    return ["distill", *how, *more, *pair.flags()]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "text.jsonl").read_text().splitlines()]


def answers(out: Path) -> dict[int, dict[str, Any]]:
    return {row["number"]: row for row in rows(out) if row["ids"]}


@pytest.mark.parametrize(
    ("given", "tasks"),
    [({}, ("chat",)), ({"kinds": "all"}, tuple(TASKS)), ({"kinds": "qa, chat,qa"}, ("qa", "chat", "qa"))],
)
def test_kinds_are_a_list_or_all_of_them(given: dict[str, str], tasks: tuple[str, ...]) -> None:
    assert distill_args({"out": "d", **given}).tasks == tasks


@pytest.mark.parametrize(("asked", "given"), [("auto", "none"), ("none", "none"), ("int8", "int8")])
def test_what_is_written_and_learned_comes_from_expanded_weights(
    asked: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.distill.distill.load_engine", lambda settings, options, stop: options)
    found: Any = load_target(Settings(), ModelOptions(quantization=asked), never)
    assert (found.quantization, found.drafter) == (given, "none")


def test_text_goes_on_where_it_stopped_and_more_can_be_asked_for(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "a", tmp_path / "b"
    file = out / "text.jsonl"
    assert main(words(pair, out, "--kinds", "chat,qa,qa", "--tokens", "100")) == 0
    error = capsys.readouterr().err
    count, before = written(file)[0], file.read_bytes()
    assert f"{file}: {count:,} tokens, {count:,} of them new, " in error
    assert error.endswith(" tokens/s\n")
    assert {row.get("kind", "chat") for row in answers(out).values()} == {"chat", "qa"}
    assert main(words(pair, out, "--kinds", "chat,qa,qa", "--tokens", "100")) == 0
    said = capsys.readouterr().err.splitlines()
    assert ([line for line in said if "runs in torch" not in line], file.read_bytes()) == ([], before)
    file.write_bytes(before + b'{"ids":[1,')  # killed
    assert main(words(pair, out, "--kinds", "chat,qa,qa", "--tokens", "200", "--batch", "5")) == 0
    assert f", {written(file)[0] - count:,} of them new, " in capsys.readouterr().err
    assert file.read_bytes().startswith(before)
    numbers = [row["number"] for row in rows(out)]
    assert len(numbers) == len(set(numbers))
    assert main(words(pair, whole, "--kinds", "chat,qa,qa", "--tokens", "200", "--quiet")) == 0
    again, once = answers(out), answers(whole)
    assert len(set(again) & set(once)) > 5
    assert all(again[number] == once[number] for number in set(again) & set(once))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--kinds", "qa"], "--kinds chat, now qa"),
        (["--dtype", "bfloat16"], "--dtype float32, now bfloat16"),
        (["--seed", "4"], "--seed 3, now 4"),
        (["--temperatures", "0"], "--temperatures 0,0.7,1, now 0"),
        (["--answer-tokens", "9"], "--answer-tokens 24, now 9"),
        (["--target", "drafter"], "--target target, now drafter"),
        (["--target", "other weights"], "a target of other weights"),
        (["--prompts", "p.jsonl"], "other prompts"),
    ],
)
def test_text_of_other_settings_is_refused(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    out, prompts = tmp_path / "a", write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    assert main(words(pair, out, "--tokens", "20", "--quiet")) == 0
    before = (out / "text.jsonl").read_bytes()
    given = words(pair, out, "--tokens", "9000")
    if more[0] == "--target":
        other = {"drafter": pair.drafter, "other weights": tiny_pair(tmp_path, seed=7).target}[more[1]]
        given[given.index("--target") + 1] = str(other)
        more = []
    assert main([*given, *(str(prompts) if word == "p.jsonl" else word for word in more)]) == 2
    assert f"error: {out} holds a run with {said}: give the same flags, or another --out\n" in capsys.readouterr().err
    assert (out / "text.jsonl").read_bytes() == before


def test_given_prompts_are_answered_to_the_last(pair: TinyPair, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}, {"turns": ["two", "three"]}])
    assert main(words(pair, tmp_path / "a", "--prompts", str(prompts), "--temperatures", "0,1")) == 0
    assert sorted((row["number"], row["temperature"]) for row in rows(tmp_path / "a") if row["ids"]) == [
        *((0, 0.0), (1, 0.0), (1, 0.0), (2, 1.0), (3, 1.0), (3, 1.0))
    ]


def test_tables_and_heads_are_made_of_one_text_stage_by_stage(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    how = ["--kinds", "qa,maths", "--tokens", "400", "--epochs", "1", "--hidden", "32"]
    assert main(words(pair, out, *how)) == 0
    kept, before = len(answers(out)), (out / "text.jsonl").read_bytes()
    assert len(rows(out)) > kept  # some came to nothing
    assert {file.name for file in out.iterdir()} == {"run.json", "text.jsonl"}
    capsys.readouterr()
    assert main(words(pair, out, *how, stage="tables")) == 0
    assert f"tokens in {kept} passages" in capsys.readouterr().err
    assert main(words(pair, out, *how, stage="head")) == 0
    assert (out / "tables.bin").is_file()
    assert (out / "model.safetensors").is_file()
    assert (out / "text.jsonl").read_bytes() == before
    data = ["--data", str(out / "text.jsonl"), "--out", str(tmp_path / "b")]
    assert main(["distill", *data, *how[4:], *pair.flags()]) == 0
    assert (tmp_path / "b" / "tables.bin").read_bytes()[:9] == (out / "tables.bin").read_bytes()[:9]


def test_a_list_of_bigrams_is_built_from_text_without_the_weights(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "bigrams"
    text.write_text("one and one is two\n\none and two is three")
    shutil.copytree(pair.target, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"no weights")
    target = ["--target", str(tmp_path / "target"), "--device", "cpu"]
    line = ["distill", "--stage", "tables", "--data", str(text), "--max-n", "1", "--out", str(out), *target]
    assert main(line) == main(line) == 0
    assert "contexts of at most 1 tokens" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ["tables.bin"]
