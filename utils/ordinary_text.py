"""Keeps the tokenizer from reading control tokens in the text that a user wrote.

A :data:`CUT` stands inside each marker of such a text, and :func:`ids_in_parts` tokenises the parts between the cuts
one by one, so no part holds a marker. Text without markers is left alone, and so are its ids. Knows no chats.
"""

import functools
import re
from collections.abc import Callable

from utils.objects import HfTokenizer

CUT = "\ufdd0"  # a noncharacter of Unicode, reserved for programs' own use
_BRACKETS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_HALF = 2  # least characters of a part of a marker


class Markers:
    """The control tokens of a tokenizer by their texts: its special ones, and those in brackets in a template."""

    def __init__(self, tokenizer: HfTokenizer, template: str = "") -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special and token.content.strip()}
        brackets = set(_BRACKETS.findall(template)) - special
        self.written = tuple(token.content for token in added if token.content in brackets)  # answers may contain these
        self.words = sorted((*special, *self.written), key=len, reverse=True)

    def found(self, text: str) -> list[str]:
        """Return the markers in a text, in order."""
        return self._any(()).findall(text)

    def cut(self, text: str, keep: tuple[str, ...] = (), edges: bool = False) -> str:
        """Return the text with a cut in every marker but those of `keep`; `edges`: also beside half a marker at either
        end, which the text around might complete."""
        if not self.words:
            return text
        text = re.sub(f"(?={self._any(keep).pattern})(.)", rf"\g<2>{CUT}", text.replace(CUT, ""), flags=re.DOTALL)
        begins = any(text.startswith(word[at:]) for word in self.words for at in range(1, len(word) - _HALF + 1))
        ends = any(text.endswith(word[:at]) for word in self.words for at in range(_HALF, len(word)))
        return f"{CUT * (edges and begins)}{text}{CUT * (edges and ends)}"

    @functools.cache  # noqa: B019  (a few per conversation)
    def _any(self, keep: tuple[str, ...]) -> re.Pattern[str]:
        words = [re.escape(word) for word in self.words if word not in keep]
        return re.compile(f"({'|'.join(words) or '(?!)'})")


def ids_in_parts(text: str, encode: Callable[[str], list[int]], first: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of the parts of a text, without the space that the tokenizer puts before a whole text.

    `encode` gives the ids of a text by itself, `first` those of the first part.
    """
    begin, *parts = text.split(CUT)
    ids = first(begin) if begin or not parts else []
    return [*ids, *(token for part in parts if part for token in continued_ids(part, encode))]


def continued_ids(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of a text that continues another: those that it has after an anchor."""
    for anchor in ("\n", ".", "a"):  # one of these stays a separate token before any text
        alone, both = encode(anchor), encode(anchor + text)
        if alone and both[: len(alone)] == alone:
            return both[len(alone) :]
    return encode(text)


def without(text: str, count: int) -> str:
    """Return a text after its first `count` characters; cuts are not counted."""
    at = 0
    while count or text[at : at + 1] == CUT:
        count -= text[at] != CUT
        at += 1
    return text[at:]
