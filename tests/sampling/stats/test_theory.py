"""The expected factors of cascades: hand-worked vectors, limits, a simulation of what they model, and the same figure
from the events of a run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from sampling.events import Call, Event, Step
from sampling.stats.ratios import cascaded, expected, modelled, speedup
from sampling.stats.summary import Stats
from sampling.stats.theory import expected_speedup, horizontal_factor, vertical_factor
from tests.sampling.stats.test_metrics import opening, step
from tests.support.runs import measure

# (α, α′, n, k, c₁, c₂) and the factor, by hand:
# φ(.8) = 1 − .2 · (1 − .4²) / .6 = .72, (1 − .8 · .72²) / .2 = 2.9264, over 1 + 2 · .1
# φ(.5) = 1 − .5 · (1 − .25³) / .75 = .34375, (1 − .5 · .34375) / .5 = 1.65625, over 1 + .2 + 2 · .05
# φ(.9) = 1 − .1 · (1 + .9 + .81 + .729) = .6561 = .9⁴ with α′ = 1; (1 − .9 · .9⁴) / .1 = 4.0951, over 1
VECTORS = [
    ((0.8, 0.5, 2, 1, 0.1, 0.0), 2.9264 / 1.2),
    ((0.5, 0.5, 1, 2, 0.2, 0.05), 1.65625 / 1.3),
    ((0.9, 1.0, 1, 3, 0.0, 0.0), 4.0951),
]


@pytest.mark.parametrize(("given", "factor"), VECTORS)
def test_the_vertical_factor_of_known_cases(given: tuple[float, ...], factor: float) -> None:
    assert vertical_factor(*given) == pytest.approx(factor, rel=1e-12)


def printed(alpha: float, inner: float, n: float, k: float, c1: float, c2: float) -> float:
    """The formula as it is printed, where nothing in it is divided by zero."""
    phi = 1 + (alpha - 1) * (1 - (inner * alpha) ** (k + 1)) / (1 - inner * alpha)
    return (1 - alpha * phi**n) / ((1 - alpha) * (1 + n * c1 + n * k * c2))


def test_the_vertical_factor_is_the_printed_formula() -> None:
    chance = random.Random(1)
    for _ in range(200):
        given = (
            chance.uniform(0.01, 0.99),
            chance.uniform(0, 1),
            chance.uniform(0, 9),
            chance.uniform(0, 12),
            0.1,
            0.01,
        )
        assert vertical_factor(*given) == pytest.approx(printed(*given), rel=1e-9)


def test_the_limits_of_the_vertical_factor() -> None:
    assert vertical_factor(0.8, 0.5, 0, 7, 0.1) == 1.0  # no reviews: plain decoding
    for gamma in (1, 3, 8):  # reviews of nothing: draft 1 alone
        assert vertical_factor(0.7, 0.4, gamma, 0, 0.05) == pytest.approx(expected_speedup(0.7, gamma, 0.05))
    assert vertical_factor(1.0, 0.5, 2, 1, 0.0) == pytest.approx(1 + 2 * 1.5)
    assert vertical_factor(1.0, 1.0, 2, 3, 0.25) == pytest.approx((1 + 2 * 4) / 1.5)
    assert vertical_factor(0.8, 1.0, 1, 3, 0.0) == pytest.approx((1 - 0.8**5) / 0.2)
    assert vertical_factor(0.0, 0.9, 3, 5, 0.1) == pytest.approx(1 / 1.3)
    assert vertical_factor(0.9, 0.0, 3, 5, 0.0) == pytest.approx((1 - 0.9**4) / 0.1)
    near = vertical_factor(1 - 1e-13, 1 - 1e-13, 2, 3, 0.25)
    assert near == pytest.approx(vertical_factor(1.0, 1.0, 2, 3, 0.25), rel=1e-9)


def simulated(chance: random.Random, alpha: float, inner: float, n: int, k: int, tail: int, beyond: float) -> float:
    """Tokens of one target pass. Draft 1 reviews n times k tokens of draft 2 (each passes with chance `inner` while
    those before it did) and adds one; `tail` raw ones follow. The target accepts with `alpha`, raw ones with `beyond`,
    up to the first refusal, and adds one."""
    reviewed = sum(1 + run_of(chance, inner, k) for _ in range(n))
    kept = run_of(chance, alpha, reviewed)
    if kept == reviewed:
        kept += run_of(chance, beyond, tail)
    return 1 + kept


def run_of(chance: random.Random, alpha: float, most: int) -> int:
    count = 0
    while count < most and chance.random() < alpha:
        count += 1
    return count


@pytest.mark.parametrize(
    ("alpha", "inner", "n", "k", "tail", "beyond"),
    [(0.8, 0.6, 3, 4, 0, 0.0), (0.9, 0.3, 5, 10, 0, 0.0), (0.95, 0.5, 2, 6, 10, 0.4), (0.7, 0.9, 1, 3, 5, 1.0)],
)
def test_the_vertical_factor_is_what_the_process_yields(
    alpha: float, inner: float, n: int, k: int, tail: int, beyond: float
) -> None:
    chance = random.Random(7)
    passes = 40_000
    mean = sum(simulated(chance, alpha, inner, n, k, tail, beyond) for _ in range(passes)) / passes
    found = vertical_factor(alpha, inner, n, k, 0.05, 0.01, tail, beyond)
    assert found * (1 + n * 0.05 + (n * k + tail) * 0.01) == pytest.approx(mean, rel=0.015)


def test_the_horizontal_factor_of_known_cases() -> None:
    # 1 + .8 + .8 · .6 + .8 · .6 · .5 = 2.52 tokens, 1 + 2 · .05 + 1 · 0 of costs
    assert horizontal_factor([0.8, 0.6, 0.5], [2, 1], [0.05, 0.0]) == pytest.approx(2.52 / 1.1)
    assert horizontal_factor([0.7] * 4, [4], [0.05]) == pytest.approx(expected_speedup(0.7, 4, 0.05))
    assert horizontal_factor([], [], []) == 1.0
    assert horizontal_factor([1.0, 1.0], [], []) == 3.0
    assert horizontal_factor([0.0, 1.0], [1], [1.0]) == 0.5


# -- from the events of a run ---------------------------------------------------------------------

PLAIN = measure([opening(), *[step(0, 0, verify_s=0.1)] * 50])


def round_of(chance: random.Random, alpha: float, inner: float, n: int, k: int, tail: int, beyond: float) -> Step:
    """A round as `simulated` plays it: a review costs 4 ms, a token of draft 2 costs 1 ms, the target's pass 120 ms."""
    reviews = []
    for _ in range(n):
        kept = run_of(chance, inner, k)
        reviews.append(replace(step(k, kept), calls=(Call("small", k, 0.001 * k), Call("glide", 1, 0.004))))
    length = sum(len(review.emitted) for review in reviews)
    kept = run_of(chance, alpha, length)
    if kept == length:
        kept += run_of(chance, beyond, tail)
    drafted = n * k + tail
    calls = (Call("glide", n, 0.004 * n), Call("small", drafted, 0.001 * drafted), Call("target", 1, 0.12))
    seconds = {"draft_s": 0.004 * n + 0.001 * drafted, "verify_s": 0.12}
    return replace(step(length + tail, kept, **seconds), inner=tuple(reviews), calls=calls)


