"""Static n-gram tables: a compact file, read into memory, and its look-up.

The file: 8 bytes MAGIC, the header's length (uint32, little-endian), a JSON header, then for each
context size three arrays sorted by key: keys uint32, tokens uint16 or uint32, confidence uint8
(the probability of the token, in 255ths). Each array begins at a multiple of 64 bytes; the header has its offset.
A context may have several entries, the likeliest first. The key of a context of one token is the token; longer
contexts have a 32-bit hash (defined here for Python integers and for numpy arrays, which build the tables, and in
utils/kernels/lookup.c for the compiled look-up), so an unknown context is taken for a known one with
probability entries / 2³² (0.01% at 400 thousand). That costs a rejected draft and nothing else: drafts are point
masses, lossless however they are chosen. Knows no text, and of the tokenizer only its fingerprint.
"""

import copy
import ctypes
import json
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.errors import UserError, raise_first
from utils.files import write_bytes
from utils.kernels.bindings import TableLevel
from utils.objects import Json

_PRIME = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1

MAGIC = b"NGRAMTBL"
FORMAT = 1
MOST = 16  # most tokens of a context
_ALIGN = 64
_HEAD = len(MAGIC) + 4
_BUCKET = 20  # low bits of a key within a bucket: 4096 buckets shorten the search and its cache misses


def suffix_keys(tail: list[int], sizes: int) -> list[int]:
    """Return the keys of the last 1, 2 … `sizes` tokens of `tail`, as far as it goes."""
    keys: list[int] = []
    state = 0
    for token in tail[: -sizes - 1 : -1]:
        state = (state + token + 1) * _PRIME & _WORD
        state ^= state >> 32
        keys.append((state & 0xFFFFFFFF) if keys else token)
    return keys


