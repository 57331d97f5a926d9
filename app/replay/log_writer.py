"""`--record`: everything that is decoded is also written to a file, a JSON object a line (app/replay/session_log.py
reads it).

A line is written whole and at once, so a killed run leaves a file that can be shown as far as it goes. If the file
cannot be written any more a line says so once, and decoding continues. Knows no screen; texts are what `decode` said
(app/replay/session_log.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from app.lanes.answers import shown_settings
from app.lanes.costs import kept, known
from app.replay.session_log import VERSION, LaneViews, LoggingDecoder, check_head
from app.screen.live import Pause, Track, tracks_of
from app.screen.view import models_of
from sampling.events import Event, Finished, to_json
from utils.errors import UsageError, UserError
from utils.files import append, drop_half_line
from utils.growing_text import Decode
from utils.machine import version

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine
    from app.settings.table import Settings

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

_LONGEST_HEAD = 65_536  # bytes


@dataclass(frozen=True)
class LoggedMessage:
    """The question of an answer that is logged."""

    prompt: str
    ids: Sequence[int]  # that the model reads
    before: Sequence[int] = ()  # the part of the answer that exists already
    begun: bool = False  # `before` is not part of `ids`
    forced: bool = False  # the user chose the last id of `before`


class SessionLogWriter(AbstractContextManager["SessionLogWriter"]):
    """A session log that is being written. `problem` says why writing stopped; it is empty again once shown."""

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, ""
        self._file: IO[bytes] | None = opened(path)
        self._head: dict[str, Any] = {}
        self.ended = time.monotonic()  # when the answer before was over

    def open_answer(
        self, engine: PairEngine, lanes: Sequence[Lane], question: LoggedMessage, settings: Settings, decode: Decode
    ) -> AnswerLog:
        """Open an answer by these lanes, whose texts are what `decode` says."""
        head = _head(engine)
        if head != self._head:
            self._head = head
            signed = {"program": version(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
            self.write({"kind": "recording", "version": VERSION, **signed, **head})
        logging = LoggingDecoder(decode)
        tracks = tracks_of(lanes, engine, question.ids, logging, question.before)
        return AnswerLog(self, question, settings, tracks, logging)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line at once; after a failure the file keeps its earlier lines and nothing more is written."""
        if self._file is None:
            return
        try:
            append(self._file, json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n", self.path)
        except (OSError, ValueError) as error:
            self.problem = f"the session log stopped, {error}"
            self.close()

    def complaint(self) -> str:
        """The problem, once."""
        problem, self.problem = self.problem, ""
        return f"{problem}; decoding continues" if problem else ""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the log; what was written stays."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError, ValueError):
                file.close()


class AnswerLog:
    """One answer that is being logged: opened at once, ended by :meth:`end`."""

    def __init__(
        self,
        writer: SessionLogWriter,
        question: LoggedMessage,
        settings: Settings,
        tracks: Sequence[Track],
        decode: LoggingDecoder,
    ) -> None:
        self._writer, self._asked, self._decode = writer, question, decode
        self._log_top = settings.log_top
        self._lanes = [LaneViews(track) for track in tracks]
        self._write(
            kind="answer",
            prompt=question.prompt,
            prompt_ids=list(question.ids),
            before=list(question.before),
            forced=question.forced,
            waited=round(time.monotonic() - writer.ended, 1),
            settings={**shown_settings(settings), "slow": settings.slow},
            lanes=[known(track.lane, track.terms).to_json() for track in tracks],
        )

    def _write(self, **line: Any) -> None:
        """Write a line with the texts that no earlier line has."""
        self._writer.write({**line, "texts": self._decode.taken()})

    def feed(self, index: int, event: Event) -> None:
        """Log an event of a lane, with every text that is needed to show it."""
        event = kept(event, self._log_top)
        self._lanes[index].feed(event)
        if isinstance(event, Finished):
            self._lanes[index].track.answer()  # its whole text, should the log be cut here
        self._write(kind="event", lane=index, **to_json(event))

    def tee(self, race: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
        """Yield the events of the race unchanged, and log each."""
        for index, event in race:
            self.feed(index, event)
            yield index, event

    def end(self, seen: bool = False, pauses: Sequence[Pause] = ()) -> str:
        """Close the answer; a line about the file, or "". Without a token there are no `answer_ids`.

        `seen`: earlier answers of the session have its text. `pauses` are those at the phases of its rounds.
        """
        last, before = self._lanes[-1].track, list(self._asked.before)
        ids = list(last.meter.ids)
        answers = [lane.track.answer() for lane in self._lanes]
        self._write(
            kind="answered",
            prompt_ids=list(self._asked.ids),
            **({"answer_ids": [*before, *ids] if self._asked.begun else ids} if ids else {}),
            reason=last.reason,
            **({"seen": True} if seen else {}),
            **({"pauses": list(pauses)} if pauses else {}),
            text=self._decode([*before, *ids]) if ids else "",
            lanes=[{"method": each.method, "ids": list(each.ids), "text": each.text} for each in answers],
        )
        self._writer.ended = time.monotonic()
        return self._writer.complaint()


def log_writer_of(settings: Settings) -> SessionLogWriter | None:
    """The writer of the file of `--record`, None without one; UsageError if that file cannot be written."""
    return SessionLogWriter(Path(os.path.expanduser(settings.record))) if settings.record else None


def opened(path: Path) -> IO[bytes]:
    """The file, new, or with room after its last whole line. UsageError for any other file."""
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
        drop_half_line(path)
    except BlockingIOError:
        file.close()
        raise UsageError(f"cannot log to {path}: another run is writing to it") from None
    except OSError:  # a file system without locks
        return file
    return file


def _head(engine: PairEngine) -> dict[str, Any]:
    """The facts of a pair that a replay needs."""
    end = getattr(engine.tokenizer, "eos_token_id", None)
    end = end if end in engine.stop_ids else min(engine.stop_ids, default=None)
    head = {**models_of(engine), "vocab_size": engine.target.vocab_size, "end_id": end, "start_id": engine.start_id}
    return {name: value for name, value in head.items() if name != "start_id" or value is not None}
