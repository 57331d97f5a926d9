"""A beam search as it reads: the best beam's text as the answer so far, the others with their ranks and scores.

Texts are put together when they are asked for, not at every step: beams that lead change as they grow. Knows no screen,
no models and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.spans import REPLACEMENT, Decode, Span, Window
from sampling.beam_tree import BeamTree, Hypothesis
from sampling.events import BeamStep, Event, Finished


class BeamLine(NamedTuple):
    """One beam: its text (what it adds to a continued answer), its score, and whether it has finished."""

    text: str
    score: float
    finished: bool


def grown_by(decode: Decode, parent: Hypothesis, token: int) -> str:
    """What a beam says with one more token."""
    return Window(decode, parent.tokens).ahead([token])[0]


class BeamReader:
    """Turns the events of a beam search into text; takes the place of :class:`app.spans.Spanner`.

    `context` holds ids that came before and are on the screen already (an answer that is continued).
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode, self._context = decode, list(context)
        self._before = decode(self._context).rstrip(REPLACEMENT) if self._context else ""
        self._tree = BeamTree()
        self._most = 0
        self._lines: tuple[BeamLine, ...] | None = ()

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, BeamStep):
            self._tree.add(event)
            self._most, self._lines = event.num_beams, None
        elif isinstance(event, Finished):
            if event.reason != "interrupted":
                self._tree.close()
            self._lines = None if self._most else ()

    @property
    def beams(self) -> tuple[BeamLine, ...]:
        """The best beams, best first, at most as many as run at a time; none before the first step."""
        if self._lines is None:
            ranked = self._tree.ranked[: self._most]
            self._lines = tuple(BeamLine(self._text(beam), beam.score, beam.finished) for beam in ranked)
        return self._lines

    @property
    def spans(self) -> list[Span]:
        """The best beam's text."""
        text = self.beams[0].text if self.beams else ""
        return [Span(text, "plain")] if text else []

    def _text(self, beam: Hypothesis) -> str:
        whole = self._decode([*self._context, *beam.tokens])[len(self._before) :]
        return whole if beam.finished else whole.rstrip(REPLACEMENT)  # a character may not be complete yet
