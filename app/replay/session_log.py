"""The log of a session, read: its answers with all that showing them takes, checked line by line.

Every line is a JSON object; its `kind` says whether it opens a run or an answer, tells what happens, or closes an
answer. A file may hold several runs; it may end in the middle of an answer, even of a line, as a killed run leaves it:
that is noted, anything else that is wrong is an error with file and line. Writes nothing. No models, no tokenizer, no
torch.

All text on the screen comes from calls of `decode` with ids. :class:`LoggingDecoder` notes each call as an entry
(earlier entry, further ids, characters kept of that entry's text, further text), so that a growing text costs a few
characters a token; :class:`ReplayingDecoder` answers the same calls from the entries.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from app.chat.conversation import Turn
from app.lanes.costs import LoggedLane, event_of, settings_of
from app.screen.live import Track, token_reader
from app.screen.spans import common
from app.screen.trace import read as read_round
from app.settings.table import Settings
from sampling.events import Event, Reason, Step
from utils.errors import UserError
from utils.growing_text import Decode, Window

VERSION = 1
Entry = tuple[int, tuple[int, ...], int, str]

NOTHING = -1  # the entry before the first: no ids, no text
_BACK = 32  # ids that are taken off at most to find an earlier entry


class UnloggedError(ValueError):
    """Ids whose text was not noted."""


class LoggingDecoder:
    """A `decode` that notes what it says."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[tuple[int, ...], tuple[int, str]] = {}  # by ids: the place of the entry, and its text
        self._news: list[Entry] = []

    def __call__(self, ids: list[int]) -> str:
        key = tuple(ids)
        if key not in self._texts:
            self._note(key, self._decode(list(ids)))
        return self._texts[key][1]

    def _note(self, ids: tuple[int, ...], text: str) -> None:
        sizes = range(len(ids) - 1, max(0, len(ids) - _BACK), -1)
        size = next((size for size in sizes if ids[:size] in self._texts), 0)
        before, known = self._texts[ids[:size]] if size else (NOTHING, "")
        kept = len(known) if text.startswith(known) else common(known, text)
        self._news.append((before, ids[size:], kept, text[kept:]))
        self._texts[ids] = (len(self._texts), text)

    def taken(self) -> list[Entry]:
        """The entries that are not written yet; they count as written from now on."""
        news, self._news = self._news, []
        return news


class ReplayingDecoder:
    """A `decode` that says what was noted. Raises UnloggedError for any other ids."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, ...], str]] = []
        self._texts: dict[tuple[int, ...], str] = {}

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take in entries in the order in which they were noted; UnloggedError for one that builds on none."""
        for before, further, kept, text in entries:
            if not NOTHING <= before < len(self._entries):
                raise UnloggedError(f"a text builds on text {before}, which is not there")
            ids, known = ((), "") if before == NOTHING else self._entries[before]
            self._entries.append((ids + further, known[:kept] + text))
            self._texts.update(self._entries[-1:])

    def __call__(self, ids: list[int]) -> str:
        try:
            return self._texts[tuple(ids)]
        except KeyError:
            raise UnloggedError(f"the text of {len(ids)} tokens is not there") from None


class RunLine(BaseModel):
    """Opens a run: what ran. A change of pair opens another."""

    pair: str
    target: str
    drafter: str
    where: str = ""
    program: str = ""
    date: str = ""


class OpeningLine(BaseModel):
    """Opens an answer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    before: tuple[int, ...] = ()
    forced: bool = False
    waited: Annotated[float, Field(ge=0)] = 0.0
    settings: dict[str, Any]
    lanes: Annotated[tuple[LoggedLane, ...], Field(min_length=1)]
    texts: tuple[Entry, ...] = ()


class EventLine(BaseModel):
    """An event of a lane; the event's own fields stand beside these."""

    lane: int
    texts: tuple[Entry, ...] = ()


class ClosingLine(BaseModel):
    """Closes an answer."""

    reason: Reason
    text: str
    seen: bool = False
    pauses: tuple[tuple[float, str], ...] = ()
    texts: tuple[Entry, ...] = ()


