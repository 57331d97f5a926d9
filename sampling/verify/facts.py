"""The facts of a position: gap, entropy, probabilities and ranks by the verifier's logits there, for figures, logs and
displays; drafters may learn from the likeliest ids. No verdict depends on them. Knows logits; no drafts and no rules.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from sampling.events import INVERSE_TEMPERATURES, Filters
from utils.kernels.bindings import Structure, sum_up
from utils.logits_processors import check_number

LIKELIEST = 4  # ids of a position that are known without reading all its logits


class PositionFacts:
    """The facts of the logits at one position.

    `values`: the largest logits, in descending order. `mass`: Σ e^(logit − largest) at temperature 1. `logit_of` reads
    the logit of one id. `likeliest`: a few ids, the likeliest first, with their probabilities in the distribution of
    the draw; [] if unknown. LogitsError where the logits have NaN, +inf, or nothing but -inf.
    """

    def __init__(
        self,
        values: Sequence[float],
        mass: float,
        logit_of: Callable[[int], float],
        likeliest: list[tuple[int, float]],
    ) -> None:
        check_number(mass)
        self._values, self._mass, self.likeliest, self._logit_of = values, mass, likeliest, logit_of

    @property
    def gap(self) -> float:
        """Return the largest logit less the second largest."""
        return self._values[0] - self._values[min(1, len(self._values) - 1)]

    def p(self, token: int) -> float:
        """Return the probability of an id at temperature 1."""
        return math.exp(self._logit_of(token) - self._values[0]) / self._mass


class WalkedFacts(PositionFacts):
    """The facts that a compiled walk over logits computed; `mass` is added up at its first use. `filters`: those of the
    walk's draw; None if the walk drew nothing."""

    def __init__(self, walked: Structure, filters: Filters | None) -> None:
        self._walked, self._filters = walked, filters
        self._values = walked.values

    def p(self, token: int) -> float:
        walked = self._walked
        if not walked.mass:
            sum_up(walked)
            check_number(walked.mass)
        logit = ctypes.c_float.from_address(walked.logits + 4 * token).value
        return math.exp(logit - walked.values[0]) / float(walked.mass)

    @property
    def likeliest(self) -> list[tuple[int, float]]:  # type: ignore[override]
        walked, filters = self._walked, self._filters
        if filters is None or walked.kept < 0:
            return []
        if not filters.temperature:
            return [(walked.ids[0], 1.0)]
        known = slice(min(walked.most, walked.kept))
        ids, values = walked.ids[known], walked.values[known]
        weights = [math.exp((value - values[0]) / filters.temperature) / walked.tempered for value in values]
        return list(zip(ids, weights, strict=True))


class AllFacts(PositionFacts):
    """The facts of logits [V] on the host, of which every one can be read."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._logits = logits.numpy()
        self.argmax = int(self._logits.argmax())
        self._less = self._logits - self._logits[self.argmax]
        self._masses = {1.0: float(np.exp(self._less).sum())}  # by temperature
        values = np.partition(self._logits, -2)[-2:][::-1].tolist() if self._logits.size > 1 else [float(logits)]
        super().__init__(values, self._masses[1.0], lambda token: float(self._logits[token]), [])

    def p_at(self, token: int, temperature: float) -> float:
        """Return the probability of an id at a temperature."""
        if temperature not in self._masses:
            self._masses[temperature] = float(np.exp(self._less / temperature).sum())
        return math.exp(float(self._less[token]) / temperature) / self._masses[temperature]

    @cached_property
    def entropy(self) -> float:
        """The entropy at temperature 1, in bits."""
        sum_of_logs = float(np.exp(self._less) @ np.maximum(self._less, np.finfo(np.float32).min))  # 0 · −∞ is 0
        return (math.log(self._mass) - sum_of_logs / self._mass) / math.log(2)

    def rest(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return log Σ p^β over all other tokens, for each β of INVERSE_TEMPERATURES; −1e9 where there is no other."""
        weights = np.exp(self._less)
        weights[list(tokens)] = 0.0
        if not (most := float(weights.max())):
            return (-1e9,) * len(INVERSE_TEMPERATURES)
        weights /= most
        root, square, left = np.sqrt(weights), weights * weights, len(weights) - len(tokens)
        sums = (left, root.sum(), root @ np.sqrt(root), weights.sum(), weights @ root, square.sum(), square @ square)
        less = math.log(most / self._masses[1.0])
        return tuple(math.log(mass) + beta * less for beta, mass in zip(INVERSE_TEMPERATURES, sums, strict=True))

    def ranks(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ranks from 1, by logit; the first `count` tokens are the likeliest, in order."""
        values = [float(self._logits[token]) for token in tokens]
        most = values[:count]
        return [
            1 + (most.index(value) if value in most else int(np.count_nonzero(self._logits > value)))
            for value in values
        ]
