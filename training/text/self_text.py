"""Texts to learn from, as token sequences in files: written by a target, taken up again where an earlier run stopped,
read back and split into what is learned from and what is held out.

How text is written is training/text/synthesize.py's business. Knows no models and no tensors beyond lists of ids; says
how far it is through a callable.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.tables.build import Passage, numbered_lines
from training.text.dialogues import Line
from training.text.synthesize import TextWriter
from utils.errors import UserError
from utils.files import append, drop_half_line
from utils.progress import never

ENDLESS = 1 << 60  # tokens: as many as there are prompts for
SHORTEST = 8  # tokens; a shorter sequence teaches nothing


def written(file: Path) -> tuple[int, set[int]]:
    """(answer tokens, numbers of the chats) of a file begun earlier; a line cut off at its end is taken away."""
    if not file.is_file():
        return 0, set()
    drop_half_line(file)
    rows = _rows(file)
    return sum(len(row["ids"]) - row["start"] for row in rows), {row["number"] for row in rows}


def _rows(file: Path) -> list[Line]:
    return [_row(line, file) for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]


def _row(line: str, file: Path) -> Line:
    try:
        row = json.loads(line)
        if isinstance(row["ids"], list) and isinstance(row["start"], int) and isinstance(row["number"], int):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file} is no file of self-written text: remove it, or name another")


def write_self(
    writer: TextWriter,
    file: Path,
    tokens: int,
    progress: Callable[[int], Any],
    interrupt: Callable[[], bool] = never,
) -> int:
    """Append answers to `file` (jsonl) until it holds `tokens` answer tokens; returns how many it holds.

    Goes on where an earlier run stopped; chats that came to nothing leave a line without ids. `progress` hears the
    tokens so far, first those found in the file; nothing where they are enough. Less than asked for comes back only
    when interrupted or when the source ends. Raises OSError (a full disk) with the whole lines written so far intact.
    """
    count, done = written(file)
    if count >= tokens:
        return count
    progress(count)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as out:
        for number, lines in writer.chats(done, interrupt):
            kept = lines or [{"ids": [], "start": 0, "number": number}]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)
            append(out, text.encode("ascii"), file)
            count += sum(len(line["ids"]) - line["start"] for line in lines)
            progress(count)
            if count >= tokens:
                break
    return count


def passages(file: Path) -> list[Passage]:
    """What :func:`write_self` wrote, its answers to be counted."""
    return [Passage(row["ids"], row["start"]) for row in _rows(file) if row["ids"]]


@dataclass(frozen=True)
class TextIds:
    """One sequence of ids. The first `start` are a prompt that nobody wrote."""

    ids: tuple[int, ...]
    start: int = 0

    @classmethod
    def cut(cls, ids: Sequence[int], start: int, longest: int) -> TextIds:
        """The first `longest` ids."""
        return cls(tuple(ids[:longest]), min(start, longest))

    @property
    def teaches(self) -> bool:
        """Whether its answer is long enough to learn from."""
        return len(self.ids) - self.start >= SHORTEST


def read_texts(files: Iterable[str | Path], vocab_size: int, longest: int) -> list[TextIds]:
    """The sequences of jsonl files with `ids`, and optionally `start`, a line; other fields are passed over.

    Sequences are cut at `longest` tokens; those with an answer of fewer than 8 are left out.

    Raises:
        UserError: a file or line that cannot be read, or an id outside the vocabulary, named by its number.
    """
    found = [_text(line, where, vocab_size, longest) for file in files for where, line in numbered_lines(file)]
    return [text for text in found if text.teaches]


def _text(line: str, where: str, vocab_size: int, longest: int) -> TextIds:
    try:
        row = json.loads(line)
        ids, start = list(map(int, row["ids"])), int(row.get("start", 0))
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError):
        raise UserError(f'{where}: must be an object with a list of token ids under "ids"') from None
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UserError(f"{where}: id {wrong} is outside the target's vocabulary (0 … {vocab_size - 1})")
    if not 0 <= start <= len(ids):
        raise UserError(f"{where}: start is {start}, the sequence has {len(ids)} ids")
    return TextIds.cut(ids, start, longest)


def split(texts: Sequence[TextIds], held: int) -> tuple[list[TextIds], list[TextIds]]:
    """(to learn from, held out): every so-many-th sequence is held out, `held` in all, at most a fifth."""
    held = max(1, min(held, len(texts) // 5))
    step = len(texts) // held
    chosen = {index * step for index in range(held)}
    return (
        [text for index, text in enumerate(texts) if index not in chosen],
        [text for index, text in enumerate(texts) if index in chosen],
    )


def short_list(texts: Iterable[TextIds], size: int, always: Iterable[int] = ()) -> list[int]:
    """The `size` most frequent ids of what was written (prompts left out), ascending; `always` are among them."""
    counts = Counter(token for text in texts for token in text.ids[text.start :])
    first = list(dict.fromkeys(always))
    ranked = sorted(counts.keys() - set(first), key=lambda token: (-counts[token], token))
    return sorted([*first, *ranked][:size])
