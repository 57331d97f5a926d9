"""`gamma auto` for trees: how deep and how wide, by measured goodput (sampling/gamma/goodput.py chooses for chains).

A tree of tables costs nothing to draft and says of each node how likely it is: gamma is how many it may have at
most, and of those it keeps the ones that are worth their place in the pass, by v(n), by what a pass brings and by how
far such promises came true (:class:`sampling.gamma.tree.Appraisal`). A model's tree has two figures: gamma is
its depth, for which the drafter is paid. It is judged as the chain of its first children, with as many siblings beside
it as what they bring where the chain is refused is worth in v(n); CaPE's are leaves, a dynamic tree goes on below them.
Knows no drafters, no tokens and no clock; decides from past rounds only, as every pace does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from sampling.events import Step
from sampling.gamma.acceptance_estimate import MEMORY, Acceptance, Ranks, chain_accepted, expected_tokens
from sampling.gamma.costs import Costs
from sampling.gamma.goodput import GAMMA_MAX, GROWTH, LOOK, SLACK, GoodputPace

SIBLINGS = (0, 1, 2, 4, 6, 8, 12, 16, 24)  # how many may stand beside a chain
HALF = 10.0  # siblings that are thought to be taken every other time where the chain is refused
MOST_NODES = 11  # of a best-first tree: wider passes cost more than such nodes bring (docs/notes.md)
WORTH = 3.0  # refusals that this guess is worth
TRUST, TRUSTED = 0.85, 8.0  # share of the promised tokens that comes, and how many of them that guess is worth
RATE, RATED = 1.5, 8.0  # tokens a plain pass' time, and how many passes' time that guess is worth


@dataclass
class Appraisal:
    """How many nodes of a tree are worth their place in the pass. May be set anew between rounds.

    trust: how much of what the nodes' chances promise comes true. v: v(1), v(2), … of the target's passes; without it
    every node stays. rate: tokens that a plain pass' time brings anyway. promised: tokens that the last tree promised.
    """

    trust: float = 1.0
    v: Sequence[float] = ()
    rate: float = 1.0
    promised: float = 0.0

    def kept(self, chances: Sequence[float]) -> int:
        """The number of nodes, likeliest first, that maximises trust · their chances − rate · v."""
        counts = range(min(len(chances), max(0, len(self.v) - 1)) + 1) if self.v else (len(chances),)
        sums = [0.0, *accumulate(chances)]
        count = max(counts, key=lambda n: self.trust * sums[n] - (self.rate * self.v[n] if self.v else 0.0))
        self.promised = sums[count]
        return count

    def more(self, chance: float, taken: int) -> bool:
        """Whether :meth:`kept` could still keep more than `taken` nodes if none behind them is likelier than this."""
        if not self.v:
            return True
        counts = range(taken + 1, len(self.v))
        return any(self.trust * chance * (n - taken) > self.rate * (self.v[n] - self.v[taken]) for n in counts)


class RankPace(GoodputPace):
    """For trees that grow best first: gamma is the most nodes, `appraisal` is told what they must be worth."""

    def __init__(self, appraisal: Appraisal, gamma_max: int = MOST_NODES, costs: Costs | None = None) -> None:
        self.appraisal = appraisal
        super().__init__(gamma_max, costs)

    def reset(self) -> None:
        super().reset()
        self._promised = self._held = self._time = self._tokens = 0.0

    def _acceptance(self) -> Acceptance | Ranks:
        return Ranks(self.gamma_max)

    def gamma(self, rows: list[int]) -> list[int]:
        """The most nodes of the coming round."""
        found = super().gamma(rows)
        look = self.appraisal
        look.promised = 0.0
        look.trust = (self._held + TRUST * TRUSTED) / (self._promised + TRUSTED)
        look.rate = (self._tokens + RATE * RATED) / (self._time + RATED)
        look.v = self.costs.v(found[0] + 1) if self.costs.drafting_known else ()
        return found

    def _best(self) -> int:
        """Nodes are judged one by one when they are known; rows of a batch get chains, judged by their past."""
        if len(self._rows) > 1:
            return super()._best()
        return min(self.gamma_max, max(LOOK, GROWTH * (self.costs.reach - 1)))

    def _learn(self, steps: list[Step]) -> None:
        if len(steps) == 1:
            (step,) = steps
            self._promised = MEMORY * self._promised + self.appraisal.promised
            self._held = MEMORY * self._held + len(step.path) * (self.appraisal.promised > 0)
            time = self.costs.v(len(step.drafted) + 1)[-1] + self.costs.c * len(step.drafted)
            self._time = MEMORY * self._time + time
            self._tokens = MEMORY * self._tokens + len(step.emitted)
        super()._learn(steps)


class Rescue:
    """What siblings bring where the chain is refused: how often one of m is taken, m / (m + HALF) times what past
    refusals say of that, and how many tokens there are from it on (1 where siblings are leaves).
    """

    def __init__(self) -> None:
        self._taken = self._thought = self._tokens = WORTH

    def learn(self, step: Step) -> None:
        """A round; only one with siblings whose chain was refused says anything."""
        length = step.length
        beside, kept = len(step.drafted) - length, chain_accepted(step)
        gained = len(step.path) - kept
        if not beside or not (gained or (step.token is not None and kept < length)):
            return
        self._taken = MEMORY * self._taken + bool(gained)
        self._tokens = MEMORY * self._tokens + gained
        self._thought = MEMORY * self._thought + _thought(beside)

    def __call__(self, siblings: int) -> float:
        """Expected tokens with so many siblings."""
        return min(0.95, _thought(siblings) * self._taken / self._thought) * self._tokens / self._taken


def _thought(siblings: int) -> float:
    return siblings / (siblings + HALF)


class Sideways(Protocol):
    """What grows a chain sideways: at most `nodes` draft nodes a row, the chain's own among them."""

    nodes: int


