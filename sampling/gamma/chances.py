"""How often what was hoped for came: the one estimator behind every choice of `gamma auto`.

A :class:`RunningRatio` is Σ came / Σ expected over rounds, newer ones weighing more. What is counted its owner says:
drafts accepted at a position (of 1 each), tokens that a tree's paths promised, tokens for a drafter's pass. A new
answer begins with what the answers before it were on average, which weighs as much as some outcomes of its own: texts
differ.
Knows counts only: no tokens, distributions, clocks or costs.
"""

from __future__ import annotations

from collections.abc import Hashable

MEMORY = 0.98  # what an outcome keeps of its weight from round to round: 50 rounds
FIRST = 7 / 3  # outcomes that a guess is worth before anything was seen: the first one has weight .3
WORTH = 30.0  # outcomes that the answers before are worth in a new one, at most
KEPT = 0.9  # what an answer keeps of its weight from answer to answer: ten answers


class RunningRatio:
    """One running ratio. `guess` is what it is before anything was seen, worth `worth` outcomes (0: nothing)."""

    __slots__ = ("_came", "_expected", "_first", "_guessed", "_past_came", "_past_expected", "_weight")

    def __init__(self, guess: float, worth: float = FIRST) -> None:
        self._first = guess, worth
        self._past_came = self._past_expected = 0.0  # of answers that are over
        self._came = self._expected = self._guessed = self._weight = 0.0
        self.begin()

    def begin(self) -> None:
        """A new answer: what this one was goes into the average of all, which the next one begins with.

        Answers that said nothing bring that back to the first guess, so that nothing is given up for good.
        """
        self._past_came = KEPT * self._past_came + self._came
        self._past_expected = KEPT * self._past_expected + self._expected
        self._came = self._expected = 0.0
        guess, worth = self._first
        known = worth + self._past_expected
        self._weight = min(WORTH, known)
        self._guessed = self._weight * (guess * worth + self._past_came) / known if known else 0.0

    def fade(self, all_of_it: bool = False) -> None:
        """A round has passed. `all_of_it`: what the answer began with fades too; else the ratio comes back to that."""
        self._came *= MEMORY
        self._expected *= MEMORY
        if all_of_it:
            self._guessed *= MEMORY
            self._weight *= MEMORY

    def add(self, came: float, expected: float = 1.0) -> None:
        """What came, and what was expected to."""
        self._came += came
        self._expected += expected

    def learn(self, came: float, expected: float = 1.0) -> None:
        """A round that says something has passed."""
        self.fade()
        self.add(came, expected)

    def restart(self, value: float = 0.0, worth: float = 0.0) -> None:
        """The text has changed: nothing before counts in this answer, and `value` as so many outcomes."""
        self._came, self._expected = value * worth, worth
        self._guessed = self._weight = 0.0

    def beside(self, guess: float, worth: float) -> float:
        """The ratio, where a guess that is worth so many outcomes stands beside what was seen."""
        return (self._came + self._guessed + guess * worth) / (self._expected + self._weight + worth)

    @property
    def value(self) -> float:
        """The ratio; ZeroDivisionError before anything was seen or guessed."""
        return (self._came + self._guessed) / (self._expected + self._weight)


class Chances:
    """Every ratio of a drafter, by name: its controller and the drafter itself learn of the same rounds."""

    def __init__(self) -> None:
        self._by_name: dict[Hashable, RunningRatio] = {}

    def of(self, name: Hashable, guess: float, worth: float = FIRST) -> RunningRatio:
        """The ratio of this name; the guess is taken where there is none yet."""
        if name not in self._by_name:
            self._by_name[name] = RunningRatio(guess, worth)
        return self._by_name[name]

    def begin(self) -> None:
        """A new answer."""
        for one in self._by_name.values():
            one.begin()
