"""How each constant of `gamma auto` changes the speed of sessions on a modelled clock, at 0.5 and 1.5 times its value.

    python benchmarks/constants.py [--seeds 24]

A session is a dozen answers of 40 to 200 tokens, in two of which the text changes, under best-first trees and under
chains, each with costs that are known and that are not, on the clocks of two machines: v(n) as measured on Zen 3 (AVX2)
and on Zen 5. The controller sees passes that vary by 5% and take half as long again for stretches, one in a hundred six
times as long; speeds are computed without this noise. Prints the mean speed and that of the slowest question, relative
to plain decoding, and by how much they change. Constants of the drafters' sources are not varied. Nothing is measured:
the clock is computed.
"""

import argparse
import random
import sys
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import harmonic_mean

from rich.console import Console

sys.path.insert(0, str(Path.cwd()))

from sampling.events import Call, Step
from sampling.gamma import acceptance, constants, controller, costs, ratios, worth

console = Console(highlight=False, soft_wrap=True)
STEEP = [1.0, 1.16, 1.42, 1.74, 2.03, 2.4, *(2.4 + 0.27 * more for more in range(1, 12))]  # v(n) at n - 1: Zen 3
FLAT = [1.0, 1.04, 1.08, 1.13, 1.2, 1.28, 1.36, *(1.36 + 0.1 * more for more in range(1, 11))]  # Zen 5
# v(n), c, what a drafted and a plain round take beside their passes, in passes, and the seconds of a pass:
CLOCKS = (STEEP, 0.015, 0.06, 0.03, 0.009), (FLAT, 0.09, 0.25, 0.08, 0.002)
QUESTIONS = [  # the drafter's mean probability, the true one over it in the first and in the second half, tokens
    *((0.15, 0.6, 0.6, 40), (0.45, 0.8, 0.8, 100), (0.15, 0.8, 0.8, 60), (0.55, 1.0, 1.0, 200)),
    *((0.6, 1.0, 0.2, 120), (0.25, 0.6, 0.6, 40), (0.35, 0.8, 0.8, 60), (0.15, 0.6, 0.6, 150)),
    *((0.5, 0.1, 1.2, 120), (0.25, 0.8, 0.8, 100), (0.15, 1.0, 1.0, 40), (0.15, 0.6, 0.6, 60)),
]
MODULES = acceptance, constants, controller, costs, ratios, worth


def step_of(depth: int, nodes: int, accepted: int, draft_s: float, verify_s: float, beside: float) -> Step:
    """Return a round's step: a chain of `nodes`, of which the first `accepted` are accepted."""
    tokens, call = tuple(range(nodes)), Call("head", int(depth > 0), draft_s)
    probs = (0.5,) * min(nodes, accepted + 1)
    return Step(
        *(0, depth, tokens, tuple(range(-1, nodes - 1)), (0,) * nodes, tokens[:accepted], 99, probs, probs, 1.0),
        calls=((call,) if depth else ()) + (Call("target", 1, verify_s),),
        draft_s=draft_s,
        verify_s=verify_s,
        sample_s=0.0,
        overhead_s=beside,
    )


def speed_of(tree: bool, known: bool, clock: tuple[list[float], float, float, float, float], seed: int) -> list[float]:
    """Return the speed of each answer of a session, relative to plain decoding."""
    (v, c, drafting, plain, seconds), noise, speeds = clock, random.Random(seed), list[float]()
    priced = costs.Costs(c, {n: v[n - 1] for n in range(2, 9)}, seconds) if known else costs.Costs()
    pace = controller.Controller(costs=priced, tree=tree, most=15)
    busy = 1.0
    for mean, first, second, length in QUESTIONS:
        pace.begin()
        tokens, spent = 0, 0.0
        while tokens < length:
            share = first if 2 * tokens < length else second
            if noise.random() < 0.02:  # other programs come and go
                busy = 2.5 - busy
            budget = pace.budget([0])
            depth = budget.max_depth[0]
            chances = [min(0.98, max(0.02, noise.betavariate(2 * mean, 2 * (1 - mean)))) for _ in range(depth)]
            promised = [*accumulate(chances, mul)][: budget.max_nodes]
            nodes = worth.worthwhile(promised, budget.costs) if tree else depth
            accepted = next((n for n in range(nodes) if noise.random() >= share * chances[n]), nodes)
            unit, passes = seconds * busy * noise.lognormvariate(0, 0.05), 1 if tree else nodes
            beside, held_up = drafting if depth else plain, 6 if noise.random() < 0.01 else 1
            drafted_s = unit * c * passes * bool(depth)
            step = step_of(depth, nodes, accepted, drafted_s, held_up * unit * v[nodes], unit * beside)
            pace.observe([step], sum(promised[:nodes]) if tree else 0.0)
            tokens += accepted + 1
            spent += v[nodes] + beside + c * passes * bool(depth)
        speeds.append(tokens * (1 + plain) / spent)
    return speeds


def scores(seeds: int) -> tuple[float, float]:
    """Return the mean speed of all answers, and that of the slowest question."""
    cases = [(tree, known, clock) for tree in (True, False) for known in (True, False) for clock in CLOCKS]
    means, worst = list[float](), 9.0
    for case in cases:
        each = zip(*(speed_of(*case, seed) for seed in range(seeds)), strict=True)
        of_question = list(map(harmonic_mean, each))
        means.append(harmonic_mean(of_question))
        worst = min(worst, *of_question)
    return harmonic_mean(means), worst


def with_value(name: str, value: object, act: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Return what `act` returns while the constant has another value, wherever it is read."""
    homes = [module for module in MODULES if hasattr(module, name)]
    before = getattr(constants, name)
    for module in homes:
        setattr(module, name, value)
    try:
        return act()
    finally:
        for module in homes:
            setattr(module, name, before)


def scaled(value: object, times: float) -> object:
    """Return a constant times a factor; whole numbers stay whole, and at least 1 (0 stays 0)."""
    if isinstance(value, tuple):
        return tuple(scaled(part, times) for part in value)
    if isinstance(value, int):
        return max(1, round(value * times)) if value else 0
    return value * times if isinstance(value, float) else value


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What each constant of gamma auto changes, on a modelled clock.")
    parser.add_argument("--seeds", type=int, default=24, help="sessions of each kind")
    seeds = parser.parse_args().seeds
    mean, worst = scores(seeds)
    console.print(f"as it is: mean {mean:.3f}, slowest question {worst:.3f}")
    read = [
        name for name in vars(constants) if name.isupper() and any(hasattr(m, name) for m in MODULES[2:] + MODULES[:1])
    ]
    for name in read:
        value, cells = getattr(constants, name), list[str]()
        for times in (0.5, 1.5):
            try:
                other, slowest = with_value(name, scaled(value, times), lambda: scores(seeds))
            except (ValueError, IndexError, ZeroDivisionError) as error:
                cells.append(type(error).__name__)
                continue
            cells.append(f"{100 * (other / mean - 1):+5.1f}% {100 * (slowest / worst - 1):+5.1f}%")
        console.print(f"{name:20} {value!s:22} half {cells[0]:16} half more {cells[1]}")


if __name__ == "__main__":
    main()
