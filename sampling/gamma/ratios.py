"""Running ratios of actual to expected outcomes: the one estimator of `gamma auto`.

A :class:`RunningRatio` is Σ actual / Σ expected over rounds, newer rounds weighing more. Its owner defines the outcome:
drafts accepted at a position (1 expected each), tokens that a tree's probabilities promise. A new answer begins with
the average of the answers before it, worth a few outcomes, because texts differ.
Knows counts only: no tokens, distributions, clocks or costs.
"""

from collections.abc import Hashable

from sampling.gamma.constants import ANSWER_MEMORY, FIRST, MEMORY, WORTH


class RunningRatio:
    """One running ratio. `guess` is its value before any outcome, worth `worth` outcomes (0: nothing)."""

    __slots__ = ("_actual", "_expected", "_first", "_past_actual", "_past_expected", "_prior", "_weight")

    def __init__(self, guess: float, worth: float = FIRST) -> None:
        self._first = guess, worth
        self._past_actual = self._past_expected = 0.0  # of finished answers
        self._actual = self._expected = self._prior = self._weight = 0.0
        self.begin()

    def begin(self) -> None:
        """Start a new answer from the average of the finished ones.

        Answers without outcomes bring that average back to the first guess, so that no ratio stays low forever.
        """
        self._past_actual = ANSWER_MEMORY * self._past_actual + self._actual
        self._past_expected = ANSWER_MEMORY * self._past_expected + self._expected
        self._actual = self._expected = 0.0
        guess, worth = self._first
        known = worth + self._past_expected
        self._weight = min(WORTH, known)
        self._prior = self._weight * (guess * worth + self._past_actual) / known if known else 0.0

    def fade(self) -> None:
        """Lower the weight of earlier outcomes and of the prior by a round."""
        self._actual *= MEMORY
        self._expected *= MEMORY
        self._prior *= MEMORY
        self._weight *= MEMORY

    def add(self, actual: float, expected: float = 1.0) -> None:
        """Count an outcome beside its expectation."""
        self._actual += actual
        self._expected += expected

    def learn(self, actual: float, expected: float = 1.0) -> None:
        """Count the outcome of a round, and lower the weight of earlier ones."""
        self._actual = self._actual * MEMORY + actual
        self._expected = self._expected * MEMORY + expected

    def restart(self, value: float = 0.0, worth: float = 0.0) -> None:
        """Forget this answer and the prior, because the text has changed; go on from `value` as `worth` outcomes."""
        self._actual, self._expected = value * worth, worth
        self._prior = self._weight = 0.0

    def with_guess(self, guess: float, worth: float) -> float:
        """Return the ratio with `guess` counted as `worth` further outcomes."""
        return (self._actual + self._prior + guess * worth) / (self._expected + self._weight + worth)

    @property
    def value(self) -> float:
        """The ratio; ZeroDivisionError without outcomes and without a guess."""
        return (self._actual + self._prior) / (self._expected + self._weight)


class Ratios:
    """All ratios of a drafter by name: its controller and the drafter learn from the same rounds."""

    def __init__(self) -> None:
        self._by_name: dict[Hashable, RunningRatio] = {}

    def of(self, name: Hashable, guess: float, worth: float = FIRST) -> RunningRatio:
        """The ratio of this name, created from the guess if it is new."""
        if name not in self._by_name:
            self._by_name[name] = RunningRatio(guess, worth)
        return self._by_name[name]

    def begin(self) -> None:
        """Start a new answer."""
        for ratio in self._by_name.values():
            ratio.begin()
