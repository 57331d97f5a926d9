"""A conversation that /save wrote, read again: its turns, and its answers with figures where the file has them.

Texts come from `decode`, so answers are whole only with the tokenizer they were made with. Knows no models, no screen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from app.answering import Answered
from app.conversation import Turn
from app.known_lane import LANE, KnownLane, settings_of
from app.live import Track
from app.save import VERSION
from app.spans import Decode
from sampling.events import Reason, from_json
from utils.errors import UserError


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
    return Kept([_turn(turn) for turn in chat.turns], chat.system, chat.tokenizer)


def _turn(turn: _Turn) -> Turn:
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
