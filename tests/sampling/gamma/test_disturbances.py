"""`gamma auto` where clocks go wrong or drafts stop paying, and where drafts come whole or not at all (cascades)."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from statistics import fmean

import pytest

from sampling.events import Step
from sampling.gamma.acceptance import Acceptance
from sampling.gamma.controller import (
    ALLOWANCE,
    RETRY,
    Controller,
)
from sampling.gamma.costs import Costs
from tests.support.pacing import PLAIN, World, flat, packed, planted_rates, rising, simulate, unpacked

WHOLE_WORLDS = [(flat, 0.05), (packed, 0.05), (rising, 0.1), (unpacked, 0.05)]


class Disturbed(World):
    """A clock that goes wrong: calls 50 times as slow, an interrupted pass, a machine of another speed."""

    slow_calls = 0  # drafting calls that take 50 times as long
    speed = 1.0
    interrupted = False  # the next pass takes 200 times as long

    def round(self, gamma: int, at: int) -> Step:
        step = super().round(gamma, at)
        draft_s, verify_s = step.draft_s * self.speed, step.verify_s * self.speed
        if gamma and self.slow_calls:
            self.slow_calls, draft_s = self.slow_calls - 1, 50 * draft_s
        if self.interrupted:
            self.interrupted, verify_s = False, 200 * verify_s
        return replace(step, draft_s=draft_s, verify_s=verify_s)


def rates_after(disturb: Callable[[Disturbed], None], costs: Costs, before: int = 200) -> tuple[float, float]:
    """Mean planted rate of the gammas taken from 24 rounds after the disturbance on; and the best rate."""
    rates, taken = planted_rates(0.7, 0.08, packed), []
    for seed in range(6):
        pace, world = Controller(costs=deepcopy(costs)), Disturbed(0.7, 0.08, packed, slow=0.0, seed=seed)
        simulate(pace, world, before) if before else None
        disturb(world)
        taken += [rates[gamma] for gamma in simulate(pace, world, 400).gammas[24:]]
    return fmean(taken), max(rates)


SEEDED = Costs(0.08, {n: packed(n) for n in range(2, 17)}, PLAIN)


@pytest.mark.parametrize("costs", [Costs(), SEEDED])
@pytest.mark.parametrize(
    ("name", "value", "more"),
    [("slow_calls", 1, {"before": 0}), ("interrupted", True, {}), ("speed", 3.0, {}), ("speed", 1 / 3, {})],
)
def test_a_first_call_fifty_times_as_slow_an_interrupted_pass_or_another_speed_is_learned_within_24_rounds(
    name: str, value: float, more: dict[str, int], costs: Costs
) -> None:
    taken, most = rates_after(lambda world: setattr(world, name, value), costs, **more)
    assert taken > 0.97 * most


def test_slow_first_calls_are_not_charged_to_drafts() -> None:
    """Five of them, as a fresh session had: it drafts on."""
    pace, world = Controller(costs=deepcopy(SEEDED)), Disturbed(0.7, 0.08, packed, slow=0.0)
    world.slow_calls = 5
    run = simulate(pace, world, 200)
    assert sum(map(bool, run.gammas)) > 0.8 * len(run.gammas)


@pytest.mark.parametrize("costs", [Costs(), SEEDED])
@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_stops_paying_is_dropped_within_32_rounds_and_taken_back_within_64(
    costs: Costs, seed: int
) -> None:
    world = World(0.8, 0.1, packed, seed=seed)
    pace = Controller(costs=deepcopy(costs))
    simulate(pace, world, 300)
    world.alpha = 0.0
    dropped = simulate(pace, world, 200)
    assert set(dropped.gammas[32:]) <= {0, 1}
    assert sum(dropped.gammas[32:]) <= len(dropped.gammas[32:]) / RETRY + 1
    assert not pace.pays
    world.alpha = 0.9
    assert next(index for index, gamma in enumerate(simulate(pace, world, 600).gammas) if gamma > 1) < 64 + 16


@pytest.mark.parametrize(("alpha", "c", "v"), [(0.0, 0.4, packed), (0.2, 0.4, packed), (0.0, 0.05, unpacked)])
@pytest.mark.parametrize("seeded", [True, False])
def test_where_nothing_pays_an_answer_of_128_tokens_loses_under_3_percent(
    alpha: float, c: float, v: Callable[[int], float], seeded: bool
) -> None:
    def slowdown(seed: int) -> float:
        costs = Costs(c, {n: v(n) for n in range(2, 17)}, PLAIN) if seeded else Costs()
        return simulate(Controller(costs=costs), World(alpha, c, v, seed=seed), 128).slowdown

    assert fmean(map(slowdown, range(8))) < 1.03


def test_the_first_round_drafts_where_costs_are_known() -> None:
    assert Controller(costs=deepcopy(SEEDED)).budget([0]).max_depth[0] > 1
    assert Controller().budget([0]).max_depth[0] == 0, "unknown costs: a plain pass first"


def test_a_card_says_how_far_drafts_may_go_before_the_first_answer() -> None:
    known, costs = Acceptance(prior=(0.3, 0.3)), deepcopy(SEEDED)
    assert Controller(known, costs).budget([0]).max_depth[0] < Controller(costs=costs).budget([0]).max_depth[0]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("v", "c"), WHOLE_WORLDS)
@pytest.mark.parametrize("most", [1, 8, 29])
def test_nothing_between_all_and_none_is_ever_asked_for(
    v: Callable[[int], float], c: float, alpha: float, most: int
) -> None:
    assert set(simulate(Controller(most=most, whole=True), World(alpha, c, v), 300).gammas) == {0, most}


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.6, 0.8, 0.9])
@pytest.mark.parametrize(("v", "c"), WHOLE_WORLDS)
def test_it_comes_near_the_better_of_all_and_none(v: Callable[[int], float], c: float, alpha: float) -> None:
    rates = planted_rates(alpha, c, v, 12)
    runs = [simulate(Controller(most=12, whole=True), World(alpha, c, v, seed=seed), 1200) for seed in range(4)]
    assert 1 / fmean(run.slowdown for run in runs) > 0.8 * max(rates[0], rates[12])


@pytest.mark.parametrize(("v", "c"), [*WHOLE_WORLDS, (unpacked, 0.3)])
@pytest.mark.parametrize("most", [4, 12, 29])
@pytest.mark.parametrize("tokens", [1, 32, 128, 512])
def test_it_loses_at_most_two_drafts_or_3_passes_and_the_margin(
    v: Callable[[int], float], c: float, most: int, tokens: int
) -> None:
    """Every draft refused, clocks that tell the truth, counted in passes of the target; two drafts measure.

    Cheap ones may be refused until they have cost what any drafter may lose."""
    loss = most * c + v(most + 1) - 1
    run = simulate(Controller(most=most, whole=True), World(0.0, c, v, noise=0.0, slow=0.0), tokens)
    assert run.cost <= 1.02 * tokens + max(2 * loss, ALLOWANCE + loss), (tokens, run.gammas)
    assert tokens < 32 or most in run.gammas


def test_a_drafter_that_says_less_than_it_may_is_priced_by_what_it_says() -> None:
    """29 may come, 6 do: what is never drafted costs no width."""
    run = simulate(Controller(most=29, whole=True), World(0.8, 0.05, rising, reach=6), 900)
    late = run.gammas[len(run.gammas) // 2 :]
    assert sum(map(bool, late)) / len(late) > 0.9


@pytest.mark.parametrize("whole", [False, True])
def test_a_controller_of_no_drafts_is_refused(whole: bool) -> None:
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        Controller(most=0, whole=whole)


def test_an_earlier_measurement_that_falls_with_the_width_is_taken_as_one_that_does_not() -> None:
    costs = Costs(0.2, {2: 4.0, 3: 0.8, 16: 1.5}, 0.002)
    assert costs.v(16) == sorted(costs.v(16))
    assert min(costs.v(16)) >= 1
    for width in (2, 16, 5, 1):
        costs.add(width, 0, 0, 0.0, 0.002)
    assert costs.plain


@pytest.mark.parametrize("moment", [0.7, 0.85, 1.15, 1.3])
def test_a_moment_of_another_speed_changes_no_measured_cost_for_long(moment: float) -> None:
    costs = Costs(0.3, {2: 1.1, 3: 1.33, 4: 1.6}, PLAIN)
    for number in range(12):
        speed = PLAIN * (moment if number < 4 else 1.0)
        width, v = (3, 1.33) if number % 4 else (2, 1.1)
        costs.add(width, 1, 0, 0.3 * speed, v * speed, 0.15 * speed)
    assert costs.v(3) == pytest.approx([1.0, 1.1, 1.33], abs=0.02)
