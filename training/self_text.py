"""What a target has written, in a file: one answer a line, taken up again where an earlier run stopped.

How it is written is training/synthesize.py's business. Knows no models; says how far it is through a callable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sampling.loop import never
from training.dialogues import Line
from training.ngram_counts import Passage
from training.synthesize import Writer
from utils.errors import UsageError, UserError

ENDLESS = 1 << 60  # tokens: as many as there are prompts for
_NOTE = -1  # the number of the line that holds the settings; those of chats begin at 0


def begin(file: Path, settings: Mapping[str, str]) -> None:
    """Note in a new file what its text depends on; UsageError, naming the first difference, in another's.

    The note is a first line without ids, as of a chat that came to nothing: who reads the text passes over it.
    """
    note = json.dumps({"ids": [], "start": 0, "number": _NOTE, "settings": dict(settings)}).encode("ascii") + b"\n"
    line = b""
    if file.is_file():
        with file.open("rb") as known:
            line = known.readline()
    if note.startswith(line) and line != note:  # new, or killed while it was begun
        file.write_bytes(note)
        return
    try:
        before = dict(_row(line.decode("utf-8", errors="replace"), file)["settings"])
    except (UserError, KeyError, TypeError, ValueError):
        raise UsageError(f"{file} holds something else, or text of unknown settings: name a new file") from None
    for name in (*settings, *before):
        if before.get(name) != settings.get(name):
            told = f"{name} {before.get(name)}, now {settings.get(name)}"
            raise UsageError(f"{file} was begun with {told}: give the same flags, or another file")


def written(file: Path) -> tuple[int, set[int]]:
    """(answer tokens, numbers of the chats) of a file begun earlier; a line cut off at its end is taken away."""
    if not file.is_file():
        return 0, set()
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        with file.open("r+b") as out:
            out.truncate(len(whole))
    rows = [_row(line, file) for line in whole.decode("utf-8", errors="replace").splitlines()]
    return sum(len(row["ids"]) - row["start"] for row in rows), {row["number"] for row in rows}


def _row(line: str, file: Path) -> Line:
    try:
        row = json.loads(line)
        if isinstance(row["ids"], list) and isinstance(row["start"], int) and isinstance(row["number"], int):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file} is no file of self-written text: remove it, or name another")


def write_self(
    writer: Writer,
    file: Path,
    tokens: int,
    told: Callable[[int], Any],
    interrupt: Callable[[], bool] = never,
) -> int:
    """Append answers to `file` (jsonl) until it holds `tokens` answer tokens; returns how many it holds.

    Goes on where an earlier run stopped; chats that came to nothing leave a line without ids. `told` hears the
    tokens so far, first those found in the file; nothing where they are enough. Less than asked for comes back only
    when interrupted or when the source ends. Raises OSError (a full disk) with the whole lines written so far intact.
    """
    count, done = written(file)
    if count >= tokens:
        return count
    told(count)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as out:
        for number, lines in writer.chats(done, interrupt):
            kept = lines or [{"ids": [], "start": 0, "number": number}]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)
            _append(out, text.encode("ascii"), file)
            count += sum(len(line["ids"]) - line["start"] for line in lines)
            told(count)
            if count >= tokens:
                break
    return count


def _append(out: Any, data: bytes, file: Path) -> None:
    """All of `data`, or nothing of it and an OSError that names the file."""
    before = out.seek(0, 2)
    try:
        while data:
            data = data[out.write(data) :]
    except OSError as error:
        out.truncate(before)
        raise OSError(error.errno, error.strerror, str(file)) from error


def passages(file: Path) -> list[Passage]:
    """What :func:`write_self` wrote, its answers to be counted."""
    rows = [_row(line, file) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Passage(row["ids"], row["start"]) for row in rows if row["ids"]]
