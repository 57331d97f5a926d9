"""Whether a drafter can draft for a target: the same tokens under the same ids, or else which bytes each id adds to a
text and which ids spell bytes. Knows no decoding."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Protocol

from utils.loading.loaded import LoadedModel


class Vocabulary(Protocol):
    """The one question asked of a tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def spoken_ids(target: LoadedModel, tokenizer: Vocabulary) -> int:
    """How many ids may be said, 0 … n-1: the target has logits for more where its vocabulary is padded."""
    return min(target.vocab_size, max(_by_id(tokenizer), default=target.vocab_size - 1) + 1)


def check_fit(
    target: LoadedModel, drafter: LoadedModel, tokenizers: tuple[Vocabulary | None, Vocabulary | None]
) -> list[str]:
    """Why the drafter does not fit, in lines for the user; empty if it does.

    `tokenizers` are the target's and the drafter's. Ids are compared one by one, added and special tokens too; where
    vocabularies end may differ, and a token of the target's that the drafter has no id for is one that it never drafts.
    """
    ours, theirs = tokenizers
    if ours is None or theirs is None:
        if target.vocab_size == drafter.vocab_size:
            return []
        missing = target.name if ours is None else drafter.name
        return [
            f"{missing} has no tokenizer files and the vocabularies differ in size "
            f"({target.name} {target.vocab_size}, {drafter.name} {drafter.vocab_size})"
        ]
    shared = min(target.vocab_size, drafter.vocab_size)
    mine, yours = _by_id(ours), _by_id(theirs)
    for token_id in range(max([-1, *mine, *yours]) + 1):
        here, there = mine.get(token_id), yours.get(token_id)
        if token_id < shared and here != there:
            return [
                f"the vocabularies of {target.name} and {drafter.name} differ: "
                f"id {token_id} is {_shown(here)} and {_shown(there)}"
            ]
        if token_id >= shared and there is not None and here != there:
            return [
                f"token {_shown(there)} (id {token_id}) lies outside the vocabulary "
                f"both models have ({target.name} {target.vocab_size}, {drafter.name} {drafter.vocab_size})"
            ]
    return []


def fit_notes(
    target: LoadedModel, drafter: LoadedModel, tokenizers: tuple[Vocabulary | None, Vocabulary | None]
) -> list[str]:
    """What fits, but is worth a line: a shorter context, an assumption made."""
    notes = []
    if drafter.context < target.context:
        notes.append(
            f"{drafter.name} has a context of {drafter.context} tokens, {target.name} {target.context}: "
            f"the pair runs with {drafter.context}"
        )
    if None in tokenizers:
        bare = target.name if tokenizers[0] is None else drafter.name
        notes.append(f"{bare} has no tokenizer files: assumed to use the other model's, as the sizes agree")
    return notes


def other_vocabulary(tokenizers: tuple[Any | None, Any | None]) -> TokenBytes | None:
    """The drafter's vocabulary where it is not the target's; None where one has no tokenizer or nothing is shared."""
    if None in tokenizers:
        return None
    ours, theirs = map(TokenBytes, tokenizers)
    return theirs if ours.by_bytes.keys() & theirs.by_bytes.keys() else None


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes: the printable ones for themselves, the rest from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


_LETTERS = _byte_alphabet()
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "\n"  # stands before a text that is not at the beginning of one


SAMPLE = """The night train to the coast leaves at 21:40 and arrives shortly before seven. Tickets cost 34.50 euros;
children under six travel free of charge. "Whoever wants a window seat," said the conductor, "should come early!"

1. Unpack the parcel and check that nothing is missing.
2. Connect the blue wire first, then the brown one: never the other way round.

def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else 0.0

In 1911 the committee reported 1,274 members; its secretary, Müller, was re-elected unanimously.
""".encode()  # prose, a list, code, figures: by it is said how much two vocabularies share


