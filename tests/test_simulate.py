"""`record` and `simulate`: a recording does what its target does, and what it predicts is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import app.record
from app.answers import run_lane
from app.bench import run_bench
from app.bench_fields import BenchArgs
from app.cli import main
from app.settings import ModelOptions, Settings
from tests.tiny import TinyPair, tiny_pair, write_prompts

# Max-gram at gamma 2, by hand. The opening round says 5. Then the longest earlier match of what was said, what is
# copied behind it, and what the round gains: [5] → 6 7, both right, own 8: 3. [5 6 7 8] → 5 6, wrong, own 9: 1.
# [9] stood nowhere, own 5: 1. [5] → 6 7, own 8: 3. [5 6 7 8] → 5 6, wrong, own 9: 1. [… 9] → 5 6, wrong, own 2: 1.
PROMPT, ANSWER = [5, 6, 7, 8], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 2]
TAR = 10 / 6
BY_HAND = {
    "map": json.dumps({"_".join(map(str, PROMPT)): "_".join(map(str, ANSWER))}),
    "lines": json.dumps({"vocab_size": 10, "end_id": 2})
    + "\n"
    + json.dumps({"prompt_ids": PROMPT, "answer_ids": ANSWER})
    + "\n",
    "printed": "tensor([[5, 6, 7, 8, 5, 6,\n         7, 8, 9, 5, 6, 7, 8, 9, 2]])\n",
}


def simulated(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "figures.json"
    assert main(["simulate", *arguments, "--out", str(out), "--quiet"]) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@pytest.mark.parametrize("form", BY_HAND)
def test_the_figures_of_a_recording_made_by_hand_are_exact(form: str, tmp_path: Path) -> None:
    file = tmp_path / "by-hand"
    file.write_text(BY_HAND[form])
    words = [str(file), "--drafter", "maxgram", "--gammas", "2", "--t-draft", "0.01", "--end-id", "2"]
    words += ["--prompt-tokens", "4"] if form == "printed" else []
    (row,) = simulated(tmp_path, *words, "--t-verify", "0.1")["rows"]
    assert (row["tokens_per_pass"], row["target_passes"], row["predicted_n"]) == (round(TAR, 4), 6, 11)
    assert (row["draft_n"], row["draft_n_accepted"], row["prompts"][0]["tokens_per_pass"]) == (10, 4, round(TAR, 4))
    # six passes of 100 ms and ten drafts of 10 ms for ten tokens
    assert (row["throughput"], row["plain_throughput"], row["speedup"]) == (round(10 / 0.7, 4), 10.0, round(1 / 0.7, 4))
    assert row["throughput_formula"] == round(TAR / (2 * 0.01 + 0.1), 4)
    # five passes over three tokens, one over one; 50 ms more a round, in plain decoding too
    (row,) = simulated(tmp_path, *words, "--t-verify", "1:0.1,3:0.2", "--t-other", "0.05")["rows"]
    assert row["throughput"] == round(10 / (5 * 0.2 + 0.1 + 10 * 0.01 + 6 * 0.05), 4)
    assert row["speedup"] == round(10 / 1.5 * 0.15, 4)


def test_the_screen_fits_and_says_what_it_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "by-hand"
    file.write_text(BY_HAND["lines"])
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["simulate", str(file), "--methods", "ngram,maxgram,match", "--gammas", "1,2", "--quiet"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        assert "no speeds: nothing tells what target passes take" in " ".join(text.split())
        assert "ngram counts 1 id a token: the recording has no more" in " ".join(text.split())
        rows = [line.split() for line in text.splitlines() if line.startswith("maxgram")]
        assert rows[1][1:3] == ["2", "1.667"]
        assert rows[3] == ["maxgram", "2", "1.67"]
    assert main(["simulate", str(file), "--methods", "maxgram", "--t-verify", "0.1", "--t-draft", "0", "--quiet"]) == 0
    assert "as given, by tokens: 1: 100" in " ".join(capsys.readouterr().out.split())


# -- recorded here ----------------------------------------------------------------------------------

PROMPTS = [{"prompt": "one two one two", "category": "a"}, {"turns": ["abc abc", "and then"], "category": "b"}]
LENGTH = ["--max-new-tokens", "32", "--quiet"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("recorded"), context=300, noise=0.05, layers=1, seed=1)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def record(pair: TinyPair, prompts: Path) -> Callable[..., int]:
    def run(out: Path, *more: str) -> int:
        words = ["--target", str(pair.target), "--device", "cpu", "--prompts", str(prompts)]
        return main(["record", *words, "--out", str(out), *LENGTH, *more])

    return run


@pytest.fixture(scope="module")
def recording(record: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recording") / "r.jsonl"
    assert record(out, "--costs") == 0
    return out


def test_a_recording_predicts_the_rounds_of_its_target_exactly(
    pair: TinyPair, prompts: Path, recording: Path, tmp_path: Path
) -> None:
    methods, gammas = ("spec", "ngram", "maxgram", "cascade"), (1, 4)
    drafting = {"cascade": "model,maxgram", "k_matrix": "[[2,3],[0,3]]"}
    settings = Settings(max_new_tokens=32, quiet=True, **drafting)
    options = ModelOptions(target=str(pair.target), drafter=str(pair.drafter), device="cpu")
    out = tmp_path / "bench.json"
    assert run_bench(settings, options, BenchArgs(prompts, methods, gammas, repeat=1, out=out)) == 0
    names = ("predicted_n", "target_passes", "tokens_per_pass")
    real = {
        (result["method"], result["gamma"]): []  # type: ignore[var-annotated]
        for result in json.loads(out.read_text())["prompts"][0]["results"]
    }
    for prompt in json.loads(out.read_text())["prompts"]:
        for result in prompt["results"]:
            real[result["method"], result["gamma"]].append([result[name] for name in names] + [result["draft_n"]])
    words = ["--methods", ",".join(methods), "--gammas", "1,4", "--cascade", "model,maxgram"]
    told = simulated(tmp_path, str(recording), "--drafter", str(pair.drafter), *words, "--k-matrix", "[[2,3],[0,3]]")
    assert (told["pass_seconds_from"], sorted(map(int, told["pass_seconds"]))) == ("recording", list(range(1, 18)))
    assert len(told["rows"]) == len(real) == 7
    for row in told["rows"]:
        wanted = real[row["method"], row["gamma"]]
        assert [[one[name] for name in names] for one in row["prompts"]] == [one[:3] for one in wanted]
        assert row["draft_n"] == sum(one[3] for one in wanted)
        assert row["tokens_per_pass"] == round(sum(n - 1 for n, *_ in wanted) / sum(one[1] for one in wanted), 4)
        assert row["throughput"] > 0
    for method in methods:  # something was accepted of each
        assert max(row["tokens_per_pass"] for row in told["rows"] if row["method"] == method) > 1


def test_a_stopped_recording_goes_on(record: Callable[..., int], recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    whole = [json.loads(line) for line in recording.read_text().splitlines()]
    answers = [(one["prompt_ids"], one["answer_ids"], one["best_ids"]) for one in whole if "prompt_ids" in one]
    assert len(answers) == 3
    assert record(out, "--limit", "1") == 0
    first = out.read_text()
    out.write_text(first + '{"prompt_ids": [1, 2], "answ')  # killed while it wrote
    assert record(out) == 0
    assert out.read_text().startswith(first)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["prompt_ids"], one["answer_ids"], one["best_ids"]) for one in again[1:]] == answers
    assert record(out) == 0
    assert len(out.read_text().splitlines()) == 4  # nothing is answered twice


def test_an_interrupt_keeps_whole_answers(
    record: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, real, calls = tmp_path / "r.jsonl", run_lane, []

    def second_is_stopped(*given: Any, **more: Any) -> Any:
        calls.append(1)
        answer = real(*given, **more)
        stats = replace(answer.stats, stop_reason="interrupted") if len(calls) == 2 else answer.stats
        return replace(answer, stats=stats)

    monkeypatch.setattr(app.record, "run_lane", second_is_stopped)
    assert record(out) == 130
    assert f"interrupted: {out} keeps 1 answers, the same command goes on" in capsys.readouterr().err
    assert record(out) == 0
    assert len(out.read_text().splitlines()) == 4


def test_another_recording_is_not_gone_on_with(
    record: Callable[..., int], recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recording.read_text()
    assert record(recording, "--temperature", "0.5") == 2
    assert "holds a recording with temperature 0.0, now 0.5: give the same flags" in capsys.readouterr().err
    assert recording.read_text() == before
    other = tmp_path / "notes.json"
    other.write_text('{"1": "2"}\n')
    assert record(other) == 2
    assert "holds something else: name a new file" in capsys.readouterr().err
    assert record(tmp_path / "none" / "r.jsonl") == 2
    assert "is not there or cannot be written to" in capsys.readouterr().err


# -- what cannot draft for a recording --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--pair", "smollm2", "--methods", "glide"], 2, "drafter glide reads its target's keys and values"),
        (["--pair", "smollm2", "--drafter", "feature"], 2, "drafter feature reads its target's hidden states"),
        (["--pair", "smollm2", "--methods", "tables+feature"], 2, "drafter tables+feature reads its target's hidden"),
        (["--pair", "smollm2", "--methods", "match+glide"], 2, "drafter match+glide reads its target's keys"),
        (["--pair", "smollm2", "--methods", "cascade"], 2, "drafter glide reads its target's keys and values"),
        (["--drafter", "plain"], 2, "a plain drafter shares its target's embeddings"),
        (["--methods", "plain"], 2, "a plain drafter shares its target's embeddings"),
        (["--drafter", "no/such/folder"], 2, "is no model: expected a folder"),
        (["--t-verify", "0"], 2, "--t-verify must be seconds above 0: one number"),
        (["--t-verify", "1:0.1,0.2"], 2, "--t-verify must be seconds above 0: one number"),
        (["--prompts", "p.jsonl"], 2, "no prompt file p.jsonl"),
        (["--drafter", "TINY"], 1, "was made with another tokenizer (abc"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    words: list[str], code: int, why: str, pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(BY_HAND["lines"].replace('"end_id": 2', '"end_id": 2, "tokenizer": "abc"'))
    words = [str(pair.drafter) if word == "TINY" else word for word in words]
    assert main(["simulate", str(file), *words, "--quiet"]) == code
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_ids_beyond_the_drafters_vocabulary_are_refused(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text('{"1_2": "3_300"}')
    assert main(["simulate", str(file), "--drafter", str(pair.drafter), "--device", "cpu", "--quiet"]) == 1
    assert f"drafter does not fit {file}: 300 is no id of its 300" in capsys.readouterr().err
    assert main(["simulate"]) == 2
    assert "simulate needs a file: the recording to play" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "none")]) == 1
    assert "cannot read the recording" in capsys.readouterr().err


def test_printed_rows_are_split_behind_their_prompts(
    pair: TinyPair, prompts: Path, recording: Path, tmp_path: Path
) -> None:
    """The same answers as torch would have printed them, with the prompts as texts, give the same figures."""
    import torch

    told = [json.loads(line) for line in recording.read_text().splitlines()]
    rows = [[*one["prompt_ids"], *one["answer_ids"]] for one in told if one.get("turn") == 0]
    printed = tmp_path / "printed.txt"
    printed.write_text("".join(f"{torch.tensor([row])}\n" for row in rows))
    words = ["--drafter", str(pair.drafter), "--device", "cpu", "--gammas", "3"]
    (one,) = simulated(tmp_path, str(printed), "--prompts", str(prompts), *words)["rows"]
    (other,) = simulated(tmp_path, str(recording), *words)["rows"]
    assert one["prompts"] == other["prompts"][:2]


def test_the_target_is_measured_where_nothing_tells_its_seconds(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"40_41_42": "43_44_45_46"}))
    words = ["--target", str(pair.target), "--drafter", str(pair.drafter), "--device", "cpu", "--gammas", "2"]
    told = simulated(tmp_path, str(file), *words)
    assert (told["pass_seconds_from"], len(told["pass_seconds"])) == ("measured", 17)
    assert told["rows"][0]["speedup"] > 0
