"""`gamma auto` for drafters whose drafts are not cut (cascades): all or none, and what that may cost."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from sampling.pace import GoodputPace
from tests.pacing import World, flat, packed, planted_rates, rising, simulate, unpacked

WORLDS = [(flat, 0.05), (packed, 0.05), (rising, 0.1), (unpacked, 0.05)]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("v", "c"), WORLDS)
@pytest.mark.parametrize("most", [1, 8, 29])
def test_nothing_between_all_and_none_is_ever_asked_for(
    v: Callable[[int], float], c: float, alpha: float, most: int
) -> None:
    run = simulate(GoodputPace(whole=most), World(alpha, c, v), 300)
    assert set(run.gammas) == {0, most}


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.6, 0.8, 0.9])
@pytest.mark.parametrize(("v", "c"), WORLDS)
def test_it_comes_near_the_better_of_all_and_none(v: Callable[[int], float], c: float, alpha: float) -> None:
    rates = planted_rates(alpha, c, v, 12)
    runs = [simulate(GoodputPace(whole=12), World(alpha, c, v, seed=seed), 1200) for seed in range(4)]
    assert 1 / fmean(run.slowdown for run in runs) > 0.9 * max(rates[0], rates[12])


@pytest.mark.parametrize(("v", "c"), [*WORLDS, (unpacked, 0.3)])
@pytest.mark.parametrize("most", [4, 12, 29])
def test_an_answer_loses_at_most_two_drafts_and_the_margin(v: Callable[[int], float], c: float, most: int) -> None:
    """Every draft refused, clocks that tell the truth, counted in passes of the target; two drafts measure."""
    loss = most * c + v(most + 1) - 1
    for tokens in (1, 32, 128, 512):
        run = simulate(GoodputPace(whole=most), World(0.0, c, v, noise=0.0, slow=0.0), tokens)
        assert run.cost <= 1.02 * tokens + max(2 * loss, 1.0), (tokens, run.gammas)
        assert tokens < 32 or most in run.gammas


def test_a_drafter_that_says_less_than_it_may_is_priced_by_what_it_says() -> None:
    """29 may come, 6 do: what is never drafted costs no width."""
    run = simulate(GoodputPace(whole=29), World(0.8, 0.05, rising, reach=6), 900)
    late = run.gammas[len(run.gammas) // 2 :]
    assert sum(map(bool, late)) / len(late) > 0.9


def test_a_whole_draft_is_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="gamma_max must be at least 1, got 0"):
        GoodputPace(whole=0)
