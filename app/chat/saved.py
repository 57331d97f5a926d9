"""A conversation as the text or JSON that /save writes and /load reads, and an answer on the clipboard.

Texts are read through `decode`, so answers are whole only with the tokenizer they were made with. Knows no models and
no screen.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from app.chat.answered import Answered
from app.chat.conversation import Turn
from app.lanes.logged_lane import LANE, KnownLane, settings_of
from app.screen.live import Track
from app.screen.spans import Decode
from sampling.events import Reason, from_json
from utils.errors import UserError

VERSION = 1
_TOOLS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "-ib"), ("pbcopy",), ("clip.exe",))
_NEEDS = {"wl-copy": "WAYLAND_DISPLAY", "xclip": "DISPLAY", "xsel": "DISPLAY"}


def as_json(turns: Sequence[Turn], about: Mapping[str, Any]) -> str:
    """The conversation with ids, texts, settings, figures and events; `about` is the pair and the system prompt."""
    return json.dumps(
        {"version": VERSION, **about, "turns": [_turn(turn) for turn in turns]}, ensure_ascii=False, indent=1
    )


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "user": turn.user,
        "text": turn.text,
        "reason": turn.reason,
        "seed": turn.seed,
        "regenerated": turn.regenerated,
        "prompt_ids": list(turn.prompt),
        "answer_ids": list(turn.answer),
        **turn.record,
    }


def as_text(turns: Sequence[Turn], system: str) -> str:
    """The conversation as plain text."""
    head = [f"[system]\n{system}\n"] if system else []
    return "\n".join([*head, *(f"[user]\n{turn.user}\n\n[assistant]\n{turn.text}\n" for turn in turns)])


def osc52(text: str) -> str:
    """The control sequence by which a terminal puts `text` on the clipboard, also over ssh."""
    return f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode('ascii')}\x07"


def local_clipboard(text: str) -> bool:
    """Put `text` on this machine's clipboard with the first tool that works; False if there is none."""
    for command in _TOOLS:
        needed = _NEEDS.get(command[0])
        if shutil.which(command[0]) is None or (needed and not os.environ.get(needed)):
            continue
        try:
            subprocess.run(
                command,
                input=text.encode("utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=3,
                check=True,
            )
            return True
        except (OSError, subprocess.SubprocessError):
            continue
    return False


class _Turn(BaseModel):
    model_config = ConfigDict(extra="allow")

    user: str
    text: str
    reason: Reason
    seed: int | None = None
    regenerated: int = 0
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    decodings: list[dict[str, Any]] = []


class _Chat(BaseModel):
    version: Literal[1]
    system: str = ""
    tokenizer: str | None = None
    turns: list[_Turn]


@dataclass(frozen=True)
class Kept:
    """A saved conversation. `tokenizer` is its fingerprint, None where the file does not say."""

    turns: list[Turn]
    system: str
    tokenizer: str | None


def read_chat(path: Path) -> Kept:
    """The conversation in a file; UserError, in one line, for any other file."""
    still = "(the conversation is unchanged)"
    try:
        told = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error} {still}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is no JSON, or not all of it is there {still}") from None
    if not isinstance(told, dict) or "turns" not in told:
        raise UserError(f"{path} holds no conversation that /save wrote {still}")
    if told.get("version") != VERSION:
        raise UserError(f"{path} has format {told.get('version')!r:.20}, this program reads {VERSION} {still}")
    try:
        chat = _Chat.model_validate(told)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']} {still}") from None
    if not chat.turns:
        raise UserError(f"{path} holds no turn {still}")
    return Kept([_read_turn(turn) for turn in chat.turns], chat.system, chat.tokenizer)


def _read_turn(turn: _Turn) -> Turn:
    record = {"decodings": turn.decodings, **(turn.model_extra or {})} if "decodings" in turn.model_fields_set else {}
    prompt, answer = turn.prompt_ids, turn.answer_ids
    return Turn(turn.user, prompt, answer, turn.text, turn.reason, turn.regenerated, turn.seed, record)


def answered_of(turn: Turn, decode: Decode) -> list[Answered]:
    """What each decoding of a turn's answer was, the first one and its continuations. UserError if that is not kept."""
    before: tuple[int, ...] = ()
    found = []
    try:
        for decoding in turn.record.get("decodings", []):
            answered = _answered(turn, decoding, before, decode)
            before = (*before, *answered.tracks[-1].meter.ids)
            found.append(answered)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, UserError):
        found = []
    if not found or before != turn.answer:
        raise UserError("the figures of this answer were not saved")
    return found


def _answered(turn: Turn, decoding: Mapping[str, Any], before: tuple[int, ...], decode: Decode) -> Answered:
    settings = settings_of(decoding["settings"])
    tracks = []
    for told in decoding["lanes"]:
        lane = KnownLane(**{**vars(LANE.validate_python(told["lane"])), "settings": settings})
        track = Track(lane, decode, told["prompt_n"], settings.max_new_tokens, before, lane.terms)
        for event in told["events"]:
            track.feed(from_json(event))
        tracks.append(track)
    models = {name: str(text) for name, text in decoding["models"].items()}
    return Answered(models["pair"], settings, turn, tracks, models)
