"""The teaching view: what was drafted, how probable it was, why it was accepted or not; and the reviews inside a round
of a cascade, in their order.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from syrupy.assertion import SnapshotAssertion

from app.lanes.answers import RULES, LaneRule, rule_of
from app.screen.palette import Look
from app.screen.trace import Trace
from app.settings.table import Settings
from sampling.events import Call, Odds, Step, Trial
from tests.support.panes import printed

WORDS = {
    0: "",
    1: "A",
    2: " river",
    3: " is",
    4: " down",
    5: " toward",
    6: " sea",
    7: "\n",
    8: " \x1b[31mextraordinarily",
}

NAMES = ("base", "small", "maxgram")
SENTENCE = ["A", "river", "is", "a", "natural", "stream", "of", "water", "that", "flows", "down", "to", "the", "sea"]


def decode(ids: list[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def step(
    drafted: list[int],
    accepted: int,
    token: int | None,
    q: tuple[float, ...] = (),
    p: tuple[float, ...] = (),
    gap: float = 0.5,
    source: tuple[int, ...] | None = None,
) -> Step:
    n = len(drafted)
    parents, sources = tuple(range(-1, n - 1)), (0,) * n if source is None else source
    return Step(
        0,
        4 * bool(n),
        tuple(drafted),
        parents,
        sources,
        tuple(range(accepted)),
        token,
        p,
        q,
        gap,
        (),
        0.001,
        0.02,
        0.001,
    )


STEPS = [
    step([], 0, 1, gap=4.25),
    step([2, 3, 4, 6], 2, 5, q=(0.95, 0.70, 0.40), p=(0.90, 0.80, 0.10)),
    step([6, 7], 2, 7, q=(0.95, 0.70), p=(0.90, 0.80), gap=0.0625),
    step([], 0, 3),
    step([8, 0], 2, None, q=(1.0, 1.0), p=(0.25, 0.5)),
]


def shown(
    width: int = 80, color: bool = False, steps: list[Step] = STEPS, ascii_only: bool = False, **more: object
) -> str:
    look = Look(width, None, color, ascii_only)
    return printed(Trace(steps, decode, look, **more), width, "truecolor" if color else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 100])
def test_a_trace_by_width(width: int, snapshot: SnapshotAssertion) -> None:
    assert shown(width, rule="ratio") == snapshot


def test_a_round_shows_how_confident_its_drafter_was() -> None:
    round_ = replace(STEPS[1], calls=(Call("dspark", 1, 0.001, (0.83, 0.125)),))
    assert "round 1  gamma 4  accepted 2/4  confidence 0.83 0.12  22.0 ms" in shown(steps=[STEPS[0], round_]).split(
        "\n"
    )


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (  # both probabilities of a draft, its chance and its fate
            {"rule": "ratio"},
            [
                ' 1  " river"            q  .95  p  .90  chance  .95  accepted',
                ' 2  " is"               q  .70  p  .80  chance 1.00  accepted',
                ' 3  " down"             q  .40  p  .10  chance  .25  rejected',
                ' 4  " sea"              not examined                 discarded',
                '    " toward"  from the target (correction), top-2 gap 0.500',
                "round 1  gamma 4  accepted 2/4  22.0 ms",
            ],
        ),
        (  # the opening round, which is the prefill, and endings
            {},
            [
                "prefill  22.0 ms",
                '    "A"  from the target (own token), top-2 gap 4.250',
                '    "↵"  from the target (bonus), top-2 gap 0.062',
                "round 3  gamma 0  nothing drafted  22.0 ms",
                "    ended by an accepted stop token",
            ],
        ),
    ],
)
def test_drafts_show_their_fate_and_rounds_how_they_began_and_ended(options: dict[str, Any], lines: list[str]) -> None:
    assert {*shown(**options).split("\n")} >= {*lines}


@pytest.mark.parametrize(
    ("rule", "chance"), [("match", "chance  .25"), ("ratio", "chance  .25"), ("argmax", None), ("coupled", None)]
)
def test_the_rule_is_told_and_decides_about_chances(rule: LaneRule, chance: str | None) -> None:
    text = shown(rule=rule, width=100)
    assert RULES[rule] in text
    assert ("chance  " in text) == (chance is not None)
    if chance:
        assert chance in text


def test_a_point_mass_of_a_sure_drafter_is_accepted_with_p() -> None:
    steps = [STEPS[0], step([2, 4], 1, 5, q=(0.5, 0.5), p=(0.75, 0.25))]
    assert "chance  .75" in shown(steps=steps, rule="match")
    assert "chance 1.00" in shown(steps=steps, rule="ratio")


def test_sources_are_named_where_there_are_several() -> None:
    steps = [STEPS[0], step([2, 3], 2, 5, q=(0.5, 0.5), p=(0.5, 0.5), source=(0, 1))]
    text = shown(steps=steps, names=("tables", "model"))
    assert "accepted   tables\n" in text
    assert "accepted   model\n" in text
    assert shown(steps=steps, names=("tables",)).count("tables") == 1


def test_no_rounds_yet() -> None:
    assert shown(steps=[]) == "no rounds yet\n"


def test_escape_sequences_are_inert_and_ascii_is_ascii() -> None:
    assert "\x1b" not in shown()
    text = shown(ascii_only=True, width=60, color=False)
    assert text.isascii()
    assert "<end>" in text


@pytest.mark.parametrize(
    ("drawn_drafts", "changes", "rule"),
    [
        (True, {}, "argmax"),
        (False, {"temperature": 0.8}, "match"),
        (True, {"temperature": 0.8}, "ratio"),
        (True, {"temperature": 0.8, "draft_sampling": "greedy"}, "match"),
        (True, {"temperature": 0.8, "coupling": "gumbel"}, "coupled"),
    ],
)
def test_the_rule_of_a_lane(drawn_drafts: bool, changes: dict[str, object], rule: LaneRule) -> None:
    assert rule_of(SimpleNamespace(name="spec", drawn_drafts=drawn_drafts, settings=Settings(**changes))) == rule


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(20, 120), st.booleans(), st.sampled_from(list(RULES)))
def test_no_row_is_wider_than_the_screen(data: st.DataObject, width: int, ascii_only: bool, rule: LaneRule) -> None:
    steps = []
    for _ in range(data.draw(st.integers(0, 4))):
        drafted = data.draw(st.lists(st.integers(0, 8), max_size=4))
        accepted = data.draw(st.integers(0, len(drafted)))
        token = None if drafted and accepted == len(drafted) else data.draw(st.integers(0, 8))
        chances = tuple(data.draw(st.floats(0, 1)) for _ in range(min(len(drafted), accepted + (token is not None))))
        steps.append(step(drafted, accepted, token, chances, chances))
    rows = Trace(steps, decode, Look(width, None, True, ascii_only), ("a", "b"), rule=rule).rows()
    assert all(sum(segment.cell_length for segment in row) <= width for row in rows)


# -- reviews inside a round ------------------------------------------------------------------------


def joined(ids: Sequence[int]) -> str:
    return " ".join(SENTENCE[token] for token in ids)


def reviewed(
    drafted: Sequence[int],
    accepted: int,
    token: int | None,
    source: Sequence[int] = (),
    by: str = "target",
    inner: Sequence[Step] = (),
    chances: Sequence[float] = (0.9, 0.8, 0.7),
) -> Step:
    """A round: q is 1, p goes down, and `by` judged."""
    n = len(drafted)
    examined = min(n, accepted + (token is not None))
    return Step(
        0,
        n,
        tuple(drafted),
        tuple(range(-1, n - 1)),
        tuple(source) if source else (2,) * n,
        tuple(range(accepted)),
        token,
        tuple(chances[:examined]),
        (1.0,) * examined,
        0.5,
        (Call("below", 1, 0.001), Call(by, 1, 0.002)),
        0.001,
        0.001,
        0.0001,
        tuple(inner),
    )


# base reviews small's " is", which small made of max-gram's; small adds to it; max-gram's last two nobody reviewed.
SMALLS = reviewed([2, 9], 1, 3, by="small")
BASES = reviewed([2, 3], 1, 4, source=(2, 1), by="base", inner=[SMALLS])
ROUND = reviewed(
    [2, 4, 5, 6, 7], 4, 8, source=(2, 0, 1, 2, 2), inner=[BASES, reviewed([], 0, 5, by="small")], chances=(0.9,) * 5
)
ROUNDS = [reviewed([], 0, 1), ROUND]


def shown_nested(
    width: int = 100, steps: Sequence[Step] = ROUNDS, names: Sequence[str] = NAMES, color: bool = False, **more: Any
) -> str:
    return printed(Trace(steps, joined, Look(width, None, color), names, **more), width, "256" if color else None)


# ---------------------------------------------------------------- what it looks like


@pytest.mark.parametrize("width", [60, 100])
def test_a_cascade_by_width(width: int, snapshot: SnapshotAssertion) -> None:
    assert shown_nested(width, rule="ratio") == snapshot


def test_reviews_come_before_the_drafts_and_deeper_ones_further_in() -> None:
    assert shown_nested().split("\n")[1:2] == ["reviews inside may be lenient: only the target's decides the text"]
    assert shown_nested().split("\n")[5:11] == [
        "round 1  gamma 5  accepted 4/5  2.1 ms",
        "  base reviewed maxgram's and small's 2: accepted 1, 2.1 ms",
        "    small reviewed maxgram's 2: accepted 1, 2.1 ms",
        "  small had nothing to review, 2.1 ms",
        ' 1  " is"               q 1.00  p  .90  accepted   maxgram',
        ' 2  " natural"          q 1.00  p  .90  accepted   base',
    ]


def test_without_reviews_there_is_no_word_about_them() -> None:
    assert "reviews inside" not in shown_nested(steps=[ROUNDS[0], reviewed([2, 3], 1, 4)])


def test_with_reviews_a_chance_is_only_near() -> None:
    assert "chances are near" in shown_nested(rule="ratio", exact=True)


# ---------------------------------------------------------------- real ones


def test_where_the_compared_figures_were_not_kept_the_head_says_so() -> None:
    drafted = replace(
        step([2, 3], 1, 5, q=(0.6, 0.39), p=(0.5, 0.12)), trials=(Trial(0, 0.75, 0.25), Trial(1, 0.12, 0.5))
    )
    note = "q(x), p(x) at temperature 1; those after the settings, which were compared, were not kept"
    assert note in shown(width=120, steps=[STEPS[0], drafted], rule="ratio").split("\n")
    assert "not kept" not in shown(width=120, steps=[STEPS[0], drafted], rule="ratio", exact=True)
    assert "not kept" not in shown(width=120, steps=[STEPS[0], drafted])


def test_a_draft_has_the_probabilities_that_were_compared_and_its_coin() -> None:
    """At temperature 1 q .06 and p .02 would not give a chance of .17."""
    odds = (Odds(0.5, 0.6), Odds(0.02, 0.06), Odds(0.3, 0.4))
    trials = (Trial(0, 0.75, 0.25, 0.6, 0.8), Trial(1, 0.17, 0.5, 0.017, 0.1))
    drafted = replace(step([2, 3, 4], 1, 5, q=(0.6, 0.06), p=(0.5, 0.02)), odds=odds, trials=trials)
    assert {*shown(steps=[STEPS[0], drafted], rule="ratio").split("\n")} >= {
        "q(x), p(x) after the settings; (not examined: at temperature 1)",
        ' 1  " river"            q  .80  p  .60  chance  .75  coin  .25  accepted',
        ' 2  " is"               q  .10  p  .02  chance  .17  coin  .50  rejected',
        ' 3  " down"             (q  .40  p  .30)                        discarded',
    }
    narrow = shown(60, steps=[STEPS[0], drafted], rule="ratio").split("\n")
    assert any('" is"' in line and "q.10 p.02 ch.17 u.50" in line and line.endswith("rejected") for line in narrow)
    assert "not examined" not in shown(steps=[STEPS[0], replace(drafted, parents=(-1, 0, 0))], rule="ratio")


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_where_the_target_draws_a_draft_says_whether_it_was_drawn(rule: LaneRule) -> None:
    trials = (Trial(0, 0.6, None, 0.6), Trial(1, 0.01, None, 0.01))
    drafted = replace(step([2, 3], 1, 5, q=(0.6, 0.06), p=(0.5, 0.02)), trials=trials)
    lines = shown(steps=[STEPS[0], drafted], rule=rule, width=100).split("\n")
    assert "p(x) after the settings, q(x) the drafter's own" in lines
    words = {"accepted": "drawn", "rejected": "not drawn"}
    for line in lines:
        if '"A"' in line or "from the target" in line or '"' not in line:
            continue
        fate = line.split()[-1]
        assert f"  {words[fate]} " in line
        assert ("p  .60" in line) == (fate == "accepted")
