"""`gamma auto` for trees: how deep and how wide, by measured goodput (sampling/gamma/goodput.py chooses for chains).

A tree of tables costs nothing to draft and knows of each node how likely its path is: gamma is how many it may have at
most, and the budget says what a node must bring to be worth its place in the pass, by v(n), by what a pass brings and
by how far such predictions came true (:class:`sampling.types.NodeCosts`). A model's tree has two figures: gamma is
its depth, for which the drafter is paid. It is judged as the chain of its first children, with as many siblings beside
it as what they bring where the chain is rejected is worth in v(n); CaPE's are leaves, a dynamic tree goes on below.
Knows no drafters, no tokens and no clock; decides from past rounds only, as every gamma controller does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sampling.events import Step
from sampling.gamma.acceptance_estimate import chain_accepted, expected_tokens
from sampling.gamma.chances import Chances
from sampling.gamma.costs import Costs
from sampling.gamma.goodput import GAMMA_MAX, REFERENCE, SLACK, GoodputController
from sampling.types import Budget, NodeCosts, Traits, Tree

SIBLINGS = (0, 1, 2, 4, 6, 8, 12, 16, 24)  # how many may stand beside a chain
HALF = 10.0  # siblings that are thought to be taken every other time where the chain is rejected
MOST_NODES = 11  # of a best-first tree: wider passes cost more than such nodes bring (docs/notes.md)
TRUST = 0.85  # share of the predicted tokens that comes
AT_ONCE = 4  # rounds that are learned from together


def controller_of(
    traits: Traits, nodes: int, costs: Costs | None = None, chances: Chances | None = None
) -> GoodputController:
    """What chooses gamma for a drafter whose rounds may have so many nodes."""
    if traits.tree is Tree.BEST_FIRST:
        return BestFirstController(min(nodes, MOST_NODES), costs, chances)
    if traits.tree is Tree.SIDEWAYS:
        return SidewaysController(nodes, costs=costs, chances=chances)
    return GoodputController(costs=costs, whole=traits.most, chances=chances)


class BestFirstController(GoodputController):
    """For trees that grow best first: gamma is the most nodes.

    Rounds of one row are learned from a few at a time once costs are known: a pass evicts this data from the CPU's
    caches, and the first update after it costs as much as three more. Until then the last budget stands, as long as
    what may be lost allows it even if nothing came of those rounds.
    """

    def __init__(self, gamma_max: int = MOST_NODES, costs: Costs | None = None, chances: Chances | None = None) -> None:
        super().__init__(gamma_max, costs, chances=chances)
        self._trust = self.chances.of("promised", TRUST)
        self._late: list[tuple[list[Step], float]] = []  # rounds that were not learned from yet
        self._standing: Budget | None = None  # until they are; None: every round is learned from at once
        self._losses: list[float] = []  # passes that a round loses at most, by its nodes
        self._left = 0.0  # that may be lost, if nothing came of the late rounds

    def begin(self) -> None:
        self._catch_up()
        super().begin()

    def budget(self, rows: list[int]) -> Budget:
        if self._late:
            if len(rows) == 1 and self._standing is not None and self._losses[-1] <= self._left:
                return self._standing
            self._catch_up()
        found = super().budget(rows)
        self._standing = None
        if len(rows) == 1 and found.costs is not None and self.costs.references >= len(REFERENCE):
            self._standing, asked = found, self.costs.waking - 1
            self._losses = [v + asked for v in found.costs.v]
            self._left = self._account.left + SLACK
        return found

    def summary(self) -> dict[str, Any]:
        self._catch_up()
        return super().summary()

    def _node_costs(self, gamma: int) -> NodeCosts:
        return NodeCosts(self.costs.v(gamma + 1), self._trust.value, self._rate.value)

    def _priced(self, drafted: int) -> int:
        """A round's drafting costs the same whatever it drafts."""
        return 1

    def _best(self, rows: int) -> int:
        """Nodes are judged one by one when they are known; rows of a batch get chains, judged as chains."""
        return super()._best(rows) if rows > 1 else self.reach

    def observe(self, steps: list[Step], predicted: float = 0.0) -> None:
        self._late.append((steps, predicted))
        if self._standing is not None and len(self._late) < AT_ONCE:
            self._left -= self._losses[len(steps[0].drafted)]
        else:
            self._catch_up()

    def _catch_up(self) -> None:
        late, self._late = self._late, []
        for steps, predicted in late:
            if len(steps) == 1:
                self._trust.learn(len(steps[0].path) * (predicted > 0), predicted)
            super().observe(steps, predicted)