class ExpandingPace(GoodputPace):
    """For a model's tree: gamma is the depth; `expansion` is told how many nodes a round may have."""

    def __init__(self, expansion: Sideways, most: int, gamma_max: int = GAMMA_MAX, costs: Costs | None = None) -> None:
        """`most`: nodes of a round, chain and siblings together."""
        self.expansion, self.most = expansion, most
        super().__init__(gamma_max, costs)

    def reset(self) -> None:
        super().reset()
        self.rescue = Rescue()

    def gamma(self, rows: list[int]) -> list[int]:
        """The depth of the coming round, the same for all rows."""
        found = super().gamma(rows)
        self.expansion.nodes = max(found) + (self._beside(max(found)) if self.costs.drafting_known else 2)
        return found

    def expected(self, limit: int) -> list[float]:
        """Expected tokens per plain pass for depth 0 … `limit`, with the number of siblings that is best there."""
        return [max(self._rate(gamma, beside) for beside in self._options(gamma)) for gamma in range(limit + 1)]

    def _options(self, gamma: int) -> list[int]:
        return [count for count in SIBLINGS if gamma and gamma + count <= self.most] or [0]

    def _beside(self, gamma: int) -> int:
        spare = self._account.spare(self.costs) + SLACK - gamma * self.costs.c
        v = self.costs.v(gamma + max(self._options(gamma)) + 1)
        fits = [count for count in self._options(gamma) if v[gamma + count] - 1 <= spare] or [0]
        return max(fits, key=lambda count: (self._rate(gamma, count), -count))

    def _rate(self, gamma: int, beside: int) -> float:
        alphas = self.acceptance.alphas[:gamma]
        chain = expected_tokens(alphas)
        whole = chain[gamma] - chain[gamma - 1] if gamma else 1.0  # the chance that all of the chain is accepted
        tokens = chain[gamma] + (1 - whole) * self.rescue(beside)
        return tokens / (gamma * self._calls * self.costs.c + self.costs.v(gamma + beside + 1)[-1])

    def _learn(self, steps: list[Step]) -> None:
        for step in steps:
            self.rescue.learn(step)
        super()._learn(steps)

    def _paid_for(self, step: Step) -> int:
        return step.length
