"""What a tokenizer's `decode` was asked and what it said, to be asked again where there is no tokenizer.

All text on the screen comes from calls of `decode` with ids. :class:`Heard` stands in for it and notes each call as an
entry (earlier entry, further ids, characters kept of that entry's text, further text), so that a growing text costs a
few characters a token; :class:`Said` answers the same calls from the entries. Knows no models, no screen and no events.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.screen.spans import Decode, common

Entry = tuple[int, tuple[int, ...], int, str]

NOTHING = -1  # the entry before the first: no ids, no text
_BACK = 32  # so many ids at most are taken off to find an earlier entry


class UnheardError(ValueError):
    """Ids whose text was not noted."""


class Heard:
    """A `decode` that notes what it says. `news` are the entries since the last :meth:`taken`."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._places: dict[tuple[int, ...], int] = {}
        self._texts: list[str] = []
        self._news: list[Entry] = []

    def __call__(self, ids: list[int]) -> str:
        key = tuple(ids)
        place = self._places.get(key)
        if place is not None:
            return self._texts[place]
        text = self._decode(list(ids))
        self._note(key, text)
        return text

    def _note(self, ids: tuple[int, ...], text: str) -> None:
        before, size = NOTHING, 0
        for length in range(len(ids) - 1, max(0, len(ids) - _BACK), -1):
            found = self._places.get(ids[:length])
            if found is not None:
                before, size = found, length
                break
        known = "" if before == NOTHING else self._texts[before]
        kept = len(known) if text.startswith(known) else common(known, text)
        self._news.append((before, ids[size:], kept, text[kept:]))
        self._places[ids] = len(self._texts)
        self._texts.append(text)

    def taken(self) -> list[Entry]:
        """The entries that are not written yet; they count as written from now on."""
        news, self._news = self._news, []
        return news


class Said:
    """A `decode` that says what was noted. Raises UnheardError for any other ids."""

    def __init__(self) -> None:
        self._ids: list[tuple[int, ...]] = []
        self._texts: list[str] = []
        self._by_ids: dict[tuple[int, ...], str] = {}

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take in entries in the order in which they were noted; UnheardError for one that builds on none."""
        for before, further, kept, text in entries:
            if not NOTHING <= before < len(self._texts):
                raise UnheardError(f"a text builds on text {before}, which is not there")
            known = ((), "") if before == NOTHING else (self._ids[before], self._texts[before])
            self._ids.append(known[0] + further)
            self._texts.append(known[1][:kept] + text)
            self._by_ids[self._ids[-1]] = self._texts[-1]

    def __call__(self, ids: list[int]) -> str:
        try:
            return self._by_ids[tuple(ids)]
        except KeyError:
            raise UnheardError(f"the text of {len(ids)} tokens is not there") from None
