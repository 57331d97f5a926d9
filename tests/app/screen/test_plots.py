"""`/plot`: bars of the expected speed-up by gamma and of acceptance by position, as exact text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from syrupy.assertion import SnapshotAssertion

from app.lanes.costs import LaneRecord, Terms
from app.screen.live import Track
from app.screen.palette import Look
from app.screen.plots import Bar, Bars, gamma_bars, rank_bars, time_bars
from app.settings.table import Settings
from sampling.events import Call, Finished, Position, Proposal, Step
from sampling.gamma.controller import Controller, best
from sampling.stats.theory import expected_speedup
from tests.support.pacing import PLAIN, World, make_step, rising
from tests.support.panes import printed
from tests.support.refusals import refused
from tests.support.scripted import run_lines

TARGET, DRAFTER = object(), object()


def lane(name: str, gamma: int | str | None, pace: Controller | None = None, drafter: object = DRAFTER) -> Any:
    return SimpleNamespace(
        name=name, lm=TARGET, drafter=drafter, drafts=gamma is not None, takes_gamma=gamma is not None, beams=None,
        drawn_drafts=False, pace=pace, settings=Settings(gamma=gamma or 1),
    )  # fmt: skip


def track(lane: Any, steps: Sequence[Step], limit: int = 1000) -> Track:
    lane.settings = lane.settings.changed(max_new_tokens=limit)
    terms = Terms(lane.drafts, "auto" if lane.pace else lane.settings.gamma if lane.drafts else None)
    made = Track(LaneRecord(lane.name, terms, settings=lane.settings), lambda ids: "x" * len(ids), 5, running=lane)
    for event in (make_step(0, 0, 0, verify_s=9.0), *steps, Finished(0, "length")):
        made.feed(event)
    return made


def answered(*tracks: Track) -> Sequence[Track]:
    return tracks


def rounds(gamma: int, accepted: Sequence[int], c: float = 0.1) -> list[Step]:
    """Rounds of which each accepted so many; v(n) is 1 + .05 (n − 1)."""
    return [make_step(gamma, gamma, each, PLAIN * c * gamma, PLAIN * rising(gamma + 1)) for each in accepted]


PLAIN_ROUNDS = [make_step(0, 0, 0) for _ in range(20)]
THREE = rounds(3, [3, 0, 1, 3] * 5)


def both(gamma: int | str = 3, steps: Sequence[Step] = tuple(THREE), pace: Controller | None = None) -> Any:
    return answered(track(lane("ar", None, drafter=object()), PLAIN_ROUNDS), track(lane("spec", gamma, pace), steps))


def shown(bars: Bars, look: Look) -> list[str]:
    return [line.rstrip() for line in printed(bars, look.width).splitlines()]


LOOKS = {
    "60": Look(60, color=False),
    "100": Look(100, color=False),
    "60 ascii": Look(60, color=False, ascii=True),
    "100 colour": Look(100),
}


@pytest.mark.parametrize("name", LOOKS)
def test_the_plots_as_they_are_printed(name: str, snapshot: SnapshotAssertion) -> None:
    look = LOOKS[name]
    lines = shown(gamma_bars([both()], look), look)
    assert "\n".join(lines) == snapshot
    assert look.color or not look.ascii or "".join(lines).isascii()


def test_the_bars_are_the_expected_speed_up_of_the_planted_costs() -> None:
    """All drafts accepted: S = (gamma + 1) / (gamma·c + v(gamma + 1)), at gamma 3 as measured."""
    drawn = gamma_bars([both(steps=rounds(3, [3] * 200))], LOOKS["60"])
    for gamma, bar in enumerate(drawn.bars[:4]):
        assert float(bar.figure[:-1]) == pytest.approx(expected_speedup(1.0, gamma, 0.1, rising(gamma + 1)), abs=0.01)
    assert drawn.bars[3].note == "this one"
    assert drawn.remarks[-1] == f"measured in the last answer: {4 / (0.3 + rising(4)):.2f}x at gamma 3"
    assert [bar.solid for bar in drawn.bars] == [True] * 4 + [False] * 13


def test_a_lane_under_gamma_auto_tells_what_its_own_pace_has_learned() -> None:
    pace, world, steps = Controller(), World(0.8, c=0.1, v=rising, noise=0.0, slow=0.0), []
    for _ in range(60):
        (gamma,) = pace.budget([0]).max_depth
        steps.append(world.round(gamma, 0))
        pace.observe([steps[-1]])
    drawn = gamma_bars([answered(track(lane("spec", "auto", pace), steps))], LOOKS["60"])
    assert [bar.figure for bar in drawn.bars] == [f"{rate:.2f}x" for rate in pace.expected(16)]
    assert [int(bar.name) for bar in drawn.bars if bar.note] == [best(pace.expected(pace.reach))]
    assert not any(remark.startswith("measured") for remark in drawn.remarks)  # nothing ran beside it


def test_gamma_auto_is_told_by_what_was_drafted_not_by_what_it_allowed() -> None:
    allowed, pace = [replace(step, gamma=9) for step in rounds(2, [1] * 40)], Controller()
    for step in allowed:
        pace.budget([0])
        pace.observe([step])
    assert gamma_bars([both("auto", allowed, pace)], LOOKS["60"]).remarks[-1].endswith("at gamma auto(2.0)")


def test_a_disturbed_timing_has_no_speed_up() -> None:
    spoiled = [replace(step, verify_s=PLAIN * (50 if index % 5 == 0 else 1)) for index, step in enumerate(PLAIN_ROUNDS)]
    wide = [replace(step, calls=(Call("target", 1, step.verify_s),)) for step in THREE]
    disturbed = answered(track(lane("ar", None, drafter=object()), spoiled), track(lane("spec", 3), wide))
    assert gamma_bars([disturbed], LOOKS["60"]).remarks[-1].startswith("timing of the last answer disturbed")


def test_gamma_of_the_settings_may_be_the_one_that_auto_takes() -> None:
    useless = both(1, rounds(1, [0] * 40))
    assert [bar.note for bar in gamma_bars([useless], LOOKS["60"]).bars][:2] == ["auto", "this one"]
    assert gamma_bars([both(16, rounds(16, [16] * 40, c=0.001))], LOOKS["60"]).bars[16].note == "this one, and auto"


def test_rounds_of_earlier_answers_count_and_those_of_other_drafters_do_not() -> None:
    one, earlier = gamma_bars([both()], LOOKS["60"]), both(steps=rounds(3, [0] * 40))
    assert gamma_bars([earlier, both()], LOOKS["60"]).remarks[0] != one.remarks[0]
    other = answered(track(lane("spec", 3, drafter=object()), rounds(3, [0] * 40)))
    assert gamma_bars([other, both()], LOOKS["60"]).remarks[0] == one.remarks[0]


def test_a_round_cut_by_the_length_is_no_silence() -> None:
    cut = [*rounds(3, [3] * 20), make_step(3, 1, 1, PLAIN * 0.1, PLAIN * rising(2))]
    exact, longer = (track(lane("spec", 3), cut, limit=1 + 20 * 4 + more) for more in (2, 9))
    figures = [[bar.figure for bar in gamma_bars([answered(one)], LOOKS["60"]).bars] for one in (exact, longer)]
    assert float(figures[0][3][:-1]) > float(figures[1][3][:-1])


def test_the_time_of_a_round_is_the_mean_of_what_it_went_to() -> None:
    """20 rounds of gamma 3: drafting 0.3, the pass over four tokens 1.15 plain passes."""
    plain, drafting = time_bars(both(), Look(60, color=False))
    draft, verify = (1000 * PLAIN * cost for cost in (0.3, rising(4)))
    assert drafting.title == f"spec: time of a round, mean of 20: {draft + verify:.2f} ms"
    assert [(bar.name, bar.figure, bar.note) for bar in drafting.bars] == [
        ("draft", f"{draft:.2f} ms", f"{draft / (draft + verify):.0%}"),
        ("verify", f"{verify:.2f} ms", f"{verify / (draft + verify):.0%}"),
        ("sample", "0.00 ms", "0%"),
        ("other", "0.00 ms", "0%"),
    ]
    assert plain.bars[1].note == "100%"


def listed(step: Step, *tokens: int) -> Step:
    """The round, with these tokens in the drafter's list where it ended."""
    proposals = tuple(Proposal(token, 0.1, rank, 0) for rank, token in enumerate(tokens, start=1))
    return replace(step, positions=(Position((), (), 0.0),) * len(step.path) + (Position((), proposals, 0.0),))


