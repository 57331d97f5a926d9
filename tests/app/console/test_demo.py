"""The tour of a tiny real pair, and the recorded one in a real terminal."""

from pathlib import Path
from typing import Any

import pytest

import app.console.demo
from app.command_line.main import main
from app.console.state import ConsoleState
from app.replay.player import STEPS
from tests.app.console.test_terminal import COLOUR
from tests.support.screen import Terminal

SHAPE = {"context": 900}


def test_the_tour_of_a_pair_goes_through_every_step(catalogue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--models", str(catalogue)]) == 0
    shown = capsys.readouterr().out
    assert all(f"{number}/6 {step.title}" in shown for number, step in enumerate(STEPS, start=1))
    assert "error: left out: " in shown  # the pair has no plain head
    assert shown.count("greedy: a draft x is accepted") == 1
    assert "gamma 16" in shown


def test_one_step_alone(catalogue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "1", "--models", str(catalogue)]) == 0
    shown = capsys.readouterr().out
    assert "1/6 A text that copies its source" in shown
    assert "plain tok/s" in shown
    assert "Enter" not in shown
    assert "2/6" not in shown


def test_ctrl_c_leaves_step_and_tour(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, count = app.console.demo.answer, [0]

    def stopping(plan: Any, state: ConsoleState) -> bool:
        count[0] += 1
        state.stop.stopped = count[0] == 3
        return whole(plan, state)

    monkeypatch.setattr(app.console.demo, "answer", stopping)
    assert main(["demo", "--models", str(catalogue)]) == 130
    shown = capsys.readouterr()
    assert count[0] == 3
    assert "3/6" in shown.out
    assert "4/6" not in shown.out
    assert "the demo was left: infer.py demo N plays a step alone" in shown.err


@pytest.mark.parametrize("columns", [80, *(pytest.param(width, marks=pytest.mark.exhaustive) for width in (100, 140))])
def test_the_first_step_at_every_width(columns: int) -> None:
    terminal = Terminal("demo", "--recorded", columns=columns, rows=40, warm=True)
    terminal.wait("Enter: step 2", 60)
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
    terminal.type("\r", until="2/6 Plain", seconds=20)
    terminal.wait("slow ", 20)
    terminal.type("\x03", until=lambda: not terminal.child.isalive(), seconds=20)
    terminal.read()
    assert "the demo was left" in terminal.raw
    assert terminal.child.exitstatus == 130
    assert not COLOUR.search(terminal.raw)
