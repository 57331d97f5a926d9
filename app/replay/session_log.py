"""The log of a session (`--log`), written and read: answers with all that is needed to show them, checked line by line.

Every line is a JSON object; its `kind` says whether it opens a run ("recording") or an answer, is an event, or closes
an answer. A file may hold several runs. It may end in the middle of an answer, even of a line, if the run was killed:
that is noted; anything else that is wrong is an error with file and line. A line is written whole and at once. If the
file cannot be written any more, one line says so, and decoding continues. Reading a log needs no model, no tokenizer
and no torch.

All text on the screen comes from calls of `decode` with ids. :class:`LoggingDecoder` records each call as an entry
(index of an earlier entry, further ids, characters kept of that entry's text, further text), so that a growing text
costs a few characters a token; :class:`ReplayingDecoder` answers the same calls from the entries.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field, ValidationError

from app.chat.conversation import Plan
from app.lanes.answers import shown_settings
from app.lanes.costs import LaneRecord, event_of, kept, settings_of
from app.screen.live import LaneViews, Pause, Track
from app.screen.spans import common
from app.screen.view import models_of
from app.settings.table import Settings
from sampling.events import Event, Finished, Reason, to_json
from utils.errors import UsageError, UserError
from utils.files import append, drop_half_line
from utils.growing_text import Decode
from utils.machine import version
from utils.objects import Json

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

VERSION = 1
TextEntry = tuple[int, tuple[int, ...], int, str]  # an entry, as above

NOTHING = -1  # the index of an empty entry: no ids, no text
_LONGEST_HEAD = 65_536  # bytes of a file that are read to see whether its first line is that of a session log
_BACK = 32  # most ids that an entry adds to an earlier one; beyond, it begins from nothing


@dataclass(eq=False)
class LoggingDecoder:
    """A `decode` that records its results as entries."""

    _decode: Decode
    _texts: dict[tuple[int, ...], tuple[int, str]] = field(default_factory=dict)  # by ids: the entry's index, its text
    _news: list[TextEntry] = field(default_factory=list)

    def __call__(self, ids: list[int]) -> str:
        key = tuple(ids)
        if key not in self._texts:
            text, sizes = self._decode(list(ids)), range(len(ids) - 1, max(0, len(ids) - _BACK), -1)
            size = next((size for size in sizes if key[:size] in self._texts), 0)
            before, known = self._texts[key[:size]] if size else (NOTHING, "")
            kept = len(known) if text.startswith(known) else common(known, text)
            self._news.append((before, key[size:], kept, text[kept:]))
            self._texts[key] = (len(self._texts), text)
        return self._texts[key][1]

    def taken(self) -> list[TextEntry]:
        """Return the entries that are not written yet, and count them as written."""
        news, self._news = self._news, []
        return news


@dataclass(eq=False)
class ReplayingDecoder:
    """A `decode` that returns the recorded texts. Raises ValueError for ids without one."""

    _entries: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    _texts: dict[tuple[int, ...], str] = field(default_factory=dict)

    def learn(self, entries: Iterable[TextEntry]) -> None:
        """Add entries in the order in which they were recorded; ValueError if the earlier entry of one is missing."""
        for before, further, shared, text in entries:
            if not NOTHING <= before < len(self._entries):
                raise ValueError(f"a text builds on text {before}, which is not there")
            ids, known = ((), "") if before == NOTHING else self._entries[before]
            self._entries.append((ids + further, known[:shared] + text))
            self._texts.update(self._entries[-1:])

    def __call__(self, ids: list[int]) -> str:
        try:
            return self._texts[tuple(ids)]
        except KeyError:
            raise ValueError(f"the text of {len(ids)} tokens is not there") from None


class RunLine(BaseModel):
    """Opens a run: the models that run. A change of pair opens another run."""

    pair: str
    target: str
    drafter: str
    where: str = ""  # the target's number format and device, or its server's address


class OpeningLine(BaseModel):
    """Opens an answer. `before`: the ids with which a continued answer begins; `forced`: the user chose the last of
    them. `waited`: seconds since the end of the answer before."""

    prompt: str
    prompt_ids: tuple[int, ...]
    before: tuple[int, ...] = ()
    forced: bool = False
    waited: Annotated[float, Field(ge=0)] = 0.0
    settings: Json
    lanes: Annotated[tuple[LaneRecord, ...], Field(min_length=1)]
    texts: tuple[TextEntry, ...] = ()


class EventLine(BaseModel):
    """An event of a lane; the event's own fields stand beside these."""

    lane: int
    texts: tuple[TextEntry, ...] = ()


class ClosingLine(BaseModel):
    """Closes an answer. `seen`: earlier answers of the session have its text. `pauses`: (seconds, key that ended it) of
    each pause at a phase of a round."""

    reason: Reason
    text: str
    seen: bool = False
    pauses: tuple[tuple[float, str], ...] = ()
    texts: tuple[TextEntry, ...] = ()


