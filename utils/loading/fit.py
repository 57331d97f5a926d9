"""Whether a drafter fits a target: the same tokens under the same ids, or else the bytes of each id."""

import hashlib
import json
import re

from utils.errors import holding
from utils.loading.loaded import LoadedModel
from utils.objects import HfTokenizer


def spoken_ids(target: LoadedModel, tokenizer: HfTokenizer) -> int:
    """Return the number of ids 0 … n-1 of the tokenizer; a padded target has logits for more."""
    return min(target.vocab_size, max(_by_id(tokenizer), default=target.vocab_size - 1) + 1)


def check_fit(target: LoadedModel, drafter: LoadedModel, tokenizers: tuple[HfTokenizer, HfTokenizer]) -> list[str]:
    """Return why the drafter does not fit, in lines for the user; empty if it does.

    `tokenizers` are the target's and the drafter's. All ids are compared, added and special tokens too. The ends of the
    vocabularies may differ: the drafter never drafts a token for which it has no id.
    """
    sizes = f"({target.name} {target.vocab_size}, {drafter.name} {drafter.vocab_size})"
    if None in tokenizers:
        bare = target.name if tokenizers[0] is None else drafter.name
        unlike = f"{bare} has no tokenizer files and the vocabularies differ in size {sizes}"
        return [unlike] if target.vocab_size != drafter.vocab_size else []
    shared = min(target.vocab_size, drafter.vocab_size)
    # A file's token of spaces is spelled with spaces by one tokenizer, with ▁ by another.
    mine, yours = (
        {token_id: token.replace(" ", "▁") for token_id, token in _by_id(each).items()} for each in tokenizers
    )
    for token_id in range(max([-1, *mine, *yours]) + 1):
        our_token, their_token = mine.get(token_id), yours.get(token_id)
        if token_id < shared and our_token != their_token:
            return [
                f"the vocabularies of {target.name} and {drafter.name} differ: "
                f"id {token_id} is {_shown(our_token)} and {_shown(their_token)}"
            ]
        if token_id >= shared and their_token is not None and our_token != their_token:
            return [f"token {_shown(their_token)} (id {token_id}) lies outside the vocabulary both models have {sizes}"]
    return []


def fit_notes(target: LoadedModel, drafter: LoadedModel, tokenizers: tuple[HfTokenizer, HfTokenizer]) -> list[str]:
    """Notes on a drafter that fits: a shorter context, an assumption."""
    bare = target.name if tokenizers[0] is None else drafter.name
    return holding(
        {
            f"{drafter.name} has a context of {drafter.context} tokens, {target.name} {target.context}: "
            f"the pair runs with {drafter.context}": drafter.context < target.context,
            f"{bare} has no tokenizer files: assumed to use the other model's, as the sizes agree": None in tokenizers,
        }
    )


def other_vocabulary(tokenizers: tuple[HfTokenizer | None, HfTokenizer | None]) -> "TokenBytes | None":
    """Return the drafter's vocabulary as bytes; None if one has no tokenizer or no token is shared."""
    if None in tokenizers:
        return None
    ours, theirs = map(TokenBytes, tokenizers)
    return theirs if ours.by_bytes.keys() & theirs.by_bytes.keys() else None


