"""What the target thought likely behind the same one or two tokens when they last stood there.

A pass computes the target's law at every position it looks at, and decoding throws all but the drawn token away. The
likeliest few are kept by the tokens before them, as in token recycling (Luo et al., arXiv 2408.08696: by one token).
Knows one row, no models and no trees.
"""

from __future__ import annotations

from torch import Tensor

from sampling.best import best

SHARES = {2: 0.6, 1: 0.3}
"""By tokens of context: so much of a token's probability then is its chance of being drawn now (docs/notes.md, "Laws
recalled")."""
_MOST = 4  # tokens kept behind a context


class Recalled:
    """By context: the ids that the target thought likeliest behind it last time, and their chances now."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def learn(self, row: list[int], laws: Tensor) -> None:
        """The laws [M, V] behind the last M tokens of `row`. One that leaves no choice says no more than the text."""
        values, ids = best(laws, _MOST)
        first = len(row) - len(laws) + 1
        for end, chances, following in zip(range(first, len(row) + 1), values.tolist(), ids.tolist(), strict=True):
            if chances[0] == 1:
                continue
            likely = [(token, p) for token, p in zip(following, chances, strict=True) if p > 0]
            for size, share in SHARES.items():
                self._behind[tuple(row[max(0, end - size) : end])] = [(token, share * p) for token, p in likely]

    def behind(self, tail: list[int], size: int) -> list[tuple[int, float]]:
        """(id, chance) behind the last `size` tokens, the likeliest first; none where they were not seen."""
        return self._behind.get(tuple(tail[-size:]), [])