@dataclass
class LoggedAnswer:
    """One answer. `place`: the file:line that opens it. `closing`: None if the run ended before the answer."""

    place: str
    head: RunLine
    opening: OpeningLine
    settings: Settings
    decode: ReplayingDecoder = field(default_factory=ReplayingDecoder)
    events: list[tuple[int, Event]] = field(default_factory=list)
    closing: ClosingLine | None = None

    def tracks(self) -> list[Track]:
        """Return its lanes before the first event."""
        opening, seen = self.opening, self.closing is not None and self.closing.seen
        lanes = [replace(lane, terms=replace(lane.terms, seen=seen), settings=self.settings) for lane in opening.lanes]
        return [
            Track(lane, self.decode, len(opening.prompt_ids), opening.before, forced=opening.forced) for lane in lanes
        ]

    def over(self) -> list[Track]:
        """Return its lanes after the last event."""
        tracks = self.tracks()
        for index, event in self.events:
            tracks[index].feed(event)
        return tracks

    def text(self, tracks: Sequence[Track]) -> str:
        """Return the answer's text; of an answer without a closing line that of `tracks` (after the last event)."""
        return tracks[-1].text if self.closing is None else self.closing.text


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
        """Return every answer, or the one of this number; UserError if there is none."""
        if number is not None and number > len(self.answers):
            raise UserError(f"there is no answer {number}: the session log has {len(self.answers)}")
        return self.answers if number is None else [self.answers[number - 1]]

    def read(self, number: int, line: bytes) -> None:
        """Add a line; UserError names file and line."""
        try:
            if line.strip():
                row = json.loads(line)
                self._take(number, row if isinstance(row, dict) else {})
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
        except json.JSONDecodeError:
            problem = "is no JSON"
        except (UserError, ValueError) as error:
            problem = str(error)
        except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
            problem = f"does not fit the lines before it ({error})"
        else:
            return
        raise UserError(f"{self.path}:{number}: {problem}")

    def _take(self, number: int, row: Json) -> None:
        match row.get("kind"):
            case "event":
                self._event(row)
            case "answered":
                answer = self._opened()
                answer.closing, self._open = ClosingLine.model_validate(row), None
                answer.decode.learn(answer.closing.texts)
            case "recording":
                self.leave()
                self._run = RunLine.model_validate(row)
            case "answer":
                self.leave()
                self._begin(number, OpeningLine.model_validate(row))
            case kind:
                raise UserError(f"is no line of a session log: its kind is {kind!r:.40}")

    def _begin(self, number: int, opening: OpeningLine) -> None:
        assert self._run is not None
        self._open = LoggedAnswer(f"{self.path}:{number}", self._run, opening, settings_of(opening.settings))
        self._open.decode.learn(opening.texts)
        self._views = [LaneViews(track) for track in self._open.tracks()]
        self.answers.append(self._open)

    def _event(self, row: Json) -> None:
        answer, event = self._opened(), event_of(row)
        line = EventLine.model_validate(row)
        if not 0 <= line.lane < len(self._views):
            raise UserError(f"lane {line.lane} is not there: the answer has {len(self._views)}")
        answer.decode.learn(line.texts)
        self._views[line.lane].feed(event)
        answer.events.append((line.lane, event))

    def _opened(self) -> LoggedAnswer:
        if self._open is None:
            raise UserError("belongs to no answer: none is open")
        return self._open

    def leave(self) -> None:
        """Leave the open answer, if there is one, and note that it has no end."""
        if self._open is not None:
            self.notes.append(f"{self.path}: answer {len(self.answers)} has no end: shown as far as it goes")
        self._open = None


