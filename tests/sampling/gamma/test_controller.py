"""`gamma auto`: the choice by its formula, what is learned of acceptance and costs, and that it changes no text.

Over simulated answers (tests/support/pacing.py): where it settles, what it may cost, how it reacts; and the same for
drafters whose drafts are not cut (cascades), which are asked for all or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Call, Step
from sampling.gamma.acceptance import Acceptance, expected_tokens
from sampling.gamma.controller import (
    ALLOWANCE,
    CREDIT,
    GAMMA_MAX,
    MARGIN,
    RETRY,
    Controller,
    best,
    goodput,
)
from sampling.gamma.costs import Costs
from sampling.loop import generate
from sampling.sampler import KeyedSampler
from sampling.stats.theory import expected_speedup
from sampling.types import Budget, Drafter, Limits
from tests.support.branching import BranchingSampler, distance, enumerate_runs, softmax
from tests.support.pacing import PLAIN, World, flat, make_step, packed, planted_rates, rising, simulate, unpacked
from tests.support.reference import exact_law
from tests.support.runs import answers, emitted, steps
from tests.support.toy_drafters import LawDrafter, PointDrafter
from tests.support.toys import TableLM
from utils.logits_processors import make_processor

WORLDS = [(flat, 0.05), (packed, 0.02), (packed, 0.05), (packed, 0.2), (unpacked, 0.05), (unpacked, 0.2)]
KNOWN = dict.fromkeys(range(2, GAMMA_MAX + 2), 1.0)  # a measured flat table: no first looks


def bound(tokens: int, lost: float = ALLOWANCE) -> float:
    """Passes that so many tokens may cost, whatever is drafted."""
    return (1 + MARGIN) * tokens + lost


WHOLE_WORLDS = [(flat, 0.05), (packed, 0.05), (rising, 0.1), (unpacked, 0.05)]


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
    rarely = goodput([0.3] * 4, 0.0, [unpacked(n) for n in range(1, 6)], drafted=[0.3, 0.3, 0.3, 0.3])
    assert often[4] < 1 < rarely[4]


# -- learning -------------------------------------------------------------------------------------


def test_the_first_outcome_weighs_three_tenths_and_the_prior_is_85_percent() -> None:
    estimates = Acceptance(4)
    assert estimates.alphas == pytest.approx([0.85] * 4)
    estimates.add(1, 0)
    assert estimates.alphas[0] == pytest.approx(0.7 * 0.85, abs=0.01)


def test_an_accepted_stop_says_nothing_of_the_position_behind_it() -> None:
    one, other = Acceptance(4), Acceptance(4)
    one.add(4, 2, ended=True)
    other.add(4, 2)
    assert one.alphas[2] > 0.85 > other.alphas[2]
    assert one.alphas[:2] == other.alphas[:2]


@pytest.mark.parametrize(("slow", "drafts"), [(0, False), (1, True)])
def test_a_batch_is_as_fast_as_its_slowest_row(slow: int, drafts: bool) -> None:
    """Three rows whose drafts always hold gain nothing where the fourth's never do: they wait for it."""
    pace = Controller()
    gammas = []
    for _ in range(200):
        gamma = pace.budget([0, 1, 2, 3]).max_depth[0]
        seconds = PLAIN * (1 + 0.3 * gamma) / 4
        step = make_step(gamma, gamma, gamma, 0.0125 * PLAIN * gamma, seconds)
        slowest = make_step(gamma, gamma, slow * gamma, 0.0125 * PLAIN * gamma, seconds)
        pace.observe([replace(step, row=0), replace(slowest, row=1), replace(step, row=2), replace(step, row=3)])
        gammas.append(gamma)
    assert (fmean(gammas[40:]) > 0.5) == drafts
    assert drafts or fmean(gammas[40:]) < 0.1


def test_costs_are_recovered_from_noisy_rounds() -> None:
    pace = Controller()
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


# -- no text and no law changes --------------------------------------------------------------------


