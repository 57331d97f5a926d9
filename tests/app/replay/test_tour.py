"""The recorded demo: what it says, that it needs no torch, and its page, which is complete in itself and inert."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.command_line.main import main
from app.replay.player import Player
from app.replay.steps import RECORDED, STEPS, chosen, slowness
from app.replay.tour import ended, parts, played, side_by_side, steps_of, walk
from app.replay.tour_page import page
from app.screen.view import Canvas
from app.settings.table import Settings
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m &amp;"


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


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_every_step_is_shown_at_any_width(width: int) -> None:
    answers = dict(zip(STEPS, steps_of(Settings()), strict=True))
    where = place(width)
    for step in STEPS:
        assert all(Player(where, 0).play(answer) for answer in answers[step])
    text = where.out.file.getvalue()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("tok/s") >= 6


def test_the_recorded_demo_imports_no_torch(tmp_path: Path) -> None:
    told = (
        "import sys; from app.command_line.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    words = ["demo", "--recorded", "6"]
    for more in ([], ["--html", str(tmp_path / "t.html")]):
        done = subprocess.run(
            [sys.executable, "-c", f"{told}; sys.exit(code)", *words, *more],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "t.html").read_text().count("<script") == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["demo", "7", "--recorded"], "demo N must be a whole number from 1 to 6, got 7"),
        (["demo", "--recorded", "--html", "/no/such/place.html"], "error: --html /no/such/place.html: the folder"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1


class Parsed(HTMLParser):
    """Tags with attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and data.strip():
            self.scripts.append(data)


def test_the_page_is_complete_and_hostile_text_is_inert() -> None:
    answers = steps_of(Settings())[5]
    for answer in answers:
        answer.opening = answer.opening.model_copy(update={"prompt": HOSTILE})
        answer.head = answer.head.model_copy(update={"target": HOSTILE})
        answer.decode = lambda ids: HOSTILE * len(ids)  # type: ignore[assignment]
    text = page([(STEPS[5], [played(answer) for answer in answers])])
    parsed = Parsed(text)
    allowed = {"html", "head", "meta", "title", "style", "body", "nav", "button", "h1", "p", "div", "noscript"}
    assert {tag for tag, _ in parsed.tags} == {*allowed, "script"}
    assert not any(name.startswith("on") or name in ("src", "href") for _, told in parsed.tags for name in told)
    data, script = parsed.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(told["content"] for _, told in parsed.tags if "Content-Security-Policy" in told.values())
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "<" not in data
    assert not re.search("innerHTML|insertAdjacent|document.write|eval", script)
    assert not re.search(r"https?://|url\(", text)
    frames = [frame for step in json.loads(data) for screen in step["screens"] for scene in screen for frame in scene]
    shown = "".join(run for _, _, rows in frames for _, runs in rows for run in runs[1::2])
    assert "alert(1)" in shown
    assert "\x1b" not in shown


def test_the_last_frame_of_the_page_is_the_final_print() -> None:
    answer = steps_of(Settings())[5][0]
    where = place()
    Player(where, 0).play(steps_of(Settings())[5][0])
    wide, narrow = json.loads(Parsed(page([(STEPS[5], [played(answer)])])).scripts[0])[0]["screens"]
    assert max(len("".join(runs[1::2])) for _, _, rows in narrow[0] for _, runs in rows) <= 60
    frames = wide[0]
    lines: list[str] = []
    for at, (_, height, rows) in enumerate(frames):
        lines = (lines + [""] * height)[:height]
        for row, runs in rows:
            lines[row] = "".join(runs[1::2])
        assert at == 0 or frames[at - 1][0] <= frames[at][0]
    told = where.out.file.getvalue()
    assert "5.00 tok/pass" in "\n".join(lines)
    assert "5.00 tok/pass" in told
    assert "/continue" not in "\n".join(lines)
    assert "faster" in lines[-1] or any("faster" in line for line in lines)
