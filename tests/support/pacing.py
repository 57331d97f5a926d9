"""A simulated decoder for a pace: geometric acceptance and planted costs, no tokens and no models.

`simulate` makes the Steps that the loop would; `Simulated.cost` is what they cost in plain passes by
the planted c and v(n), `noise` disturbs only the seconds that the pace sees.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sampling.events import Step
from sampling.gamma.controller import goodput
from sampling.types import GammaController

PLAIN = 0.05  # seconds of a one-token pass


def flat(n: int) -> float:
    return 1.0


def packed(n: int) -> float:
    """About what a CPU with packed weights does: v(8) = 1.2."""
    return 1.0 + 0.03 * (n - 1)


def unpacked(n: int) -> float:
    """What plain linear layers do on a CPU: v(4) = 2.1, v(8) = 2.6."""
    return 1.0 + 1.1 * min(n - 1, 3) / 3 + 0.125 * max(0, n - 4)


def make_step(
    gamma: int,
    drafted: int,
    accepted: int,
    draft_s: float = 0.0,
    verify_s: float = PLAIN,
    row: int = 0,
    ended: bool = False,
) -> Step:
    """A chain of `drafted` tokens of which the first `accepted` stayed."""
    tokens = tuple(range(drafted))
    return Step(
        row=row, gamma=gamma, drafted=tokens, parents=tuple(range(-1, drafted - 1)), source=(), path=tokens[:accepted],
        token=None if ended else 7, target_p=(), draft_p=(), top2_gap=1.0, calls=(), draft_s=draft_s, verify_s=verify_s,
        sample_s=0.0,
    )  # fmt: skip


def rising(n: int) -> float:
    """Every further token costs 5% of a pass."""
    return 1.0 + 0.05 * (n - 1)


@dataclass
class Simulated:
    """What a simulated answer did."""

    gammas: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0  # plain passes

    @property
    def slowdown(self) -> float:
        """Cost relative to plain decoding of as many tokens."""
        return self.cost / self.tokens


@dataclass
class World:
    """What is planted: acceptance by token index, c, v, the drafter's own reach and the clock's noise.

    `wake`: passes that a drafter's first draft costs more for each plain round before it (it has to read those tokens).
    """

    alpha: Callable[[int], float] | float
    c: float = 0.05
    v: Callable[[int], float] = flat
    reach: int = 64  # the drafter falls silent behind so many
    noise: float = 0.1  # sigma of the seconds' logarithm
    slow: float = 0.03  # chance of a pass that takes 8 times as long
    seed: int = 0
    wake: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.idle = 0

    def chance(self, at: int) -> float:
        return self.alpha(at) if callable(self.alpha) else self.alpha

    def seconds(self, passes: float) -> float:
        slow = 8.0 if self.random.random() < self.slow else 1.0
        return PLAIN * passes * slow * self.random.lognormvariate(0, self.noise)

    def asking(self, gamma: int) -> float:
        """Passes that drafting costs; finding nothing costs as much as one draft."""
        return self.c * max(min(gamma, self.reach), 1) + self.wake * self.idle if gamma else 0.0

    def round(self, gamma: int, at: int) -> Step:
        drafted = min(gamma, self.reach)
        accepted = 0
        while accepted < drafted and self.random.random() < self.chance(at + accepted):
            accepted += 1
        drafting = self.seconds(self.asking(gamma))
        self.idle = 0 if gamma else self.idle + 1
        return make_step(gamma, drafted, accepted, drafting, self.seconds(self.v(drafted + 1)))


def simulate(pace: GammaController, world: World, tokens: int) -> Simulated:
    """Run `pace` until so many tokens are out."""
    run = Simulated()
    while run.tokens < tokens:
        (gamma,) = pace.budget([0]).max_depth
        asked = world.asking(gamma)
        step = world.round(gamma, run.tokens)
        pace.observe([step], 0.0)
        run.gammas.append(gamma)
        run.tokens += len(step.emitted)
        run.cost += asked + world.v(len(step.drafted) + 1)
    return run


def planted_rates(alpha: float, c: float, v: Callable[[int], float], limit: int = 16) -> list[float]:
    """Goodput of each gamma in truth."""
    return goodput([alpha] * limit, c, [v(n) for n in range(1, limit + 2)])
