"""A finished answer with everything that is known about it: its turn, the answer of each lane, the models that ran.

Knows tracks by their figures and ids; draws nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.chat.conversation import Turn
from app.lanes.answers import Answer, compared, shown_settings
from app.screen.inspection import SaidToken
from app.screen.live import Track, tokens_of
from app.settings.table import Settings


@dataclass(frozen=True)
class Answered:
    """A finished answer with everything that is known about it."""

    pair: str
    settings: Settings
    turn: Turn
    tracks: list[Track]
    models: Mapping[str, str] = field(default_factory=dict)  # that ran, in the words of app/screen/view.py
    earlier: tuple[SaidToken, ...] = ()  # of a part of the answer from before

    @property
    def tokens(self) -> list[SaidToken]:
        """The answer token by token, as far as its drafts are known."""
        return [*self.earlier, *tokens_of(self.tracks[-1])]

    @property
    def before(self) -> str:
        """The text before the first of :attr:`tokens`."""
        track = self.tracks[-1]
        return "" if self.earlier or not track.before else track.decode(list(track.before))

    @property
    def answers(self) -> list[Answer]:
        """The answer of each lane."""
        return [track.answer() for track in self.tracks]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `run --json` prints."""
        answers = self.answers
        return {
            "pair": self.pair,
            "prompt": self.turn.user,
            "settings": shown_settings(self.settings),
            "results": [answer.to_json() for answer in answers],
            **compared(answers),
        }
