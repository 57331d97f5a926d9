"""The rounds of an answer as pictures, looked through by keys. Knows how to go from one to another; a picture is
app/screen/trace.py's.
"""

from __future__ import annotations

from collections.abc import Callable

from app.screen.beams import BeamTrace
from app.screen.palette import Look
from app.screen.rows import Row
from app.screen.trace import Trace
from app.screen.viewer import Action, Scroll
from utils.errors import UserError


class RoundPictures:
    """A viewer's content: round `number` (the prefill is round 0) of the trace that `make` draws, or step `number`."""

    help = "n next round  p previous  up/down scroll  q leave"

    def __init__(self, make: Callable[[Look], Trace | BeamTrace], number: int) -> None:
        self.make, self.number, self.scroll = make, number, Scroll()
        self.first = make(Look()).first
        self.last = self.first + len(make(Look()).steps) - 1
        if not self.first <= number <= self.last:
            raise UserError(f"there is no round {number}: the answer has rounds {self.first} to {self.last}")

    def rows(self, look: Look) -> list[Row]:
        """The picture, as much of it as fits."""
        return self.scroll.part(self.picture(look), look)

    def picture(self, look: Look) -> list[Row]:
        """The whole picture."""
        return self.make(look.sized()).picture(self.number)

    def to(self, number: int) -> None:
        """Show another round; the first or last one instead of none."""
        self.number, self.scroll.top = max(self.first, min(self.last, number)), 0

    @property
    def keys(self) -> dict[str, Action]:
        forth, back = lambda: self.to(self.number + 1), lambda: self.to(self.number - 1)
        turns: dict[str, Action] = {"n": forth, "right": forth, "p": back, "left": back}
        return {**turns, "home": lambda: self.to(self.first), "end": lambda: self.to(self.last), **self.scroll.keys}
