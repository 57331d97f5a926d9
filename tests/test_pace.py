"""`gamma auto`: the choice by its formula, and what is learned of acceptance and costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sampling.acceptance import Acceptance, expected_tokens
from sampling.costs import Costs
from sampling.pace import GAMMA_MAX, GoodputPace, best, goodput
from sampling.theory import expected_speedup
from tests.pacing import PLAIN, World, flat, packed, simulate, unpacked

WORLDS = [(flat, 0.05), (packed, 0.02), (packed, 0.05), (packed, 0.2), (unpacked, 0.05), (unpacked, 0.2)]
KNOWN = dict.fromkeys(range(2, GAMMA_MAX + 2), 1.0)  # a measured flat table: no first looks


# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed"), [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)]
)
def test_the_best_gamma_of_known_estimates(alpha: float, gamma: int, speed: float) -> None:
    rates = goodput([alpha] * 16, 0.05, [1.0] * 17)
    assert (best(rates), round(rates[gamma], 2)) == (gamma, speed)


@pytest.mark.parametrize("v", [flat, packed, unpacked])
def test_goodput_is_the_expected_speed_up(v: Callable[[int], float]) -> None:
    rates = goodput([0.7] * 8, 0.1, [v(n) for n in range(1, 10)])
    assert rates == pytest.approx([expected_speedup(0.7, gamma, 0.1, v(gamma + 1)) for gamma in range(9)])


def test_no_draft_where_none_pays_and_the_smaller_of_equals() -> None:
    assert best(goodput([0.1] * 8, 0.2, [1.0] * 9)) == 0
    assert best([1.0, 2.0, 2.0]) == 1
    assert expected_tokens([0.5, 0.0, 0.9]) == [1.0, 1.5, 1.5, 1.5]


def test_silence_costs_no_width() -> None:
    often = goodput([0.3] * 4, 0.0, [unpacked(n) for n in range(1, 6)])
    rarely = goodput([0.3] * 4, 0.0, [unpacked(n) for n in range(1, 6)], given=[0.3, 0.3, 0.3, 0.3])
    assert often[4] < 1 < rarely[4]


# -- learning -------------------------------------------------------------------------------------


def test_the_first_outcome_weighs_three_tenths_and_the_prior_is_85_percent() -> None:
    estimates = Acceptance(4)
    assert estimates.alphas == pytest.approx([0.85] * 4)
    estimates.add([(1, 0, False)])
    assert estimates.alphas[0] == pytest.approx(0.7 * 0.85, abs=0.01)


def test_an_accepted_stop_says_nothing_of_the_position_behind_it() -> None:
    one, other = Acceptance(4), Acceptance(4)
    one.add([(4, 2, True)])
    other.add([(4, 2, False)])
    assert one.alphas[2] > 0.85 > other.alphas[2]
    assert one.alphas[:2] == other.alphas[:2]


def test_rows_of_a_batch_are_one_outcome_each_round() -> None:
    batch, single = Acceptance(2), Acceptance(2)
    batch.add([(1, 1, False), (1, 0, False)])
    single.add([(1, 1, False)])
    assert 0.5 < batch.alphas[0] < single.alphas[0]


def test_one_slow_pass_moves_neither_c_nor_v_nor_the_choice() -> None:
    pace = GoodputPace()
    simulate(pace, World(0.7, 0.05, packed, noise=0.0, slow=0.0), 200)
    c, v, chosen = pace.costs.c, pace.costs.v(12), pace.chosen
    (gamma,) = pace.gamma([0])
    pace.costs.add(gamma + 1, gamma, 0, 20 * PLAIN, 20 * PLAIN)
    pace.costs.add(1, 0, 0, 0.0, 20 * PLAIN)
    assert (pace.costs.c, pace.costs.v(12), best(pace.rates)) == (
        pytest.approx(c),
        pytest.approx(v),
        pytest.approx(chosen, abs=1),
    )
    assert pace.costs.v(12) == pytest.approx(v)


def test_costs_are_recovered_from_noisy_rounds() -> None:
    pace = GoodputPace()
    simulate(pace, World(0.8, 0.08, packed, seed=3), 2000)
    assert pace.costs.c == pytest.approx(0.08, rel=0.15)
    assert pace.costs.v(8)[6] == pytest.approx(packed(7), rel=0.12)
    assert pace.costs.plain == pytest.approx(PLAIN, rel=0.1)


def test_v_is_monotone_starts_at_one_and_never_tops_n_passes() -> None:
    costs = Costs()
    for seconds, width in ((1.0, 1), (1.0, 1), (0.9, 3), (0.9, 3), (90.0, 5), (90.0, 5), (1.5, 9), (1.5, 9)):
        costs.add(width, 0, 0, 0.0, seconds)
    v = costs.v(12)
    assert v[0] == 1.0
    assert v == sorted(v)
    assert v[4] <= v[8] == pytest.approx(1.5)


def test_seeds_hold_until_measured_and_wrong_ones_are_refused() -> None:
    seeded = Costs(c=0.3, table={2: 1.1, 4: 1.5})
    assert (seeded.c, seeded.v(4)) == (0.3, pytest.approx([1.0, 1.1, 1.3, 1.5]))
    assert seeded.drafting_known
    for _ in range(2):
        seeded.add(1, 0, 0, 0.0, 1.0)
        seeded.add(3, 2, 0, 0.2, 1.0)
    assert (seeded.c, seeded.v(3)[2]) == (pytest.approx(0.1), pytest.approx(1.0))
    with pytest.raises(ValueError, match="costs must be positive"):
        Costs(table={2: 0.0})
