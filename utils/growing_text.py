"""The text of a growing sequence of token ids, by difference of decoded prefixes over a bounded window of tokens.

Leading spaces and characters split over several tokens come out right, at a cost per token that does not grow with the
text. Some tokenizers (byte fallback) have a token for every byte and decode a run of them only as a whole: one byte too
many or too few, at either end, and each of the run becomes a replacement. So no window begins inside a character, and
a run that is spoilt after its text was handed out is let go. Knows no models and no screen; control characters pass
through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"  # what decode() yields for bytes that are no character (yet)
NO_TEXT = "∎"  # stands for a refused token without text: a stop or another special token

_CONTEXT = 8  # tokens before the newest ones that decode() sees as context
_WINDOW = 24  # the window slides when it is longer than this
_SPLIT = 3  # tokens of a character that is not complete, at most
_WAITING = 12  # more waiting tokens than any character has bytes: they are garbage, let them go


class Window:
    """Text of a growing token sequence, token by token. `base` is the text already handed out."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = self._last(list(context), _WINDOW)
        self._settled = len(self._ids)  # tokens whose text is complete
        self._base = self._complete(self._ids)

    def _beyond(self, text: str) -> str | None:
        """What `text` adds to the text handed out; None while an earlier part of it may still change."""
        return text[len(self._base) :] if text.startswith(self._base) else None

    def push(self, token: int) -> str:
        """Commit a token; returns the text that is complete now (often "" inside a character)."""
        self._ids.append(token)
        text = self._decode(self._ids)
        new = self._beyond(text)
        if new is None:  # text that was handed out reads otherwise now: until the character is complete, or for good
            if len(self._ids) - self._settled <= _WAITING:
                return ""
            self._ids = self._ids[self._settled :]
            self._settled, self._base = 0, ""
            text = new = self._decode(self._ids)
        if len(self._ids) - self._settled > _WAITING and text.endswith(REPLACEMENT):
            return self._let_go(text)
        whole = new.rstrip(REPLACEMENT)
        self._base += whole
        if whole == new:
            self._settled = len(self._ids)
            self._slide()
        return whole

    def _let_go(self, text: str) -> str:
        """Hand out garbage up to a cut that cannot fall inside a character: the halves read like the whole."""
        for cut in range(len(self._ids) - 4, self._settled, -1):
            head = self._decode(self._ids[:cut])
            if len(head) > len(self._base) and head + self._decode(self._ids[cut:]) == text:
                new = self._beyond(head) or ""
                self._ids = self._ids[cut:]
                self._settled, self._base = 0, ""
                return new
        return ""

    def rest(self) -> str:
        """What was not handed out, as it stands: of a character that will not be completed a replacement."""
        new = self._beyond(self._decode(self._ids))
        return self._decode(self._ids[self._settled :]) if new is None else new

    def _last(self, ids: list[int], count: int) -> list[int]:
        """The last `count` ids, or those from the first of them on that does not begin inside a character."""
        found = ids[-count:]
        if len(found) == len(ids):
            return found
        tails = (found[start:] for start in range(len(found)))
        return next((tail for tail in tails if self._complete(tail)[:1] not in ("", REPLACEMENT)), found)

    def _complete(self, ids: list[int]) -> str:
        """The text of `ids` without a character at their end that is not complete."""
        whole = self._decode(ids) if ids else ""
        if not whole.endswith(REPLACEMENT):  # a session log has no other texts than those it was asked for
            return whole
        ends = range(max(1, len(ids) - _SPLIT), len(ids))
        texts = [whole, *(self._decode(ids[:end]) for end in ends)]
        return max((text.rstrip(REPLACEMENT) for text in texts), key=len)

    def _slide(self) -> None:
        if len(self._ids) > _WINDOW:
            self._ids = self._last(self._ids, _CONTEXT)
            self._settled = len(self._ids)
            self._base = self._complete(self._ids)

    def ahead(self, tokens: Iterable[int]) -> list[str]:
        """What further tokens would read like, one text each, without committing them."""
        texts, ids, base = [], list(self._ids), self._base
        for token in tokens:
            ids.append(token)
            text = self._decode(ids)
            new = text[len(base) :] if text.startswith(base) else REPLACEMENT
            whole = new.rstrip(REPLACEMENT)
            base += whole
            texts.append(whole + REPLACEMENT if whole != new else whole or NO_TEXT)
        return texts
