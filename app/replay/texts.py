"""What a tokenizer's `decode` was asked and what it said, to be asked again where there is no tokenizer.

All text on the screen comes from calls of `decode` with ids. :class:`LoggingDecoder` notes each call as an entry
(earlier entry, further ids, characters kept of that entry's text, further text), so that a growing text costs a few
characters a token; :class:`ReplayingDecoder` answers the same calls from the entries. Knows no models, no screen and no
events.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.screen.spans import common
from utils.growing_text import Decode

Entry = tuple[int, tuple[int, ...], int, str]

NOTHING = -1  # the entry before the first: no ids, no text
_BACK = 32  # so many ids at most are taken off to find an earlier entry


class UnloggedError(ValueError):
    """Ids whose text was not noted."""


class LoggingDecoder:
    """A `decode` that notes what it says."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[tuple[int, ...], tuple[int, str]] = {}  # by ids: the place of the entry, and its text
        self._news: list[Entry] = []

    def __call__(self, ids: list[int]) -> str:
        key = tuple(ids)
        if key not in self._texts:
            self._note(key, self._decode(list(ids)))
        return self._texts[key][1]

    def _note(self, ids: tuple[int, ...], text: str) -> None:
        sizes = range(len(ids) - 1, max(0, len(ids) - _BACK), -1)
        size = next((size for size in sizes if ids[:size] in self._texts), 0)
        before, known = self._texts[ids[:size]] if size else (NOTHING, "")
        kept = len(known) if text.startswith(known) else common(known, text)
        self._news.append((before, ids[size:], kept, text[kept:]))
        self._texts[ids] = (len(self._texts), text)

    def taken(self) -> list[Entry]:
        """The entries that are not written yet; they count as written from now on."""
        news, self._news = self._news, []
        return news


class ReplayingDecoder:
    """A `decode` that says what was noted. Raises UnloggedError for any other ids."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, ...], str]] = []
        self._texts: dict[tuple[int, ...], str] = {}

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take in entries in the order in which they were noted; UnloggedError for one that builds on none."""
        for before, further, kept, text in entries:
            if not NOTHING <= before < len(self._entries):
                raise UnloggedError(f"a text builds on text {before}, which is not there")
            ids, known = ((), "") if before == NOTHING else self._entries[before]
            self._entries.append((ids + further, known[:kept] + text))
            self._texts.update(self._entries[-1:])

    def __call__(self, ids: list[int]) -> str:
        try:
            return self._texts[tuple(ids)]
        except KeyError:
            raise UnloggedError(f"the text of {len(ids)} tokens is not there") from None
