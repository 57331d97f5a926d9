"""/demo in the console over a tiny real pair, and the recorded one in a real terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import app.console.demo
from app.console.state import ConsoleState
from app.replay.steps import STEPS
from tests.app.console.test_terminal import COLOUR
from tests.support.screen import Terminal
from tests.support.scripted import catalogue_of, run_lines
from tests.support.tiny import tiny_pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    return catalogue_of(folder, {"tiny": tiny_pair(folder / "tiny", stop=False, context=900)})


def talk(state: ConsoleState) -> tuple[Any, ...]:
    assert state.chat is not None
    assert state.session is not None
    assert state.pairs.engine is not None
    cached = state.session.rollback([state.chat.ids])[0]
    return tuple(state.chat.turns), cached, state.settings, len(state.answers), state.latest, id(state.pairs.engine)


def test_the_tour_leaves_conversation_and_settings_as_they_were(catalogue: Path) -> None:
    seen: list[Any] = []

    def look(state: ConsoleState) -> None:
        seen.append(talk(state))

    ran = run_lines(catalogue, "/temperature 0.6", "hello", look, "/demo", look, "/stats", "/temperature")
    told = ran.after("/demo")
    for number, step in enumerate(STEPS, start=1):
        assert f"{number}/6 {step.title}" in told
    assert "error: left out: " in told  # the pair has no plain head
    assert told.count("greedy: a draft x is accepted") == 1
    assert told.count("gamma 16") == 1 or told.count("γ 16") >= 1
    assert seen[0] == seen[1]
    assert ran.after("/temperature") == "temperature = 0.6\n"


def test_one_step_alone(catalogue: Path) -> None:
    ran = run_lines(catalogue, "/demo 1", "/demo 7", "/demo x")
    told = ran.after("/demo 1")
    assert "1/6 A text that copies its source" in told
    assert "Seen: " in told
    assert "Enter" not in told
    assert "2/6" not in told
    assert ran.errors == [
        "error: /demo must be a whole number from 1 to 6, got 7",
        "error: /demo must be a whole number from 1 to 6, got 'x'",
    ]


def test_ctrl_c_leaves_step_and_tour(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = app.console.demo.answer, [0]

    def stopping(plan: Any, state: ConsoleState) -> bool:
        count[0] += 1
        state.stop.stopped = count[0] == 3
        return whole(plan, state)

    monkeypatch.setattr(app.console.demo, "answer", stopping)
    ran = run_lines(catalogue, "hello", "/demo", "and you?")
    told = ran.after("/demo")
    assert count[0] == 3
    assert "3/6" in told
    assert "4/6" not in told
    assert "the demo was left: /demo N, N from 1 to 6, plays a step alone" in told.replace("\n", " ")
    assert [turn.user for turn in ran.state.chat.turns] == ["hello", "and you?"]  # type: ignore[union-attr]


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_first_step_at_every_width(columns: int) -> None:
    terminal = Terminal("demo", "--recorded", columns=columns, rows=40)
    terminal.wait("Enter: step 2", 60)
    assert "Seen:" in terminal.text
    assert "plain" in terminal.text.lower()
    assert COLOUR.search(terminal.raw)
    terminal.child.close(force=True)


def test_the_recorded_tour_in_a_terminal() -> None:
    terminal = Terminal("demo", "--recorded", columns=60, environ={"NO_COLOR": "1"})
    terminal.wait("Enter: step 2", 60)
    assert "same" in terminal.text or "identical" in terminal.text
    terminal.type("x")
    terminal.quiet(0.2)
    assert "2/6" not in terminal.text
    terminal.type("\r")
    terminal.wait("2/6 Plain", 20)
    terminal.wait("slow ", 20)
    terminal.type("\x03")
    terminal.wait(lambda: not terminal.child.isalive(), 20)
    terminal.read()
    assert "the demo was left" in terminal.raw
    assert terminal.child.exitstatus == 130
    assert not COLOUR.search(terminal.raw)