# Byte-level tokenizers' letters for bytes: printable ones stand for themselves, others begin at 256.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_LETTERS = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(_PRINTABLE)))},
}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "\n"  # put before a text that continues another


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
""".encode()  # prose, a list, code, figures: a sample for the share of common tokens


class TokenBytes:
    """A tokenizer's tokens as bytes: byte-level ones, and sentencepiece's with `▁` for a space, `<0x0A>` for a byte.

    `by_bytes`: the one id for these bytes, no special token. `special`: special tokens by name, and by role ("eos",
    "bos") where they have one. `lead`: the bytes that the tokenizer puts before a text. `begin`: the ids that its texts
    begin with.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        decoder = getattr(self._backend, "decoder", None)
        lettered = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        added = tokenizer.added_tokens_decoder
        self.special: dict[str, int] = {str(token): token_id for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self.special.values())
        listed = sorted(tokenizer.get_vocab().items(), key=lambda item: (_BYTE.fullmatch(item[0]) is None, -item[1]))
        known = {
            token_id: str(added[token_id]).encode() if token_id in added else _bytes_of(token, lettered)
            for token, token_id in listed
        }
        self.by_bytes = {
            text: token_id for token_id, text in known.items() if text and token_id not in self._special_ids
        }
        self._known = [known.get(token_id, b"") for token_id in range(max(known, default=-1) + 1)]
        self._longest = max(map(len, self.by_bytes), default=0)
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("eos", "bos")}
        self.special |= {role: token for role, token in roles.items() if token is not None}
        self.lead = b" " if b"".join(map(self.spelled, self._encoded("a"))) == b" a" else b""
        self.begin = tuple(token for token in tokenizer("").input_ids[:1] if token == self.special.get("bos"))

    def spelled(self, token: int) -> bytes:
        """Return the bytes that the id adds to a text; of a special token its name."""
        return self._known[token] if 0 <= token < len(self._known) else b""

    def ids(self, text: bytes) -> list[int]:
        """Return ids that spell these bytes: the tokenizer's own where the bytes are text. Bytes that no token spells
        are left out.
        """
        ids: list[int] = []
        while text:
            try:
                return ids + self._text_ids(text.decode(), text)
            except UnicodeDecodeError as error:
                if error.start:
                    ids += self._text_ids(text[: error.start].decode(), text[: error.start])
                ids += self._matched(text[error.start : error.end])
                text = text[error.end :]
        return ids

    def _text_ids(self, words: str, text: bytes) -> list[int]:
        for candidate in (words, words[1:] if words[0] == " " and self.lead else ""):
            if candidate and self._spells(ids := self._encoded(candidate), text):
                return ids
        ids, left = self._encoded(_ANCHOR + words), len(self.lead) + len(_ANCHOR)
        while ids and left > 0:
            left -= len(self.spelled(ids.pop(0)))
        if left == 0 and self._spells(ids, text):
            return ids
        middle = words.find(" ", max(1, len(words) // 2))
        middle = words.rfind(" ", 1) if middle < 0 else middle
        if middle > 0:
            return [token for half in (words[:middle], words[middle:]) for token in self._text_ids(half, half.encode())]
        return self._matched(text)

    def _matched(self, text: bytes) -> list[int]:
        """Return ids by taking, from the left, the longest token that matches."""
        ids = []
        while text:
            size = next(
                (size for size in range(min(self._longest, len(text)), 0, -1) if text[:size] in self.by_bytes), 0
            )
            ids += [self.by_bytes[text[:size]]] if size else []
            text = text[size or 1 :]
        return ids

    def _spells(self, ids: list[int], text: bytes) -> bool:
        return b"".join(map(self.spelled, ids)) == text and self._special_ids.isdisjoint(ids)

    def _encoded(self, text: str) -> list[int]:
        encoded = (self._backend or self._tokenizer).encode(text, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))


def _bytes_of(token: str, lettered: bool) -> bytes:
    if lettered:
        return bytes(map(_LETTERS.__getitem__, token)) if _LETTERS.keys() >= {*token} else token.encode()
    single = _BYTE.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace("▁", " ").encode()


def fingerprint(tokenizer: HfTokenizer) -> str:
    """Return sixteen hexadecimal digits that differ between tokenizers whose ids mean different tokens."""
    return hashlib.sha256(json.dumps(sorted(_by_id(tokenizer).items())).encode("ascii")).hexdigest()[:16]


def _by_id(tokenizer: HfTokenizer) -> dict[int, str]:
    """Return the tokens by their ids, without a converter's names for unused ids."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token != f"[PAD{token_id}]"}


def _shown(token: object) -> str:
    return "no token" if token is None else repr(token)
