"""An answer token by token: what is said of each, at four widths and 24 rows, and what the keys do."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from syrupy.assertion import SnapshotAssertion

from app.screen.inspection import Force, Inspection, SaidToken, TokenReader, decided, forced_in
from app.screen.palette import Look
from app.screen.rows import Row
from app.screen.terminal import drawn
from sampling.events import Call, Likely, Odds, Position, Proposal, Step, Trial

WORDS = {1: "A", 2: " river", 3: " lake", 4: " runs", 5: "\n", 6: " 川", 7: " stream"}
CALLS = (Call("target", 1, 0.01),)
OPENING = Step(
    0, 0, (), (), (), (), 1, (), (), 2.0, CALLS, 0.0, 0.01, 0.0,
    positions=(Position((Likely(1, 0.75, 0.875, 1, 0.5), Likely(6, 0.125, 0.125, 2, 1.0)), (), 1.25),),
)  # fmt: skip
ROUND = Step(  # river and its sibling lake, behind river runs: river is accepted, runs is not
    0, 3, (2, 3, 4), (-1, -1, 0), (0, 1, 1), (0,), 5, (0.5, 0.25), (0.75, 0.5), 1.0, CALLS, 0.0, 0.01, 0.0,
    positions=(
        Position((Likely(2, 0.5, 0.625, 1, 0.0), Likely(7, 0.25, 0.25, 2, 0.0)), (Proposal(2, 0.75, 1, 0),), 2.0),
        Position(
            (Likely(5, 0.5, 0.75, 1, 0.0), Likely(4, 0.25, 0.0, 2, 0.0)),
            (Proposal(4, 0.5, 1, 1), Proposal(3, 0.125, 2, 0)), 1.5,
        ),
    ),
    trials=(Trial(0, 0.75, 0.25), Trial(2, 0.125, 0.5)), odds=(Odds(0.5, 0.75), Odds(0.0, 0.5), Odds(0.25, 0.5)),
)  # fmt: skip


def tokens(rule: str = "ratio", *steps: Step) -> list[SaidToken]:
    reader = TokenReader(lambda ids: "".join(WORDS[one] for one in ids), ("feature", "tables"), rule)  # type: ignore[arg-type]
    return [token for step in steps or (OPENING, ROUND) for token in reader.read(step)]


def text(rows: list[Row]) -> list[str]:
    return ["".join(part.text for part in row).rstrip() for row in rows]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("color", [True, False])
def test_a_walk_by_width(width: int, color: bool, snapshot: SnapshotAssertion) -> None:
    look = Look(width, 23, color)
    content = Inspection(tokens(), forces=True)
    shown = []
    for _ in content.tokens:
        shown += [*text(drawn(content, look)), ""]
        content.keys["right"]()
    assert shown == snapshot


def test_every_token_knows_its_round_its_kind_and_who_proposed_it() -> None:
    assert [(one.shown, one.round, one.kind, one.by) for one in tokens()] == [
        ("A", 0, "own token", ""),
        (" river", 1, "accepted", "feature"),
        ("\n", 1, "correction", ""),
    ]


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        (
            "ratio",
            [
                '" runs": coin .50 >= chance .12 (q after the settings was not kept): rejected',
                "the token was then drawn from what p has more than q",
            ],
        ),
        ("match", ['" runs" was drafted, the target chose "↵": rejected', "drawn by the target"]),
        ("argmax", ['" runs" was drafted, the target chose "↵": rejected', "greedy: the target's likeliest token"]),
    ],
)
def test_what_decided_is_said_in_words(rule: str, lines: list[str]) -> None:
    trials = ROUND.trials if rule == "ratio" else tuple(trial._replace(number=None) for trial in ROUND.trials)
    *_, last = tokens(rule, OPENING, replace(ROUND, trials=trials))
    assert decided(last, Look(80)) == [*lines, "1 further draft discarded, not examined"]


def test_penalties_that_moved_the_likeliest_token_are_named_and_a_long_rank_keeps_its_column() -> None:
    position = Position((Likely(7, 0.75, 0.0, 1, 0.0), Likely(1, 0.125, 1.0, 22_180, 0.0)), (), 1.25)
    (token,) = tokens("argmax", replace(OPENING, positions=(position,)))
    assert decided(token, Look(80)) == ["greedy: the likeliest token after the settings"]
    titles, *rows = text(Inspection([token]).panel(Look(80, None, False)))[-3:]
    ends = {row.index(rank) + len(rank) for row, rank in zip(rows, ("   1 ", " 22k "), strict=True)}
    assert ends == {titles.index("rank") + len("rank ")}


def test_a_draw_is_told_as_the_race_that_it_was() -> None:
    first, *_ = tokens("match")
    assert decided(first, Look(80)) == ['drawn: largest log p + random noise: "A" 0.37, next " 川" -1.08']


def test_a_coin_that_accepted_is_told() -> None:
    assert decided(tokens()[1], Look(80)) == ["coin .25 < chance .75 (q after the settings was not kept): accepted"]
    assert decided(tokens("ratio", OPENING, replace(ROUND, positions=()))[1], Look(80)) == [
        "coin .25 < chance .75 (p and q after the settings were not kept): accepted"
    ]


@pytest.mark.parametrize(
    ("chance", "coin", "p", "q", "line"),
    [
        (0.08 / 0.69, 0.03, 0.08, 0.69, "coin .030 < chance .12 = p .080 / q .69, both after the settings: accepted"),
        (1.0, 0.5, 0.8, 0.7, "coin .50 < chance 1.00 = min(1, p .80 / q .70), both after the settings: accepted"),
        (
            0.0006,
            0.00012,
            0.0003,
            0.5,
            "coin .0001 < chance .0006 = p .0003 / q .50, both after the settings: accepted",
        ),
        (4e-6, 1e-6, 2e-6, 0.5, "coin 1e-6 < chance 4e-6 = p 2e-6 / q .50, both after the settings: accepted"),
        (1.0, 0.9999, 0.5, 0.5, "coin .9999 < chance 1.0000 = p .50 / q .50, both after the settings: accepted"),
        (0.3, 0.2, 0.1, 0.7, "coin .20 < chance .30 (of a block; p .10, q .70, both after the settings): accepted"),
    ],
)
def test_a_coins_chance_is_the_quotient_that_is_shown(
    chance: float, coin: float, p: float, q: float, line: str
) -> None:
    drafted = replace(ROUND, trials=(Trial(0, chance, coin, p, q), ROUND.trials[1]), positions=())
    assert decided(tokens("ratio", OPENING, drafted)[1], Look(80)) == [line]


def test_the_drafters_probability_after_the_settings_has_its_column() -> None:
    trials = (Trial(0, 0.75, 0.25, 0.525, 0.7), ROUND.trials[1])
    content = Inspection(tokens("ratio", OPENING, replace(ROUND, trials=trials)), 1)
    titles, river, _ = text(content.panel(Look(80, None, False)))[-3:]
    assert titles.split() == ["p", "set", "rank", "q", "set", "rank", "by"]
    assert river.split()[3:9] == [".50", ".62", "1", ".75", ".70", "1"]


def test_drafts_beside_an_accepted_path_are_told_as_that() -> None:
    *_, last = tokens("argmax", OPENING, replace(ROUND, path=(0, 2)))
    assert last.kind == "bonus"
    assert decided(last, Look(80))[-1] == "1 draft on other branches left aside"


def test_enter_forces_the_alternative_that_up_and_down_chose() -> None:
    content = Inspection(tokens(), forces=True)
    content.keys["right"]()
    assert content.keys["enter"]() is None  # the token that was said
    content.keys["down"]()
    assert content.keys["enter"]() == Force(1, 7)
    assert Inspection(tokens()).keys["enter"]() is None
    fixed = Inspection(tokens(), 1)
    fixed.keys["down"]()
    assert fixed.keys["enter"]() is None  # a log has no model to go on with


def test_a_forced_token_says_so_and_what_it_replaced() -> None:
    forced = forced_in(tokens()[1], 7)
    assert (forced.kind, forced.text) == ("forced", " stream")
    assert {choice.text: choice.fate for choice in forced.choices} == {" river": "replaced", " stream": "said"}
    assert decided(forced, Look(80)) == ["forced: neither target nor drafter was asked"]


def test_what_was_not_recorded_is_missing_and_never_guessed() -> None:
    content = Inspection(
        tokens("ratio", *[replace(step, positions=(), trials=(), odds=()) for step in (OPENING, ROUND)]), 1
    )
    panel = text(content.panel(Look(80, None, False)))
    assert panel[-1] == "alternatives were not kept (files keep them with --log-top 5)"
    assert not any("entropy" in line or "coin" in line for line in panel)
    assert content.token.choices[0][1:4] == (" river", 0.5, None)


@given(st.integers(2, 160), st.integers(1, 40), st.integers(0, 2), st.booleans(), st.booleans())
def test_no_row_is_wider_and_no_picture_higher_than_the_screen(
    width: int, height: int, index: int, color: bool, ascii_only: bool
) -> None:
    rows = Inspection(tokens(), index, forces=True).rows(Look(width, height, color, ascii_only))
    assert len(rows) <= height
    assert all(sum(part.cell_length for part in row) <= width for row in rows)


def test_a_lossy_rule_says_what_it_asked_of_each_draft() -> None:
    lossy = [replace(step, trials=()) for step in (OPENING, ROUND)]
    opening, accepted, own = tokens("typical", *lossy)
    assert decided(accepted, Look(80)) == ['lossy: " river" p .50 > min(.09, .30 exp(-H)) = .075: accepted']
    assert decided(own, Look(80)) == [
        'lossy: " runs" p .25 <= min(.09, .30 exp(-H)) = .090: rejected',
        "the target's own",
        "1 further draft discarded, not examined",
    ]
    assert decided(opening, Look(80))[0].startswith("drawn: largest log p + random noise: ")
    bare = tokens("typical", *[replace(step, positions=()) for step in lossy])[1]
    assert decided(bare, Look(80)) == ['lossy: " river" p .50 > min(.09, .30 exp(-H)): accepted']
    content = Inspection([replace(accepted, rest=(0.0,) * 7)])
    content.keys["t"]()
    panel = " ".join(text(content.panel(Look(80))))
    assert "what if: a lossy rule asks p at temperature 1, whatever the settings" in panel
