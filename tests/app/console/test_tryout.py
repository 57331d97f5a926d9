"""/prompts and /bench in the console, over tiny real pairs: what they ask and time, and what they leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.console.slash_commands import COMMANDS, completions
from app.console.state import ConsoleState
from tests.app.console.test_slash_commands import ScriptedConsole
from tests.support.scripted import failing, run_lines
from tests.support.tiny import write_prompts

SHAPE = {"context": 250}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"turns": ["first of two", "second of two"], "category": "chat"},
        {"prompt": "y" * 300},
        {"prompt": "[bold]last\x1b[31m"},
    ]
    return write_prompts(tmp_path / "my prompts.jsonl", rows)


def talk(state: ConsoleState) -> tuple[Any, ...]:
    assert state.chat is not None
    assert state.session is not None
    cached = state.session.rollback([state.chat.ids])[0]
    return tuple(state.chat.turns), cached, state.settings


def test_the_prompts_are_asked_and_the_conversation_is_as_it_was(catalogue: Path, prompts: Path) -> None:
    seen: list[Any] = []

    def look(state: ConsoleState) -> None:
        seen.append((talk(state), len(state.answers)))

    ran = run_lines(catalogue, "hello", look, f'/prompts "{prompts}"', look, "and you?", look)
    told = ran.after(f'/prompts "{prompts}"')
    assert told.count("same output") == 3
    assert "/continue" not in told  # it would go on with the conversation
    assert "\n3 answers\n" in told  # the figures of all
    assert told.index("1/3 chat first of two") < told.index("1/3 chat second of two") < told.index("3/3 [bold]last")
    assert "error: prompt 2/3 is left out: the prompt is 3" in told.replace("\n", " ")
    assert "\x1b[31m" not in told
    before, after, later = seen
    assert before[0] == after[0]
    assert (before[1], after[1]) == (1, 4)
    assert [turn.user for turn in later[0][0]] == ["hello", "and you?"]
    asked = ran.state.answers[2].turn
    first = ran.state.answers[1].turn
    assert asked.prompt[: len(first.prompt) + 12] == (*first.prompt, *first.answer)  # one chat a question


def test_lanes_are_timed_over_the_last_prompts(catalogue: Path, prompts: Path) -> None:
    seen: list[Any] = []

    def look(state: ConsoleState) -> None:
        seen.append((talk(state), dict(state.pairs.engine._kept), len(state.answers)))

    ran = run_lines(catalogue, "hello", f"/prompts {prompts}", look, "/bench 1,3", look, "/bench", width=60)
    told = ran.after("/bench 1,3")
    assert "3 prompts × ar, spec gamma 1, spec gamma 3; Ctrl-C keeps" in told
    assert "prompt 2, turn 1 skipped" in told
    assert "3 prompts, 3 answers a method" in told
    assert [line[:6].strip() for line in told.splitlines() if line.startswith(("ar ", "spec "))][:3] == [
        "ar",
        "spec 1",
        "spec 3",
    ]
    assert max(map(len, told.splitlines())) <= 60
    assert seen[0] == seen[1]
    assert "spec 4" in ran.after("/bench")  # the gamma of the settings


def test_wrong_prompts_and_no_model_are_one_line(catalogue: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    ran = run_lines(catalogue, "/prompts gsm8k", f"/prompts {broken}", "/prompts ~nobody/x.txt", "/bench 0")
    said = [line for line in ran.text.splitlines() if line.startswith("error:")]
    assert len(said) == 4
    assert "Traceback" not in ran.text
    assert "internal" not in ran.text
    ran = run_lines(catalogue, "/bench 1,2", loader=failing)
    assert ran.reader.defaults[1] == "/bench 1,2"


def test_tab_offers_names_folders_and_prompt_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.txt", "c.json"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    offered = [found.text for found in completions("/prompts ", 9, ScriptedConsole(), COMMANDS)]
    assert offered == [
        "spec_bench",
        "mt_bench",
        "gsm8k",
        "mmlu",
        "gsm8k_cascade",
        "mmlu_cascade",
        "hellaswag",
        "a.jsonl",
        "b.txt",
        "sub/",
    ]