class Planted(Controller):
    """The real pace under a clock that depends on nothing but the widths, so that runs can be repeated."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.asked: list[int] = []

    def budget(self, rows: list[int]) -> Budget:
        found = super().budget(rows)
        self.asked.append(found.max_depth[0])
        return found

    def observe(self, steps: list[Step], promised: float = 0.0) -> None:
        widths = [len(step.drafted) for step in steps]
        planted = zip(steps, widths, strict=True)
        super().observe([replace(step, draft_s=0.05 * n, verify_s=1 + 0.03 * n) for step, n in planted], promised)


def run_with(
    pace: Controller, lm: TableLM, drafter: Drafter, sampler: Any, length: int, rows: int = 1
) -> list[list[int]]:
    events = list(
        generate(lm, [[0, 1, 0 + row % 2] for row in range(rows)], drafter, sampler, Limits(length), pace=pace)
    )
    return emitted(events, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", ["ngram", "model", "wrong"])
def test_auto_gives_plain_decodings_text(temperature: float, rows: int, make: str) -> None:
    """Greedy, and with keyed noise under gumbel coupling (the n-gram's point masses need none)."""
    lm, prompt = TableLM(6, seed=3, sharpness=4.0), [[0, 1, row % 2] for row in range(rows)]
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(6),
        "model": lambda: ModelDrafter(TableLM(6, seed=3, sharpness=2.0)),
        "wrong": lambda: PointDrafter(6, lambda row: 5),
    }
    for seed in range(3):
        sampler = lambda: KeyedSampler(make_processor(temperature, 0, 1.0, 0.0), seed, coupling="gumbel")  # noqa: B023, E731
        pace = Planted()
        assert run_with(pace, lm, makers[make](), sampler(), 90, rows) == answers(
            lm, prompt, None, sampler(), length=90
        )
        assert len(set(pace.asked)) > 1


@pytest.mark.parametrize("least_top", [0.0, 0.55])
def test_enumeration_is_exact_under_a_gamma_that_follows_past_rounds(least_top: float) -> None:
    """Drafts from a law: every branch is taken, gammas differing from branch to branch with what was accepted."""
    target, prompt = TableLM(3, seed=2), [0, 1, 0]
    seen: set[tuple[int, ...]] = set()

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        pace = Planted(most=2, costs=Costs(c=0.45, table={2: 1.0, 3: 1.0}))
        drafter = LawDrafter(TableLM(3, seed=9), least_top)
        found = tuple(run_with(pace, target, drafter, sampler, 4)[0])
        seen.add(tuple(pace.asked))
        return found

    assert distance(enumerate_runs(run, softmax), exact_law(target, prompt, softmax, 4)) < 1e-9
    assert len(seen) > 1


def test_a_pace_that_sees_the_fate_of_the_tested_token_is_caught() -> None:
    """The control: resuming or stopping by the very draft under test bends the law, and the enumeration sees it."""
    target, prompt = TableLM(3, seed=2), [0, 1, 0]

    class Peeking(LawDrafter):
        def chain(self, name: int, row: list[int], want: int, sampler: Any) -> list[Any]:
            drafted = super().chain(name, row, want, sampler)
            return drafted if drafted and drafted[0][0] != 0 else []  # drops a token already drawn

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        pace = Planted(most=2, costs=Costs(c=0.05, table={2: 1.0, 3: 1.0}))
        return tuple(run_with(pace, target, Peeking(TableLM(3, seed=9)), sampler, 4)[0])

    assert distance(enumerate_runs(run, softmax), exact_law(target, prompt, softmax, 4)) > 1e-3


def test_the_length_limit_is_not_taken_for_silence() -> None:
    """Near its end a row is asked for less; the pace is told what was asked."""
    lm = TableLM(4, seed=1, sharpness=9.0)
    pace = Planted(costs=Costs(c=0.01, table=KNOWN))
    events = list(
        generate(lm, [[0, 1]], ModelDrafter(lm), KeyedSampler(make_processor(0, 0, 1, 0)), Limits(9), pace=pace)
    )
    assert len(steps(events)[1].drafted) < steps(events)[1].gamma
    assert min(pace.acceptance.alphas) >= 0.85


