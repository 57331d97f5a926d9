"""`write` as a command, with a tiny target: what it writes others read, it goes on, refuses and tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app.command_line.arguments import build_parser, read_request
from app.command_line.main import main
from app.distill.texts import load_target
from app.settings.table import ModelOptions, Settings
from tests.support.numbers import number_model, number_tokenizer
from tests.support.tiny import TinyPair, tiny_pair, write_prompts
from tests.support.warm import Warm
from training.text.dialogues import KINDS
from training.text.self_text import written
from utils.progress import never

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("write"))


def words(pair: TinyPair, file: Path, *more: str) -> list[str]:
    return ["write", str(file), "--answer-tokens", "24", "--seed", "3", *more, *pair.flags()]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answers(file: Path) -> dict[int, dict[str, Any]]:
    return {row["number"]: row for row in rows(file) if row["ids"]}


# -- the command line -----------------------------------------------------------------------------


def test_what_it_takes() -> None:
    def own(*given: str) -> Any:
        return read_request(["write", "a.jsonl", *given], {}).own

    def known(**more: Any) -> dict[str, Any]:
        plain = {"file": Path("a.jsonl"), "tokens": 200_000, "kinds": ("chat",), "prompts": None}
        return {**plain, "temperatures": (0.0, 0.7, 1.0), "answer_tokens": 256, "batch": 32, **more}

    assert vars(own()) == known()
    assert own().kinds == ("chat",)
    assert own("--kinds", "all").kinds == tuple(KINDS)
    assert own("--kinds", "qa, chat,qa").kinds == ("qa", "chat", "qa")
    assert vars(own("--temperatures", "0,0.5", "--batch", "4", "--answer-tokens", "9", "--tokens", "7")) == known(
        tokens=7, temperatures=(0.0, 0.5), answer_tokens=9, batch=4
    )
    assert vars(own("--prompts", "p.jsonl")) == known(tokens=None, prompts=Path("p.jsonl"))
    assert vars(own("--prompts", "gsm8k", "--tokens", "9")) == known(tokens=9, prompts="gsm8k")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a.jsonl", "--kinds", "poetry"], f"--kinds must be all or a comma list of {', '.join(KINDS)}, got 'poetry'"),
        (["a.jsonl", "--kinds", ""], "--kinds must be all or a comma list of chat, "),
        (["a.jsonl", "--kinds", "all,qa"], "--kinds must be all or a comma list of chat, "),
        (["a.jsonl", "--temperatures", "9"], "--temperatures must be a comma list of numbers from 0 to 5"),
        (["a.jsonl", "--tokens", "0"], "--tokens must be a whole number, 1 or more"),
        (["a.jsonl", "--kinds", "qa", "--prompts", "p.txt"], "--kinds and --prompts contradict each other"),
        ([], "write needs a file to write"),
        (["a.txt"], "a.txt: the file must end in .jsonl"),
        (["nowhere/a.jsonl"], "FILE nowhere/a.jsonl: the folder"),
        (["a.jsonl", "b.jsonl"], "write takes no further argument 'b.jsonl'"),
        (["a.jsonl", "--gamma", "3"], "write takes no --gamma"),
        (["a.jsonl", "--prompts", "none.txt"], "no prompt file none.txt"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["write", *given]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"error: {said}")
    assert not list(tmp_path.iterdir())


def test_help_names_its_own_flags() -> None:
    text = build_parser("write").format_help()
    for flag in ("FILE", "--tokens", "--kinds", "--prompts", "--temperatures", "--answer-tokens", "--batch", "--seed"):
        assert f"  {flag} " in text
    assert "--gamma " not in text


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [("auto", "none"), ("none", "none"), ("int8", "int8")])
def test_what_is_written_and_learned_comes_from_expanded_weights(
    asked: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.distill.texts.load_engine", lambda settings, options, stop: options)
    found: Any = load_target(Settings(), ModelOptions(quantization=asked), never)
    assert (found.quantization, found.drafter) == (given, "none")


def test_it_writes_goes_on_and_says_when_it_is_finished(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert main(words(pair, file, "--kinds", "chat,qa,qa", "--tokens", "100")) == 0
    error = capsys.readouterr().err
    count, before = written(file)[0], file.read_bytes()
    assert error.startswith("\rwriting text:   0%|")
    assert f"{file}: {count:,} tokens, {count:,} of them new, " in error
    assert error.endswith(" tokens/s\n")
    assert {row.get("kind", "chat") for row in answers(file).values()} == {"chat", "qa"}

    assert main(words(pair, file, "--kinds", "chat,qa,qa", "--tokens", "100")) == 0
    assert capsys.readouterr().err == f"{file} is finished: it holds {count:,} tokens\n"
    assert file.read_bytes() == before

    file.write_bytes(before + b'{"ids":[1,')  # killed
    assert main(words(pair, file, "--kinds", "chat,qa,qa", "--tokens", "200", "--batch", "5")) == 0
    assert f", {written(file)[0] - count:,} of them new, " in capsys.readouterr().err
    assert file.read_bytes().startswith(before)
    numbers = [row["number"] for row in rows(file)]
    assert len(numbers) == len(set(numbers))
    assert main(words(pair, whole, "--kinds", "chat,qa,qa", "--tokens", "200", "--quiet")) == 0
    assert capsys.readouterr().err == ""
    again, once = answers(file), answers(whole)
    assert len(set(again) & set(once)) > 5
    assert all(again[number] == once[number] for number in set(again) & set(once))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--kinds", "qa"], "was begun with kinds chat, now qa"),
        (["--dtype", "bfloat16"], "was begun with dtype float32, now bfloat16"),
        (["--seed", "4"], "was begun with seed 3, now 4"),
        (["--temperatures", "0"], "was begun with temperatures 0,0.7,1, now 0"),
        (["--answer-tokens", "9"], "was begun with answer tokens 24, now 9"),
        (["--target", "drafter"], "was begun with target target, now drafter"),
        (["--target", "other weights"], "was begun with weights "),
        (["--prompts", "p.jsonl"], "was begun with prompts none, now "),
    ],
)
def test_a_file_of_other_settings_is_refused(
    pair: TinyPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.jsonl"
    write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    assert main(words(pair, file, "--tokens", "20", "--quiet")) == 0
    before = file.read_bytes()
    given = words(pair, file, "--tokens", "9000")
    if more[0] == "--target":
        other = {"drafter": pair.drafter, "other weights": tiny_pair(tmp_path, seed=7).target}[more[1]]
        given[given.index("--target") + 1] = str(other)
    assert main([*given, *([] if more[0] == "--target" else more)]) == 2
    error = capsys.readouterr().err
    assert f"error: {file} {said}" in error
    assert error.endswith(": give the same flags, or another file\n")
    assert file.read_bytes() == before


def test_what_others_have_put_there_stays(pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    before = file.read_bytes()
    assert main(words(pair, file)) == 2
    assert f"error: {file} holds something else, or text of unknown settings" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_given_prompts_are_answered_to_the_last(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}, {"turns": ["two", "three"]}])
    given = words(pair, file, "--prompts", str(prompts), "--temperatures", "0,1")
    assert main(given) == 0
    assert sorted((row["number"], row["temperature"]) for row in rows(file) if row["ids"]) == [
        *((0, 0.0), (1, 0.0), (1, 0.0), (2, 1.0), (3, 1.0), (3, 1.0))
    ]
    capsys.readouterr()
    assert main(given) == 0
    assert "is finished: it holds" in capsys.readouterr().err
    write_prompts(prompts, [{"prompt": "one"}, {"turns": ["two", "four"]}])
    assert main(given) == 2
    assert "was begun with prompts " in capsys.readouterr().err


def test_prompts_that_all_lack_room_for_an_answer_are_refused(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, prompts = tmp_path / "a.jsonl", write_prompts(tmp_path / "p.jsonl", [{"prompt": "one two " * 200}])
    for _ in range(2):  # also when it is asked again
        assert main(words(pair, file, "--prompts", str(prompts), "--quiet")) == 1
        assert capsys.readouterr().err == "error: every prompt has 512 tokens or more: there is no room for an answer\n"


def test_distill_and_tables_read_it(pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    assert main(words(pair, file, "--kinds", "qa,maths", "--tokens", "400", "--quiet")) == 0
    kept = len(answers(file))
    assert len(rows(file)) > kept + 1  # some came to nothing
    assert main(["tables", "--from", str(file), "--out", str(tmp_path / "t.bin"), *pair.flags()]) == 0
    assert f"tokens in {kept} passages" in capsys.readouterr().err
    made = ["--data", str(file), "--out", str(tmp_path / "d"), "--epochs", "1", "--hidden", "32", "--quiet"]
    assert main(["distill", *made, *pair.flags()]) == 0


def test_ctrl_c_keeps_what_was_written_and_the_same_command_goes_on(pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    line = words(pair, file, "--kinds", "all", "--tokens", "1000000")
    run = Warm(
        [sys.executable, str(ROOT / "infer.py"), *line],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 120
    while not file.is_file() or file.read_bytes().count(b"\n") < 20:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 130
    count, before = written(file)[0], file.read_bytes()
    assert before.endswith(b"\n")
    assert error.endswith(f"interrupted: {file} keeps {count:,} tokens, the same command goes on from there\n")
    line[line.index("1000000")] = str(count + 30)
    assert main(line) == 0
    assert file.read_bytes().startswith(before)
    assert written(file)[0] >= count + 30


def test_a_target_that_cannot_write_to_itself_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny_pair(tmp_path / "bare", chat=False)
    assert main(words(bare, tmp_path / "a.jsonl")) == 1
    assert "has no chat template to write to itself with" in capsys.readouterr().err
    number_model(0, 32, 1).save_pretrained(tmp_path / "t5")
    number_tokenizer().save_pretrained(tmp_path / "t5")
    assert main(words(TinyPair(tmp_path / "t5", tmp_path / "t5"), tmp_path / "a.jsonl")) == 1
    assert "error: t5 is an encoder-decoder: write takes decoder-only targets" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()
