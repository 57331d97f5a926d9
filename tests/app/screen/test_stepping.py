"""A race in steps: what is known at each phase of a round, and where it stops."""

from collections.abc import Sequence

import pytest

from app.lanes.costs import LaneRecord, Terms
from app.screen.live import KEYS, Track, in_steps
from app.screen.palette import Look
from app.screen.rows import Row
from app.settings.table import Settings
from sampling.events import Finished, Odds, Step, Trial

WORDS = {1: "A", 2: " river", 3: " lake", 4: " runs"}
OPENING = Step(0, 0, (), (), (), (), 1, (), (), 2.0, (), 0.0, 0.01, 0.0)
ROUND = Step(
    0, 2, (2, 3), (-1, -1), (0, 0), (0,), 4, (0.5,), (0.75,), 1.0, (), 0.002, 0.01, 0.0,
    trials=(Trial(0, 0.25, 0.125),), odds=(Odds(0.5, 0.75), Odds(0.0625, 0.125)),
)  # fmt: skip


def stops(keys: Sequence[bytes]) -> list[list[str]]:
    """The rows below the lanes at each stop of a race of two rounds."""
    lane = LaneRecord("spec", Terms(True, sources=("small",)), drawn_drafts=True, settings=Settings(temperature=1))
    track, left, shown = Track(lane, lambda ids: "".join(WORDS[one] for one in ids), 1), list(keys), []

    def draw(below: Sequence[Row] = ()) -> None:
        shown.append(["".join(part.text for part in row).rstrip() for row in below])

    race = [(0, OPENING), (0, ROUND), (0, ROUND), (0, Finished(0, "length"))]
    for _, event in in_steps(race, [track], draw, lambda: Look(80, 24, color=False), lambda: left.pop(0)):
        track.feed(event)
    assert track.events == [OPENING, ROUND, ROUND, Finished(0, "length")]
    return shown


def test_each_phase_shows_what_is_known_by_then() -> None:
    draft, scored, accepted, committed, *_ = stops([b" "] * 8)
    assert draft == [
        "1 draft: 2 tokens in 2.0 ms",
        ' 1  ├─ " river"         q  .75                                  drafted',
        ' 2  └─ " lake"          q  .12                                  drafted',
        KEYS,
    ]
    assert scored[0] == "2 one pass of the target over 3 positions in 10.0 ms"
    assert scored[1] == ' 1  ├─ " river"         q  .75  p  .50  chance  .25             drafted'
    assert accepted[0] == "3 accept: 1 of 2, then one token of the target's own"
    assert accepted[1] == ' 1  ├─ " river"         q  .75  p  .50  chance  .25  coin  .12  accepted'
    assert accepted[3].startswith('    " runs"  from the target')
    assert committed == ["4 commit: 2 tokens joined the text", KEYS]


@pytest.mark.parametrize(
    ("keys", "phases"),
    [
        ([b" "] * 8, "12341234"),
        ([b" ", b"r", b" ", b" ", b" ", b" "], "121234"),
        ([b" ", b" ", b"q"], "123"),
        ([b""], "1"),
    ],
)
def test_keys_go_on_by_a_phase_a_round_or_to_the_end(keys: list[bytes], phases: str) -> None:
    assert "".join(rows[0][0] for rows in stops(keys)) == phases