# -- simulated answers -----------------------------------------------------------------------------


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
def test_the_worst_prompt_costs_what_may_be_lost_and_the_margin(
    v: Callable[[int], float], c: float, alpha: float
) -> None:
    """Clocks that tell the truth: what is proved is the budget, not the clock. One look is not priced yet."""
    for seed in range(8):
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
def test_a_trained_drafter_that_is_always_wrong_costs_what_may_be_lost_and_the_margin(
    kind: type[World], wake: float, tokens: int
) -> None:
    """c = 0.07, every further token of a pass 5%: the worst prompt in counted passes, alone or after a good answer,
    whose gains count for some passes more.

    `wake`: 64 tokens to catch up with cost most of a pass of the target.
    """
    for before in (0, 400):
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


@pytest.mark.parametrize(("v", "c"), WORLDS)
def test_with_a_noisy_clock_the_mean_stays_within_the_bound(v: Callable[[int], float], c: float) -> None:
    runs = [simulate(Controller(), World(0.0, c, v, seed=seed), 256) for seed in range(12)]
    assert fmean(run.cost for run in runs) <= bound(256, ALLOWANCE + 2 * (c + v(2) - 1))
    assert max(run.slowdown for run in runs) <= 1.05


def test_a_hopeless_prompt_after_a_good_one_loses_some_passes_of_the_gain_at_most() -> None:
    pace = Controller()
    simulate(pace, World(0.95, 0.1, packed, noise=0.0, slow=0.0), 400)
    assert (pace.last or 0) >= 5
    pace.begin()
    run = simulate(pace, World(0.0, 0.1, packed, noise=0.0, slow=0.0), 256)
    assert run.cost <= bound(256, CREDIT), run.gammas


def test_answers_that_are_never_drafted_for_well_cost_3_passes_once() -> None:
    """The bound holds over a conversation: what drafts of this pair are worth need not be found out in every answer."""
    pace, cost = Controller(), 0.0
    for answer in range(12):
        pace.begin()
        run = simulate(pace, World(0.0, 0.1, packed, noise=0.0, slow=0.0, seed=answer), 64)
        cost += run.cost
        assert cost <= bound(64 * (answer + 1), ALLOWANCE + 0.13), answer
    assert cost < 1.02 * 12 * 64


def test_a_new_answer_begins_with_what_the_last_ones_were() -> None:
    """One that pays is drafted for at once, with as long drafts as before; one that never did is not."""
    for alpha, least in ((0.8, 3), (0.0, 0)):
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


def test_from_loops_to_nothing_it_stops_drafting_within_a_few_rounds() -> None:
    pace = Controller()
    world = World(lambda at: 0.99 if at < 300 else 0.0, 0.1, packed)
    before = simulate(pace, world, 300)
    assert fmean(before.gammas[-5:]) > 8
    world.alpha = 0.0
    after = simulate(pace, world, 40)
    wasted = [round for round, gamma in enumerate(after.gammas) if gamma > 1]
    assert max(wasted, default=0) < 12
    assert set(after.gammas[12:]) <= {0, 1}


def test_from_nothing_to_loops_a_probe_finds_out() -> None:
    pace = Controller()
    simulate(pace, World(0.0, 0.05, packed), 150)
    assert not pace.pays
    run = simulate(pace, World(0.98, 0.05, packed), 400)
    found = next(round for round, gamma in enumerate(run.gammas) if gamma > 3)
    assert found < 90
    assert run.slowdown < 0.6


