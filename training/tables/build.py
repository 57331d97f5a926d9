"""Builds static n-gram tables: token sequences in, one compact file out. Knows no models and no screen.

A context's distribution is interpolated with that of the context one token shorter:
P_n(w) = (c_n(w) + k · P_{n-1}(w)) / (c_n + k), with P_0 the share of the token. The best tokens are those with
the largest P_n of the tokens seen there, so that ties go to what follows the shorter context more often,
and P_n is their confidence. The file's format: sampling/drafters/tables/table_file.py.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sampling.drafters.tables.table_file import TableArrays, grown, keys_of, write_tables
from utils.errors import UsageError, UserError
from utils.files import numbered_lines, object_in, read_text

Array = np.ndarray[Any, Any]
PRIOR = 8.0  # k: the weight of the shorter context's distribution, in sightings; at 8 the confidence is calibrated
LEAST = 0.03  # least confidence of a context's further tokens: less likely ones are never drafted

Encode = Callable[[str], list[int]]
_ENTRY = {2: 7, 4: 9}  # bytes of an entry, by the bytes of a token
_HEADER = 4096  # bytes left to the header and to alignment


@dataclass(frozen=True)
class Passage:
    """One sequence; the tokens from index `start` on are counted and learned, those before it are context only."""

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

    def take(self, chosen: Array) -> "Level":
        """Return only the entries where `chosen` [N] is true."""
        return Level(
            self.size,
            *(array[chosen] for array in (self.keys, self.tokens, self.confidence, self.counts, self.repeats)),
        )


def count_levels(passages: Iterable[Passage], max_n: int, most: int = 1) -> list[Level]:
    """Return levels of 1 … `max_n` context tokens, as far as the passages reach; at most `most` entries a context."""
    kept = list(passages)
    sequences = [np.asarray(passage.ids, dtype=np.int64) for passage in kept]
    # Of each counted token: how many tokens of its passage precede it, and its index among all ids.
    reaches = [np.arange(max(passage.start, 1), len(passage.ids)) for passage in kept]
    begins = np.cumsum([0, *map(len, sequences)])
    reach = np.concatenate([np.zeros(0, dtype=np.int64), *reaches])
    if not len(reach):
        return []
    at = np.concatenate([inside + begin for inside, begin in zip(reaches, begins, strict=False)])
    flat = np.concatenate(sequences)
    follows = flat[at]
    below = np.bincount(follows)[follows] / len(follows)  # P of the shorter context, for each counted token
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
        level, below, likely = _level(size, states, front, follows, below, likely, most)
        levels.append(level)
    return levels


def _level(
    size: int, states: Array, front: Array, follows: Array, below: Array, likely: Array, most: int
) -> tuple[Level, Array, Array]:
    """Return one level, and for each counted token [N] its P at this size and its context's best token."""
    _, first, context, totals = np.unique(states, return_index=True, return_inverse=True, return_counts=True)
    vocabulary = int(follows.max()) + 1
    pairs, seen, pair, counts = np.unique(
        context * vocabulary + follows, return_index=True, return_inverse=True, return_counts=True
    )
    owner, token = pairs // vocabulary, pairs % vocabulary
    probs = (counts + PRIOR * below[seen]) / (totals[owner] + PRIOR)
    order = np.lexsort((token, -probs, owner))
    _, start = np.unique(owner[order], return_index=True)
    rank = np.empty(len(order), dtype=np.int64)  # of each pair in its context, 0 for the largest P
    rank[order] = np.arange(len(order)) - start[owner[order]]
    best = token[order[start]]  # [contexts]
    keys = keys_of(states[first], front[first], size)
    order = np.lexsort((-totals, keys))  # of contexts that share a key the most frequent one is kept
    frequent = np.zeros(len(keys), dtype=bool)
    frequent[order[np.unique(keys[order], return_index=True)[1]]] = True
    kept = np.flatnonzero(frequent[owner] & ((rank == 0) | ((rank < most) & (probs >= LEAST))))
    kept = kept[np.lexsort((rank[kept], keys[owner[kept]]))]
    owners = owner[kept]
    level = Level(
        size,
        keys[owners],
        token[kept],
        probs[kept],
        np.where(rank[kept] == 0, totals[owners], counts[kept]),
        token[kept] == likely[first][owners],
    )
    return level, probs[pair], best[context]