def cascade(alpha: float, inner: float, n: int, k: int, tail: int = 0, beyond: float = 0.0) -> Stats:
    chance = random.Random(3)
    events: list[Event] = [opening(), *(round_of(chance, alpha, inner, n, k, tail, beyond) for _ in range(3000))]
    return measure(events)


@pytest.mark.parametrize("given", [(0.85, 0.6, 2, 5), (0.85, 0.6, 2, 5, 10, 0.4), (0.6, 0.2, 4, 10, 3, 0.9)])
def test_the_expected_speedup_of_a_cascade_is_what_it_reaches(given: tuple[float, ...]) -> None:
    stats = cascade(*given)  # type: ignore[arg-type]
    reached = speedup(PLAIN, stats)
    assert expected(stats, PLAIN, None) == pytest.approx(reached, rel=0.02)
    alpha, inner, n, k, *rest = given
    tail, beyond = rest or (0, 0.0)
    # A target pass takes 1.2 plain ones; costs are relative to it.
    wanted = vertical_factor(alpha, inner, n, k, 4 / 120, 1 / 120, tail, beyond) / 1.2
    assert cascaded(stats, PLAIN) == pytest.approx(wanted, rel=0.03)


def chained(kept: int, drafted: int, gamma: int) -> Step:
    calls = (Call("glide", 2, 0.006), Call("target", 1, 0.12))
    return replace(step(drafted, kept, gamma=gamma, draft_s=0.006, verify_s=0.12), calls=calls)


def test_the_expected_speedup_of_a_chain_does_not_overrate_short_ones() -> None:
    # Four passes: 3, 1 and 0 of four kept, and one of which only two were drafted, both kept. Reached and kept: 3 of 4,
    # 2 of 3, 1 of 2, 0 of 1; with two calls of 3 ms a pass and passes of 1.2 plain ones.
    stats = measure([opening(), chained(3, 4, 4), chained(1, 4, 4), chained(0, 4, 4), chained(2, 2, 4)])
    wanted = horizontal_factor([3 / 4, 2 / 3, 1 / 2, 0.0], [2], [3 / 120]) / 1.2
    assert [kept / before for before, kept in pairwise([4, *stats.accepted_at[:3]])] == [3 / 4, 2 / 3, 1 / 2]
    assert expected(stats, PLAIN, None) == pytest.approx(wanted)
    assert wanted == pytest.approx((1 + 6 / 4) / (1.2 + 2 * 0.03))


def test_where_no_formula_applies_nothing_is_expected() -> None:
    stats = cascade(0.85, 0.6, 2, 5)
    assert expected(stats, PLAIN, "auto") is None
    assert expected(PLAIN, PLAIN, None) is None  # it drafts nothing
    assert expected(stats, Stats(), None) is None
    assert expected(Stats(), PLAIN, None) is None
    two = replace(stats, reviews={**stats.reviews, "small": (1, 2)}, reviewed={**stats.reviewed, "small": 3})
    assert expected(two, PLAIN, None) is None
    usual = measure([opening(), *[step(4, 3, draft_s=0.02, verify_s=0.12)] * 10])
    assert expected(usual, PLAIN, 4) == modelled(usual, PLAIN, 4) is not None
