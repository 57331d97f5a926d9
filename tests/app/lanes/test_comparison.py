"""The verdict says what is true: faster or slower, the same or not, and where."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from app.lanes.answers import (
    ROUNDING,
    Answer,
    Comparison,
    agrees,
    compared,
    comparisons_of,
    difference,
    parting,
    promise,
)
from app.lanes.costs import Terms
from sampling.stats.summary import Stats

IDS = list(range(100, 160))


def stats(rate: float | None = 20.0, n: int = 60, reason: str = "eos", gaps: dict[int, float] | None = None) -> Stats:
    """Figures of n tokens at a rate in tokens a second."""
    known = tuple((gaps or {}).get(i) for i in range(n))
    ms = 1000 * (n - 1) / rate if rate else 0.0
    return Stats(stop_reason=reason, predicted_n=n, predicted_ms=ms, openings=1, top2_gaps=known)  # type: ignore[arg-type]


def verdict(
    plain: Stats | None,
    last: Stats | None,
    one: list[int],
    two: list[int],
    *,
    may_differ: bool,
    label: str = "",
    precision: str = "float32",
    invariant: bool = False,
) -> Comparison | None:
    """The comparison of `ar` with the last lane, of three where that has a label."""
    lanes = (("ar", plain, one), ("ngram" if label else "", None, []), (label or "spec", last, two))
    answers = [
        Answer(name, tuple(ids), "", stats or Stats(), may_differ, Terms(precision=precision, invariant=invariant))
        for name, stats, ids in lanes
        if name
    ]
    return next(reversed(comparisons_of(answers)), None)


def judge(
    plain: Stats, last: Stats, one: list[int] = IDS, two: list[int] = IDS, may_differ: bool = False
) -> Comparison:
    result = verdict(plain, last, one, two, may_differ=may_differ)
    assert result is not None
    return result


def changed(position: int) -> list[int]:
    return [*IDS[:position], 7, *IDS[position + 1 :]]


@pytest.mark.parametrize(
    ("rate", "text", "style"),
    [
        (42.2, "2.11x faster, same output", "good"),
        (20.5, "1.02x faster, same output", "good"),
        (20.39, "as fast, same output", "plain"),
        (19.61, "as fast, same output", "plain"),
        (17.86, "1.12x slower, same output", "bad"),
        (None, "same output", "plain"),
    ],
)
def test_speed_in_words(rate: float | None, text: str, style: str) -> None:
    assert judge(stats(20.0), stats(rate)) == Comparison(text, style)  # type: ignore[arg-type]


def test_a_difference_that_must_not_be_is_an_alarm_with_position_and_gap() -> None:
    assert judge(stats(gaps={56: 0.004}), stats(40.0), two=changed(56)) == Comparison(
        "differs at token 57, top-2 gap 0.004; 2.00x faster", "alarm"
    )


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.0009, "top-2 gap 9.0e-04 (near tie)"),
        (0.001, "top-2 gap 0.001"),
        (0.0, "top-2 gap 0 (tie)"),
        (2.5, "top-2 gap 2.500"),
    ],
)
def test_a_near_tie_is_named(gap: float, words: str) -> None:
    assert words + ";" in judge(stats(gaps={3: gap}), stats(40.0), two=changed(3)).text
    assert ("tie" in words) == (gap < 1e-3)


def test_the_gap_comes_from_the_other_lane_where_plain_decoding_has_none() -> None:
    assert "gap 0.250" in judge(stats(), stats(40.0, gaps={3: 0.25}), two=changed(3)).text
    assert judge(stats(), stats(40.0), two=changed(3)).text == "differs at token 4; 2.00x faster"


def test_sampled_drafts_may_draw_another_text() -> None:
    assert judge(stats(), stats(40.0), two=changed(3), may_differ=True) == Comparison(
        "2.00x faster, same distribution, different draw", "good"
    )
    assert judge(stats(), stats(40.0), may_differ=True).text == "2.00x faster, same output"
    assert judge(stats(), stats(10.0), two=IDS[:-1], may_differ=True).text.startswith("2.00x slower")


@pytest.mark.parametrize(
    ("precision", "gap", "text", "style"),
    [
        ("float32", 0.0009, "differs at token 4, top-2 gap 9.0e-04 (near tie); 2.00x faster", "alarm"),
        ("float32", 0.25, "differs at token 4, top-2 gap 0.250; 2.00x faster", "alarm"),
        ("bfloat16", 0.25, "differs at token 4, top-2 gap 0.250 (within bfloat16 rounding); 2.00x faster", "plain"),
        ("bfloat16", 2.5, "differs at token 4, top-2 gap 2.500 (beyond bfloat16 rounding); 2.00x faster", "alarm"),
        ("bfloat16", None, "differs at token 4 (bfloat16); 2.00x faster", "alarm"),
        ("float16", 0.05, "differs at token 4, top-2 gap 0.050 (within float16 rounding); 2.00x faster", "plain"),
        ("float16", 0.25, "differs at token 4, top-2 gap 0.250 (beyond float16 rounding); 2.00x faster", "alarm"),
        ("nf4", 0.25, "differs at token 4, top-2 gap 0.250 (nf4 rounding is not measured); 2.00x faster", "alarm"),
    ],
)
def test_a_difference_is_told_by_the_rounding_of_its_number_format(
    precision: str, gap: float | None, text: str, style: str
) -> None:
    plain = stats() if gap is None else stats(gaps={3: gap})
    found = verdict(plain, stats(40.0), IDS, changed(3), may_differ=False, precision=precision)
    assert found == Comparison(text, style)  # type: ignore[arg-type]
    assert verdict(plain, stats(40.0), IDS, IDS, may_differ=False, precision=precision) == Comparison(
        "2.00x faster, same output", "good"
    )


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("float32", "same distribution"),
        ("bfloat16", "same distribution up to bfloat16 rounding"),
        ("int8", "same distribution up to int8 rounding"),
    ],
)
def test_another_draw_is_of_the_same_distribution_up_to_rounding(precision: str, words: str) -> None:
    assert verdict(stats(), stats(40.0), IDS, changed(3), may_differ=True, precision=precision) == Comparison(
        f"2.00x faster, {words}, different draw", "good"
    )


@pytest.mark.parametrize(
    ("two", "may_differ", "reason", "told"),
    [
        (IDS, False, "eos", "2.00x faster, identical by construction"),
        (IDS[:30], False, "interrupted", "2.00x faster, identical by construction, stopped"),
        (
            changed(3),
            False,
            "eos",
            "differs at token 4, top-2 gap 0.0009 (impossible in the compiled pass); 2.00x faster",
        ),
        (IDS, True, "eos", "2.00x faster, same output"),
        (changed(3), True, "eos", "2.00x faster, same distribution, different draw"),
    ],
)
def test_the_compiled_pass_leaves_no_room_for_another_text(
    two: list[int], may_differ: bool, reason: str, told: str
) -> None:
    """Where no draft can change a token that is said, and any difference is an alarm, at a near tie as well."""
    plain, last = stats(gaps={3: 0.0009}), stats(40.0, reason=reason)
    assert verdict(plain, last, IDS, two, may_differ=may_differ, precision="Q4_1", invariant=True) == Comparison(
        told, "alarm" if told.startswith("differs") else "good"
    )


README = Path(__file__).parents[3] / "README.md"


def test_the_readme_promises_what_the_program_does() -> None:
    """The sentences of /info stand there word by word, one for each number format; no page says more."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert all(promise(precision) in text for precision in (*ROUNDING, "int8"))
    assert promise("Q4_1", invariant=True) in text
    assert "provably" not in text


