"""The recorded demo: what it says, and that it needs no torch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.command_line.main import main
from app.replay.steps import RECORDED, STEPS, chosen, slowness
from app.replay.tour import ended, parts, side_by_side, steps_of, walk
from app.screen.view import Canvas
from app.settings.table import Settings
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def place(width: int = 100) -> Canvas:
    return Canvas(Settings(), Console(file=io.StringIO(), width=width, color_system=None, no_color=True))


def test_a_step_says_its_title_and_what_to_look_at_and_the_next_one_is_announced() -> None:
    where = place(60)
    seen: list[str] = []

    def play(step: Any) -> Any:
        seen.append(step.title)
        return []

    assert walk([(1, STEPS[0]), (2, STEPS[1])], play, where)
    assert seen == [STEPS[0].title, STEPS[1].title]
    told = "\n".join(line.rstrip() for line in where.out.file.getvalue().split("\n"))  # type: ignore[attr-defined]
    assert (
        told
        == """
1/6 Plain decoding against drafts
Look: Both lanes write the same text; plain decoding runs
the target once for every token, speculative decoding only
for the tokens marked as the target's own: count its passes.

Enter: step 2 of 6, Gamma: how much to draft; Ctrl-C leaves

2/6 Gamma: how much to draft
Look: One question at gamma 1, 4 and 16: tokens a pass rise,
but so do rejected drafts, and each one costs time.

"""
    )


def test_a_step_that_was_left_ends_the_tour() -> None:
    seen: list[str] = []

    def play(step: Any) -> Any:
        seen.append(step.title)

    assert not walk(chosen(None), play, place())
    assert seen == [STEPS[0].title]
    assert ended(chosen(3), False).startswith("the demo was left: /demo 3 plays a step alone")
    assert ended(chosen(3), True).startswith("that was step 3: /demo plays all 6; ")
    assert ended(chosen(None), True).startswith("that was the demo: /demo N, N from 1 to 6, plays a step alone")


def test_plain_decoding_is_shown_at_ten_tokens_a_second_unless_slow_is_set() -> None:
    assert slowness(Settings(), 156.2) == 16
    assert slowness(Settings(), 3.0) == slowness(Settings(), None) == 1
    assert slowness(Settings(), 1e9) == 1000
    assert slowness(Settings(slow=3), 156.2) == 3
    for answer in (answer for step in steps_of(Settings(slow=3)) for answer in step):
        assert answer.settings.slow == 3


def test_several_answers_of_a_step_end_in_a_table() -> None:
    answers = steps_of(Settings())[1]
    where, shown = place(40), []
    for answer in answers:
        shown.append(answer.tracks())
        for index, event in answer.events:
            shown[-1][index].feed(event)
    assert walk([(2, STEPS[1])], lambda _: shown, where)
    told = where.out.file.getvalue().split("\n")  # type: ignore[attr-defined]
    stats = [tracks[0].meter.stats for tracks in shown]
    head = next(row for row, line in enumerate(told) if line.startswith("gamma"))
    assert told[head].split() == ["gamma", "tok/s", "tok/pass", "accepted", "alpha"]
    for line, one, gamma in zip(told[head + 2 :], stats, (1, 4, 16), strict=False):
        figures = f"{one.predicted_per_second:.1f} {one.tokens_per_pass:.2f} {one.acceptance_rate:.0%} {one.alpha:.2f}"
        assert line.split() == f"{gamma} {figures}".split()
    assert side_by_side(STEPS[1], shown[:1], where.out, Settings()).row_count == 1


def test_the_recording_is_the_steps_own() -> None:
    assert RECORDED.stat().st_size < 300_000
    slow = steps_of(Settings())[0][0].settings.slow
    for step, answers in zip(STEPS, steps_of(Settings()), strict=True):
        assert [answer.opening.prompt for answer in answers] == [step.question] * len(step.plays)
        for answer, changes in zip(answers, step.plays, strict=True):
            settings = answer.settings.model_dump()
            told = Settings(**{name: value for name, value in changes.items() if name != "compare"}).model_dump()
            assert {name: settings[name] for name in changes if name != "compare"} == {
                name: told[name] for name in changes if name != "compare"
            }
            assert settings["slow"] == slow > 1
            if "compare" in changes:
                assert ",".join(lane.name for lane in answer.lanes) == changes["compare"]


def test_what_the_steps_say_is_so_in_the_recording() -> None:
    found = []
    for answers in steps_of(Settings()):
        found.append([])
        for answer in answers:
            tracks = answer.tracks()
            for index, event in answer.events:
                tracks[index].feed(event)
            found[-1].append([track.meter.stats for track in tracks])
    ((plain, drafting),), gammas, heats, ((one, bad),), _, ((_, copying),) = found
    assert drafting.draft_n_accepted > 0
    assert drafting.target_passes < plain.target_passes
    passes = [row[0].tokens_per_pass for row in gammas]
    assert passes == sorted(passes)
    assert heats[0][0].alpha > heats[-1][0].alpha
    assert bad.predicted_per_second < one.predicted_per_second
    assert copying.tokens_per_pass > 4


def test_a_log_of_something_else_is_no_recording() -> None:
    with pytest.raises(UserError, match="is no recorded demo"):
        steps_of(Settings(), ROOT / "docs/examples/session.jsonl")


def test_the_rounds_are_those_of_the_trace() -> None:
    answer = steps_of(Settings())[4][0]
    where, tracks = place(), answer.tracks()
    for index, event in answer.events:
        tracks[index].feed(event)
    rounds = list(parts(tracks, where.out, where.settings))
    assert len(rounds) == 1 + len(tracks[-1].steps)
    assert any("discarded" in segment.text for row in rounds[2].rows() for segment in row)


def test_the_recorded_demo_imports_no_torch() -> None:
    told = (
        "import sys; from app.command_line.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    words = ["demo", "--recorded", "6"]
    done = subprocess.run(
        [sys.executable, "-c", f"{told}; sys.exit(code)", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["demo", "7", "--recorded"], "demo N must be a whole number from 1 to 6, got 7"),
        (["demo", "--recorded", "--html", "tour.html"], "--html"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
