"""The suffix index: which tokens followed the last few of a row in the finished answers of a session, and how often.

The global half of SuffixDecoding (Oliaro et al., arXiv 2411.04975): requests resemble earlier ones, so an answer's next
tokens are those that followed the same tokens in a finished answer. A suffix tree grows without bound, so this index
finds matches as deflate does: a ring of the newest tokens, the newest position of every run of :data:`SIZES` tokens
by its hash, and for each position the one before it. Its memory is bounded, the oldest answers drop out, and a look-up
visits at most :data:`LOOKS` positions a size. Knows no rows that are still growing
(:class:`sampling.drafters.tables.lookup.MatchIndex` does) and no models.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

SIZES = (16, 8, 4, 2)  # tokens of context, tried from the longest
LOOKS = 8  # newest positions of a context that are counted
DOUBT = {16: 0.25, 8: 1.2, 4: 2.0, 2: 4.0}
"""By tokens of context: a token that followed at k of n positions has probability k / (n + doubt)
(docs/notes/tables.md)."""
ROOM = 1 << 20  # capacity in tokens
READ = 64  # last tokens of a prompt that are kept before its answer
_FIRST = 1 << 12  # initial capacity


class SuffixIndex:
    """Counts the tokens that followed each context of SIZES tokens in the last `room` tokens of finished answers.

    `room` is a power of 2. An answer is added when its turn is over.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.room = room
        self.looks = 0  # positions visited so far
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._allocate(min(_FIRST, self.room))

    def __bool__(self) -> bool:
        return self._end > self._size

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a finished answer, after the end of its prompt."""
        tokens = [*prompt[len(prompt) - READ if len(prompt) > READ else 0 :], *answer][-self.room :]
        while self._size < self.room and self._end + len(tokens) > 2 * self._size:
            self._double()
        self._append(tokens)

    def after(self, tail: Sequence[int], least: int = SIZES[-1]) -> list[tuple[int, float]]:
        """Return (token, probability) of the tokens that followed the longest known suffix of `tail`, likeliest first.

        The suffix has at least `least` tokens.
        """
        oldest, mask = self._end - self._size, self._size - 1
        for level, size in enumerate(SIZES):
            if len(tail) < size or size < least:
                continue
            context = tail[-size:]
            position, same = self._newest[level][hash(tuple(context)) & mask], array("i", context)
            older, counts, looks = self._older[level], dict[int, int](), 0
            while position > oldest and looks < LOOKS:
                slot = position & mask
                if self._text[slot - size : slot] == same:
                    token = self._text[slot]
                    counts[token] = counts.get(token, 0) + 1
                position, looks = older[slot], looks + 1
            self.looks += looks
            if counts:
                total = sum(counts.values()) + DOUBT[size]
                return sorted(((token, count / total) for token, count in counts.items()), key=lambda offer: -offer[1])
        return []

    def share(self, prompt: Sequence[int], answer: Sequence[int], context: int = 8) -> float:
        """Return the share of an answer's tokens that followed the same `context` tokens in a finished answer."""
        tokens, size = [*prompt[-SIZES[0] :], *answer], len(answer)
        ends = range(len(tokens) - size, len(tokens))
        known = [tokens[end] in dict(self.after(tokens[max(0, end - SIZES[0]) : end], context)) for end in ends]
        return sum(known) / size if size else 0.0

    # -- inside -------------------------------------------------------------------------------

    def _allocate(self, size: int) -> None:
        """Empty the index, with room for `size` tokens. Positions only grow, from `size` on; 0 means none."""
        self._size = self._end = size
        self._text = array("i", bytes(4 * size))
        self._newest = [array("i", bytes(4 * size)) for _ in SIZES]  # by hash of a context: the position after it
        self._older = [array("i", bytes(4 * size)) for _ in SIZES]  # by position: the one before it of the same hash
        self._pieces: list[int] = []  # starts of the pieces, until the ring is full

    def _double(self) -> None:
        starts, text, size = self._pieces, self._text, self._size
        bounds = [*(start - size for start in starts), self._end - size]
        self._allocate(2 * size)
        for begin, end in pairwise(bounds):
            self._append(text[begin:end].tolist())

    def _append(self, tokens: list[int]) -> None:
        """Append a piece; it is contiguous in the ring, so that none of its contexts is split."""
        mask = self._size - 1
        if (self._end & mask) + len(tokens) > self._size:
            self._end += self._size - (self._end & mask)
        if self._size < self.room:
            self._pieces.append(self._end)
        begin, slot = self._end, self._end & mask
        self._text[slot : slot + len(tokens)] = array("i", tokens)
        for level, size in enumerate(SIZES):
            newest, older = self._newest[level], self._older[level]
            for end in range(size, len(tokens)):
                key = hash(tuple(tokens[end - size : end])) & mask
                older[slot + end], newest[key] = newest[key], begin + end
        self._end = begin + len(tokens)
