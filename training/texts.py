"""Token sequences to learn from: read from files, split into what is learned from and what is held out.

Knows no models and no tensors beyond lists of ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import UserError

SHORTEST = 8  # tokens; a shorter sequence teaches nothing


@dataclass(frozen=True)
class Text:
    """One sequence of ids. The first `start` are a prompt that nobody wrote; `temperature` is that of the rest."""

    ids: tuple[int, ...]
    start: int = 0
    temperature: float | None = None


def read_texts(files: Iterable[str | Path], vocab_size: int, longest: int) -> list[Text]:
    """The sequences of jsonl files with `ids`, and optionally `start` and `temperature`, a line.

    Sequences are cut at `longest` tokens; those with an answer of fewer than 8 are left out.

    Raises:
        UserError: a file or line that cannot be read, or an id outside the vocabulary, named by its number.
    """
    found = []
    for file in map(Path, files):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {file}: {' '.join(str(error).split())}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_text(line, f"{file}:{number}", vocab_size, longest))
    return [text for text in found if len(text.ids) - text.start >= SHORTEST]


def _text(line: str, where: str, vocab_size: int, longest: int) -> Text:
    try:
        row = json.loads(line)
        ids, start, temperature = list(map(int, row["ids"])), int(row.get("start", 0)), row.get("temperature")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f'{where}: must be an object with a list of token ids under "ids"') from None
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UserError(f"{where}: id {wrong} is outside the target's vocabulary (0 … {vocab_size - 1})")
    if not 0 <= start <= len(ids):
        raise UserError(f"{where}: start is {start}, the sequence has {len(ids)} ids")
    return Text(tuple(ids[:longest]), min(start, longest), temperature)


def split(texts: Sequence[Text], held: int) -> tuple[list[Text], list[Text]]:
    """(to learn from, held out): every so-many-th sequence is held out, `held` in all, at most a fifth."""
    held = max(1, min(held, len(texts) // 5))
    step = len(texts) // held
    chosen = {index * step for index in range(held)}
    return (
        [text for index, text in enumerate(texts) if index not in chosen],
        [text for index, text in enumerate(texts) if index in chosen],
    )


def short_list(texts: Iterable[Text], size: int, always: Iterable[int] = ()) -> list[int]:
    """The `size` most frequent ids of what was written (prompts left out), ascending; `always` are among them."""
    counts: dict[int, int] = {}
    for text in texts:
        for token in text.ids[text.start :]:
            counts[token] = counts.get(token, 0) + 1
    first = list(dict.fromkeys(always))
    ranked = sorted((token for token in counts if token not in set(first)), key=lambda token: (-counts[token], token))
    return sorted([*first, *ranked][:size])


Told = Callable[[str, float | None], Any]
"""Hears what is being done and how far it is (0 … 1, None if unknown)."""
