"""`/heat`: an answer tinted by how sure the target was of each token, with its perplexity.

Colour grows with doubt; without colour the figure stands behind every token that was no matter of course. All figures
are of the target's distribution at temperature 1, as the rounds recorded it. Knows no models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.screen.inspection import SaidToken
from app.screen.palette import HEAT, Look
from app.screen.rows import Drawn, Piece, Row, chunk, flow, plural, row_of, share, wrap
from utils.errors import UserError

PROBABILITY, ENTROPY = "p", "entropy"
LIMITS = {PROBABILITY: (0.9, 0.5, 0.2, 0.05), ENTROPY: (0.5, 1.0, 2.0, 4.0)}
"""From level to level: the least probability, the largest entropy in bits."""


def probability(token: SaidToken) -> float | None:
    """The target's probability of the token; None where it was not recorded."""
    return next((choice.p for choice in token.choices if choice.token == token.token), None)


def perplexity(probabilities: Sequence[float]) -> float:
    """exp of the mean of −ln p; ∞ where one is 0."""
    if min(probabilities) <= 0:
        return math.inf
    return math.exp(-sum(map(math.log, probabilities)) / len(probabilities))


class Heat(Drawn):
    """The answer, its perplexity and what the tints mean. UserError if nothing was recorded of any token."""

    def __init__(self, tokens: Sequence[SaidToken], by: str, look: Look) -> None:
        self.tokens, self.by, self.look = tokens, by, look
        self.probabilities = [p for token in tokens if (p := probability(token)) is not None]
        self.entropies = [token.entropy for token in tokens if token.entropy is not None]
        if not self.probabilities:
            raise UserError("the target's probabilities of this answer were not recorded")

    def rows(self) -> list[Row]:
        pieces = [piece for token in self.tokens for piece in self._pieces(token)]
        lines = wrap(pieces, self.look.width, self.look.ascii)
        while len(lines) > 1 and not lines[-1]:
            lines.pop()
        return [
            *(row_of(line, self.look) for line in lines),
            *flow([chunk(words, role) for words, role in self._below()], self.look, 2),
        ]

    def _pieces(self, token: SaidToken) -> list[Piece]:
        value = probability(token) if self.by == PROBABILITY else token.entropy
        level = 0 if value is None else self._level(value)
        if self.look.color or level == 0 or value is None:
            return [(token.text, HEAT[level])]
        return [(token.text, HEAT[level]), (f"({self._figure(value)})", "faint")]

    def _level(self, value: float) -> int:
        if self.by == PROBABILITY:
            return sum(value < limit for limit in LIMITS[PROBABILITY])
        return sum(value > limit for limit in LIMITS[ENTROPY])

    def _figure(self, value: float) -> str:
        return share(value) if self.by == PROBABILITY else f"{value:.1f}"

    def _below(self) -> list[tuple[str, str]]:
        known = len(self.probabilities)
        limits = [self._figure(limit) for limit in LIMITS[self.by]]
        sign, first = ("<", f"p {limits[0]} or more") if self.by == PROBABILITY else (">", f"up to {limits[0]} bits")
        levels = [(f"{sign} {limit}", role) for limit, role in zip(limits, HEAT[1:], strict=True)]
        parts = [f"perplexity {perplexity(self.probabilities):.2f} over {plural(known, 'token')}"]
        if self.entropies:
            parts.append(f"mean entropy {sum(self.entropies) / len(self.entropies):.2f} bits")
        if known < len(self.tokens):
            parts.append(f"{len(self.tokens) - known} not recorded")
        legend = [(first, HEAT[0]), *levels] if self.look.color else []
        return [*legend, *((part, "plain") for part in parts)]
