"""`gamma auto`: the choice by its formula, what is learned of acceptance and costs, and that it changes no text."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Step
from sampling.gamma.acceptance import Acceptance, expected_tokens
from sampling.gamma.controller import (
    GAMMA_MAX,
    Controller,
    best,
    goodput,
)
from sampling.gamma.costs import Costs
from sampling.loop import generate
from sampling.stats.theory import expected_speedup
from sampling.types import Budget, Drafter, Limits
from tests.support.branching import BranchingSampler, distance, enumerate_runs, softmax
from tests.support.pacing import PLAIN, World, flat, make_step, packed, simulate, unpacked
from tests.support.reference import exact_law
from tests.support.runs import answers, crossed, emitted, greedy, sampler, steps
from tests.support.toys import LawDrafter, PointDrafter, TableLM

# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed"), [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)]
)
def test_the_best_gamma_of_known_estimates(alpha: float, gamma: int, speed: float) -> None:
    rates = goodput([alpha] * 16, 0.05, [1.0] * 17)
    assert (best(rates), round(rates[gamma], 2)) == (gamma, speed)


@pytest.mark.parametrize("v", [flat, packed, unpacked])
def test_goodput_is_the_expected_speed_up(v: Callable[[int], float]) -> None:
    assert goodput([0.7] * 8, 0.1, [v(n) for n in range(1, 10)]) == pytest.approx(
        [expected_speedup(0.7, gamma, 0.1, v(gamma + 1)) for gamma in range(9)]
    )


def test_no_draft_where_none_pays_and_the_smaller_of_equals() -> None:
    assert best(goodput([0.1] * 8, 0.2, [1.0] * 9)) == 0
    assert best([1.0, 2.0, 2.0]) == 1
    assert expected_tokens([0.5, 0.0, 0.9]) == [1.0, 1.5, 1.5, 1.5]


def test_silence_costs_no_width() -> None:
    often = goodput([0.3] * 4, 0.0, [unpacked(n) for n in range(1, 6)])
    assert often[4] < 1 < goodput([0.3] * 4, 0.0, [unpacked(n) for n in range(1, 6)], drafted=[0.3, 0.3, 0.3, 0.3])[4]


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
        planted = zip(steps, [len(step.drafted) for step in steps], strict=True)
        super().observe([replace(step, draft_s=0.05 * n, verify_s=1 + 0.03 * n) for step, n in planted], promised)


def run_with(
    pace: Controller, lm: TableLM, drafter: Drafter, sampler: Any, length: int, rows: int = 1
) -> list[list[int]]:
    return emitted(
        list(generate(lm, [[0, 1, 0 + row % 2] for row in range(rows)], drafter, sampler, Limits(length), pace=pace)),
        rows,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("rows", "make"), crossed([1, 3], ["ngram", "model", "wrong"]))
def test_auto_gives_plain_decodings_text(temperature: float, rows: int, make: str) -> None:
    """Greedy, and with keyed noise under gumbel coupling (the n-gram's point masses need none)."""
    lm, prompt = TableLM(6, seed=3, sharpness=4.0), [[0, 1, row % 2] for row in range(rows)]
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(6),
        "model": lambda: ModelDrafter(TableLM(6, seed=3, sharpness=2.0)),
        "wrong": lambda: PointDrafter(6, lambda row: 5),
    }
    for seed in range(3):
        drawing = lambda: sampler(temperature, seed, coupling="gumbel")  # noqa: B023, E731
        pace = Planted()
        assert run_with(pace, lm, makers[make](), drawing(), 90, rows) == answers(
            lm, prompt, None, drawing(), length=90
        )
        assert len(set(pace.asked)) > 1


@pytest.mark.parametrize("least_top", [0.0, 0.55])
def test_enumeration_is_exact_under_a_gamma_that_follows_past_rounds(least_top: float) -> None:
    """Drafts from a law: every branch is taken, gammas differing from branch to branch with what was accepted."""
    target, prompt = TableLM(3, seed=2), [0, 1, 0]
    seen: set[tuple[int, ...]] = set()

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        pace = Planted(most=2, costs=Costs(c=0.45, table={2: 1.0, 3: 1.0}))
        found = tuple(run_with(pace, target, LawDrafter(TableLM(3, seed=9), least_top), sampler, 4)[0])
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
    # a measured flat table: no first looks
    pace = Planted(costs=Costs(c=0.01, table=dict.fromkeys(range(2, GAMMA_MAX + 2), 1.0)))
    events = list(generate(lm, [[0, 1]], ModelDrafter(lm), greedy(), Limits(9), pace=pace))
    assert len(steps(events)[1].drafted) < steps(events)[1].gamma
    assert min(pace.acceptance.alphas) >= 0.85