def test_ranks_count_where_the_targets_token_was_in_the_drafters_list() -> None:
    """Of six rounds one was accepted whole, four of the others had the token at rank 2, 2, 3 and 7, one not at all."""
    rejected, whole = make_step(3, 3, 1), make_step(3, 3, 3)
    token = rejected.token
    assert token is not None
    lists = ([9001, token], [9001, token], [9001, 9002, token], [*range(9001, 9007), token], [9001, 9002])
    steps = [listed(whole, token), *(listed(rejected, *names) for names in lists)]
    (bars,) = rank_bars([track(lane("spec", 3), steps)], Look(60, color=False))
    assert [(bar.name, bar.figure, bar.note) for bar in bars.bars] == [
        ("2", "2", "40%"), ("3", "1", "20%"), ("4", "0", "0%"), ("5", "0", "0%"), ("6 on", "1", "20%"),
        ("not named", "1", "20%"),
    ]  # fmt: skip
    assert bars.title.endswith("after 5 rejections")
    assert "right in 2 of 5" in bars.remarks[1]
    assert "0.33 a round" in bars.remarks[1]
    refused(rank_bars, [track(lane("spec", 3), [rejected])], Look(), match="on record")


def test_an_oracles_bars_have_the_theorys_figures_beside_them() -> None:
    bars = gamma_bars([answered(track(lane("oracle:.5:c=.2", 3), THREE))], Look(100)).bars
    assert bars[0].note == "theory 1.00x"
    # By hand: (1 - .5^4) / (.5 (3 * .2 + 1)) = 1.171875
    assert bars[3].note.startswith("theory 1.17x")


