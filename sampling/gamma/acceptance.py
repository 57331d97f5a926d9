"""How far drafts get, learned from past rounds: alpha by position, promised tokens of a tree.

alpha_j = P(position j is drafted *and* accepted | the positions before it were accepted), so that a drafter that often
drafts nothing is not overrated. Knows outcomes only: no tokens, distributions, clocks or costs.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from sampling.events import Step
from sampling.gamma.constants import BORROWED, PENDING, PRIOR, PROMISED, RECENT, SHIFT
from sampling.gamma.ratios import Ratios


def chain_accepted(step: Step) -> int:
    """Return the number of accepted nodes of the first chain: first children all the way down."""
    edges = enumerate(pairwise((-1, *step.path)))
    other = (count for count, (parent, node) in edges if step.parents.index(parent) != node)
    return next(other, len(step.path))


class Acceptance:
    """Estimates of how far a drafter's drafts get, from past rounds. `calibration`: the share that is accepted of
    the tokens which best-first trees promise.

    Args:
        limit: positions with an estimate each.
        prior: alpha by position on held-out text, as stored with a draft head; () if there is none.
        ratios: holds the estimates, if they outlive this object.
    """

    def __init__(self, limit: int = 16, prior: Sequence[float] = (), ratios: Ratios | None = None) -> None:
        self.ratios = ratios = Ratios() if ratios is None else ratios
        guesses = [*(prior or (PRIOR,)), *[None] * limit][:limit]
        self._accepted = [
            ratios.of(("accepted", position), *((0.0, 0.0) if guess is None else (guess,)))
            for position, guess in enumerate(guesses)
        ]
        self._drafted = [ratios.of(("drafted", position), 1.0) for position in range(limit)]
        self.calibration = ratios.of("promised", PROMISED)
        self._recent: list[float | None] = [None] * limit
        self._pending: deque[tuple[Step, int, Sequence[Step]]] = deque(maxlen=PENDING)

    def begin(self) -> None:
        """Start a new answer."""
        self._catch_up()
        self.ratios.begin()
        self._recent = [None] * len(self._accepted)

    def learn(self, step: Step, gamma: int, steps: Sequence[Step]) -> None:
        """Learn from one round, of whose `steps` `step` is the slowest row's. `gamma`: tokens allowed, the most of any
        row."""
        self._pending.append((step, gamma, steps))

    def _catch_up(self) -> None:
        while self._pending:
            step, gamma, steps = self._pending.popleft()
            drafted = max(other.length for other in steps)
            self.add(step.gamma, chain_accepted(step), step.token is None)
            for position, ratio in enumerate(self._drafted[:gamma]):
                ratio.learn(float(drafted > position))

    def add(self, gamma: int, accepted: int, ended: bool = False) -> None:
        """Count one round. `ended`: an accepted stop token closed the row, so the next position was not examined."""
        # All positions fade, so that one that is no longer drafted after bad luck recovers.
        for ratio in self._accepted:
            ratio.fade()
        for position in range(min(gamma, accepted if ended else accepted + 1, len(self._accepted))):
            self._count(position, float(accepted > position))

    def _count(self, position: int, outcome: float) -> None:
        accepted, recent = self._accepted[position], self._recent[position]
        recent = self._until(position + 1)[position] if recent is None else recent
        self._recent[position] = recent = (1 - RECENT) * recent + RECENT * outcome
        accepted.add(outcome)
        if abs(recent - self._until(position + 1)[position]) > SHIFT:
            accepted.restart(recent, (2 - RECENT) / RECENT)  # outcomes that a mean of this weight is worth
            for deeper in range(position + 1, len(self._accepted)):
                self._accepted[deeper].restart()
                self._recent[deeper] = None

    @property
    def alphas(self) -> list[float]:
        """alpha_1 … alpha_limit; the position before is the guess for one that is seldom reached."""
        self._catch_up()
        return self._until(len(self._accepted))

    def _until(self, count: int) -> list[float]:
        alphas = [self._accepted[0].value]
        for ratio in self._accepted[1:count]:
            alphas.append(ratio.with_guess(alphas[-1], BORROWED))
        return alphas

    @property
    def drafted(self) -> list[float]:
        """P(position j is drafted | gamma allows it): 1 for a drafter that always drafts."""
        self._catch_up()
        return [ratio.value for ratio in self._drafted]


def expected_tokens(alphas: Sequence[float]) -> list[float]:
    """Return 1 + Σ_{j≤γ} ∏_{i≤j} α_i for γ = 0 … len(alphas): tokens of a round."""
    return list(accumulate([1.0, *accumulate(alphas, mul)]))
