"""`gamma auto` over simulated answers (tests/pacing.py): where it settles, what it may cost, how it reacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

import pytest

from sampling.acceptance import expected_tokens
from sampling.costs import Costs
from sampling.events import Step
from sampling.pace import COOLDOWN, GAMMA_MAX, GoodputPace, best
from tests.pacing import PLAIN, World, flat, make_step, packed, planted_rates, rising, simulate, unpacked

WORLDS = [(flat, 0.05), (packed, 0.02), (packed, 0.05), (packed, 0.2), (unpacked, 0.05), (unpacked, 0.2)]
KNOWN = dict.fromkeys(range(2, GAMMA_MAX + 2), 1.0)  # a measured flat table: no first looks


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.6, 0.7, 0.8])
@pytest.mark.parametrize(("v", "c"), [(flat, 0.05), (packed, 0.05)])
def test_it_settles_within_one_of_the_optimum(v: Callable[[int], float], c: float, alpha: float) -> None:
    """The median gamma of six noisy runs, their first third left out."""
    rates = planted_rates(alpha, c, v)
    found = []
    for seed in range(6):
        run = simulate(GoodputPace(), World(alpha, c, v, seed=seed), 900)
        found.append(median(run.gammas[len(run.gammas) // 3 :]))
    assert abs(fmean(found) - best(rates)) <= 1.0, found


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("v", "c"), WORLDS)
def test_it_reaches_nine_tenths_of_the_best_rate(v: Callable[[int], float], c: float, alpha: float) -> None:
    """What counts in the end: near alpha .9 the optimum is so flat that gamma itself says little."""
    runs = [simulate(GoodputPace(), World(alpha, c, v, seed=seed), 900) for seed in range(4)]
    assert 1 / fmean(run.slowdown for run in runs) > 0.9 * max(planted_rates(alpha, c, v))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize(("v", "c"), [*WORLDS, (packed, 0.5)])
def test_the_worst_prompt_costs_at_most_3_percent_more_than_plain_decoding(
    v: Callable[[int], float], c: float, alpha: float
) -> None:
    """128 tokens, clocks that tell the truth: what is proved is the budget, not the clock."""
    for seed in range(8):
        run = simulate(GoodputPace(), World(alpha, c, v, noise=0.0, slow=0.0, seed=seed), 128)
        assert run.slowdown <= 1.03, (seed, run.slowdown, run.gammas)


@dataclass
class Trap(World):
    """Accepts single drafts, so that longer ones look worth their while, and refuses all of those."""

    def round(self, gamma: int, at: int) -> Step:
        return replace(super().round(gamma, at), path=(0,) if gamma == 1 else ())


@pytest.mark.parametrize(("wake", "tokens"), [(0.0, 67), (0.0, 128), (0.0, 512), (0.01, 96), (0.01, 128), (0.01, 512)])
@pytest.mark.parametrize("kind", [World, Trap])
def test_a_trained_drafter_that_is_always_wrong_costs_at_most_3_percent(
    kind: type[World], wake: float, tokens: int
) -> None:
    """c = 0.07, every further token of a pass 5%: the worst prompt in counted passes, alone or after a good answer.

    `wake`: 64 tokens to catch up with cost most of a pass of the target.
    """
    for before in (0, 400):
        pace = GoodputPace()
        if before:
            simulate(pace, World(0.9, 0.07, rising, noise=0.0, slow=0.0, wake=wake), before)
            pace.begin()
        run = simulate(pace, kind(0.0, 0.07, rising, noise=0.0, slow=0.0, wake=wake), tokens)
        assert run.slowdown <= 1.03, (before, run.slowdown, run.gammas)
        assert kind is Trap or run.gammas.count(0) > 0.75 * len(run.gammas)


@pytest.mark.parametrize("right", range(1, 60, 7))
def test_a_trained_drafter_that_turns_wrong_costs_at_most_3_percent(right: int) -> None:
    """Always right up to some token, always wrong from there on."""
    world = World(lambda at: 1.0 if at < right else 0.0, 0.07, rising, noise=0.0, slow=0.0, wake=0.01)
    run = simulate(GoodputPace(), world, 128)
    assert run.slowdown <= 1.03, (run.slowdown, run.gammas)


@pytest.mark.parametrize(("v", "c"), WORLDS)
def test_with_a_noisy_clock_the_mean_stays_below_3_percent(v: Callable[[int], float], c: float) -> None:
    runs = [simulate(GoodputPace(), World(0.0, c, v, seed=seed), 128) for seed in range(12)]
    assert fmean(run.slowdown for run in runs) <= 1.03
    assert max(run.slowdown for run in runs) <= 1.05


def test_a_prompt_after_a_good_one_has_its_own_budget() -> None:
    pace = GoodputPace()
    simulate(pace, World(0.95, 0.1, packed, noise=0.0, slow=0.0), 400)
    assert pace.chosen >= 5
    pace.begin()
    run = simulate(pace, World(0.0, 0.1, packed, noise=0.0, slow=0.0), 128)
    assert run.slowdown <= 1.03, run.gammas


def test_a_fixed_gamma_would_fail_that() -> None:
    """The control: what the budget is held against can be exceeded."""
    from sampling.types import FixedPace

    assert simulate(FixedPace(4), World(0.0, 0.1, packed), 128).slowdown > 1.4


def test_from_loops_to_nothing_it_stops_drafting_within_a_few_rounds() -> None:
    pace = GoodputPace()
    world = World(lambda at: 0.99 if at < 300 else 0.0, 0.1, packed)
    before = simulate(pace, world, 300)
    assert fmean(before.gammas[-5:]) > 8
    world.alpha = 0.0
    after = simulate(pace, world, 40)
    wasted = [round for round, gamma in enumerate(after.gammas) if gamma > 1]
    assert max(wasted, default=0) < 12
    assert set(after.gammas[12:]) <= {0, 1}


def test_from_nothing_to_loops_a_probe_finds_out() -> None:
    pace = GoodputPace()
    simulate(pace, World(0.0, 0.05, packed), 150)
    assert pace.chosen == 0
    run = simulate(pace, World(0.98, 0.05, packed), 400)
    found = next(round for round, gamma in enumerate(run.gammas) if gamma > 3)
    assert found < 90
    assert run.slowdown < 0.6


def test_a_gamma_is_kept_for_two_rounds_after_a_change() -> None:
    for seed in range(5):
        pace = GoodputPace(costs=Costs(c=0.05, table=KNOWN))
        changed: list[int] = []
        kept: list[int] = []
        world = World(0.6, 0.05, flat, seed=seed)
        for turn in range(200):
            (gamma,) = pace.gamma([0])
            kept.append(pace.chosen)
            if turn and kept[-1] != kept[-2]:
                changed.append(turn)
            pace.observe(world.round(gamma, turn))
        assert len(changed) > 3
        assert all(later - earlier > COOLDOWN for earlier, later in pairwise(changed))


def test_probes_are_single_tokens_and_grow_rarer() -> None:
    pace = GoodputPace(costs=Costs(c=0.3, table=KNOWN))
    run = simulate(pace, World(0.0, 0.3, flat), 400)
    after = next(round for round in range(len(run.gammas)) if not any(run.gammas[round : round + 8]))
    probes = [round for round in range(after, 400) if run.gammas[round]]
    assert {run.gammas[round] for round in probes} == {1}
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert min(gaps) > 8
    assert gaps[-3:] == [65, 65, 65]


@pytest.mark.parametrize("reach", [0, 1, 2, 3])
def test_a_silent_drafter_is_not_overrated(reach: int) -> None:
    """It drafts `reach` tokens and no more, always right: the positions behind count as refused."""
    pace = GoodputPace(costs=Costs(c=0.05, table=KNOWN))
    simulate(pace, World(1.0, 0.05, flat, reach=reach), 600)
    alphas = pace.acceptance.alphas
    assert all(alpha > 0.9 for alpha in alphas[:reach])
    assert expected_tokens(alphas)[-1] < reach + 1.35
    assert (pace.chosen > 0) == (reach > 0)


def test_what_a_woken_drafter_catches_up_is_not_its_c() -> None:
    costs = Costs()
    for idle, seconds in ((0, 0.1), (0, 0.1), (9, 0.9), (9, 0.9)):
        costs.add(2, 1, idle, seconds, 1.0)
        costs.add(1, 0, 0, 0.0, 1.0)
    assert (costs.c, costs.waking) == (pytest.approx(0.1), pytest.approx(0.9))


def test_rows_of_a_batch_share_one_gamma_and_one_pass() -> None:
    one, batch = GoodputPace(), GoodputPace()
    for turn in range(60):
        gamma, gammas = one.gamma([0])[0], batch.gamma([0, 1, 3])
        assert gammas == [gamma] * 3, turn
        step = make_step(gamma, gamma, min(gamma, turn % 4), 0.05 * PLAIN * gamma, PLAIN)
        one.observe(step)
        for row in (0, 1, 3):
            batch.observe(replace(step, row=row, draft_s=step.draft_s / 3, verify_s=step.verify_s / 3))
    assert one.summary() == batch.summary()


def test_reset_forgets_the_conversation_and_keeps_the_machine() -> None:
    pace = GoodputPace()
    simulate(pace, World(0.2, 0.1, packed), 200)
    c = pace.costs.c
    pace.reset()
    assert pace.acceptance.alphas == pytest.approx([0.85] * GAMMA_MAX)
    assert (pace.last, pace.rounds, pace.costs.c) == (None, 0, c)
    assert pace.gamma([0])[0] > 0  # no first looks again


def test_the_summary_is_json() -> None:
    pace = GoodputPace()
    simulate(pace, World(0.5, 0.1, packed), 100)
    told = json.loads(json.dumps(pace.summary()))
    assert told == pace.summary()
    assert (len(told["alpha"]), len(told["v"]), told["measured"]) == (16, 17, True)
    with pytest.raises(ValueError, match="gamma_max must be at least 1, got 0"):
        GoodputPace(0)
