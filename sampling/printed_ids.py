"""Rows of ids as torch prints tensors: `tensor([[  518,   799, …` with rows that wrap, one or several a tensor, split
into prompt and answer. Knows no text and no models; what is wrong is named by file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.errors import UserError

Ids = tuple[int, ...]
Starts = Sequence[Sequence[Sequence[int]]]

_TENSOR = re.compile(r"tensor\(([^()]*)\)")
_ROW = re.compile(r"\[[^\[\]]*\]")
_SHAPE = re.compile(r"\s*(0|\[\s*0(\s*,\s*0)*\s*,?\s*\])\s*(,\s*[a-z_]+\s*=\s*[^,\[\]]+)*\s*")
_SHORTENED = "torch has shortened it: torch.set_printoptions(threshold=…)"


def printed_answers(
    file: Path, text: str, starts: Starts | None, prompt_tokens: int | None
) -> Iterator[tuple[Ids, Ids]]:
    """Prompt and answer of every row of a file; arguments and errors as :func:`sampling.recordings.read_recording`."""
    return _split(file, list(_rows(file, text)), starts, prompt_tokens)


def _rows(file: Path, text: str) -> Iterator[tuple[int, Ids]]:
    """Every row of every tensor, with the line that it begins on."""
    done = 0
    for found in _TENSOR.finditer(text):
        _nothing(file, text, done, found.start())
        done, body = found.end(), found[1]
        if not _SHAPE.fullmatch(_ROW.sub("0", body)):
            shortened = f": {_SHORTENED}" if "..." in body else ""
            refuse(file, text, found.start(), f"a tensor must hold rows of ids{shortened}")
        for row in _ROW.finditer(body):
            place = found.start(1) + row.start()
            try:
                ids = json.loads(row[0])
            except ValueError:
                why = f": {_SHORTENED}" if "..." in row[0] else f", got {row[0][:20]!r}"
                refuse(file, text, place, f"a row must be a list of ids{why}")
            yield line_of(text, place), checked(file, line_of(text, place), "a row", ids)
    _nothing(file, text, done, len(text))


def _nothing(file: Path, text: str, start: int, end: int) -> None:
    """Between tensors there is only space."""
    rest = text[start:end].strip()
    if rest:
        place = start + text[start:end].index(rest[0])
        open_one = rest.startswith("tensor(")
        refuse(file, text, place, "a tensor is not closed" if open_one else f"expected tensor(…, got {rest[:20]!r}")


def _split(
    file: Path, rows: list[tuple[int, Ids]], starts: Starts | None, prompt_tokens: int | None
) -> Iterator[tuple[Ids, Ids]]:
    """Each row as prompt and answer."""
    if starts is None and not prompt_tokens:
        raise UserError(f"{file}: its rows hold prompts and answers together: tell the prompts, or their tokens")
    if starts is not None and prompt_tokens:
        raise UserError(
            f"{file}: the prompts tell their tokens: prompt_tokens must be 0 beside them, got {prompt_tokens}"
        )
    if starts is not None and len(rows) > len(starts):
        raise UserError(f"{file}:{rows[len(starts)][0]}: row {len(starts) + 1} has no prompt, there are {len(starts)}")
    for number, (line, row) in enumerate(rows):
        if starts is None:
            count = prompt_tokens or 0
            prompt, answer = row[:count], row[count:]
        elif prompt_tokens == 0:
            prompt, answer = tuple(starts[number][0]), row
        else:
            known = [tuple(ids) for ids in starts[number]]
            prompt = next((ids for ids in known if ids and row[: len(ids)] == ids), ())
            if not prompt:
                raise UserError(
                    f"{file}:{line}: row {number + 1} does not begin with its prompt: {_parting(row, known)}"
                )
            answer = row[len(prompt) :]
        if not answer:
            raise UserError(f"{file}:{line}: row {number + 1} of {len(row)} tokens has no answer behind its prompt")
        yield prompt, answer


def _parting(row: Ids, known: Sequence[Ids]) -> str:
    """Where the likeliest prompt and the row part."""

    def shared(ids: Ids) -> int:
        return next((i for i, (one, other) in enumerate(zip(ids, row, strict=False)) if one != other), len(row))

    at = max(map(shared, known))
    prompt = next(ids for ids in known if shared(ids) == at)
    here = row[at] if at < len(row) else "nothing"
    return f"token {at + 1} is {here}, the prompt's {prompt[at]}"


def checked(file: Path, number: int, what: str, ids: Any) -> Ids:
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise UserError(f"{file}:{number}: {what} must be a list of ids, at least one, none below 0")
    return tuple(ids)


def line_of(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def refuse(file: Path, text: str, place: int, why: str) -> NoReturn:
    raise UserError(f"{file}:{line_of(text, place)}: {why}")
