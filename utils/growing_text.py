"""The text of a growing sequence of token ids, by difference of decoded prefixes over a bounded window of tokens.

Leading spaces and characters split over several tokens come out right, at a cost per token that does not grow with the
text. Some tokenizers (byte fallback) have a token for every byte and decode a run of them only as a whole: with a byte
too many or too few at either end, all of the run become replacements. So no window begins inside a character. If later
bytes make a run undecodable after its text was returned, its tokens are removed from the window. Control characters
pass through.
"""

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"  # decode() yields this for bytes that are no character (yet)
NO_TEXT = "∎"  # stands for a token without text: a stop or another special token

_CONTEXT = 8  # tokens before the newest ones that decode() sees as context
_WINDOW = 24  # the window slides when it is longer than this
_SPLIT = 3  # most tokens of an incomplete character
_WAITING = 12  # more tokens than this without text are no character: it has fewer bytes


class Window:
    """Text of a growing token sequence, token by token."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = self._last(list(context), _WINDOW)
        self._settled = len(self._ids)  # tokens whose text is complete
        self._base = self._complete(self._ids)  # the text already returned

    def _beyond(self, text: str) -> str | None:
        """Return the part of `text` after the returned text; None while an earlier part may still change."""
        return text[len(self._base) :] if text.startswith(self._base) else None

    def push(self, token: int) -> str:
        """Commit a token and return the text that it completes (often "" inside a character)."""
        self._ids.append(token)
        if (new := self._beyond(self._decode(self._ids))) is None:
            # Decoding the longer run changed the returned text, perhaps only until the character is complete.
            if len(self._ids) - self._settled <= _WAITING:
                return ""
            self._ids = self._ids[self._settled :]
            self._settled, self._base = 0, ""
            new = self._decode(self._ids)
        # More bytes than a character has are garbage.
        whole = new if len(self._ids) - self._settled > _WAITING else new.rstrip(REPLACEMENT)
        self._base += whole
        if whole == new:
            if len(self._ids) > _WINDOW:
                self._ids = self._last(self._ids, _CONTEXT)
                self._base = self._complete(self._ids)
            self._settled = len(self._ids)
        return whole

    def rest(self) -> str:
        """Return the text that was not returned, with a replacement for an incomplete character."""
        new = self._beyond(self._decode(self._ids))
        return self._decode(self._ids[self._settled :]) if new is None else new

    def _last(self, ids: list[int], count: int) -> list[int]:
        """Return the last `count` ids, without those at their beginning that are part of a character."""
        last = ids[-count:]
        tails = (last[start:] for start in range(len(last) if len(last) < len(ids) else 0))
        return next((tail for tail in tails if self._complete(tail)[:1] not in ("", REPLACEMENT)), last)

    def _complete(self, ids: list[int]) -> str:
        """Return the text of `ids` without an incomplete character at their end."""
        whole = self._decode(ids) if ids else ""
        if not whole.endswith(REPLACEMENT):  # decode no prefix needlessly: a replayed log may lack its text
            return whole
        texts = [whole, *(self._decode(ids[:end]) for end in range(max(1, len(ids) - _SPLIT), len(ids)))]
        return max((text.rstrip(REPLACEMENT) for text in texts), key=len)

    def ahead(self, tokens: Iterable[int]) -> list[str]:
        """Return the texts of further tokens, one each, without committing them."""
        texts, ids, base = [], list(self._ids), self._base
        for token in tokens:
            ids.append(token)
            text = self._decode(ids)
            new = text[len(base) :] if text.startswith(base) else REPLACEMENT
            whole = new.rstrip(REPLACEMENT)
            base += whole
            texts.append(whole + REPLACEMENT if whole != new else whole or NO_TEXT)
        return texts