def read_log(path: Path) -> SessionLog:
    """Return the session log in a file, without a last line that has no end; UserError names file and line."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        check_head(lines[0] if lines else rest)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{path}:1: {error}") from None
    log = SessionLog(path)
    for number, line in enumerate(lines, start=1):
        log.read(number, line)
    if rest:
        log.notes.append(f"{path} ends in the middle of line {len(lines) + 1}: shown as far as it goes")
    log.leave()
    return log


def check_head(line: bytes) -> None:
    """Raise UserError unless the line opens a session log of this format."""
    row = None
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict) or row.get("kind") != "recording":
        raise UserError("it is no session log")
    if row.get("version") != VERSION:
        program = f" by {row['program']}" if isinstance(row.get("program"), str) else ""
        raise UserError(f"it was written in format {row.get('version')!r}{program}, this program reads {VERSION}")


# -- writing ----------------------------------------------------------------------------------------


class SessionLogWriter(AbstractContextManager["SessionLogWriter"]):
    """A session log that is being written. `problem` says why writing stopped; :meth:`AnswerLog.end` reports and clears
    it. `failed`: whether writing stopped."""

    def __init__(self, path: Path) -> None:
        self.path, self.problem, self.failed = path, "", False
        self._file: IO[bytes] | None = opened(path)
        self._head: Json = {}
        self.ended = time.monotonic()  # when the answer before was over

    def open_answer(
        self,
        engine: "PairEngine",
        lanes: Sequence[LaneRecord],
        plan: Plan,
        settings: Settings,
        decode: Decode,
    ) -> "AnswerLog":
        """Open an answer by these lanes, whose texts `decode` returns; a line with the facts of the pair that `replay`
        and `simulate` need comes first if they have changed."""
        end = getattr(engine.tokenizer, "eos_token_id", None)
        end = end if end in engine.stop_ids else min(engine.stop_ids, default=None)
        start = {} if engine.start_id is None else {"start_id": engine.start_id}
        head = {**models_of(engine), "vocab_size": engine.target.vocab_size, "end_id": end, **start}
        if head != self._head:
            self._head = head
            self.write(
                {
                    **{"kind": "recording", "version": VERSION, "program": version()},
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    **head,
                }
            )
        return AnswerLog(self, plan, settings, lanes, LoggingDecoder(decode))

    def log_answer(self, engine: "PairEngine", track: Track, plan: Plan) -> str:
        """Log a finished answer of one lane; return a line about the file if writing failed, else ""."""
        log = self.open_answer(engine, [track.lane], plan, track.lane.settings, track.decode)
        for event in track.events:
            log.feed(0, event)
        return log.end()

    def write(self, line: Json) -> None:
        """Append one line at once; after a failure the file keeps its earlier lines and nothing more is written."""
        if self._file is None:
            return
        try:
            append(self._file, json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n", self.path)
        except (OSError, ValueError) as error:
            self.problem, self.failed = f"the session log stopped, {error}", True
            self.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError, ValueError):
                file.close()


class AnswerLog:
    """One answer that is being logged: the constructor writes its opening line, :meth:`end` the closing one."""

    def __init__(
        self,
        writer: SessionLogWriter,
        plan: Plan,
        settings: Settings,
        lanes: Sequence[LaneRecord],
        decode: LoggingDecoder,
    ) -> None:
        self._writer, self._plan, self._decode = writer, plan, decode
        self._log_top, size, before = settings.log_top, len(plan.prompt), plan.answer
        self._lanes = [LaneViews(Track(lane, decode, size, before, forced=plan.forced)) for lane in lanes]
        self._write(
            {
                "kind": "answer",
                "prompt": plan.user,
                "prompt_ids": list(plan.prompt),
                "before": list(plan.answer),
                "forced": plan.forced,
                "waited": round(time.monotonic() - writer.ended, 1),
                "settings": {**shown_settings(settings), "slow": settings.slow},
                "lanes": [lane.to_json() for lane in lanes],
            }
        )

    def _write(self, line: Json) -> None:
        """Write a line with the entries of texts that no earlier line has."""
        self._writer.write({**line, "texts": self._decode.taken()})

    def feed(self, index: int, event: Event) -> None:
        """Log an event of a lane, with every text that is needed to show it."""
        event = kept(event, self._log_top)
        self._lanes[index].feed(event)
        if isinstance(event, Finished):
            self._lanes[index].track.answer()  # decodes its whole text now, in case the log ends here
        self._write({"kind": "event", "lane": index, **to_json(event)})

    def tee(self, race: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
        """Yield the events of the race unchanged, and log each."""
        for index, event in race:
            self.feed(index, event)
            yield index, event

    def end(self, seen: bool = False, pauses: Sequence[Pause] = ()) -> str:
        """Close the answer; return a line about the file if writing failed, else "". An answer without a token has no
        `answer_ids`.

        `seen`: earlier answers of the session have its text. `pauses`: those at the phases of its rounds.
        """
        last, before = self._lanes[-1].track, list(self._plan.answer)
        ids = list(last.meter.ids)
        answers = [lane.track.answer() for lane in self._lanes]
        self._write(
            {
                "kind": "answered",
                "prompt_ids": list(self._plan.prompt),
                **({"answer_ids": [*before, *ids] if self._plan.begun else ids} if ids else {}),
                "reason": last.reason,
                **({"seen": True} if seen else {}),
                **({"pauses": list(pauses)} if pauses else {}),
                "text": self._decode([*before, *ids]) if ids else "",
                "lanes": [{"method": each.method, "ids": list(each.ids), "text": each.text} for each in answers],
            }
        )
        self._writer.ended = time.monotonic()
        problem, self._writer.problem = self._writer.problem, ""
        return f"{problem}; decoding continues" if problem else ""


def log_writer_of(settings: Settings) -> SessionLogWriter | None:
    """Return the writer of the file of --log, None without one; UsageError if that file cannot be written."""
    return SessionLogWriter(Path(os.path.expanduser(settings.record))) if settings.record else None


def opened(path: Path) -> IO[bytes]:
    """Open a new file, or a session log without its unfinished last line. UsageError for any other file."""
    try:
        if path.is_file() and path.stat().st_size:
            with open(path, "rb") as before:
                check_head(before.readline(_LONGEST_HEAD))
        file = open(path, "ab", buffering=0)  # noqa: SIM115
    except UserError as error:
        raise UsageError(f"cannot log to {path}: {error} (the file is unchanged, name another)") from None
    except OSError as error:
        raise UsageError(f"cannot log to {path}: {error.strerror or error}") from None
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"cannot log to {path}: another run is writing to it") from None
    except OSError:  # a file system without locks
        pass
    with suppress(OSError):
        drop_half_line(path)
    return file