class Rescue:
    """What siblings bring where the chain is rejected: how often one of m is taken, m / (m + HALF) times what past
    rejections say of that, and how many tokens there are from it on (1 where siblings are leaves).
    """

    def __init__(self, chances: Chances | None = None) -> None:
        chances = Chances() if chances is None else chances
        self._taken, self._tokens = chances.of("beside", 1.0), chances.of("behind", 1.0)

    def learn(self, step: Step) -> None:
        """A round; only one with siblings whose chain was rejected says anything."""
        length = step.length
        beside, accepted = len(step.drafted) - length, chain_accepted(step)
        gained = len(step.path) - accepted
        if not beside or not (gained or (step.token is not None and accepted < length)):
            return
        self._taken.learn(float(gained > 0), beside / (beside + HALF))
        if gained:
            self._tokens.learn(gained)

    def __call__(self, siblings: int) -> float:
        """Expected tokens with so many siblings."""
        return min(0.95, siblings / (siblings + HALF) * self._taken.value) * self._tokens.value


class SidewaysController(GoodputController):
    """For a model's tree: gamma is the depth; the budget says how many nodes a round may have."""

    def __init__(
        self,
        most: int,
        gamma_max: int = GAMMA_MAX,
        costs: Costs | None = None,
        chances: Chances | None = None,
    ) -> None:
        """`most`: nodes of a round, chain and siblings together."""
        super().__init__(gamma_max, costs, chances=chances)
        self.most, self.rescue = most, Rescue(self.chances)

    def budget(self, rows: list[int]) -> Budget:
        """The depth of the coming round, the same for all rows, and its nodes."""
        found = super().budget(rows)
        depth = found.depth[0]
        return replace(found, nodes=depth + (self._beside(depth) if self.costs.drafting_known else 2))

    def expected(self, limit: int) -> list[float]:
        """Expected tokens per plain pass for depth 0 … `limit`, with the number of siblings that is best there."""
        return [max(rates.values()) for rates in self._rates(range(limit + 1))]

    def _beside(self, gamma: int) -> int:
        """How many siblings to stand beside a chain, of those whose loss can be borne."""
        left = self._account.left + SLACK - gamma * self.costs.c
        (rates,) = self._rates([gamma])
        v = self.costs.v(gamma + max(rates) + 1)
        fits = [count for count in rates if v[gamma + count] - 1 <= left] or [0]
        return max(fits, key=lambda count: (rates[count], -count))

    def _rates(self, gammas: Sequence[int]) -> list[dict[int, float]]:
        """For each depth, by number of siblings: expected tokens per plain pass."""
        chain = expected_tokens(self.acceptance.alphas[: max(gammas)])
        c, v = self.draft_cost, self.costs.v(max(gammas) + SIBLINGS[-1] + 1)
        rescued = [(count, self.rescue(count)) for count in SIBLINGS]
        found = []
        for gamma in gammas:
            whole = chain[gamma] - chain[gamma - 1] if gamma else 1.0  # the chance that all of the chain is accepted
            fit = [one for one in rescued if gamma and gamma + one[0] <= self.most] or rescued[:1]
            found.append(
                {count: (chain[gamma] + (1 - whole) * saved) / (gamma * c + v[gamma + count]) for count, saved in fit}
            )
        return found

    def observe(self, steps: list[Step], predicted: float = 0.0) -> None:
        for step in steps:
            self.rescue.learn(step)
        super().observe(steps, predicted)

    def _paid_for(self, step: Step) -> int:
        return step.length
