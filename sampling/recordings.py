"""Recorded answers read from a file: which ids followed which prompt, and what is told of the model that said them.

Three formats, told apart by looking at the text: lines as torch prints them (`tensor([[518, 799, …`, rows may wrap)
whose rows begin with their prompt; a JSON map from a prompt's ids to the answer's ("12_7_99": "5_6"), as the
experiments of Cascade Speculative Drafting recorded theirs (arXiv 2312.11462); and this project's JSON lines: a line
with `vocab_size` and `end_id`, and every line with both `prompt_ids` and `answer_ids`. Knows no text and no models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sampling.printed_ids import Ids, Starts, checked, printed_answers, refuse
from utils.errors import UserError


@dataclass(frozen=True)
class Recorded:
    """One recorded answer. `best` holds the model's likeliest ids at each of its places, likeliest first, where they
    were recorded; `told` is all that the file says of it."""

    prompt: Ids
    answer: Ids
    best: tuple[Ids, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """The answers of a file, one a prompt (the last, where a prompt has several), and its header.

    `header` may have `vocab_size`, `end_id`, `stop_ids`, `start_id`, `context`, `tokenizer` (its fingerprint),
    `settings` and `pass_seconds` (seconds of a pass over n tokens, by n); nothing but those two JSON kinds have one.
    """

    answers: tuple[Recorded, ...]
    header: Mapping[str, Any] = field(default_factory=dict)

    @property
    def highest(self) -> int:
        """The highest id of all prompts and answers."""
        return max(max(*one.prompt, *one.answer) for one in self.answers)

    @property
    def vocab_size(self) -> int | None:
        """Of the recorded model, if that is told."""
        return self.header.get("vocab_size")

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer, as far as they are told."""
        end = self.header.get("end_id")
        return frozenset([*self.header.get("stop_ids", ()), *([] if end is None else [end])])

    @property
    def pass_seconds(self) -> dict[int, float]:
        """Seconds of a pass over n tokens where it was recorded, by n; {} if that was not measured."""
        return {int(n): float(seconds) for n, seconds in self.header.get("pass_seconds", {}).items()}

    @property
    def best(self) -> int:
        """How many likeliest ids are known at every place; 1: none but the recorded one."""
        known = [[len(ids) for ids in one.best] if len(one.best) >= len(one.answer) else [1] for one in self.answers]
        return max(1, min(min(each, default=1) for each in known))


def read_recording(path: str | Path, starts: Starts | None = None, prompt_tokens: int | None = None) -> Recording:
    """The recording in a file.

    Args:
        path: the file, of any format.
        starts: of rows that torch printed: for each, in order, what its prompt may be, as ids (the first one that it
            begins with is taken).
        prompt_tokens: how many tokens each such row's prompt has, where `starts` do not tell; 0 beside `starts`: the
            rows hold answers alone.

    Raises:
        UserError: a file that cannot be read or holds no recording; with file and line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the recording {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} holds no recording: it is no UTF-8 text") from error
    begin = text.lstrip()
    if not begin:
        raise UserError(f"{file} holds no recording: it is empty")
    if begin.startswith("tensor("):
        rows = printed_answers(file, text, starts, prompt_tokens)
        return Recording(tuple(Recorded(prompt, answer) for prompt, answer in rows))
    if not begin.startswith("{"):
        raise UserError(
            f'{file} holds no recording: it must be tensor(…) lines, a JSON map of "id_id_…" to "id_id_…" or JSON lines'
        )
    found = _map(file, text)
    return _lines(file, text) if found is None else found


def _map(file: Path, text: str) -> Recording | None:
    """The JSON map; None for a file of JSON lines."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if {"vocab_size", "prompt_ids", "answer_ids", "event"} & told.keys():
        return None
    return Recording(
        tuple(Recorded(_joined(file, text, key, key), _joined(file, text, key, answer)) for key, answer in told.items())
    )


def _joined(file: Path, text: str, key: str, ids: Any) -> Ids:
    parts = ids.split("_") if isinstance(ids, str) else []
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        shown = key if len(key) <= 30 else key[:29] + "…"
        refuse(file, text, max(0, text.find(json.dumps(key))), f'the entry "{shown}" must be ids joined by "_"')
    return tuple(map(int, parts))


def _lines(file: Path, text: str) -> Recording:
    """JSON lines. A last one without its newline was being written when the writer was stopped: it is left out."""
    header: dict[str, Any] = {}
    found: dict[Ids, Recorded] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and number > 1:
                break
            raise UserError(f"{file}:{number}: no JSON: {error}") from None
        if not isinstance(told, dict):
            raise UserError(f"{file}:{number}: must be a JSON object, got {line.strip()[:20]!r}")
        if "prompt_ids" in told and "answer_ids" in told:
            if told["answer_ids"] == []:
                continue  # stopped before its first token
            one = _answer(file, number, told)
            found[one.prompt] = one
        elif "vocab_size" in told or "pass_seconds" in told:
            header |= _header(file, number, told)
    return Recording(tuple(found.values()), header)


def _answer(file: Path, number: int, told: dict[str, Any]) -> Recorded:
    prompt, answer = (checked(file, number, name, told[name]) for name in ("prompt_ids", "answer_ids"))
    best = told.get("best_ids", [])
    if not isinstance(best, list):
        raise UserError(f"{file}:{number}: best_ids must be a list of lists of ids")
    return Recorded(prompt, answer, tuple(checked(file, number, "an entry of best_ids", ids) for ids in best), told)


def _header(file: Path, number: int, told: dict[str, Any]) -> dict[str, Any]:
    """The header's line; what a reader counts on is checked."""
    for name, least in (("vocab_size", 1), ("end_id", 0), ("start_id", 0), ("context", 1)):
        value = told.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UserError(f"{file}:{number}: {name} must be a whole number, {least} or more, got {value!r}")
    if told.get("stop_ids"):
        checked(file, number, "stop_ids", told["stop_ids"])
    seconds = told.get("pass_seconds")
    if seconds is not None and not (
        isinstance(seconds, dict)
        and all(n.isascii() and n.isdigit() and int(n) for n in seconds)
        and all(isinstance(one, int | float) and 0 < one < 1e9 for one in seconds.values())
    ):
        raise UserError(f'{file}:{number}: pass_seconds must map numbers of tokens to seconds, such as {{"1": 0.05}}')
    return {name: value for name, value in told.items() if value is not None}