def test_ending_early_is_a_difference() -> None:
    assert judge(stats(), stats(40.0, n=59), two=IDS[:-1]).text.startswith("differs at token 60")
    assert judge(stats(n=59), stats(40.0), one=IDS[:-1]).style == "alarm"


def test_a_stopped_lane_is_compared_as_far_as_it_came() -> None:
    last = stats(40.0, n=10, reason="interrupted")
    assert judge(stats(), last, two=IDS[:10]).text == "2.00x faster, same output so far, stopped"
    assert judge(stats(), last, two=changed(4)[:10]).text == "differs at token 5, stopped; 2.00x faster"
    assert judge(last, stats(40.0), one=IDS[:10]).text == "as fast, same output so far, stopped"


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_first_difference_is_where_the_common_part_ends(one: list[int], two: list[int]) -> None:
    position = difference(one, two)
    if position is None:
        assert one == two
    else:
        assert one[:position] == two[:position]
        assert one[position : position + 1] != two[position : position + 1]
    assert (difference(one, two, prefix=True) is None) == (one[: len(two)] == two[: len(one)])


@given(st.floats(1, 1000), st.floats(1, 1000))
def test_slower_never_reads_as_faster(plain: float, last: float) -> None:
    text = judge(stats(plain), stats(last)).text
    ratio = stats(last).predicted_per_second / stats(plain).predicted_per_second  # type: ignore[operator]
    words = ["slower", "as fast", "faster"]
    bounds = [0.0, 0.98, 1.02, float("inf")]
    expected = next(word for word, (low, high) in zip(words, pairwise(bounds), strict=True) if low <= ratio <= high)
    assert expected in text or abs(abs(ratio - 1) - 0.02) < 1e-9


@pytest.mark.parametrize(
    ("one", "reason", "text"),
    [
        (changed(30), "eos", "2.00x faster, lossy: differs from token 31"),
        (IDS[:-1], "eos", "2.00x faster, lossy: differs from token 60"),
        (IDS, "eos", "2.00x faster, lossy: same output this time"),
        (IDS[:40], "interrupted", "2.00x faster, lossy: same output so far, stopped"),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "Q4_1"])
@pytest.mark.parametrize("invariant", [True, False])
def test_a_lossy_lane_says_lossy_and_promises_nothing(
    one: list[int], reason: str, text: str, precision: str, invariant: bool
) -> None:
    how: Any = {"may_differ": True, "label": "lossy", "precision": precision, "invariant": invariant}
    assert verdict(stats(), stats(40.0, reason=reason), IDS, one, **how) == Comparison(f"lossy: {text}", "good")


@pytest.mark.parametrize(("text", "same"), [("the text", True), ("another", False)])
def test_an_answer_is_compared_with_a_servers_by_its_text(text: str, same: bool) -> None:
    plain = Answer("server", (7, 8), "the text", replace(stats(n=2), pieces=2), may_differ=True)
    answers = [plain, Answer("spec", tuple(IDS), text, stats())]
    assert compared(answers)["same_output"] is same
    assert ("same output" in comparisons_of(answers)[0].text) == same


def test_the_drafter_alone_is_another_model() -> None:
    found = verdict(stats(), stats(40.0), IDS, changed(3), may_differ=True, label="draft")
    assert found == Comparison("draft: 2.00x faster, another text, of another model", "good")


def test_a_lossy_lane_is_another_text_and_never_counts_as_equal() -> None:
    plain, lossy = Answer("ar", tuple(IDS), "", stats()), Answer("lossy", tuple(changed(3)), "", stats(), True)
    parted = parting(plain, lossy)
    assert parted is not None
    assert (parted.kind, parted.position) == ("other text", 3)
    assert (agrees(plain, lossy), compared([plain, lossy])["same_output"]) == (None, None)