def grown(states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the hash states [N] uint64 of contexts extended at their front by tokens [N]."""
    states = (states + tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_PRIME)
    return np.asarray(states ^ (states >> np.uint64(32)))


def keys_of(states: np.ndarray, tokens: np.ndarray, size: int) -> np.ndarray:
    """Return keys [N] uint32 of contexts of `size` tokens: their hash, or for size 1 their only token."""
    return tokens.astype(np.uint32) if size == 1 else (states & np.uint64(0xFFFFFFFF)).astype(np.uint32)


@dataclass(frozen=True)
class TableArrays:
    """The entries of one context size, sorted by key, likeliest token first within a key: all [N] integers."""

    size: int
    keys: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray


class StaticTables:
    """Looks up contexts of at most `max_n` tokens, the longest known one first.

    `header` is the file's: source, counts, date, tokenizer. Ids from `end` on are not offered.
    """

    def __init__(self, header: Json, levels: Sequence[TableArrays]) -> None:
        self.header, self.end = header, 1 << 62
        self.max_n = max((level.size for level in levels), default=0)
        sizes = {level.size: level for level in levels}
        none = np.zeros(0, dtype=np.uint32)
        bounds = np.arange((1 << 32 - _BUCKET) + 1, dtype=np.uint64) << np.uint64(_BUCKET)
        # Lists and memoryviews: reading single entries of arrays is far slower.
        self._levels: list[tuple[list[int], memoryview, memoryview, memoryview]] = []
        self._records = (TableLevel * self.max_n)()
        for size in range(1, self.max_n + 1):
            level = sizes.get(size, TableArrays(size, none, none, none))
            starts = np.searchsorted(level.keys, bounds).tolist()
            self._levels.append((starts, level.keys.data, level.tokens.data, level.confidence.data))
            self._records[size - 1] = TableLevel(
                level.keys.ctypes.data,
                level.tokens.ctypes.data,
                level.confidence.ctypes.data,
                len(level.keys),
                level.tokens.itemsize,
            )
        self.compiled = ctypes.addressof(self._records)  # of all context sizes, for a compiled look-up

    def below(self, end: int) -> "StaticTables":
        """Return the same tables without next tokens from id `end` on."""
        tables = copy.copy(self)
        tables.end = min(end, self.end)
        return tables

    def entries(self, tail: list[int], most: int = 1) -> Iterator[tuple[int, int, float]]:
        """Yield (size of context, next token, its probability) of the `most` likeliest tokens after each known suffix
        of `tail`, the longest suffix first."""
        keys = suffix_keys(tail, self.max_n)
        for size in range(len(keys), 0, -1):
            starts, known, tokens, confidence = self._levels[size - 1]
            key = keys[size - 1]
            bucket = key >> _BUCKET
            begin = bisect_left(known, key, starts[bucket], starts[bucket + 1])
            for index in range(begin, min(begin + most, len(known))):
                if known[index] != key:
                    break
                if tokens[index] < self.end:
                    yield size, tokens[index], confidence[index] / 255

    @staticmethod
    def open(path: str | Path, *, vocab_size: int | None = None, fingerprint: str | None = None) -> "StaticTables":
        """Read a file: this project's format, or a published bigram table (a JSON list).

        Args:
            path: the file.
            vocab_size: of the target; tables for a larger vocabulary are refused.
            fingerprint: of the target's tokenizer; tables made with another one are refused.

        Raises:
            UserError: a file that is missing, damaged, of another format or another vocabulary.
        """
        file = Path(path)
        try:
            with file.open("rb") as opened:
                begin = opened.read(_HEAD)
                if begin[:1] in (b"[", b" ", b"\n"):
                    return _published(file, vocab_size)
                if begin[: len(MAGIC)] != MAGIC:
                    raise UserError(f"{file} holds no n-gram tables: it does not begin with {MAGIC.decode()}")
                data = begin + opened.read()  # not mapped: a file that is overwritten meanwhile does no harm
        except OSError as error:
            raise UserError(f"cannot read the n-gram tables {file}: {error.strerror}") from error
        header, levels = _parsed(file, data)
        size, theirs = header.get("vocab_size"), header.get("tokenizer")
        if not isinstance(size, int) or (vocab_size is not None and size > vocab_size):
            ids = f"{size} ids, the target has {vocab_size}" if isinstance(size, int) else "unknown size"
            raise UserError(f"the n-gram tables {file} are for a vocabulary of {ids}")
        if fingerprint is not None and theirs is not None and theirs != fingerprint:
            raise UserError(f"the n-gram tables {file} were made with another tokenizer ({theirs}, here {fingerprint})")
        if any(len(level.tokens) and level.tokens.max() >= size for level in levels):
            raise UserError(f"the n-gram tables {file} are damaged: they hold ids beyond their own vocabulary")
        return StaticTables(header, levels)


def _parsed(file: Path, data: bytes) -> tuple[Json, list[TableArrays]]:
    """Return the header and arrays of a whole, undamaged file."""
    length = int.from_bytes(data[len(MAGIC) : _HEAD], "little")
    try:
        header = json.loads(data[_HEAD : _HEAD + length].decode("utf-8"))
        version, total, checksum, described = (header[key] for key in ("format", "bytes", "crc32", "levels"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the n-gram tables {file} are damaged: no header can be read") from error
    raise_first(
        {
            f"the n-gram tables {file} have format {version}, this version reads {FORMAT}": version != FORMAT,
            f"the n-gram tables {file} are damaged: {len(data)} bytes instead of {total}": len(data) != total,
        },
        UserError,
    )
    start = _aligned(_HEAD + length)
    if zlib.crc32(memoryview(data)[start:]) != checksum:
        raise UserError(f"the n-gram tables {file} are damaged: their checksum is wrong")
    try:
        return header, [_level(data, start, level) for level in described]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the n-gram tables {file} are damaged: the header does not describe the data") from error


def _level(data: bytes, start: int, described: Json) -> TableArrays:
    size, count, offsets = int(described["size"]), int(described["entries"]), described["offsets"]
    if not 1 <= size <= MOST:
        raise ValueError(size)
    parts = zip(("<u4", f"<u{described['token_bytes']}", "u1"), offsets, strict=True)
    return TableArrays(size, *(np.frombuffer(data, kind, count, start + int(offset)) for kind, offset in parts))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def write_tables(path: str | Path, levels: Sequence[TableArrays], about: Json) -> int:
    """Write a file and return its size in bytes. `about` joins the header: `vocab_size`, `tokenizer`, `source` …

    The file appears whole or not at all.
    """
    token_bytes = 2 if about["vocab_size"] <= 1 << 16 else 4
    described, body = [], bytearray()
    for level in levels:
        offsets = []
        for kind, values in ("<u4", level.keys), (f"<u{token_bytes}", level.tokens), ("u1", level.confidence):
            offsets.append(len(body))
            part = values.astype(kind).tobytes()
            body += part.ljust(_aligned(len(part)), b"\0")
        described.append(
            {"size": level.size, "entries": len(level.keys), "token_bytes": token_bytes, "offsets": offsets}
        )
    header = {"format": FORMAT, **about, "crc32": zlib.crc32(body), "levels": described, "bytes": 0}
    room = _aligned(_HEAD + len(json.dumps(header)) + 20)  # the total's digits have room, blanks fill the rest
    header["bytes"] = room + len(body)
    text = json.dumps(header).encode("ascii").ljust(room - _HEAD)
    write_bytes(path, MAGIC + len(text).to_bytes(4, "little") + text + body)
    return room + len(body)


def _published(file: Path, vocab_size: int | None) -> StaticTables:
    """Read a bigram table as CS-Drafting publishes it: a JSON list, entry i the id after id i; −1, null or 0 if unseen.

    0 is `<unk>` or padding in the tokenizers of the published lists: it never follows anything.
    """
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} holds no n-gram tables: it begins like JSON and is none") from error
    if not isinstance(listed, list) or (vocab_size is not None and len(listed) > vocab_size):
        count = f"{len(listed)} ids, the target has {vocab_size}" if isinstance(listed, list) else "no list"
        raise UserError(f"the bigram table {file} does not fit: {count}")
    limit = len(listed) if vocab_size is None else vocab_size
    wrong = next((i for i, n in enumerate(listed) if n is not None and not (type(n) is int and -1 <= n < limit)), None)
    if wrong is not None:
        shown = json.dumps(listed[wrong])[:20]
        raise UserError(f"the bigram table {file} is damaged: entry {wrong} must be an id below {limit}, got {shown}")
    seen = [token for token, following in enumerate(listed) if following is not None and following > 0]
    keys, tokens = (np.array(ids, dtype=np.uint32) for ids in (seen, [listed[token] for token in seen]))
    sure = np.full(len(seen), 128, dtype=np.uint8)  # one half: this format has no counts
    return StaticTables(
        {"format": "bigram list", "vocab_size": len(listed), "source": file.name}, [TableArrays(1, keys, tokens, sure)]
    )
