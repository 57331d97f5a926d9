"""A session of everyday questions on a modelled clock where wider passes are dear: none loses much to drafts.

Costs as measured on two Zen 3 cores (AVX2, the default pair, 2026-11-28): v(n) below, c .015, a pass of 9 ms and .6 ms
beside it in a round that drafts; half of that in one that does not.
"""

import random
from dataclasses import replace
from itertools import accumulate
from operator import mul
from statistics import harmonic_mean

import pytest

from sampling.gamma.controller import Controller
from sampling.gamma.costs import Costs
from sampling.gamma.worth import worthwhile
from tests.support.pacing import make_step

V = [1.0, 1.16, 1.42, 1.74, 2.03, 2.4, *(2.4 + 0.27 * more for more in range(1, 11))]  # v(n) at n - 1
C, DRAFTING, PLAIN_ROUND, PASS = 0.015, 0.6 / 9, 0.3 / 9, 0.009  # in passes; PASS in seconds

# Mean probability that the drafter gives a draft, the share of it that is true, tokens of the answer.
QUESTIONS = [
    *((0.15, 0.6, 40), (0.45, 0.8, 100), (0.15, 0.8, 60), (0.55, 1.0, 200), (0.15, 0.6, 60)),
    *((0.25, 0.6, 40), (0.35, 0.8, 60), (0.15, 0.6, 150), (0.25, 0.8, 100), (0.15, 1.0, 40)),
]


def speed_up(pace: Controller, noise: random.Random, mean: float, share: float, length: int) -> float:
    """Answer one question; its speed in that of plain decoding."""
    pace.begin()
    tokens, cost = 0, 0.0
    while tokens < length:
        budget = pace.budget([0])
        depth = budget.max_depth[0]
        chances = [min(0.98, max(0.02, noise.betavariate(2 * mean, 2 * (1 - mean)))) for _ in range(depth)]
        promised = [*accumulate(chances, mul)][: budget.max_nodes]
        nodes = worthwhile(promised, budget.costs)
        accepted = next((n for n in range(nodes) if noise.random() >= share * chances[n]), nodes)
        second = PASS * noise.lognormvariate(0, 0.05)
        beside = DRAFTING - C if depth else PLAIN_ROUND
        step = make_step(depth, nodes, accepted, second * C * bool(depth), second * V[nodes])
        pace.observe([replace(step, overhead_s=second * beside)], sum(promised[:nodes]))
        tokens += accepted + 1
        cost += V[nodes] + beside + C * bool(depth)
    return tokens * (1 + PLAIN_ROUND) / cost


@pytest.mark.parametrize(("measured", "least"), [(True, 0.97), (False, 0.96)])
def test_no_question_of_a_session_is_much_slower_than_plain_decoding(measured: bool, least: float) -> None:
    """The mean of 16 sessions for each question, because an answer of 40 tokens alone is luck. Costs that are not
    known must be paid for."""
    speeds: dict[int, list[float]] = {}
    for seed in range(16):
        noise = random.Random(seed)
        costs = Costs(C, {n: V[n - 1] for n in range(2, 9)}, PASS) if measured else Costs()
        pace = Controller(costs=costs, tree=True, most=15)
        for number, (mean, share, length) in enumerate(QUESTIONS):
            speeds.setdefault(number, []).append(speed_up(pace, noise, mean, share, length))
    means = [harmonic_mean(of_question) for of_question in speeds.values()]
    assert min(means) >= least, means
    assert max(means) > 1.3, means


@pytest.mark.parametrize("c", [0.05, 0.2, 0.3, 0.45, 0.6])
def test_an_answer_drafts_from_its_first_rounds_whatever_a_draft_costs(c: float) -> None:
    """Drafts that gained in one answer are not withheld in the next because a single one may lose more than a third of
    a pass: on a busy machine that was so, and nothing was drafted for thirty rounds."""
    noise = random.Random(3)
    pace = Controller(costs=Costs(c, {2: 1.1, 4: 1.2, 8: 1.4}, PASS), tree=True, most=15)
    for _ in range(3):
        pace.begin()
        allowed = []
        for _ in range(40):
            allowed.append(pace.budget([0]).max_depth[0])
            nodes, width = (min(4, allowed[-1]), 1.2) if allowed[-1] else (0, 1.0)
            second = PASS * noise.lognormvariate(0, 0.05)
            step = make_step(allowed[-1], nodes, nodes, second * c * bool(nodes), second * width)
            pace.observe([step], 0.95 * nodes)
        assert all(allowed[:3]), allowed
        assert allowed.count(0) <= 2, allowed  # plain passes that time T(1)