def test_a_batch_looks_as_many_times_as_seldom_as_it_has_rows_and_follows_no_look() -> None:
    """Every other draft is right, and one token more costs .6 of a pass."""

    def looks(rows: int) -> list[int]:
        pace, asked = Controller(costs=Costs(c=0.1, table={2: 1.5, 3: 2.0})), list[int]()
        for number in range(4000):
            gamma = pace.budget(list(range(rows))).max_depth[0]
            right = gamma * (len(asked) % 2)
            step = make_step(gamma, gamma, right, 0.1 * PLAIN * gamma / rows, PLAIN * (1 + 0.5 * gamma) / rows)
            pace.observe([replace(step, row=row) for row in range(rows)])
            if gamma:
                asked.append(number)
        return asked[len(asked) // 2 :]

    many, few = looks(4), looks(1)
    assert 0 < len(many) < len(few) / 4
    assert min(later - earlier for earlier, later in pairwise(many)) > 4 * RETRY
    assert min(later - earlier for earlier, later in pairwise(few)) == 1


@pytest.mark.parametrize("reach", [0, 1, 2, 3])
def test_a_silent_drafter_is_not_overrated(reach: int) -> None:
    """It drafts `reach` tokens and no more, always right: the positions behind count as refused."""
    pace = Controller(costs=Costs(c=0.05, table=KNOWN))
    simulate(pace, World(1.0, 0.05, flat, reach=reach), 600)
    alphas = pace.acceptance.alphas
    assert all(alpha > 0.9 for alpha in alphas[:reach])
    assert expected_tokens(alphas)[-1] < reach + 1.35
    assert (pace.last > 0) == (reach > 0)


def test_a_batch_times_its_own_plain_pass_though_one_row_was_timed_before() -> None:
    """One row's pass takes a second token for 10% more, eight rows' for 65%: drafts pay there and not here."""
    pace = Controller()
    for rows, second, paid in ((1, 1.1, True), (8, 1.65, False)):
        pace.begin()
        gammas = []
        for turn in range(200):
            gamma = pace.budget(list(range(rows))).max_depth[0]
            seconds = PLAIN * (1.0 + (second - 1) * gamma)
            step = make_step(gamma, gamma, min(gamma, turn % 2), 0.05 * PLAIN * gamma / rows, seconds / rows)
            pace.observe([replace(step, row=row) for row in range(rows)])
            gammas.append(gamma)
        assert (fmean(gammas[20:]) > 0.9) == paid
        assert pace.costs.references >= 2
    assert fmean(gammas) < 0.3


def test_what_a_model_catches_up_is_not_its_c_where_it_was_left_out_of_rounds_that_drafted() -> None:
    """Tables with a head behind them: they draft every round, the head runs four times and rests as often."""
    pace = Controller()
    for turn in range(160):
        called, woken = turn % 8 < 4, turn % 8 == 0 and turn > 0
        gamma = pace.budget([0]).max_depth[0]
        drafted = min(gamma, 1)
        step = make_step(gamma, drafted, drafted, (0.9 if woken else 0.1 if called else 0.01) * PLAIN, PLAIN)
        calls = (Call("head", 1, 0.0), Call("target", 1, PLAIN)) if called else (Call("target", 1, PLAIN),)
        pace.observe([replace(step, calls=calls)])
    assert pace.costs.c == pytest.approx(0.1, abs=0.01)
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
    assert one.summary() == batch.summary()


def test_another_conversation_is_not_known_and_the_machine_is() -> None:
    pace = Controller()
    simulate(pace, World(0.2, 0.1, packed), 200)
    c = pace.costs.c
    pace = Controller(costs=pace.costs)
    assert pace.acceptance.alphas == pytest.approx([0.85] * GAMMA_MAX)
    assert (pace.last, pace.rounds, pace.costs.c) == (None, 0, c)
    assert pace.budget([0]).max_depth[0] > 0  # no first looks again


def test_the_summary_is_json() -> None:
    pace = Controller()
    simulate(pace, World(0.5, 0.1, packed), 100)
    told = json.loads(json.dumps(pace.summary()))
    assert told == pace.summary()
    assert (len(told["alpha"]), len(told["v"]), told["measured"]) == (16, 17, True)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        Controller(most=0)


# -- disturbances ----------------------------------------------------------------------------------


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
        run = simulate(pace, world, 400)
        taken += [rates[gamma] for gamma in run.gammas[24:]]
    return fmean(taken), max(rates)


SEEDED = Costs(0.08, {n: packed(n) for n in range(2, 17)}, PLAIN)


@pytest.mark.parametrize("costs", [Costs(), SEEDED])
def test_first_calls_fifty_times_as_slow_are_forgotten_within_24_rounds(costs: Costs) -> None:
    taken, most = rates_after(lambda world: setattr(world, "slow_calls", 1), costs, before=0)
    assert taken > 0.97 * most


def test_slow_first_calls_are_not_charged_to_drafts() -> None:
    """Five of them, as a fresh session had: it drafts on."""
    pace, world = Controller(costs=deepcopy(SEEDED)), Disturbed(0.7, 0.08, packed, slow=0.0)
    world.slow_calls = 5
    run = simulate(pace, world, 200)
    assert sum(map(bool, run.gammas)) > 0.8 * len(run.gammas)


@pytest.mark.parametrize("costs", [Costs(), SEEDED])
def test_an_interrupted_pass_is_forgotten_within_24_rounds(costs: Costs) -> None:
    taken, most = rates_after(lambda world: setattr(world, "interrupted", True), costs)
    assert taken > 0.97 * most


@pytest.mark.parametrize("costs", [Costs(), SEEDED])
@pytest.mark.parametrize("speed", [3.0, 1 / 3])
def test_a_machine_of_another_speed_is_followed_within_24_rounds(costs: Costs, speed: float) -> None:
    taken, most = rates_after(lambda world: setattr(world, "speed", speed), costs)
    assert taken > 0.97 * most


def test_a_drafter_that_stops_paying_is_dropped_within_32_rounds_and_taken_back_within_64() -> None:
    for seed in range(5):
        world = World(0.8, 0.1, packed, seed=seed)
        pace = Controller(costs=deepcopy(SEEDED))
        simulate(pace, world, 300)
        world.alpha = 0.0
        dropped = simulate(pace, world, 200)
        assert set(dropped.gammas[32:]) <= {0, 1}
        assert sum(dropped.gammas[32:]) <= len(dropped.gammas[32:]) / RETRY + 1
        assert not pace.pays
        world.alpha = 0.9
        again = simulate(pace, world, 600)
        assert next(index for index, gamma in enumerate(again.gammas) if gamma > 1) < 64 + 16


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


# -- drafts that are not cut -----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("v", "c"), WHOLE_WORLDS)
@pytest.mark.parametrize("most", [1, 8, 29])
def test_nothing_between_all_and_none_is_ever_asked_for(
    v: Callable[[int], float], c: float, alpha: float, most: int
) -> None:
    run = simulate(Controller(most=most, whole=True), World(alpha, c, v), 300)
    assert set(run.gammas) == {0, most}


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.6, 0.8, 0.9])
@pytest.mark.parametrize(("v", "c"), WHOLE_WORLDS)
def test_it_comes_near_the_better_of_all_and_none(v: Callable[[int], float], c: float, alpha: float) -> None:
    rates = planted_rates(alpha, c, v, 12)
    runs = [simulate(Controller(most=12, whole=True), World(alpha, c, v, seed=seed), 1200) for seed in range(4)]
    assert 1 / fmean(run.slowdown for run in runs) > 0.8 * max(rates[0], rates[12])


