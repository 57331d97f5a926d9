"""The line that grows under the panes: a bar for each round, and the rates of the lanes over time."""

import math
import random
from dataclasses import replace

import pytest

from app.screen.palette import Look
from app.screen.panes import Round, TimeLine, bars_key, rates, timeline
from app.screen.spans import Span
from app.screen.view import Frame
from sampling.stats.summary import Stats
from tests.app.screen.test_view import FASTER
from tests.support.panes import pane_of

AR: TimeLine = ("AR", [Round(0.1, 1, 0, 0)] * 20)
SPEC: TimeLine = ("spec", [Round(0.1, 1 + n, 4, n) for n in (0, 1, 2, 3, 4, 4, 1, 0)] + [Round(0.1, 1, 0, 0)])


def text(drafting: TimeLine, plain: TimeLine | None, look: Look) -> str:
    return "\n".join("".join(segment.text for segment in row) for row in timeline(drafting, plain, look))


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (19, ""),
        (30, "spec accepted ▁▂▃▄▅▅▂▁·"),
        # By hand, of spans of 2 s / 7: 19.5, 45.5, 17.5 and 10 tok/s, levels 3, 7, 3 and 2 of 7; AR 10.
        (60, "spec accepted ▁▂▃▄▅▅▂▁·  tok/s ▄█▄▃  AR ▃▃▃▃▃▃▃  peak 46"),
        (80, "spec accepted ▁▂▃▄▅▅▂▁·  tok/s ▃▆█▃▂  AR ▂▂▂▂▂▂▂▂▂▂  peak 50"),
        (100, "spec accepted ▁▂▃▄▅▅▂▁·  tok/s ▃▆█▇▃▃  AR ▃▃▃▃▃▃▃▃▃▃▃▃  peak 46"),
        (140, "spec accepted ▁▂▃▄▅▅▂▁·  tok/s ▃▄▆▇█▄▂▂  AR ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂  peak 50"),
    ],
)
def test_the_line_at_each_width(width: int, shown: str) -> None:
    assert text(SPEC, AR, Look(width)) == shown


@pytest.mark.parametrize(("look", "none"), [(Look(100, color=False), "·"), (Look(100, ascii=True), ".")])
def test_without_level_bars_it_is_digits(look: Look, none: str) -> None:
    assert text(SPEC, AR, look) == f"spec accepted 01234410{none}  tok/s 369722  AR 222222222222  peak 46"
    assert bars_key(look) == f"a digit a round: accepted drafts, 9: 9 or more, {none} none drafted"


def test_the_key_of_level_bars() -> None:
    assert bars_key(Look()) == "a bar a round: ▁ 0, █ 7 or more, · none drafted"


def test_more_rounds_than_room_shows_the_last_ones() -> None:
    line = text(("spec", [Round(0.1, 1, 4, n % 5) for n in range(200)]), None, Look(43))
    assert line == "spec accepted …" + "".join("▁▂▃▄▅"[n % 5] for n in range(194, 200)) + "  tok/s █████  peak 10"


def test_rates_are_tokens_over_seconds_in_equal_spans() -> None:
    drawn = random.Random(0)
    rounds = [Round(drawn.uniform(0.01, 0.2), drawn.randint(1, 6), 4, 0) for _ in range(50)]
    total, span = sum(each.seconds for each in rounds), 0.37
    values = rates(rounds, span)
    assert len(values) == math.ceil(total / span)
    spans = [span] * (len(values) - 1) + [total - span * (len(values) - 1)]
    assert sum(value * seconds for value, seconds in zip(values, spans, strict=True)) == pytest.approx(
        sum(each.tokens for each in rounds)
    )
    # By hand: how far the count has come at a time, a round's tokens coming evenly within it.
    ends = [0.0]
    for each in rounds:
        ends.append(ends[-1] + each.seconds)

    def count(at: float) -> float:
        shares = ((at - start) / each.seconds for start, each in zip(ends, rounds, strict=False))
        return sum(each.tokens * min(1, max(0, share)) for each, share in zip(rounds, shares, strict=True))

    for index, (value, seconds) in enumerate(zip(values, spans, strict=True)):
        start = index * span
        assert value == pytest.approx((count(start + seconds) - count(start)) / seconds)


def test_the_line_stands_between_panes_and_figures_and_goes_where_there_is_no_room() -> None:
    stats = Stats(ttft_ms=88, predicted_n=33, predicted_ms=1670, target_passes=9, openings=1, draft_n=20)
    panes = [
        pane_of("ar", (), replace(stats, draft_n=0), "running", rounds=AR[1]),
        pane_of("spec", (), stats, "running", rounds=SPEC[1]),
    ]

    def lines(height: int | None) -> list[str]:
        return ["".join(segment.text for segment in row) for row in Frame(panes, Look(100, height)).rows()]

    whole = lines(None)
    at = next(index for index, line in enumerate(whole) if line.startswith("spec accepted ▁"))
    assert whole[at - 1].startswith("└")
    assert whole[at + 1].startswith("AR ")
    assert not any("accepted ▁" in line for line in lines(5))
    panes[1] = pane_of("spec", (), replace(stats, draft_n=0), "running", names=("match",), rounds=AR[1])
    assert any(line.startswith("spec accepted ····") for line in lines(None))
    spans = (Span("A river", "accepted"),)
    plain = Frame([panes[0], replace(panes[1], spans=spans)], Look(100, color=False), comparisons=[FASTER]).rows()
    assert any("a digit a round" in segment.text for row in plain for segment in row)
