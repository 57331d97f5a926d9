"""The teaching view: what was drafted, how probable it was, why it was accepted or not."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from app.palette import Look
from app.trace import RULES, Rule, Trace, rule_of
from sampling.events import Step

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
    file = StringIO()
    Console(width=width, file=file, color_system="truecolor" if color else None, force_terminal=color).print(
        Trace(steps, decode, look, **more)  # type: ignore[arg-type]
    )
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 100])
def test_a_trace_by_width(width: int, snapshot: SnapshotAssertion) -> None:
    assert shown(width, rule="ratio") == snapshot


def test_a_draft_shows_both_probabilities_its_chance_and_its_fate() -> None:
    lines = shown(rule="ratio").split("\n")
    assert ' 1  " river"            q  .95  p  .90  chance  .95  accepted' in lines
    assert ' 2  " is"               q  .70  p  .80  chance 1.00  accepted' in lines
    assert ' 3  " down"             q  .40  p  .10  chance  .25  rejected' in lines
    assert ' 4  " sea"              not examined                 discarded' in lines
    assert '    " toward"  from the target (correction), top-2 gap 0.500' in lines
    assert "round 1  gamma 4  accepted 2/4  22.0 ms" in lines


def test_the_opening_round_is_the_prefill_and_endings_are_told() -> None:
    lines = shown().split("\n")
    assert "prefill  22.0 ms" in lines
    assert '    "A"  from the target (own token), top-2 gap 4.250' in lines
    assert '    "↵"  from the target (bonus), top-2 gap 0.062' in lines
    assert "round 3  gamma 0  nothing drafted  22.0 ms" in lines
    assert "    ended by an accepted stop token" in lines


@pytest.mark.parametrize(
    ("rule", "chance"), [("match", "chance  .25"), ("ratio", "chance  .25"), ("argmax", None), ("coupled", None)]
)
def test_the_rule_is_told_and_decides_about_chances(rule: Rule, chance: str | None) -> None:
    text = shown(rule=rule, width=100)
    assert RULES[rule] in text
    assert ("chance  " in text) == (chance is not None)
    if chance:
        assert chance in text


def test_a_point_mass_of_a_sure_drafter_is_accepted_with_p() -> None:
    steps = [STEPS[0], step([2, 4], 1, 5, q=(0.5, 0.5), p=(0.75, 0.25))]
    assert "chance  .75" in shown(steps=steps, rule="match")
    assert "chance 1.00" in shown(steps=steps, rule="ratio")


def test_figures_are_labelled_as_temperature_1() -> None:
    assert "q(x), p(x) at temperature 1; the run's own law may differ, chances are near\n" in shown(rule="ratio")
    assert "q(x), p(x) at temperature 1\n" in shown(rule="ratio", exact=True)
    assert "q(x), p(x) at temperature 1\n" in shown(rule="argmax")


def test_only_the_last_rounds_on_request_read_in_their_context() -> None:
    text = shown(last=2)
    assert "prefill" not in text
    assert "round 3" in text
    assert "round 2" not in text
    assert "round 1" in shown(last=99)
    assert "round" not in shown(last=0)


def test_a_trace_can_be_drawn_twice() -> None:
    trace = Trace(STEPS, lambda ids: decode(ids).removeprefix("A"), Look(80))
    assert trace.rows() == trace.rows()


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
    text = shown(ascii_only=True, width=30, color=False)
    assert text.isascii()
    assert "<end>" in text


@pytest.mark.parametrize(
    ("temperature", "more", "rule"),
    [
        (0.0, {"sampled": True}, "argmax"),
        (0.8, {"sampled": False}, "match"),
        (0.8, {"sampled": True}, "ratio"),
        (0.8, {"sampled": True, "draft_sampling": "greedy"}, "match"),
        (0.8, {"sampled": True, "coupling": "gumbel"}, "coupled"),
    ],
)
def test_the_rule_of_a_lane(temperature: float, more: dict[str, object], rule: Rule) -> None:
    assert rule_of(temperature, **more) == rule  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(8, 120), st.booleans(), st.sampled_from(list(RULES)))
def test_no_row_is_wider_than_the_screen(data: st.DataObject, width: int, ascii_only: bool, rule: Rule) -> None:
    steps = []
    for _ in range(data.draw(st.integers(0, 4))):
        drafted = data.draw(st.lists(st.integers(0, 8), max_size=4))
        accepted = data.draw(st.integers(0, len(drafted)))
        token = None if drafted and accepted == len(drafted) else data.draw(st.integers(0, 8))
        chances = tuple(data.draw(st.floats(0, 1)) for _ in range(min(len(drafted), accepted + (token is not None))))
        steps.append(step(drafted, accepted, token, chances, chances))
    rows = Trace(steps, decode, Look(width, None, True, ascii_only), ("a", "b"), rule=rule).rows()
    assert all(sum(segment.cell_length for segment in row) <= width for row in rows)
