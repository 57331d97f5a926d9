"""The steps of a beam search → its beams: which are running, which have finished, which is best.

The steps say only by what token which beam grew; here the sequences are put together, for the search itself, the
figures and the screen alike. Pure arithmetic over :mod:`sampling.events`; knows no text, no tensors and no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from sampling.events import BeamStep


class Hypothesis(NamedTuple):
    """A beam with all its tokens (a closing stop id included). `score` is `log_p` with the length penalty."""

    tokens: tuple[int, ...]
    log_p: float
    score: float
    finished: bool


class BeamTree:
    """The beams after the steps so far. Both lists are ordered best first."""

    def __init__(self) -> None:
        self.running = [Hypothesis((), 0.0, 0.0, False)]
        self.finished: list[Hypothesis] = []

    def add(self, step: BeamStep) -> None:
        """Grow by one step. Finished beams keep their score; equal scores keep the order in which they finished."""
        before, self.running = self.running, []
        for beam in step.beams:
            grown = (*before[beam.parent].tokens, beam.token)
            if beam.fate == "kept":
                self.running.append(Hypothesis(grown, beam.log_p, beam.score, False))
            elif beam.fate == "finished":
                self.finished.append(Hypothesis(grown, beam.log_p, beam.score, True))
        self.finished.sort(key=lambda beam: -beam.score)

    def close(self) -> None:
        """The search is over: beams that are still running are out, unless none has finished."""
        if self.finished:
            self.running = []

    @property
    def ranked(self) -> list[Hypothesis]:
        """Running and finished beams, best first; of equal scores the finished one."""
        return sorted([*self.finished, *self.running], key=lambda beam: -beam.score)

    @property
    def best(self) -> Hypothesis:
        """The answer so far; without tokens before the first step."""
        return self.ranked[0]
