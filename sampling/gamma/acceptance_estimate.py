"""How far drafts get: alpha by position, learned from past rounds.

alpha_j = P(position j is drafted *and* accepted | the positions before it were accepted), so that a
drafter that falls silent is not overrated. Knows outcomes only: no tokens, distributions, clocks or costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from sampling.events import Step

WEIGHT = 0.3  # of the newest outcome in the quick mean, and of the first one in the steady mean
PRIOR = 0.85
MEMORY = 0.98  # what an outcome keeps of its weight in the steady mean from round to round: 50 rounds
SHIFT = 0.5  # quick and steady mean so far apart: the text has changed
GIVEN_WEIGHT = 0.1  # of the newest round in the chance that a position is drafted at all
BORROWED = 6.0  # outcomes that the position before is worth as a guess for this one


def chain_accepted(step: Step) -> int:
    """How many nodes of the first chain, first children all the way, were accepted."""
    chain = -1
    for count, node in enumerate(step.path):
        if next(i for i, parent in enumerate(step.parents) if parent == chain) != node:
            return count
        chain = node
    return len(step.path)


class Acceptance:
    """Estimates of alpha_1 … alpha_`limit`.

    An exponential mean of weight .3 (prior .85) follows a change within a few rounds but scatters by
    ±.2, which moves the best gamma by several. So its weight falls, as that of a plain mean does, to
    about 1 / 50 while outcomes agree with the estimate; where a second mean that keeps the weight .3 leaves
    it by more than .5 the text has changed: the estimate starts again from the quick mean, and what
    was known of deeper positions, which came from the other text, is dropped. A position seldom
    reached leans on the one before it.
    """

    def __init__(self, limit: int) -> None:
        start = (1 - WEIGHT) / WEIGHT  # outcomes that the prior is worth: the first outcome has weight .3
        self._sum = [PRIOR * start] + [0.0] * (limit - 1)
        self._count = [start] + [0.0] * (limit - 1)
        self._quick: list[float | None] = [None] * limit
        self.given = [1.0] * limit  # P(position j is drafted | j is asked for): 1 for a drafter that always drafts

    def learn(self, steps: Sequence[Step]) -> None:
        """One round, a Step a row; of a tree the chain that its siblings stand beside counts."""
        self.add([(step.gamma, chain_accepted(step), step.token is None) for step in steps])
        # One row that drafts makes the pass wide for all.
        asked, given = max(step.gamma for step in steps), max(step.length for step in steps)
        for place in range(min(asked, len(self.given))):
            self.given[place] += (float(given > place) - self.given[place]) * GIVEN_WEIGHT

    def add(self, outcomes: Sequence[tuple[int, int, bool]]) -> None:
        """One round of one or more rows: (asked, accepted, ended) of each.

        `ended`: an accepted stop token closed the row, so the position behind it was not examined.
        """
        deepest = max((asked for asked, _, _ in outcomes), default=0)
        # Time passes for all positions, else one that had bad luck and is no longer asked for stays condemned.
        self._sum = [MEMORY * total for total in self._sum]
        self._count = [MEMORY * count for count in self._count]
        for position in range(1, min(deepest, len(self._sum)) + 1):
            seen = [
                accepted >= position
                for asked, accepted, ended in outcomes
                if asked >= position and (accepted >= position or (accepted == position - 1 and not ended))
            ]
            if seen:
                self._learn(position - 1, sum(seen) / len(seen))

    @property
    def alphas(self) -> list[float]:
        """The estimates, first position first."""
        found: list[float] = []
        for total, count in zip(self._sum, self._count, strict=True):
            guess, worth = (found[-1], BORROWED) if found else (PRIOR, 0.0)
            found.append((total + worth * guess) / (count + worth))
        return found

    def _learn(self, place: int, outcome: float) -> None:
        before = self.alphas[place]
        quick = self._quick[place]
        quick = before if quick is None else quick
        self._quick[place] = quick = quick + WEIGHT * (outcome - quick)
        self._sum[place] += outcome
        self._count[place] += 1.0
        if abs(quick - self.alphas[place]) > SHIFT:  # start again from the quick mean
            worth = (2 - WEIGHT) / WEIGHT  # outcomes that a mean of this weight is worth
            self._sum[place], self._count[place] = quick * worth, worth
            for deeper in range(place + 1, len(self._sum)):
                self._sum[deeper], self._count[deeper], self._quick[deeper] = 0.0, 0.0, None


def expected_tokens(alphas: Sequence[float]) -> list[float]:
    """1 + Σ_{j≤γ} ∏_{i≤j} α_i for γ = 0 … len(alphas): tokens of a round."""
    return list(accumulate([1.0, *accumulate(alphas, mul)]))
