"""The worth of a draft's nodes and of a pass of the drafter's own model: how many nodes a draft keeps, and whether the
model runs. Knows probabilities and prices; no tokens, no sources and no clock.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from sampling.gamma.constants import DEFAULT_PRICE, MAX_PROB, MODEL_GAIN_WORTH, MODEL_GAINS, RETRY
from sampling.gamma.ratios import Ratios
from sampling.types import NodeCosts


def worthwhile(paths: Sequence[float], costs: NodeCosts | None) -> int:
    """Return how many nodes to keep, given the probabilities of their paths in descending order.

    The number maximises calibration · Σ paths − rate · v. All of them if `costs` is None.
    """
    if costs is None:
        return len(paths)
    count, gain, most = 0, 0.0, 0.0
    for number, (path, (width, wider)) in enumerate(zip(paths, pairwise(costs.v), strict=False), start=1):
        gain += costs.calibration * path - costs.rate * (wider - width)
        if gain > most:
            count, most = number, gain
    return count


def floors_of(costs: NodeCosts, most: int) -> list[float]:
    """Return, by the number of likelier nodes, the path probability below which :func:`worthwhile` keeps no node.

    The mean cost of further nodes is at least that of the cheapest one among them.
    """
    scale = costs.rate / costs.calibration if costs.calibration > 0 else math.inf
    steps = [scale * (wider - width) for width, wider in pairwise(costs.v)]
    return [*[*accumulate(reversed(steps), min)][::-1], *[math.inf] * (most + 1)][: most + 1]


class ModelWorth:
    """Whether a pass of a model pays after the nodes of a level, beside sources without one.

    Args:
        ratios: keep the gains that were measured.
        learn: decide by measured gains and prices; else by the guesses MODEL_GAINS[0] and DEFAULT_PRICE.
        alone: there are no other sources.
    """

    def __init__(self, ratios: Ratios, learn: bool, alone: bool) -> None:
        # Of a depth: tokens that a pass brings there, over the probability that the others leave.
        self._gain_at = cache(lambda depth: ratios.of(("gain", depth), MODEL_GAINS[depth > 0], MODEL_GAIN_WORTH))
        self._learn, self._alone = learn, alone
        self._price, self._rounds_without = DEFAULT_PRICE, 0

    def begin(self, price: float | None) -> None:
        """Begin a round in which a pass costs `price` tokens; None: unknown."""
        self._price = DEFAULT_PRICE if price is None or not self._learn else price
        self._rounds_without += 1

    def pays(self, depth: int, left: float, rows: int) -> bool:
        """Return whether to run a pass for `rows` rows: it pays, nothing else drafts, or it is time to try one again.

        `left`: the part of the level's path probabilities, summed, that the other sources leave open.
        """
        gain = self._gain_at(depth).value if self._learn else MODEL_GAINS[0]
        alone = self._alone and not (depth and self._learn)
        retry = not depth and self._learn and self._rounds_without > RETRY and left > 1 - MAX_PROB
        return gain * left > self._price * rows or alone or retry

    def ran(self) -> None:
        """Note that a pass offered something: the count of rounds without one begins again."""
        self._rounds_without = 0

    def learn(self, depth: int, tokens: int, left: float) -> None:
        """Learn what a pass at this depth brought beyond the other sources."""
        self._gain_at(depth).learn(tokens, left)
