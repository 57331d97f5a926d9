"""What if: the distribution of a token under another temperature, top-k, top-p and min-p, from the numbers recorded at
its position (sampling/events.py: Position), without running a model.

All results are (lower, upper) bounds, which are equal where the numbers determine the value. log Σ p^β is a convex
function of β = 1/T. Between two recorded values of β it lies below the chord that joins them and above the extensions
of the neighbouring chords. Above the largest recorded β (temperatures below 0.25) it lies above the extension of the
last chord, and since the norm (Σ p^β)^(1/β) falls with β, below β times its last recorded logarithm. The named tokens,
those that the position lists, begin with the likeliest ones, ranks 1 to n without a gap (`_head`); a token that is not
named is no likelier than the last of these. Knows no models and no screen.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sampling.events import INVERSE_TEMPERATURES, Filters


class RankedToken(NamedTuple):
    """A token with its probability at temperature 1 and its rank by it, from 1."""

    token: int
    p: float
    rank: int


Bounds = tuple[float, float]


def target_rest_bounds(sums: Sequence[float], beta: float) -> Bounds:
    """Return the bounds of log Σ p^β over the tokens that are not named, from `Position.rest`."""
    points = list(zip(INVERSE_TEMPERATURES, sums, strict=True))
    for beta_kept, kept in points:
        if beta == beta_kept:
            return kept, kept

    def line(at: int) -> float:
        (x0, y0), (x1, y1) = points[at : at + 2]
        return y0 + (y1 - y0) * (beta - x0) / (x1 - x0)

    below = max(at for at, (kept, _) in enumerate(points) if kept < beta)
    if below == len(points) - 1:
        return line(below - 1), sums[-1] * beta / INVERSE_TEMPERATURES[-1]
    return max(line(at) for at in (below - 1, below + 1) if 0 <= at < len(points) - 1), line(below)


def _head(named: Sequence[RankedToken]) -> int:
    """Return n, if the first n tokens have the ranks 1 to n and the next has not n + 1."""
    return next((at for at, each in enumerate(named) if each.rank > at + 1), len(named))


def drafter_rest_bounds(named: Sequence[RankedToken], count: float, beta: float) -> Bounds:
    """Return the bounds of log Σ q^β over at most `count` further tokens, of which only the sum at β = 1 is known."""
    left, least = max(1e-12, 1.0 - sum(each.p for each in named)), named[_head(named) - 1].p
    # The bounds are reached with the mass concentrated on tokens of probability `least`, or uniform over all `count`.
    concentrated = math.log(left) + (beta - 1) * math.log(least)
    uniform = beta * math.log(left) + (1 - beta) * math.log(max(1.0, count))
    return min(uniform, concentrated), concentrated if beta >= 1 else max(uniform, concentrated)


def shaped(named: Sequence[RankedToken], rest: Bounds, shape: Filters) -> dict[int, Bounds]:
    """Return the bounds of the probability of each token of `named`, which is in the order of ranks.

    `rest`: the bounds of log Σ p^β over all other tokens. (0, 0): the settings cut the token; if only the lower bound
    is 0, they may cut it.
    """
    if not shape.temperature:
        return {each.token: (float(not at),) * 2 for at, each in enumerate(named)}
    beta, first, head = 1 / shape.temperature, math.log(named[0].p), _head(named)
    top_k = shape.top_k or math.inf
    every = [math.exp(beta * (math.log(each.p) - first)) if each.p > 0 else 0.0 for each in named]
    weights = [weight if each.rank <= top_k else 0.0 for each, weight in zip(named, every, strict=True)]
    least, most = (math.exp(min(700.0, bound - beta * first)) for bound in rest)
    if top_k < math.inf:
        further = max(0.0, top_k - sum(each.rank <= top_k for each in named))
        least, most = 0.0, min(most, further * every[head - 1])
    low, high = list(weights), list(weights)
    if shape.top_p < 1:
        small, large = sum(weights) + least, sum(weights) + most
        before = [sum(weights[:at]) for at in range(head)] + [sum(weights[:head])] * (len(named) - head)
        for at, mass in enumerate(before):
            low[at] = 0.0 if at >= head or mass / small >= shape.top_p else low[at]
            high[at] = 0.0 if mass / large >= shape.top_p else high[at]
        least, most = 0.0, 0.0 if sum(weights[:head]) / large >= shape.top_p else most
    floor = shape.min_p * every[0]
    low, high = ([kept if kept >= floor else 0.0 for kept in side] for side in (low, high))
    least, most = (0.0 if floor else least), (0.0 if every[head - 1] < floor else most)
    sums = sum(low) + least, sum(high) + most
    return {
        each.token: (lo and lo / (sums[1] - hi + lo), hi and hi / (sums[0] - lo + hi))
        for each, lo, hi in zip(named, low, high, strict=True)
    }


def overlap(p: dict[int, Bounds], q: dict[int, Bounds]) -> Bounds:
    """Return the bounds of Σ min(p, q), the chance that a draft drawn from q is accepted (arXiv 2211.17192)."""
    both = p.keys() & q.keys()
    low, high = (sum(min(p[token][end], q[token][end]) for token in both) for end in (0, 1))
    outside = min(1 - sum(side[token][0] for token in both) for side in (p, q))
    return low, min(1.0, high + max(0.0, outside))
