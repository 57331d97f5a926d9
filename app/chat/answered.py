"""A finished answer with everything that is known about it: its turn, what every lane made of it, what ran.

Knows tracks by their figures and ids; draws nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.chat.conversation import Turn
from app.lanes.answers import Answer, compared, results, shown_settings
from app.screen.live import Track
from app.settings.table import Settings


@dataclass(frozen=True)
class Answered:
    """A finished answer with everything that is known about it."""

    pair: str
    settings: Settings
    turn: Turn
    tracks: list[Track]
    models: Mapping[str, str] = field(default_factory=dict)  # what ran, as app/screen/view.py tells it
    shown: float | None = None  # share of a race's time that screen, text and figures took; None where none was drawn

    @property
    def answers(self) -> list[Answer]:
        return [track.answer() for track in self.tracks]

    def to_json(self) -> dict[str, Any]:
        """The object that `run --json` prints."""
        answers = self.answers
        return {
            "pair": self.pair,
            "prompt": self.turn.user,
            "settings": shown_settings(self.settings),
            "results": results(answers),
            **compared(answers),
        }
