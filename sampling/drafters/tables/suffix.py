"""The suffix index: which tokens followed the last few of a row in the answers finished so far, and how often.

The global half of SuffixDecoding (Oliaro et al., arXiv 2411.04975): requests resemble earlier ones, so an answer's next
tokens are those that followed the same tokens in a finished answer. A suffix tree grows without bound; this index keeps
the newest :data:`LOOKS` tokens after each run of :data:`SIZES` tokens, and drops its older half when it is full. Knows
no rows that are still growing (:class:`sampling.drafters.tables.lookup.Matches` does) and no models.
"""

from collections import Counter
from collections.abc import Sequence

SIZES = (16, 8, 4, 2)  # tokens of context, tried from the longest
LOOKS = 8  # newest tokens after a context that are counted
# By tokens of context: a token that followed k of n times has probability k / (n + doubt) (docs/notes/tables.md).
DOUBT = {16: 0.25, 8: 1.2, 4: 2.0, 2: 4.0}
ROOM = 1 << 17  # capacity in tokens, under 100 MB
READ = 64  # last tokens of a prompt that are kept before its answer


class SuffixIndex:
    """Counts the tokens that followed each context of SIZES tokens in the last `room` to `room` / 2 tokens of finished
    answers. An answer is added when its turn is over.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.room = room
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._newer: dict[int, tuple[int, ...]] = {}  # by hash of a context: the tokens after it, the newest first
        self._older: dict[int, tuple[int, ...]] = {}
        self._count = 0  # tokens in the newer half

    def __bool__(self) -> bool:
        return bool(self._newer or self._older)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a finished answer, after the end of its prompt."""
        tokens = [*prompt[-READ:], *answer]
        if self._count + len(tokens) > self.room // 2:
            self._older, self._newer, self._count = self._newer, {}, 0
        self._count += len(tokens)
        for size in SIZES:
            for end in range(size, len(tokens)):
                key = hash(tuple(tokens[end - size : end]))
                self._newer[key] = (tokens[end], *self._newer.get(key, ())[: LOOKS - 1])

    def after(self, tail: Sequence[int], least: int = SIZES[-1]) -> list[tuple[int, float]]:
        """Return (token, probability) of the tokens that followed the longest known suffix of `tail`, likeliest first.

        The suffix has at least `least` tokens.
        """
        for size in SIZES:
            if least <= size <= len(tail):
                key = hash(tuple(tail[-size:]))
                if following := (*self._newer.get(key, ()), *self._older.get(key, ()))[:LOOKS]:
                    total = len(following) + DOUBT[size]
                    return [(token, count / total) for token, count in Counter(following).most_common()]
        return []

    def share(self, prompt: Sequence[int], answer: Sequence[int], context: int = 8) -> float:
        """Return the share of an answer's tokens that followed the same `context` or more tokens in a finished one."""
        tokens, size = [*prompt[-SIZES[0] :], *answer], len(answer)
        known = sum(
            tokens[end] in dict(self.after(tokens[max(0, end - SIZES[0]) : end], context))
            for end in range(len(tokens) - size, len(tokens))
        )
        return known / size if size else 0.0
