"""Builds static n-gram tables: token sequences in, one compact file out. Knows no models and no screen.

A context's distribution is interpolated with that of the context one token shorter:
P_n(w) = (c_n(w) + k · P_{n-1}(w)) / (c_n + k), with P_0 the share of the token. The best tokens are those with
the largest P_n of the tokens seen there, so that ties go to what follows the shorter context more often,
and P_n is their confidence. What is read from where is told in :func:`read_passages`, the file's format in
sampling/drafters/tables/table_file.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sampling.drafters.tables.table_file import MOST, TableArrays, grown, keys_of, write_tables
from utils.errors import UsageError, UserError

Array = np.ndarray[Any, Any]
PRIOR = 8.0
"""k: how many sightings the shorter context's law is worth; at 8 the confidence is what is then seen."""
LEAST = 0.03
"""A further token of a context is kept from this confidence on: less likely ones are never drafted."""

Encode = Callable[[str], list[int]]
_ENTRY = {2: 7, 4: 9}  # bytes of an entry, by the bytes of a token
_HEADER = 4096  # bytes left to the header and to alignment


@dataclass(frozen=True)
class Passage:
    """One sequence; the tokens from index `start` on are counted, those before it are context only."""

    ids: Sequence[int]
    start: int = 0


@dataclass(frozen=True)
class Level:
    """The entries of all contexts of `size` tokens, sorted by key; of one key the likeliest token first. All [N]."""

    size: int
    keys: Array  # uint32
    tokens: Array  # int64: a next token
    confidence: Array  # float64 in (0, 1]
    counts: Array  # int64: sightings of the context; of the context with this token where it is not the best one
    repeats: Array  # bool: it is the best token of the context one token shorter

    def take(self, chosen: Array) -> Level:
        """Only the entries where `chosen` [N] is true."""
        arrays = (self.keys, self.tokens, self.confidence, self.counts, self.repeats)
        return Level(self.size, *(array[chosen] for array in arrays))


def count_levels(passages: Iterable[Passage], max_n: int, prior: float = PRIOR, most: int = 1) -> list[Level]:
    """Levels of 1 … `max_n` context tokens, as far as the passages reach; at most `most` entries a context."""
    flat, at, reach = _flattened(passages)
    if not len(at):
        return []
    follows = flat[at]
    unigrams = np.bincount(follows)
    below = unigrams[follows] / len(follows)  # P of the shorter context, for each counted token
    likely = np.full(len(at), -1)  # and that context's best token; the tables have no empty context
    states = np.zeros(len(at), dtype=np.uint64)
    levels: list[Level] = []
    for size in range(1, max_n + 1):
        whole = reach >= size
        at, follows, reach, below, likely = at[whole], follows[whole], reach[whole], below[whole], likely[whole]
        if not len(at):
            break
        front = flat[at - size]
        states = grown(states[whole], front)
        level, below, likely = _level(size, states, front, follows, below, likely, prior, most)
        levels.append(level)
    return levels


def _flattened(passages: Iterable[Passage]) -> tuple[Array, Array, Array]:
    """All ids [T], the index of each counted token [N] and how many tokens of its passage precede it [N]."""
    pieces, places, reaches, offset = [], [], [], 0
    for passage in passages:
        ids = np.asarray(passage.ids, dtype=np.int64)
        inside = np.arange(max(passage.start, 1), len(ids))
        pieces.append(ids)
        places.append(inside + offset)
        reaches.append(inside)
        offset += len(ids)
    none = np.zeros(0, dtype=np.int64)
    return (
        np.concatenate([none, *pieces]),
        np.concatenate([none, *places]),
        np.concatenate([none, *reaches]),
    )


def _level(
    size: int, states: Array, front: Array, follows: Array, below: Array, likely: Array, prior: float, most: int
) -> tuple[Level, Array, Array]:
    """One level, and for each counted token [N] its P at this size and its context's best token."""
    _, first, context, totals = np.unique(states, return_index=True, return_inverse=True, return_counts=True)
    vocabulary = int(follows.max()) + 1
    pairs, seen, pair, counts = np.unique(
        context * vocabulary + follows, return_index=True, return_inverse=True, return_counts=True
    )
    owner, token = pairs // vocabulary, pairs % vocabulary
    law = (counts + prior * below[seen]) / (totals[owner] + prior)
    order = np.lexsort((token, -law, owner))
    _, start = np.unique(owner[order], return_index=True)
    rank = np.empty(len(order), dtype=np.int64)  # of each pair in its context, 0 for the largest P
    rank[order] = np.arange(len(order)) - start[owner[order]]
    best = token[order[start]]  # [contexts]
    keys = keys_of(states[first], front[first], size)
    stays = _frequent(keys, totals)[owner] & ((rank == 0) | ((rank < most) & (law >= LEAST)))
    kept = np.flatnonzero(stays)
    kept = kept[np.lexsort((rank[kept], keys[owner[kept]]))]
    owners = owner[kept]
    level = Level(
        size,
        keys[owners],
        token[kept],
        law[kept],
        np.where(rank[kept] == 0, totals[owners], counts[kept]),
        token[kept] == likely[first][owners],
    )
    return level, law[pair], best[context]


def _frequent(keys: Array, totals: Array) -> Array:
    """[contexts] bool: of those that share a key the most frequent one."""
    order = np.lexsort((-totals, keys))
    _, unique = np.unique(keys[order], return_index=True)
    found = np.zeros(len(keys), dtype=bool)
    found[order[unique]] = True
    return found


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
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    size = write_tables(out, arrays, about)
    return {**about, "contexts": [len(level.keys) for level in levels], "bytes": size}


def arrays_of(level: Level) -> TableArrays:
    """A level as it is looked up: confidence in 255ths, never 0."""
    confidence = np.clip(np.rint(level.confidence * 255), 1, 255).astype(np.uint8)
    return TableArrays(level.size, level.keys, level.tokens.astype(np.uint32), confidence)
