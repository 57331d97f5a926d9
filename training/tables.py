"""Builds static n-gram tables: token sequences in, one compact file out. Knows no models and no screen.

What is read from where is told in :func:`read_passages`; the counting is in training/ngram_counts.py,
the file's format in sampling/drafters/table_file.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sampling.drafters.table_file import MOST, TableArrays, write_tables
from training.ngram_counts import Level, Passage, count_levels
from utils.errors import UsageError, UserError

Encode = Callable[[str], list[int]]
_ENTRY = {2: 7, 4: 9}  # bytes of an entry, by the bytes of a token
_HEADER = 4096  # bytes left to the header and to alignment


def read_passages(path: str | Path, encode: Encode, vocab_size: int) -> Iterator[Passage]:
    """The sequences of a file.

    A .jsonl line holds `ids` (and `start`, from which on they are counted: an answer behind its
    prompt), or `text`, or `prompt`; any other file is plain text, split at empty lines.

    Raises:
        UserError: a file or line that cannot be read, named by its number.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {' '.join(str(error).split())}") from None
    if file.suffix not in (".jsonl", ".json"):
        yield from (Passage(encode(part)) for part in text.split("\n\n") if part.strip())
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _passage(line, f"{file}:{number}", encode, vocab_size)


def _passage(line: str, where: str, encode: Encode, vocab_size: int) -> Passage:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f'{where}: must be an object with "ids", "text" or "prompt"')
    if "ids" not in data:
        text = data.get("text", data.get("prompt"))
        if not isinstance(text, str):
            raise UserError(f'{where}: needs "ids", "text" or "prompt", has {", ".join(map(str, data)) or "nothing"}')
        return Passage(encode(text))
    ids, start = data["ids"], data.get("start", 0)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError(f"{where}: ids must be a list of whole numbers")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        outside = min(ids) if min(ids) < 0 else max(ids)
        raise UserError(f"{where}: id {outside} lies outside the vocabulary of {vocab_size} ids")
    if type(start) is not int or not 0 <= start <= len(ids):
        raise UserError(f"{where}: start must be a whole number from 0 to {len(ids)}, got {start!r}")
    return Passage(ids, start)


def pruned(levels: Sequence[Level], entries: int) -> list[Level]:
    """At most `entries` entries: those often seen and those that correct the shorter context stay.

    A context whose token the shorter one predicts as well goes before one that says something new,
    a rare one before a frequent one, a long one before a short one.
    """
    total = sum(len(level.keys) for level in levels)
    if total <= entries:
        return list(levels)
    sizes = np.concatenate([np.full(len(level.keys), level.size) for level in levels])
    counts = np.concatenate([level.counts for level in levels])
    repeats = np.concatenate([level.repeats for level in levels])
    order = np.lexsort((sizes, -counts, repeats))
    keep = np.zeros(total, dtype=bool)
    keep[order[: max(0, entries)]] = True
    ends = np.cumsum([len(level.keys) for level in levels])[:-1]
    parts = np.split(keep, ends)
    return [level.take(part) for level, part in zip(levels, parts, strict=True)]


def build(
    passages: Iterable[Passage],
    out: str | Path,
    *,
    vocab_size: int,
    fingerprint: str | None,
    source: str,
    max_n: int = 5,
    max_mb: float = 10.0,
    choices: int = 1,
) -> dict[str, Any]:
    """Count, prune to `max_mb` million bytes, write; returns the header's facts with `bytes`.

    Args:
        passages: what to count.
        out: the file.
        vocab_size, fingerprint: of the target and its tokenizer, kept in the header.
        source: told in the header.
        max_n: tokens of the longest context, 1 … 16.
        max_mb: most bytes of the file, in millions.
        choices: most next tokens of a context; trees draft more than one.

    Raises:
        UsageError: max_n or max_mb out of range.
        UserError: nothing to count, or a file that cannot be written.
    """
    if not 1 <= max_n <= MOST:
        raise UsageError(f"max_n must be from 1 to {MOST}, got {max_n}")
    kept = [one for one in passages if len(one.ids)]
    counted = sum(max(0, len(one.ids) - max(one.start, 1)) for one in kept)
    levels = count_levels(kept, max_n, most=choices)
    if not levels:
        raise UserError(f"{source}: no tokens to count")
    room = int(max_mb * 1e6) - _HEADER
    entries = room // _ENTRY[2 if vocab_size <= 1 << 16 else 4]
    if entries < 1:
        raise UsageError(f"max_mb must leave room for one entry, got {max_mb:g}")
    found = [len(level.keys) for level in levels]
    levels = [level for level in pruned(levels, entries) if len(level.keys)]
    about = {
        "vocab_size": vocab_size,
        "tokenizer": fingerprint,
        "max_n": max_n,
        "source": source,
        "passages": len(kept),
        "tokens": counted,
        "contexts_found": found,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    arrays = [arrays_of(level) for level in levels]
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        size = write_tables(out, arrays, about)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return {**about, "contexts": [len(level.keys) for level in levels], "bytes": size}


def arrays_of(level: Level) -> TableArrays:
    """A level as it is looked up: confidence in 255ths, never 0."""
    confidence = np.clip(np.rint(level.confidence * 255), 1, 255).astype(np.uint8)
    return TableArrays(level.size, level.keys, level.tokens.astype(np.uint32), confidence)