def read_passages(path: str | Path, encode: Encode, vocab_size: int) -> Iterator[Passage]:
    """Return the sequences of a file.

    A line of a .jsonl, .jsonl.gz or .json file holds `ids` (and `start`, from which on they are counted: an answer
    after its prompt), or `text`, or `prompt`; any other file is plain text, split at empty lines.

    Raises:
        UserError: a file or line that cannot be read, named by its number.
    """
    file = Path(path).expanduser()
    if file.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        return (passage_of(line, f"{file}:{number}", vocab_size, encode) for number, line in numbered_lines(file))
    return (Passage(encode(part)) for part in read_text(file).split("\n\n") if part.strip())


def passage_of(line: str, where: str, vocab_size: int, encode: Encode | None = None) -> Passage:
    """Return the sequence in a line of JSON; without `encode` it must hold ids. UserError names `where`."""
    data = object_in(line, where)
    text = data.get("text", data.get("prompt"))
    if "ids" not in data and encode is not None and isinstance(text, str):
        return Passage(encode(text))
    if "ids" not in data:
        wanted = '"ids"' if encode is None else '"ids", "text" or "prompt"'
        raise UserError(f"{where}: needs {wanted}, has {', '.join(map(str, data)) or 'nothing'}")
    ids, start = data["ids"], data.get("start", 0)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError(f"{where}: ids must be a list of whole numbers")
    if outside := [token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < vocab_size]:
        raise UserError(f"{where}: id {outside[0]} lies outside the vocabulary of {vocab_size} ids")
    if type(start) is not int or not 0 <= start <= len(ids):
        raise UserError(f"{where}: start must be a whole number from 0 to {len(ids)}, got {start!r}")
    return Passage(ids, start)


def pruned(levels: Sequence[Level], entries: int) -> list[Level]:
    """Return at most `entries` entries: the frequent ones and those that correct the shorter context.

    Dropped first are entries whose token is the shorter context's best one too, then rare ones, then those of long
    contexts.
    """
    sizes = np.concatenate([np.full(len(level.keys), level.size) for level in levels])
    counts = np.concatenate([level.counts for level in levels])
    repeats = np.concatenate([level.repeats for level in levels])
    keep = np.zeros(len(sizes), dtype=bool)
    keep[np.lexsort((sizes, -counts, repeats))[:entries]] = True
    ends = np.cumsum([len(level.keys) for level in levels])[:-1]
    return [level.take(part) for level, part in zip(levels, np.split(keep, ends), strict=True)]


def arrays_of(level: Level) -> TableArrays:
    """Return the part of a level that a file keeps."""
    confidence = np.clip(np.rint(level.confidence * 255), 1, 255).astype(np.uint8)  # in 255ths, never 0
    return TableArrays(level.size, level.keys, level.tokens.astype(np.uint32), confidence)


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
    """Count, prune to `max_mb` million bytes, write; return the header's facts with `bytes` and, by level, the number
    of entries kept (`contexts`).

    Args:
        passages: the sequences to count.
        out: the file.
        vocab_size, fingerprint: of the target and its tokenizer, kept in the header.
        source: named in the header.
        max_n: tokens of the longest context, 1 … 16 (sampling/drafters/tables/table_file.py: MOST).
        max_mb: most bytes of the file, in millions.
        choices: most next tokens of a context; trees draft more than one.

    Raises:
        UsageError: max_mb leaves no room for an entry.
        UserError: nothing to count.
        OSError: a file that cannot be written.
    """
    kept = [passage for passage in passages if len(passage.ids)]
    counted = sum(max(0, len(passage.ids) - max(passage.start, 1)) for passage in kept)
    if not (levels := count_levels(kept, max_n, most=choices)):
        raise UserError(f"{source}: no tokens to count: it takes a passage of two tokens or more")
    entries = (int(max_mb * 1e6) - _HEADER) // _ENTRY[2 if vocab_size <= 1 << 16 else 4]
    if entries < 1:
        raise UsageError(f"max_mb must leave room for one entry, got {max_mb:g}")
    left = [level for level in pruned(levels, entries) if len(level.keys)]
    about = {
        "vocab_size": vocab_size,
        "tokenizer": fingerprint,
        "max_n": max_n,
        "source": source,
        "passages": len(kept),
        "tokens": counted,
        "contexts_found": [len(level.keys) for level in levels],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    size = write_tables(out, [arrays_of(level) for level in left], about)
    return {**about, "contexts": [len(level.keys) for level in left], "bytes": size}