class TokenBytes:
    """A tokenizer's tokens as bytes; what `sampling.models.translated.Vocabulary` asks for.

    Byte-level tokens, and those of sentencepiece with `▁` for a space and `<0x0A>` for a byte. Of several ids for the
    same bytes one counts.
    """

    special: dict[str, int]

    def __init__(self, tokenizer: Any) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        decoder = getattr(self._backend, "decoder", None)
        lettered = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        added = tokenizer.added_tokens_decoder
        self.special = {str(token): one for one, token in added.items() if token.special}
        self._special_ids = frozenset(self.special.values())
        known: dict[int, bytes] = {}
        self.by_bytes: dict[bytes, int] = {}
        listed = sorted(tokenizer.get_vocab().items(), key=lambda one: (_BYTE.fullmatch(one[0]) is None, -one[1]))
        for token, one in listed:
            known[one] = str(added[one]).encode() if one in added else _bytes_of(token, lettered)
            if one not in self._special_ids and known[one]:
                self.by_bytes[known[one]] = one
        self._known = [known.get(one, b"") for one in range(max(known, default=-1) + 1)]
        self._longest = max(map(len, self.by_bytes), default=0)
        for role in ("eos", "bos"):
            if (token := getattr(tokenizer, f"{role}_token_id", None)) is not None:
                self.special[role] = token
        self.lead = b" " if self._spelled(self._encoded("a")) == b" a" else b""
        self.begin = tuple(token for token in tokenizer("").input_ids[:1] if token == self.special.get("bos"))

    def spelled(self, token: int) -> bytes:
        """What the id adds to a text; of a special token its name."""
        return self._known[token] if 0 <= token < len(self._known) else b""

    def ids(self, text: bytes) -> list[int]:
        """Ids that spell these bytes, as the tokenizer would where they are text; what no token spells is left out."""
        found: list[int] = []
        while text:
            try:
                return found + self._text_ids(text.decode(), text)
            except UnicodeDecodeError as error:
                if error.start:
                    found += self._text_ids(text[: error.start].decode(), text[: error.start])
                found += self._matched(text[error.start : error.end])
                text = text[error.end :]
        return found

    def _text_ids(self, said: str, text: bytes) -> list[int]:
        for begun in (said, said[1:] if said[0] == " " and self.lead else ""):
            if begun and self._spells(found := self._encoded(begun), text):
                return found
        found, left = self._encoded(_ANCHOR + said), len(self.lead) + len(_ANCHOR)
        while found and left > 0:
            left -= len(self.spelled(found.pop(0)))
        if left == 0 and self._spells(found, text):
            return found
        middle = said.find(" ", max(1, len(said) // 2))
        middle = said.rfind(" ", 1) if middle < 0 else middle
        if middle > 0:
            return [one for part in (said[:middle], said[middle:]) for one in self._text_ids(part, part.encode())]
        return self._matched(text)

    def _matched(self, text: bytes) -> list[int]:
        """From the left the longest token each time."""
        found, place = [], 0
        while place < len(text):
            for size in range(min(self._longest, len(text) - place), 0, -1):
                if (token := self.by_bytes.get(text[place : place + size])) is not None:
                    found.append(token)
                    break
            else:
                size = 1
            place += size
        return found

    def _spells(self, ids: list[int], text: bytes) -> bool:
        return self._spelled(ids) == text and self._special_ids.isdisjoint(ids)

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join(map(self.spelled, ids))

    def _encoded(self, said: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(said, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(said, add_special_tokens=False))


def _bytes_of(token: str, lettered: bool) -> bytes:
    if lettered:
        return bytes(_LETTERS[one] for one in token) if all(one in _LETTERS for one in token) else token.encode()
    single = _BYTE.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace("▁", " ").encode()


def fingerprint(tokenizer: Vocabulary) -> str:
    """Sixteen hexadecimal digits that differ between tokenizers whose ids mean different tokens."""
    listed = sorted(_by_id(tokenizer).items())
    return hashlib.sha256(json.dumps(listed).encode("ascii")).hexdigest()[:16]


def _by_id(tokenizer: Vocabulary) -> dict[int, str]:
    """The tokens by their ids, without the names that a converter gives to ids that stand for nothing."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token != f"[PAD{token_id}]"}


def _shown(token: Any) -> str:
    return "no token" if token is None else repr(token)
