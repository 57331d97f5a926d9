"""Texts to learn from, as token sequences in files: written by a target, resumed where an earlier run stopped, read
back and split into texts to learn from and texts that are held out.

training/text/synthesize.py writes the text. Knows no models and no tensors beyond lists of ids; reports its progress
to a callable.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from training.tables.build import Passage, numbered_lines, passage_of
from training.text.dialogues import Line
from training.text.synthesize import TextWriter
from utils.errors import UserError
from utils.files import append, drop_half_line
from utils.progress import never

ENDLESS = 1 << 60  # tokens: as many as there are prompts for
SHORTEST = 8  # tokens; a shorter sequence teaches nothing


def written(file: Path) -> tuple[int, set[int]]:
    """Return (answer tokens, numbers of the chats) of a file begun earlier; a line cut off at its end is removed."""
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
    """Append answers to `file` (jsonl) until it holds `tokens` answer tokens; return how many it holds.

    Resumes an earlier run; chats without an answer leave a line without ids. `progress` gets the tokens so far, first
    those of the file, unless they are enough already. Fewer tokens than wanted are returned only when interrupted or
    when the source ends. Raises OSError (a full disk) with the whole lines written so far intact.
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
    """Return the answers that :func:`write_self` wrote, to be counted."""
    return [Passage(row["ids"], row["start"]) for row in _rows(file) if row["ids"]]


def cut(ids: Sequence[int], start: int, longest: int) -> Passage | None:
    """Return the first `longest` ids; None if their answer is too short to learn from."""
    text = Passage(tuple(ids[:longest]), min(start, longest))
    return text if len(text.ids) - text.start >= SHORTEST else None


def read_texts(files: Iterable[str | Path], vocab_size: int, longest: int) -> list[Passage]:
    """Return the sequences of jsonl files with `ids`, and optionally `start`, a line; other fields are ignored.

    Sequences are cut at `longest` tokens; those with an answer of fewer than 8 are left out.

    Raises:
        UserError: a file or line that cannot be read, or an id outside the vocabulary, named by its number.
    """
    texts = [passage_of(line, where, vocab_size) for file in files for where, line in numbered_lines(file)]
    return [text for each in texts if (text := cut(each.ids, each.start, longest)) is not None]


def split(texts: Sequence[Passage], held: int) -> tuple[list[Passage], list[Passage]]:
    """Return (to learn from, held out): `held` sequences at equal steps are held out, at most a fifth."""
    held = max(1, min(held, len(texts) // 5))
    step = len(texts) // held
    chosen = {index * step for index in range(held)}
    return (
        [text for index, text in enumerate(texts) if index not in chosen],
        [text for index, text in enumerate(texts) if index in chosen],
    )


def short_list(texts: Iterable[Passage], size: int, always: Iterable[int] = ()) -> list[int]:
    """Return the `size` most frequent ids of the answers, ascending; `always` are among them."""
    counts = Counter(token for text in texts for token in text.ids[text.start :])
    first = list(dict.fromkeys(always))
    ranked = sorted(counts.keys() - set(first), key=lambda token: (-counts[token], token))
    return sorted([*first, *ranked][:size])
