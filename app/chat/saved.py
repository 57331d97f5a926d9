"""A finished answer with all that is known about it; a conversation as the text or JSON that /save writes and /load
reads; and an answer on the clipboard.

Texts are read through `decode`, so answers are whole only with the tokenizer they were made with. Knows no models and
no screen.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from app.chat.conversation import Turn
from app.lanes.answers import Answer, compared, shown_settings
from app.lanes.logged_lane import LoggedLane, event_of, settings_of
from app.screen.inspection import SaidToken
from app.screen.live import Track, tokens_of
from app.screen.trace import Rounds
from app.settings.table import Settings
from sampling.events import Reason
from utils.errors import UserError
from utils.growing_text import Decode

VERSION = 1
_KEYS = {
    **{name: name for name in ("user", "text", "reason", "seed", "regenerated")},
    **{"prompt_ids": "prompt", "answer_ids": "answer"},
}
_TOOLS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "-ib"), ("pbcopy",), ("clip.exe",))
_NEEDS = {"wl-copy": "WAYLAND_DISPLAY", "xclip": "DISPLAY", "xsel": "DISPLAY"}


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


def as_json(turns: Sequence[Turn], about: Mapping[str, Any]) -> str:
    """Return the conversation with ids, texts, settings, figures and events; `about`: pair and system prompt."""
    rows = [{name: getattr(turn, key) for name, key in _KEYS.items()} | turn.record for turn in turns]
    return json.dumps({"version": VERSION, **about, "turns": rows}, ensure_ascii=False, indent=1)


def as_text(turns: Sequence[Turn], system: str) -> str:
    """Return the conversation as plain text."""
    head = [f"[system]\n{system}\n"] if system else []
    return "\n".join([*head, *(f"[user]\n{turn.user}\n\n[assistant]\n{turn.text}\n" for turn in turns)])


def osc52(text: str) -> str:
    """Return the control sequence by which a terminal puts `text` on the clipboard, also over ssh."""
    return f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode('ascii')}\x07"


def local_clipboard(text: str) -> bool:
    """Put `text` on this machine's clipboard with the first tool that works; False if there is none."""
    data = text.encode("utf-8", "replace")
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 3, "check": True}
    for command in _TOOLS:
        if command[0] in _NEEDS and not os.environ.get(_NEEDS[command[0]]):
            continue
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, input=data, **quiet)
            return True
    return False


class _SavedTurn(BaseModel, extra="allow"):
    user: str
    text: str
    reason: Reason
    seed: int | None = None
    regenerated: int = 0
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    decodings: list[dict[str, Any]] | None = None

    def turn(self) -> Turn:
        more = {} if self.decodings is None else {"decodings": self.decodings, **(self.model_extra or {})}
        return Turn(record=more, **{key: getattr(self, name) for name, key in _KEYS.items()})


class _SavedLane(BaseModel):
    lane: LoggedLane
    prompt_n: int = Field(ge=0)
    events: list[dict[str, Any]]


class _Decoding(BaseModel):
    models: dict[str, Any]
    settings: dict[str, Any]
    lanes: list[_SavedLane] = Field(min_length=1)


class SavedChat(BaseModel):
    """A saved conversation. `tokenizer` is its fingerprint, None if the file has none."""

    version: Literal[1]
    system: str = ""
    tokenizer: str | None = None
    saved: list[_SavedTurn] = Field(alias="turns")

    @property
    def turns(self) -> list[Turn]:
        return [turn.turn() for turn in self.saved]


def read_chat(path: Path) -> SavedChat:
    """Read the conversation in a file; UserError, in one line, for any other file."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or "turns" not in data:
            raise UserError("holds no conversation that /save wrote")
        if data.get("version") != VERSION:
            raise UserError(f"has format {data.get('version')!r:.20}, this program reads {VERSION}")
        chat = SavedChat.model_validate(data)
        if not chat.saved:
            raise UserError("holds no turn")
        return chat
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror or error}"
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError):
        problem = f"{path} is no JSON, or a part is missing"
    except UserError as error:
        problem = f"{path} {error}"
    raise UserError(f"{problem} (the conversation is unchanged)")


def answered_of(turn: Turn, decode: Decode) -> list[Answered]:
    """Return each decoding of a turn's answer, continuations included. UserError if they were not saved."""
    decodings = []
    try:
        before = tuple(map(int, turn.record.get("forced", ())))  # the beginning of a branch
        for decoding in turn.record.get("decodings", []):
            answered = _answered(turn, decoding, before, decode)
            before = (*before, *answered.tracks[-1].meter.ids)
            decodings.append(answered)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, UserError):
        decodings = []
    if not decodings or before != turn.answer:
        raise UserError("the figures of this answer were not saved")
    return decodings


def _answered(turn: Turn, record: Mapping[str, Any], before: tuple[int, ...], decode: Decode) -> Answered:
    """Return one decoding, with all derived figures: an impossible record raises here."""
    decoding = _Decoding.model_validate(record)
    settings = settings_of(decoding.settings)
    tracks = []
    for saved in decoding.lanes:
        lane = replace(saved.lane, settings=settings)
        track, rounds = Track(lane, decode, saved.prompt_n, settings.max_new_tokens, before, lane.terms), Rounds(decode)
        for event in map(event_of, saved.events):
            track.feed(event)
        track.pane()
        for step in track.steps:
            rounds.read(step)
        tracks.append(track)
    models = {name: str(text) for name, text in decoding.models.items()}
    return Answered(models["pair"], settings, turn, tracks, models)
