"""The log of a session, read: its answers with all that showing them takes, checked line by line.

Every line is a JSON object; its `kind` says whether it opens a run or an answer, tells what happens, or closes an
answer. A file may hold several runs; it may end in the middle of an answer, even of a line, as a killed run leaves it:
that is noted, anything else that is wrong is an error with file and line. Writes nothing. No models, no tokenizer, no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from app.chat.conversation import Turn
from app.lanes.logged_lane import KnownLane, settings_of
from app.replay.texts import Entry, Said
from app.screen.beams import grown_by
from app.screen.live import Track
from app.screen.trace import Rounds
from app.settings.layers import Settings
from sampling.events import KINDS, BeamStep, BeamTree, Event, Reason, Step
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


@dataclass
class RecordedAnswer:
    """One answer. `place` is where it opens, file:line; without a `closing` the run ended before it did."""

    place: str
    head: Head
    opening: Opening
    settings: Settings
    said: Said = field(default_factory=Said)
    events: list[tuple[int, Event]] = field(default_factory=list)
    closing: Closing | None = None

    def tracks(self) -> list[Track]:
        """Its lanes before anything has happened."""
        size, most = len(self.opening.prompt_ids), self.settings.max_new_tokens
        before = self.opening.before
        return [Track(lane, self.said, size, most, before, lane.terms) for lane in self.lanes]

    @property
    def lanes(self) -> list[KnownLane]:
        return [KnownLane(**{**vars(lane), "settings": self.settings}) for lane in self.opening.lanes]

    def turn(self, tracks: Sequence[Track]) -> Turn:
        """What was said, by the tracks when all has happened."""
        last = tracks[-1]
        text = last.text if self.closing is None else self.closing.text
        ids = (*self.opening.before, *last.meter.ids)
        return Turn(self.opening.prompt, self.opening.prompt_ids, ids, text, last.reason)


class Viewed:
    """A lane as every view of it would be drawn, so that all texts are asked for: to note them, or to miss them."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self._rounds, self._tree = Rounds(track.decode), BeamTree()

    def feed(self, event: Event) -> None:
        """Take in an event."""
        self.track.feed(event)
        self.track.pane()
        if isinstance(event, Step):
            self._rounds.read(event)
        elif isinstance(event, BeamStep):
            for beam in event.beams:
                grown_by(self.track.decode, self._tree.running[beam.parent], beam.token)
            self._tree.add(event)


@dataclass(frozen=True)
class Recording:
    """The answers of a file, and what is to be said about it (half lines, answers without an end)."""

    answers: list[RecordedAnswer]
    notes: list[str]


def read_recording(path: Path) -> Recording:
    """The recording in a file; UserError names file and line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        head_of(data.partition(b"\n")[0])
    except UserError as error:
        raise UserError(f"{path}:1: {error}") from None
    reader = _Reader(path)
    *lines, rest = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        reader.line(number, line)
    if rest and not reader.last(len(lines) + 1, rest):
        reader.notes.append(f"{path} ends in the middle of line {len(lines) + 1}: shown as far as it goes")
    reader.leave()
    return Recording(reader.answers, reader.notes)


class _Reader:
    """Puts lines together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: list[RecordedAnswer] = []
        self.notes: list[str] = []
        self._head: Head | None = None
        self._open: RecordedAnswer | None = None
        self._lanes: list[Viewed] = []

    def last(self, number: int, line: bytes) -> bool:
        """A last line without its end; False if it is not whole."""
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return False
        self.line(number, line)
        return True

    def line(self, number: int, line: bytes) -> None:
        """Take in a line."""
        if not line.strip():
            return
        try:
            self._take(number, json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UserError(f"{self.path}:{number}: is no JSON") from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{self.path}:{number}: {place or 'the line'}: {first['msg']}") from None
        except UserError as error:
            raise UserError(f"{self.path}:{number}: {error}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            told = str(error) if isinstance(error, ValueError) else f"does not fit the lines before it ({error})"
            raise UserError(f"{self.path}:{number}: {told}") from None

    def _take(self, number: int, told: Any) -> None:
        kind = told.get("kind") if isinstance(told, dict) else None
        if kind == "event":
            self._event(told)
        elif kind == "recording":
            check_version(told)
            self.leave()
            self._head = LINES[kind].validate_python(told)
        elif kind == "answer":
            self.leave()
            self._answer(number, LINES[kind].validate_python(told))
        elif kind == "answered":
            self._close(LINES[kind].validate_python(told))
        else:
            raise UserError(f"is no line of a recording: its kind is {kind!r:.40}")

    def _answer(self, number: int, opening: Opening) -> None:
        assert self._head is not None
        place = f"{self.path}:{number}"
        self._open = RecordedAnswer(place, self._head, opening, settings_of(opening.settings))
        self._open.said.learn(opening.texts)
        self._lanes = [Viewed(track) for track in self._open.tracks()]
        self.answers.append(self._open)

    def _event(self, told: dict[str, Any]) -> None:
        found = self._opened()
        kind = EVENTS.get(told.get("event"))
        if kind is None:
            raise UserError(f"no event is called {told.get('event')!r:.40}")
        line = LINES["event"].validate_python(told)
        event = kind.validate_python({name: value for name, value in told.items() if name not in Happened.model_fields})
        if not 0 <= line.lane < len(self._lanes):
            raise UserError(f"lane {line.lane} is not there: the answer has {len(self._lanes)}")
        found.said.learn(line.texts)
        self._lanes[line.lane].feed(event)
        found.events.append((line.lane, event))

    def _close(self, closing: Closing) -> None:
        found = self._opened()
        found.said.learn(closing.texts)
        found.closing = closing
        self._open = None

    def _opened(self) -> RecordedAnswer:
        if self._open is None:
            raise UserError("belongs to no answer: none is open")
        return self._open

    def leave(self) -> None:
        """Go on to something else; an answer that is still open has no end."""
        if self._open is not None:
            self.notes.append(f"{self.path}: answer {len(self.answers)} has no end: shown as far as it goes")
        self._open = None


def chosen(recording: Recording, number: int | None) -> Iterator[RecordedAnswer]:
    """Every answer, or the one of this number; UserError if it is not there."""
    if number is not None and number > len(recording.answers):
        raise UserError(f"there is no answer {number}: the recording has {len(recording.answers)}")
    yield from recording.answers if number is None else [recording.answers[number - 1]]
