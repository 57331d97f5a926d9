"""The lines of a recording: what opens a run and an answer, what happens, what closes an answer; all checked.

Every line is a JSON object; its `kind` says which. Knows no order of lines (app/recording.py) and writes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from app.known_lane import KnownLane
from app.texts import Entry
from sampling.events import KINDS, Reason
from utils.errors import UsageError, UserError

VERSION = 1
_LONGEST_HEAD = 65_536  # bytes


class Head(BaseModel):
    """Opens a run: what ran. A change of pair opens another."""

    kind: Literal["recording"]
    pair: str
    target: str
    drafter: str
    where: str = ""
    program: str = ""
    date: str = ""


class Opening(BaseModel):
    """Opens an answer."""

    kind: Literal["answer"]
    prompt: str
    prompt_ids: tuple[int, ...]
    before: tuple[int, ...] = ()
    settings: dict[str, Any]
    lanes: Annotated[tuple[KnownLane, ...], Field(min_length=1)]
    texts: tuple[Entry, ...] = ()


class Happened(BaseModel):
    """An event of a lane; the event's own fields stand beside these."""

    kind: Literal["event"]
    lane: int
    event: str
    texts: tuple[Entry, ...] = ()


class Closing(BaseModel):
    """Closes an answer."""

    kind: Literal["answered"]
    reason: Reason
    text: str
    texts: tuple[Entry, ...] = ()


LINES: dict[Any, TypeAdapter[Any]] = {
    "recording": TypeAdapter(Head),
    "answer": TypeAdapter(Opening),
    "event": TypeAdapter(Happened),
    "answered": TypeAdapter(Closing),
}
EVENTS: dict[Any, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in KINDS.items()}


def check_head(path: Path) -> None:
    """UsageError if the file does not begin as a recording that this program writes."""
    with open(path, "rb") as file:
        first = file.readline(_LONGEST_HEAD)
    try:
        head_of(first)
    except UserError as error:
        raise UsageError(f"cannot record to {path}: {error} (the file is unchanged, name another)") from None


def head_of(line: bytes) -> None:
    """UserError unless the line opens a recording of this format."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or told.get("kind") != "recording":
        raise UserError("it is no recording")
    check_version(told)


def check_version(told: dict[str, Any]) -> None:
    if told.get("version") != VERSION:
        program = f" by {told['program']}" if isinstance(told.get("program"), str) else ""
        raise UserError(f"it was recorded in format {told.get('version')!r}{program}, this program reads {VERSION}")
