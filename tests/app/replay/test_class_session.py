"""The recorded session for a class in a real terminal, thirty times faster than it was shown."""

from itertools import chain

import pytest

from app.lanes.race import timed
from app.replay.session_log import read_log
from tests.support.screen import ROOT, Terminal

pytestmark = pytest.mark.slow

FILE = "docs/examples/class.jsonl"


@pytest.mark.parametrize(
    "columns", [60, *(pytest.param(width, marks=pytest.mark.exhaustive) for width in (80, 100, 140))]
)
def test_it_has_two_questions_a_round_in_steps_a_forced_token_and_a_simulated_lane(columns: int) -> None:
    played = Terminal("replay", FILE, "--speed", "30", columns=columns, rows=24, warm=True)
    seen: list[str] = []

    def over() -> bool:
        seen.extend(line for line in played.lines if line not in seen)
        return not played.child.isalive()

    played.wait(over, 60)
    played.read()
    over()  # its last lines
    text = "\n".join(seen)
    assert len([line for line in dict.fromkeys(seen) if line.startswith("› ")]) == 2
    assert [
        phase
        for phase in (
            "1 draft: 4 tokens",
            "2 one pass",
            "3 accept: 3 of 4",
            "4 commit: 4 tokens",
            "any key: next phase",
        )
        if phase not in text
    ] == []
    assert "token 3 is forced, the answer goes on after: 1. Sunday" in text
    assert "faster (simulated)" in text
    assert played.end() == 0


def test_it_takes_about_two_minutes() -> None:
    answers = read_log(ROOT / FILE).answers
    pauses = chain.from_iterable(answer.closing.pauses for answer in answers if answer.closing)
    shown = sum(timed(answer.events)[-1][0] * answer.settings.times_slower for answer in answers)
    waited = sum(answer.opening.waited for answer in answers[1:])
    assert 90 < waited + sum(seconds for seconds, _ in pauses) + shown < 150
