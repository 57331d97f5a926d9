"""`gamma auto` for trees: what is learned of nodes, and how large a tree gets at planted costs."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings, strategies as st

from sampling.events import Step
from sampling.gamma.acceptance import chain_accepted
from sampling.gamma.controller import Controller
from sampling.gamma.costs import Costs
from sampling.gamma.worth import floors_of, worthwhile
from sampling.types import NodeCosts
from tests.support.pacing import PLAIN, flat, make_step, packed, unpacked

V = Callable[[int], float]


def tree_step(gamma: int, parents: tuple[int, ...], path: tuple[int, ...], c: float = 0.0, v: float = 1.0) -> Step:
    from dataclasses import replace

    return replace(
        make_step(gamma, len(parents), 0, c * PLAIN, v * PLAIN), parents=parents, path=path, drafted=(1,) * len(parents)
    )


@pytest.mark.parametrize(("path", "kept"), [((), 0), ((0,), 1), ((0, 1), 2), ((2,), 0), ((0, 4), 1)])
def test_how_much_of_the_chain_was_accepted(path: tuple[int, ...], kept: int) -> None:
    # A chain of two, two siblings of its first node and one of its second.
    assert chain_accepted(tree_step(2, (-1, 0, -1, -1, 0), path)) == kept


def grown(
    chances: list[float], v: V, promised: float = 1.0, rounds: int = 300, costs: Costs | None = None
) -> tuple[Controller, list[int]]:
    """The nodes of rounds in which node r is accepted with chances[r]; the drafter promises `promised` times that."""
    pace, noise, sizes = Controller(costs=costs, tree=True, most=len(chances)), random.Random(3), []
    for _ in range(rounds):
        budget = pace.budget([0])
        told = [promised * chance for chance in chances[: budget.max_depth[0]]][: budget.max_nodes]
        nodes = worthwhile(told, budget.costs)
        path = tuple(rank for rank in range(nodes) if noise.random() < chances[rank])
        above = {node: parent for parent, node in pairwise(path)}  # each accepted one stands below the one before
        step = tree_step(
            budget.max_depth[0], tuple(above.get(node, -1) for node in range(nodes)), path, 0.002, v(nodes + 1)
        )
        pace.observe([step], sum(told[:nodes]))
        sizes.append(nodes)
    return pace, sizes


@pytest.mark.parametrize("promised", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("v", [flat, packed, unpacked])
def test_a_best_first_tree_is_about_as_large_as_its_nodes_are_worth(v: V, promised: float) -> None:
    """Node r holds with .4 / (r + 1), whatever is promised. What is chosen brings 97% of what the best size would."""
    chances = [0.4 / (rank + 1) for rank in range(16)]
    true = [(1 + sum(chances[:size])) / (0.002 * size + v(size + 1)) for size in range(17)]
    _, sizes = grown(chances, v, promised)
    late = sorted(sizes[150:])
    assert true[late[len(late) // 2]] > 0.97 * max(true)


def test_the_calibration_is_the_share_of_the_promised_tokens_that_came() -> None:
    pace, _ = grown([0.4, 0.2, 0.1, 0.1], flat, promised=1.6)
    costs = pace.budget([0]).costs
    assert costs is not None
    assert costs.calibration == pytest.approx(1 / 1.6, abs=0.12)


def test_a_tree_that_never_holds_is_given_up_and_tried_again() -> None:
    pace, noise, sizes = Controller(tree=True, most=8), random.Random(1), []
    for turn in range(400):
        budget = pace.budget([0])
        told = [0.3, 0.2, 0.1][: budget.max_depth[0]]
        nodes = worthwhile(told, budget.costs)
        path = (0,) if nodes and turn >= 200 and noise.random() < 0.5 else ()
        pace.observe([tree_step(nodes, (-1,) * nodes, path, 0.001, 1 + 0.1 * nodes)], sum(told[:nodes]))
        sizes.append(nodes)
    assert sum(sizes[100:200]) < 60  # a node in two rounds is what forgetting costs; at first there were two in each
    assert sum(sizes[:10]) > 8
    assert sum(sizes[300:]) > 120


BY_HAND = NodeCosts(v=(1.0, 1.1, 1.2, 1.9), calibration=0.5, rate=2.0)


@pytest.mark.parametrize(
    ("paths", "costs", "kept"),
    [
        ([0.9, 0.5, 0.5], BY_HAND, 2),  # they bring .45, .25 and .25
        ([0.3, 0.2], BY_HAND, 0),  # .15 < .2
        ([0.3, 0.3, 0.3], BY_HAND, 0),
        ([0.1, 0.1], None, 2),  # nothing known of costs: all stay
    ],
)
def test_what_is_kept_by_hand(paths: list[float], costs: NodeCosts | None, kept: int) -> None:
    """rate 2, v 1, 1.1, 1.2, 1.9: nodes cost .2, .2 and 1.4."""
    assert worthwhile(paths, costs) == kept


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 99), max_size=12),
    st.lists(st.integers(0, 40), min_size=1, max_size=13),
    st.integers(20, 120),
    st.integers(50, 400),
)
@example([24, 24, 24], [2, 24, 24, 0], 58, 58)
def test_a_tree_that_stops_growing_keeps_what_it_would_have_kept(
    chances: list[int], steps: list[int], trust: int, rate: int
) -> None:
    falling = sorted((chance / 100 for chance in chances), reverse=True)
    v = tuple(1.0 + sum(steps[:count]) / 100 for count in range(len(steps)))
    costs = NodeCosts(calibration=trust / 100, v=v, rate=rate / 100)
    least = floors_of(costs, len(falling))
    grown = next((count for count, chance in enumerate(falling) if chance <= least[count]), len(falling))

    def brings(nodes: int) -> float:
        return costs.calibration * sum(falling[:nodes]) - costs.rate * v[nodes]

    kept = worthwhile(falling[:grown], costs)
    assert brings(kept) == pytest.approx(brings(worthwhile(falling, costs)), abs=1e-12)  # a tie may fall either way


@pytest.mark.parametrize("times", [2.0, 3.0])
def test_costs_measured_on_a_busier_machine_are_corrected(times: float) -> None:
    """Wider passes were taken for `times` as dear as they are, and no node seemed worth one."""
    chances = [0.7 / (node + 1) for node in range(15)]
    given = {n: times * packed(n) for n in range(2, 17)}
    assert worthwhile(chances, NodeCosts([1.0, *given.values()], 1.0, 1.5)) == 0
    _, sizes = grown(chances, packed, costs=Costs(0.1, given, PLAIN))
    rates = [(1 + sum(chances[:size])) / (0.1 + packed(size + 1)) for size in range(16)]
    assert sum(rates[size] for size in sizes[24:128]) > 0.97 * 104 * max(rates)
