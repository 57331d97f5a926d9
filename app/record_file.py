"""The file that `record` writes: a header, then a line an answer as it is made; a stopped run goes on in it.

Knows the form (sampling/recordings.py reads it), no models and no decoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from app.bench_file import writable
from sampling.recordings import Recorded, read_recording
from utils.errors import UsageError

_KEPT = ("target", "vocab_size", "end_id", "tokenizer")
_SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "repetition_penalty", "no_repeat_ngram"),
    *("system", "chat", "template"),
)
"""What an answer of the target alone depends on."""


class RecordFile:
    """A context: opens the file, new or with a stopped run's answers in it (`known`, by prompt ids).

    UsageError, before anything is written, for a file that is another run's or none of ours.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.known: dict[tuple[int, ...], Recorded] = {}
        self.has_costs = False
        self._new = not path.exists() or path.stat().st_size == 0
        writable(path)
        if not self._new:
            self._take(header)
        self._header = header

    def _take(self, header: Mapping[str, Any]) -> None:
        """What is there already; an unfinished last line goes."""
        found = read_recording(self.path)
        if "recording" not in found.header:
            raise UsageError(f"--out {self.path} holds something else: name a new file")
        now, before = _facts(header), _facts(found.header)
        for name, value in now.items():
            if before.get(name) != value:
                raise UsageError(
                    f"--out {self.path} holds a recording with {name} {before.get(name)}, now {value}: "
                    "give the same flags, or another file"
                )
        self.known = {one.prompt: one for one in found.answers}
        self.has_costs = bool(found.pass_seconds)
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def __enter__(self) -> RecordFile:
        self._file = self.path.open("a", encoding="utf-8")
        if self._new:
            self.add(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one line, now."""
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def _facts(header: Mapping[str, Any]) -> dict[str, Any]:
    told = header.get("settings", {})
    return {name: header.get(name) for name in _KEPT} | {name: told.get(name) for name in _SETTINGS}