class LaneViews:
    """A lane as every view of it would be drawn, so that `decode` reads every text: it notes them, or misses one."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self._window, self._tokens = Window(track.decode), token_reader(track)

    def feed(self, event: Event) -> None:
        """Take in an event."""
        self.track.feed(event)
        self.track.pane()
        if isinstance(event, Step):
            read_round(event, self._window)
            if event.positions:
                self._tokens.read(event)


@dataclass
class LoggedAnswer:
    """One answer. `place` is where it opens, file:line; without a `closing` the run ended before it did."""

    place: str
    head: RunLine
    opening: OpeningLine
    settings: Settings
    decode: ReplayingDecoder = field(default_factory=ReplayingDecoder)
    events: list[tuple[int, Event]] = field(default_factory=list)
    closing: ClosingLine | None = None

    def tracks(self) -> list[Track]:
        """Its lanes before anything has happened."""
        size, most, before = len(self.opening.prompt_ids), self.settings.max_new_tokens, self.opening.before
        seen = self.closing is not None and self.closing.seen
        return [Track(lane, self.decode, size, most, before, replace(lane.terms, seen=seen)) for lane in self.lanes]

    def over(self) -> list[Track]:
        """Its lanes when all has happened."""
        tracks = self.tracks()
        for index, event in self.events:
            tracks[index].feed(event)
        return tracks

    @property
    def lanes(self) -> list[LoggedLane]:
        return [replace(lane, settings=self.settings) for lane in self.opening.lanes]

    def turn(self, tracks: Sequence[Track]) -> Turn:
        """What was said, by the tracks when all has happened."""
        last = tracks[-1]
        text = last.text if self.closing is None else self.closing.text
        ids = (*self.opening.before, *last.meter.ids)
        return Turn(self.opening.prompt, self.opening.prompt_ids, ids, text, last.reason)


@dataclass
class SessionLog:
    """The answers of a file, and notes about it (half lines, answers without an end)."""

    path: Path
    answers: list[LoggedAnswer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _run: RunLine | None = None
    _open: LoggedAnswer | None = None
    _views: list[LaneViews] = field(default_factory=list)  # of the open answer's lanes

    def answer(self, number: int | None) -> list[LoggedAnswer]:
        """Every answer, or the one of this number; UserError if it is not there."""
        if number is not None and number > len(self.answers):
            raise UserError(f"there is no answer {number}: the session log has {len(self.answers)}")
        return self.answers if number is None else [self.answers[number - 1]]

    def read(self, number: int, line: bytes) -> None:
        """Take in a line; UserError names file and line."""
        try:
            if line.strip():
                self._take(number, parsed(line))
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
        except (UserError, ValueError) as error:
            problem = str(error)
        except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
            problem = f"does not fit the lines before it ({error})"
        else:
            return
        raise UserError(f"{self.path}:{number}: {problem}")

    def _take(self, number: int, row: Any) -> None:
        kind = row.get("kind") if isinstance(row, dict) else None
        match kind:
            case "event":
                self._event(row)
            case "answered":
                found = self._opened()
                found.closing, self._open = ClosingLine.model_validate(row), None
                found.decode.learn(found.closing.texts)
            case "recording":
                check_version(row)
                self.leave()
                self._run = RunLine.model_validate(row)
            case "answer":
                self.leave()
                self._begin(number, OpeningLine.model_validate(row))
            case _:
                raise UserError(f"is no line of a session log: its kind is {kind!r:.40}")

    def _begin(self, number: int, opening: OpeningLine) -> None:
        assert self._run is not None
        self._open = LoggedAnswer(f"{self.path}:{number}", self._run, opening, settings_of(opening.settings))
        self._open.decode.learn(opening.texts)
        self._views = [LaneViews(track) for track in self._open.tracks()]
        self.answers.append(self._open)

    def _event(self, row: dict[str, Any]) -> None:
        found, event = self._opened(), event_of(row)
        line = EventLine.model_validate(row)
        if not 0 <= line.lane < len(self._views):
            raise UserError(f"lane {line.lane} is not there: the answer has {len(self._views)}")
        found.decode.learn(line.texts)
        self._views[line.lane].feed(event)
        found.events.append((line.lane, event))

    def _opened(self) -> LoggedAnswer:
        if self._open is None:
            raise UserError("belongs to no answer: none is open")
        return self._open

    def leave(self) -> None:
        """Go on to something else; an answer that is still open has no end."""
        if self._open is not None:
            self.notes.append(f"{self.path}: answer {len(self.answers)} has no end: shown as far as it goes")
        self._open = None


def read_log(path: Path) -> SessionLog:
    """The session log in a file; UserError names file and line."""
    try:
        first, *lines = path.read_bytes().split(b"\n")
        check_head(first)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{path}:1: {error}") from None
    log, last = SessionLog(path), len(lines) + 1
    for number, line in enumerate([first, *lines], start=1):
        if number == last and not whole(line):
            log.notes.append(f"{path} ends in the middle of line {number}: shown as far as it goes")
        else:
            log.read(number, line)
    log.leave()
    return log


def parsed(line: bytes) -> Any:
    """The JSON of a line; UserError for any other."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise UserError("is no JSON") from None


def whole(line: bytes) -> bool:
    """Whether a last line without its end is there as a whole, or not at all."""
    try:
        parsed(line)
    except UserError:
        return not line
    return True


def check_head(line: bytes) -> None:
    """UserError unless the line opens a session log of this format."""
    row = None
    with suppress(UserError):
        row = parsed(line)
    if not isinstance(row, dict) or row.get("kind") != "recording":
        raise UserError("it is no session log")
    check_version(row)


def check_version(row: dict[str, Any]) -> None:
    if row.get("version") != VERSION:
        program = f" by {row['program']}" if isinstance(row.get("program"), str) else ""
        raise UserError(f"it was written in format {row.get('version')!r}{program}, this program reads {VERSION}")