def test_what_cannot_be_plotted_is_said() -> None:
    refused(
        gamma_bars,
        [answered(track(lane("ar", None), PLAIN_ROUNDS))],
        LOOKS["60"],
        match="no lane of the last answer drafts by gamma",
    )
    refused(gamma_bars, [both(steps=THREE[:1])], LOOKS["60"], match="too few rounds")


BAR = st.builds(Bar, st.text("12", max_size=3), st.text("0.x", max_size=5), st.floats(0, 1), st.text("ab", max_size=9))


@given(st.lists(BAR, max_size=4), st.integers(60, 120), st.lists(st.text("ab ", max_size=200), max_size=2))
def test_no_row_is_wider_than_the_screen(bars: list[Bar], width: int, remarks: list[str]) -> None:
    for row in Bars("spec: expected speed-up by gamma", bars, Look(width), remarks).rows():
        assert sum(segment.cell_length for segment in row) <= width


def test_marked_bars_stand_out_in_colour_and_guessed_ones_are_faint() -> None:
    look = Look(60)
    marked, guessed = Bars("t", [Bar("1", "1", 1, "auto", marked=True), Bar("2", "1", 1, solid=False)], look).rows()[1:]
    assert [segment.style for segment in marked] == [look.style(role) for role in ("strong", "accent", "strong")]
    assert guessed[1].style == look.style("faint")


def test_the_command_in_a_console(catalogue: Path) -> None:
    lines = ("/plot gamma", "/plot", "one", "/plot gamma", "/plot nothing")
    ran = run_lines(catalogue, *lines, width=60, settings={"max_new_tokens": 40, "gamma": 4})
    assert ran.text.count("error: no answer yet") == 1
    assert "error: /plot must be gamma, ranks or time, got ''" in ran.after("/plot")
    assert " ".join(ran.after("/plot nothing").split()) == "error: /plot must be gamma, ranks or time, got 'nothing'"
    assert ran.after("/plot gamma").startswith("spec: expected speed-up by gamma\n   0  1.00x  ")
