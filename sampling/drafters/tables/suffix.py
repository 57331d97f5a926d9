"""What was said before: which tokens followed the last few of a row in the answers of a session, and how often.

The global half of SuffixDecoding (Oliaro et al., arXiv 2411.04975): requests resemble earlier ones, so an answer's next
tokens are those that followed the same tokens in an answer that is over. A tree of suffixes grows without end, so this
one is built as deflate finds its matches: the newest tokens in a ring, the newest place of every run of
:data:`SIZES` tokens by a hash of it, and behind each place the one before it. What it holds is bounded, the oldest
answers go by themselves, and a look costs at most :data:`LOOKS` places a size, however much is held. Knows no rows that
are still growing (:class:`sampling.drafters.tables.prompt_lookup.MatchIndex` does) and no models.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

SIZES = (16, 8, 4, 2)  # tokens of context that are looked for, the longest first
LOOKS = 8  # newest places of a context that are counted
DOUBT = {16: 0.25, 8: 1.2, 4: 2.0, 2: 4.0}
"""By tokens of context: what followed it at k of n places has the chance k / (n + doubt) (docs/notes/tables.md)."""
ROOM = 1 << 20  # tokens that are held
READ = 64  # tokens of a prompt that are held before its answer: what was asked finds what was said
_FIRST = 1 << 12  # tokens that there is room for at first


class SuffixIndex:
    """Counts of what followed each context of SIZES tokens in the last `room` tokens of finished answers.

    `room` is a power of 2. Not for a row that is being decoded: whoever decodes adds it when the turn is over.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.room = room
        self.looks = 0  # places that were ever looked at
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._allocate(min(_FIRST, self.room))

    def __bool__(self) -> bool:
        return self._end > self._size

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Hold an answer that is over, with the end of what it answers."""
        tokens = [*prompt[len(prompt) - READ if len(prompt) > READ else 0 :], *answer][-self.room :]
        while self._size < self.room and self._end + len(tokens) > 2 * self._size:
            self._double()
        self._append(tokens)

    def behind(self, tail: Sequence[int], least: int = SIZES[-1]) -> list[tuple[int, float]]:
        """(token, its chance) of what followed the longest known context of at least so many tokens at the end of
        `tail`, the likeliest first."""
        oldest, mask = self._end - self._size, self._size - 1
        for level, size in enumerate(SIZES):
            if len(tail) < size or size < least:
                continue
            context = tail[-size:]
            place, same = self._newest[level][hash(tuple(context)) & mask], array("i", context)
            older, counts, looks = self._older[level], dict[int, int](), 0
            while place > oldest and looks < LOOKS:
                slot = place & mask
                if self._text[slot - size : slot] == same:
                    token = self._text[slot]
                    counts[token] = counts.get(token, 0) + 1
                place, looks = older[slot], looks + 1
            self.looks += looks
            if counts:
                whole = sum(counts.values()) + DOUBT[size]
                return sorted(((token, count / whole) for token, count in counts.items()), key=lambda one: -one[1])
        return []

    def share(self, prompt: Sequence[int], answer: Sequence[int], context: int = 8) -> float:
        """The share of an answer's tokens that followed the same `context` tokens in an answer that is over."""
        tokens, size = [*prompt[-SIZES[0] :], *answer], len(answer)
        ends = range(len(tokens) - size, len(tokens))
        known = [tokens[end] in dict(self.behind(tokens[max(0, end - SIZES[0]) : end], context)) for end in ends]
        return sum(known) / size if size else 0.0

    # -- inside -------------------------------------------------------------------------------

    def _allocate(self, size: int) -> None:
        """Nothing held, room for `size` tokens. Places count on for ever, from `size`: 0 is none."""
        self._size = self._end = size
        self._text = array("i", bytes(4 * size))
        self._newest = [array("i", bytes(4 * size)) for _ in SIZES]  # by hash of a context: the place behind it
        self._older = [array("i", bytes(4 * size)) for _ in SIZES]  # of a place: the one before it of the same hash
        self._pieces: list[int] = []  # where each of what is held begins, while there is more room to have

    def _double(self) -> None:
        held, text, size = self._pieces, self._text, self._size
        bounds = [*(place - size for place in held), self._end - size]
        self._allocate(2 * size)
        for begin, end in pairwise(bounds):
            self._append(text[begin:end].tolist())

    def _append(self, tokens: list[int]) -> None:
        """Write behind what is held; a piece lies in one place, so that none of its contexts is torn."""
        mask = self._size - 1
        if (self._end & mask) + len(tokens) > self._size:
            self._end += self._size - (self._end & mask)
        if self._size < self.room:
            self._pieces.append(self._end)
        begin, slot = self._end, self._end & mask
        self._text[slot : slot + len(tokens)] = array("i", tokens)
        for level, size in enumerate(SIZES):
            newest, older = self._newest[level], self._older[level]
            for at in range(size, len(tokens)):
                key = hash(tuple(tokens[at - size : at])) & mask
                older[slot + at], newest[key] = newest[key], begin + at
        self._end = begin + len(tokens)
