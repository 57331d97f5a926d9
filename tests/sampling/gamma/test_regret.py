"""`gamma auto` over simulated answers (tests/support/pacing.py): where it settles, what it may cost, how it reacts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import pytest

from sampling.events import Call, Step
from sampling.gamma.acceptance import expected_tokens
from sampling.gamma.controller import (
    ALLOWANCE,
    CREDIT,
    GAMMA_MAX,
    MARGIN,
    Controller,
)
from sampling.gamma.costs import Costs
from tests.support.pacing import PLAIN, World, flat, make_step, packed, planted_rates, rising, simulate, unpacked

WORLDS = [(flat, 0.05), (packed, 0.02), (packed, 0.05), (packed, 0.2), (unpacked, 0.05), (unpacked, 0.2)]


def bound(tokens: int, lost: float = ALLOWANCE) -> float:
    """Passes that so many tokens may cost, whatever is drafted."""
    return (1 + MARGIN) * tokens + lost


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.6, 0.7, 0.8])
@pytest.mark.parametrize(("v", "c"), [(flat, 0.05), (packed, 0.05)])
def test_it_settles_where_the_rate_is_within_3_percent_of_the_best(
    v: Callable[[int], float], c: float, alpha: float
) -> None:
    """The mean of six noisy runs, their first third left out."""
    rates = planted_rates(alpha, c, v)
    settled = []
    for seed in range(6):
        run = simulate(Controller(), World(alpha, c, v, seed=seed), 900)
        settled += [rates[gamma] for gamma in run.gammas[len(run.gammas) // 3 :] if gamma]
    assert fmean(settled) > 0.97 * max(rates)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("v", "c"), WORLDS)
def test_it_reaches_nine_tenths_of_the_best_rate(v: Callable[[int], float], c: float, alpha: float) -> None:
    """What counts in the end: near alpha .9 the optimum is so flat that gamma itself says little."""
    runs = [simulate(Controller(), World(alpha, c, v, seed=seed), 900) for seed in range(4)]
    assert 1 / fmean(run.slowdown for run in runs) > 0.9 * max(planted_rates(alpha, c, v))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize(("v", "c"), [*WORLDS, (packed, 0.5)])
@pytest.mark.parametrize("seed", range(4))
def test_the_worst_prompt_costs_what_may_be_lost_and_the_margin(
    v: Callable[[int], float], c: float, alpha: float, seed: int
) -> None:
    """Clocks that tell the truth: what is proved is the budget, not the clock. One look is not priced yet."""
    for tokens in (128, 512):
        run = simulate(Controller(), World(alpha, c, v, noise=0.0, slow=0.0, seed=seed), tokens)
        assert run.cost <= bound(tokens, ALLOWANCE + 2 * (c + v(2) - 1)), (seed, run.slowdown, run.gammas)
    assert run.slowdown <= 1.03, (seed, run.slowdown, run.gammas)


@dataclass
class Trap(World):
    """Accepts single drafts, so that longer ones look worth their while, and refuses all of those."""

    def round(self, gamma: int, at: int) -> Step:
        return replace(super().round(gamma, at), path=(0,) if gamma == 1 else ())


@pytest.mark.parametrize(("wake", "tokens"), [(0.0, 67), (0.0, 128), (0.0, 512), (0.01, 96), (0.01, 128), (0.01, 512)])
@pytest.mark.parametrize("kind", [World, Trap])
@pytest.mark.parametrize("before", [0, 400])
def test_a_trained_drafter_that_is_always_wrong_costs_what_may_be_lost_and_the_margin(
    kind: type[World], wake: float, tokens: int, before: int
) -> None:
    """c = 0.07, every further token of a pass 5%: the worst prompt in counted passes, alone or after a good answer,
    whose gains count for some passes more.

    `wake`: 64 tokens to catch up with cost most of a pass of the target.
    """
    pace = Controller()
    if before:
        simulate(pace, World(0.9, 0.07, rising, noise=0.0, slow=0.0, wake=wake), before)
        pace.begin()
    run = simulate(pace, kind(0.0, 0.07, rising, noise=0.0, slow=0.0, wake=wake), tokens)
    assert run.cost <= bound(tokens, (CREDIT if before else ALLOWANCE) + 1.2), (before, run.slowdown, run.gammas)
    assert before or tokens < 512 or run.slowdown <= 1.03
    assert tokens < 128 or kind is Trap or run.gammas.count(0) > 0.75 * len(run.gammas)


@pytest.mark.parametrize("right", range(1, 60, 7))
def test_a_trained_drafter_that_turns_wrong_loses_what_it_gained_at_most(right: int) -> None:
    """Always right up to some token, always wrong from there on."""
    world = World(lambda at: 1.0 if at < right else 0.0, 0.07, rising, noise=0.0, slow=0.0, wake=0.01)
    run = simulate(Controller(), world, 128)
    assert run.cost <= bound(128, ALLOWANCE + 0.5), (run.slowdown, run.gammas)


def test_answers_that_are_never_drafted_for_well_cost_3_passes_once() -> None:
    """The bound holds over a conversation: what drafts of this pair are worth need not be found out in every answer."""
    pace, cost = Controller(), 0.0
    for answer in range(12):
        pace.begin()
        cost += simulate(pace, World(0.0, 0.1, packed, noise=0.0, slow=0.0, seed=answer), 64).cost
        assert cost <= bound(64 * (answer + 1), ALLOWANCE + 0.13), answer
    assert cost < 1.02 * 12 * 64


@pytest.mark.parametrize(("alpha", "least"), [(0.8, 3), (0.0, 0)])
def test_a_new_answer_begins_with_what_the_last_ones_were(alpha: float, least: int) -> None:
    """One that pays is drafted for at once, with as long drafts as before; one that never did is not."""
    pace = Controller()
    for answer in range(3):
        pace.begin()
        simulate(pace, World(alpha, 0.05, packed, noise=0.0, slow=0.0, seed=answer), 200)
    pace.begin()
    (gamma,) = pace.budget([0]).max_depth
    assert (gamma >= least) if least else not pace.pays, (alpha, gamma)


def test_a_fixed_gamma_would_fail_that() -> None:
    """The control: what the budget is held against can be exceeded."""
    from sampling.types import FixedPace

    assert simulate(FixedPace(4), World(0.0, 0.1, packed), 128).slowdown > 1.4


@pytest.mark.parametrize("reach", [0, 1, 2, 3])
def test_a_silent_drafter_is_not_overrated(reach: int) -> None:
    """It drafts `reach` tokens and no more, always right: the positions behind count as refused."""
    # a measured flat table: no first looks
    pace = Controller(costs=Costs(c=0.05, table=dict.fromkeys(range(2, GAMMA_MAX + 2), 1.0)))
    simulate(pace, World(1.0, 0.05, flat, reach=reach), 600)
    alphas = pace.acceptance.alphas
    assert all(alpha > 0.9 for alpha in alphas[:reach])
    assert expected_tokens(alphas)[-1] < reach + 1.35
    assert (pace.last > 0) == (reach > 0)


def test_what_a_model_catches_up_is_not_its_c_where_it_was_left_out_of_rounds_that_drafted() -> None:
    """Tables with a head behind them: they draft every round, the head runs four times and rests as often."""
    pace = Controller()
    for turn in range(160):
        called, woken = turn % 8 < 4, turn % 8 == 0 and turn > 0
        gamma = pace.budget([0]).max_depth[0]
        drafted = min(gamma, 1)
        step = make_step(gamma, drafted, drafted, (0.9 if woken else 0.1 if called else 0.01) * PLAIN, PLAIN)
        model_s = (0.8 if woken else 0.08) * PLAIN
        calls = (Call("head", 1, model_s), Call("target", 1, PLAIN)) if called else (Call("target", 1, PLAIN),)
        pace.observe([replace(step, calls=calls)])
    assert pace.costs.c == pytest.approx(0.1, abs=0.01)
    assert pace.costs.model_cost == pytest.approx(0.08, abs=0.01)
    assert pace.costs.waking == pytest.approx(0.9, abs=0.05)


def test_rows_of_a_batch_share_one_gamma_and_one_pass() -> None:
    one, batch = Controller(), Controller()
    for turn in range(60):
        gamma, gammas = one.budget([0]).max_depth[0], batch.budget([0, 1, 3]).max_depth
        assert gammas == [gamma] * 3, turn
        step = make_step(gamma, gamma, min(gamma, turn % 4), 0.05 * PLAIN * gamma, PLAIN)
        one.observe([step])
        shared = {"draft_s": step.draft_s / 3, "verify_s": step.verify_s / 3}
        batch.observe([replace(step, row=row, **shared) for row in (0, 1, 3)])
    assert (one.acceptance.alphas, one.costs.c) == (batch.acceptance.alphas, batch.costs.c)


def test_another_conversation_is_not_known_and_the_machine_is() -> None:
    pace = Controller()
    simulate(pace, World(0.2, 0.1, packed), 200)
    c = pace.costs.c
    pace = Controller(costs=pace.costs)
    assert pace.acceptance.alphas == pytest.approx([0.85] * GAMMA_MAX)
    assert (pace.last, pace.costs.c) == (None, c)
    assert pace.budget([0]).max_depth[0] > 0  # no first looks again