@pytest.mark.parametrize(("v", "c"), [*WHOLE_WORLDS, (unpacked, 0.3)])
@pytest.mark.parametrize("most", [4, 12, 29])
def test_it_loses_at_most_two_drafts_or_3_passes_and_the_margin(v: Callable[[int], float], c: float, most: int) -> None:
    """Every draft refused, clocks that tell the truth, counted in passes of the target; two drafts measure.

    Cheap ones may be refused until they have cost what any drafter may lose."""
    loss = most * c + v(most + 1) - 1
    for tokens in (1, 32, 128, 512):
        run = simulate(Controller(most=most, whole=True), World(0.0, c, v, noise=0.0, slow=0.0), tokens)
        assert run.cost <= 1.02 * tokens + max(2 * loss, ALLOWANCE + loss), (tokens, run.gammas)
        assert tokens < 32 or most in run.gammas


def test_a_drafter_that_says_less_than_it_may_is_priced_by_what_it_says() -> None:
    """29 may come, 6 do: what is never drafted costs no width."""
    run = simulate(Controller(most=29, whole=True), World(0.8, 0.05, rising, reach=6), 900)
    late = run.gammas[len(run.gammas) // 2 :]
    assert sum(map(bool, late)) / len(late) > 0.9


def test_a_whole_draft_is_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        Controller(most=0, whole=True)


def test_an_earlier_measurement_that_falls_with_the_width_is_taken_as_one_that_does_not() -> None:
    costs = Costs(0.2, {2: 4.0, 3: 0.8, 16: 1.5}, 0.002)
    assert costs.v(16) == sorted(costs.v(16))
    assert min(costs.v(16)) >= 1
    for width in (2, 16, 5, 1):
        costs.add(width, 0, 0, 0.0, 0.002)
    assert costs.plain
