"""The recorded demo: what it says, and that it needs no torch."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.command_line.main import main
from app.replay.player import BASE_SETTINGS, PAGE, RECORDED, STEPS, chosen, slowness, steps_of, walk
from app.screen.live import Track
from app.screen.view import Surface
from app.settings.table import Settings
from tests.support.refusals import refused

ROOT = Path(__file__).resolve().parents[3]


def place(width: int = 100) -> Surface:
    return Surface(Settings(), Console(file=io.StringIO(), width=width, color_system=None, no_color=True))


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
1/6 A text that copies its source
Look: Where the answer repeats what was said, matches draft
whole phrases: see the tokens a pass (tok/pass).

Enter: step 2 of 6, Plain decoding against drafts; Ctrl-C
leaves

2/6 Plain decoding against drafts
Look: Plain decoding runs the target once for every token;
with drafts it runs once for every token that is marked as
the target's own: count its passes.

"""
    )


def test_a_step_that_was_left_ends_the_tour() -> None:
    seen: list[str] = []

    def play(step: Any) -> Any:
        seen.append(step.title)

    assert not walk(chosen(None), play, place())
    assert seen == [STEPS[0].title]


@pytest.mark.parametrize(
    ("settings", "rate", "times"),
    [
        (Settings(), 156.2, 16),
        (Settings(), 3.0, 1),
        (Settings(), None, 1),
        (Settings(), 1e9, 1000),
        (Settings(slow=3), 156.2, 3),
    ],
)
def test_plain_decoding_is_shown_at_ten_tokens_a_second_unless_slow_is_set(
    settings: Settings, rate: float | None, times: int
) -> None:
    assert slowness(settings, rate) == times


def test_every_answer_of_every_step_is_as_slow_as_is_set() -> None:
    assert {answer.settings.slow for step in steps_of(Settings(slow=3)) for answer in step} == {3}


def shown(number: int) -> list[list[Track]]:
    """The recorded answers of a step when all has happened."""
    return [answer.over() for answer in steps_of(Settings())[number - 1]]


@pytest.mark.parametrize("number", range(1, 7))
def test_every_step_ends_in_a_table_with_plain_decoding(number: int) -> None:
    step, where, answers = STEPS[number - 1], place(80), shown(number)
    assert walk([(number, replace(step, traced=False))], lambda _: answers, where)
    told = where.out.file.getvalue().split("\n")  # type: ignore[attr-defined]
    head = next(row for row, line in enumerate(told) if "plain tok/s" in line)
    assert told[head].split()[:4] == [step.varied or "lane", "plain", "tok/s", "tok/s"]
    for line, tracks in zip(told[head + 2 :], answers, strict=False):
        plain, drafting = tracks[0].meter.stats, tracks[-1].meter.stats
        rates = [plain.predicted_per_second, drafting.predicted_per_second]
        figures = [*(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}", f"{drafting.tokens_per_pass:.2f}"]  # type: ignore[operator]
        assert line.split()[1:] == [*figures, f"{drafting.acceptance_rate:.0%}", f"{drafting.alpha:.2f}"]


def test_the_recording_is_the_steps_own() -> None:
    assert RECORDED.stat().st_size < 350_000
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
                assert ",".join(lane.name for lane in answer.opening.lanes) == changes["compare"]


def test_a_step_decodes_the_same_whatever_the_user_has_chosen() -> None:
    odd = Settings(presence_penalty=1, typical_p=0.5, penalty_window=9, logit_bias=((3, -1.0),), regex="a", stop=("x",))
    assert odd.changed(**BASE_SETTINGS) == Settings(**BASE_SETTINGS)


def test_a_log_of_something_else_is_no_recording() -> None:
    refused(steps_of, Settings(), ROOT / "docs/examples/session.jsonl", match="is no recorded demo")


def test_the_recorded_demo_imports_no_torch() -> None:
    told = (
        "import sys; from app.command_line.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    words = ["demo", "--recorded", "1"]
    done = subprocess.run(
        [sys.executable, "-c", f"{told}; sys.exit(code)", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"
    assert done.stdout.startswith("This is what a win and a loss look like (page: docs/examples/")
    assert (ROOT / PAGE).is_file()


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
