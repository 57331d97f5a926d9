"""How far drafts get: alpha by position, learned from past rounds.

alpha_j = P(position j is drafted *and* accepted | the positions before it were accepted), so that a
drafter that falls silent is not overrated. Knows outcomes only: no tokens, distributions, clocks or costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from sampling.events import Step
from sampling.gamma.chances import Chances

WEIGHT = 0.3  # of the newest outcome in the quick mean
PRIOR = 0.85
SHIFT = 0.5  # quick and steady mean so far apart: the text has changed
LATER = 64  # rounds that wait to be asked about, at most: older ones hardly count
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
    """Estimates of alpha_1 … alpha_`limit`, a :class:`sampling.gamma.chances.RunningRatio` each.

    Where a mean of weight .3, which follows a change within a few rounds but scatters by ±.2, leaves the
    estimate by more than .5 the text has changed: the estimate starts again from the quick mean, and what
    was known of deeper positions, which came from the other text, is dropped. A position seldom
    reached leans on the one before it.
    """

    def __init__(self, limit: int, chances: Chances | None = None) -> None:
        chances = Chances() if chances is None else chances
        first = chances.of(("held", 0), PRIOR)
        self._held = [first, *(chances.of(("held", place), 0.0, 0.0) for place in range(1, limit))]
        self._given = [chances.of(("given", place), 1.0) for place in range(limit)]
        self._quick: list[float | None] = [None] * limit
        self._alphas: list[float] = []
        self._new: deque[tuple[Step, int, int]] = deque(maxlen=LATER)  # the latest that nobody has asked about yet

    def begin(self) -> None:
        """A new answer: another text."""
        self._quick = [None] * len(self._held)
        self._alphas = []

    def learn(self, step: Step, asked: int, given: int) -> None:
        """One round, of a batch the row that counts; of a tree the chain that its siblings stand beside. `asked` and
        `given` are the most tokens of any row: one that drafts makes the pass wide for all."""
        self._new.append((step, asked, given))

    def catch_up(self) -> None:
        """Take in what came since somebody last asked: who judges a tree's nodes one by one seldom does."""
        while self._new:
            step, asked, given = self._new.popleft()
            self.add(step.gamma, chain_accepted(step), step.token is None)
            for place, one in enumerate(self._given[:asked]):
                one.learn(float(given > place))

    def add(self, asked: int, accepted: int, ended: bool = False) -> None:
        """One round. `ended`: an accepted stop token closed the row, so the position behind it was not examined."""
        # Time passes for all positions, else one that had bad luck and is no longer asked for stays condemned.
        for one in self._held:
            one.fade(all_of_it=True)
        self._alphas = []
        examined = accepted if ended else accepted + 1
        for place in range(min(asked, examined, len(self._held))):
            self._learn(place, float(accepted > place))

    @property
    def alphas(self) -> list[float]:
        """The estimates, first position first."""
        self.catch_up()
        if not self._alphas:
            self._alphas = self._until(len(self._held))
        return self._alphas

    def _until(self, count: int) -> list[float]:
        """The first `count` of them."""
        found = [self._held[0].value]
        for one in self._held[1:count]:
            found.append(one.beside(found[-1], BORROWED))
        return found

    @property
    def given(self) -> list[float]:
        """P(position j is drafted | j is asked for): 1 for a drafter that always drafts."""
        self.catch_up()
        return [one.value for one in self._given]

    def _learn(self, place: int, outcome: float) -> None:
        held, quick = self._held[place], self._quick[place]
        quick = self._until(place + 1)[place] if quick is None else quick
        self._quick[place] = quick = (1 - WEIGHT) * quick + WEIGHT * outcome
        held.add(outcome)
        if abs(quick - self._until(place + 1)[place]) > SHIFT:  # start again from the quick mean
            held.restart(quick, (2 - WEIGHT) / WEIGHT)  # outcomes that a mean of this weight is worth
            for deeper in range(place + 1, len(self._held)):
                self._held[deeper].restart()
                self._quick[deeper] = None


def expected_tokens(alphas: Sequence[float]) -> list[float]:
    """1 + Σ_{j≤γ} ∏_{i≤j} α_i for γ = 0 … len(alphas): tokens of a round."""
    return list(accumulate([1.0, *accumulate(alphas, mul)]))
