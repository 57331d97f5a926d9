"""`run`: what goes to standard output, the JSON, exit codes, pipes and interrupts."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.command_line.run import AnswerWriter, run_once
from app.lanes.race import Race
from app.prompts.questions import prompt_ids
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.models.causal import CausalLM
from tests.sampling.stats.test_metrics import KEYS
from tests.support.refusals import refused
from tests.support.tiny import TinyPair
from tests.support.warm import Warm
from utils.errors import UsageError
from utils.progress import never

SHAPE = {"context": 4096}


def as_json(options: ModelOptions, capsys: pytest.CaptureFixture[str], code: int = 0, **changes: Any) -> dict[str, Any]:
    assert run_once(Settings(**{"max_new_tokens": 30, **changes}), options, "What is this?", as_json=True) == code
    data: dict[str, Any] = json.loads(capsys.readouterr().out)  # the whole output is one object
    return data


def test_the_json_has_the_documented_keys_in_their_order(
    options: ModelOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_json(options, capsys, gamma=3)
    assert tuple(data) == ("pair", "prompt", "settings", "results", "speedup", "disturbed", "same_output")
    assert data["prompt"] == "What is this?"
    assert {name: data["settings"][name] for name in ("gamma", "temperature", "top_p", "seed")} == {
        "gamma": 3,
        "temperature": 0,
        "top_p": 1.0,
        "seed": 42,
    }
    assert [result["method"] for result in data["results"]] == ["ar", "spec"]
    assert {tuple(result) for result in data["results"]} == {("method", "text", "ids", *KEYS, "swi")}


def test_the_figures_of_the_json_fit_together(options: ModelOptions, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(options, capsys, gamma=4)
    plain, spec = data["results"]
    assert data["same_output"] is True
    assert plain["ids"] == spec["ids"]
    assert plain["text"] == spec["text"]
    if not data["disturbed"]:
        assert data["speedup"] == pytest.approx(spec["predicted_per_second"] / plain["predicted_per_second"], rel=1e-3)
    for result in data["results"]:
        assert result["predicted_n"] == len(result["ids"]) == 30
        assert result["stop_reason"] == "length"
        assert result["predicted_n"] - 1 == result["draft_n_accepted"] + result["target_passes"]
        assert sum(result["acceptance_histogram"]) == result["target_passes"] == result["calls"]["target"]
        assert result["predicted_per_second"] == pytest.approx(
            1000 * (result["predicted_n"] - 1) / result["predicted_ms"], rel=1e-3
        )
        assert result["tokens_per_pass"] == pytest.approx(
            (result["predicted_n"] - 1) / result["target_passes"], rel=1e-3
        )
        assert result["draft_ms"] + result["verify_ms"] + result["sample_ms"] <= result["predicted_ms"] * 1.001
        assert 0 < result["prompt_ms"] <= result["ttft_ms"]
    assert (plain["alpha"], plain["acceptance_rate"], plain["alpha_per_position"]) == (None, None, [])
    examined = spec["draft_n_accepted"] + spec["draft_n_rejected"]
    assert spec["alpha"] == pytest.approx(spec["draft_n_accepted"] / examined, abs=1e-4)
    assert len(spec["acceptance_histogram"]) == 5


def test_the_text_goes_out_alone_and_the_figures_beside_it(
    options: ModelOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wanted = as_json(options, capsys)["results"][-1]["text"]
    assert run_once(Settings(max_new_tokens=30), options, "What is this?", as_json=False) == 0
    out, err = capsys.readouterr()
    assert out == wanted.rstrip("\n") + "\n"
    note, *lines = err.splitlines()
    assert "runs in torch: no compiled pass" in note
    assert lines[0].startswith("AR    30 tok")
    assert lines[1].startswith("spec  30 tok")
    assert "same output" in lines[2]
    assert lines[-1] == "cut at 30 tokens"


def test_the_first_pass_of_a_process_is_on_no_clock(options: ModelOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the race begins passes over one token and over several were run, of the target and of the drafter."""
    happened: list[Any] = []
    forward, begin = CausalLM.open, Race.__iter__

    def opened(self: CausalLM, *given: Any, **more: Any) -> Any:
        session = forward(self, *given, **more)
        score = session.score

        def scored(rows: Any, draft: Any) -> Any:
            happened.append((self.name, draft.width + 1))
            return score(rows, draft)

        session.score = scored
        return session

    def begun(self: Race) -> Any:
        happened.append("race")
        yield from begin(self)

    monkeypatch.setattr(CausalLM, "open", opened)
    monkeypatch.setattr(Race, "__iter__", begun)
    run_once(Settings(max_new_tokens=4, quiet=True), options, "x", as_json=False)
    before = happened[: happened.index("race")]
    assert ("target", 1) in before
    assert {name for name, width in before if width > 1} == {"target"}
    assert "drafter" in {name for name, _ in before}


def test_quiet_says_nothing_but_the_answer(options: ModelOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_once(Settings(max_new_tokens=5, quiet=True), options, "x", as_json=False) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ("x" * 5000, r"^the prompt is 5,\d{3} tokens, the context holds 4,096 .*$"),
    ],
)
def test_a_prompt_that_is_empty_or_longer_than_the_context_is_refused_in_one_line(
    options: ModelOptions, prompt: str, told: str
) -> None:
    refused(run_once, Settings(quiet=True), options, prompt, as_json=False, kind=UsageError, match=told)


def test_the_template_and_the_system_prompt_are_in_what_the_model_reads(options: ModelOptions) -> None:
    engine = load_engine(Settings(quiet=True), options, never)
    chat = engine.tokenizer.decode(prompt_ids(engine, "hi", Settings(system="be brief")))
    assert chat == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.tokenizer.decode(prompt_ids(engine, "hi", Settings(chat=False))) == "hi"


# -- interrupts ---------------------------------------------------------------------------------


def test_a_real_ctrl_c_ends_with_130_and_what_was_said(pair: TinyPair) -> None:
    words = ["infer.py", "run", "go on", "--compare", "spec", "--max-new-tokens", "4000", "--quiet", *pair.flags()]
    with Warm(
        [sys.executable, *words],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert len(first + rest) > 4
    assert err == b""


# -- writing ------------------------------------------------------------------------------------


class Pieces(io.StringIO):
    """Remembers what was written, piece by piece."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_an_answer_that_ends_its_line_gets_no_second_newline() -> None:
    stream = Pieces()
    AnswerWriter(stream, lambda ids: "").finish("done\n")
    assert stream.getvalue() == "done\n"


def test_a_text_that_becomes_another_is_written_whole() -> None:
    stream = Pieces()
    writer = AnswerWriter(stream, lambda ids: "begun")
    writer.feed(SimpleNamespace(emitted=(1,)))  # type: ignore[arg-type]
    writer.finish("<think>begun</think>")
    assert stream.getvalue() == "begun\n<think>begun</think>\n"


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_all() -> None:
    text = "red \x1b[31m\tbell\x07 \x9b2J\nend"
    for terminal, wanted in ((True, "red \u241b[31m\tbell\u2407 \\x9b2J\nend"), (False, text)):
        stream = Pieces(terminal)
        AnswerWriter(stream, lambda ids: "").finish(text)
        assert stream.getvalue() == wanted + "\n"


# -- the default pair ---------------------------------------------------------------------------
