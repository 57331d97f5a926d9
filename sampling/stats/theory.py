"""The expected speed-up of speculative decoding from its three numbers alpha, c and v(n).

alpha is the chance that an examined draft is accepted, c the cost of one drafted token and v(n)
that of a target pass over n tokens, both relative to a one-token target pass. Pure arithmetic;
knows nothing of how they were measured. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 3. Cascades have
factors of their own (Chen et al. 2023, arXiv 2312.11462).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import mul


def efficiency(alpha: float, gamma: int) -> float:
    """E = (1 − α^(γ+1)) / (1 − α): expected tokens of a target pass (Leviathan 2023, equation 1).

    Raises ValueError for alpha outside 0…1 or a negative gamma.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
    return float(gamma + 1) if alpha == 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """S = E / (γ·c + v): the speed-up over plain decoding; `v` is v(γ+1), relative like `c`."""
    if c < 0 or v <= 0:
        raise ValueError(f"c must be at least 0 and v above 0, got {c} and {v}")
    return efficiency(alpha, gamma) / (gamma * c + v)


def best_gamma(alpha: float, c: float, v: Callable[[int], float] | None = None, limit: int = 64) -> tuple[int, float]:
    """The gamma in 0…`limit` of the highest expected speed-up, and that speed-up; ties go to the smaller.

    `v(n)` is the cost of a target pass over n tokens relative to one token; None means flat.
    """
    cost = v or (lambda n: 1.0)
    options = [(expected_speedup(alpha, gamma, c, cost(gamma + 1)), -gamma) for gamma in range(limit + 1)]
    best, gamma = max(options)
    return -gamma, best


def break_even(c: float, v: Callable[[int], float] | None = None, limit: int = 64) -> float | None:
    """The least alpha from which on drafting loses nothing: the best gamma of 1…`limit` has a speed-up of 1 there.

    `v` as in :func:`best_gamma`. None where even certain acceptance does not pay. With v flat it is c itself, at
    gamma 1, where S = (1 + α) / (1 + c); a longer draft needs more.
    """
    cost = v or (lambda n: 1.0)
    costs = [(gamma, gamma * c + cost(gamma + 1)) for gamma in range(1, limit + 1)]

    def pays(alpha: float) -> bool:
        return any(efficiency(alpha, gamma) >= spent for gamma, spent in costs)

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0  # S grows with alpha for every gamma, and so does the best one
    if pays(low):
        return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def roofline(
    parameters: float, weight_bytes: float, bandwidth: float, flops: float | None = None
) -> Callable[[int], float]:
    """Seconds of a pass over n tokens of a dense model that is only described (the roofline model of Williams et al.
    2009): its weights are read once a pass, two operations are done with each weight for each token, and the slower
    of the two counts.

    Attention, caches, launches and the other machines' talk are left out: it is a lower bound, and v(n) of it is flat
    up to the n from which computing takes longer than reading.

    Args:
        parameters: of the model.
        weight_bytes: of one parameter.
        bandwidth: bytes read a second.
        flops: operations a second; None: never the slower.

    Raises ValueError for a size or a speed that is not above 0.
    """
    given = (parameters, weight_bytes, bandwidth, *(() if flops is None else (flops,)))
    if min(given) <= 0:
        raise ValueError(f"sizes and speeds must be above 0, got {', '.join(map(str, given))}")
    reading = parameters * weight_bytes / bandwidth
    each = 0.0 if flops is None else 2 * parameters / flops
    return lambda n: max(reading, n * each)


def vertical_factor(
    alpha: float,
    inner_alpha: float,
    n: float,
    k: float,
    c1: float,
    c2: float = 0.0,
    tail: float = 0.0,
    tail_alpha: float = 0.0,
) -> float:
    """The speed-up of a vertical cascade, (1 − α·φ(α)ⁿ) / [(1 − α)(1 + n·c₁ + n·k·c₂)] (Chen et al. 2023,
    arXiv 2312.11462), φ(x) = 1 + (x − 1)(1 − (α′x)^(k+1)) / (1 − α′x).

    Before each target pass draft 1 reviews `n` times `k` tokens of draft 2 and adds one of its own each time; φ
    generates the number of tokens of a review. Counts may be means.

    Args:
        alpha: the chance that the target accepts a token that it examines.
        inner_alpha: α′, the chance that draft 1 accepts a token of draft 2.
        c1, c2: a call of draft 1 and a token of draft 2, relative to a target pass.
        tail, tail_alpha: so many tokens of draft 2 follow unreviewed, which the target accepts with this chance.

    Raises ValueError for a chance outside 0…1 or a negative count or cost.
    """
    _check((alpha, inner_alpha, tail_alpha), (n, k, c1, c2, tail))
    # 1 − φ(α) = (1 − α)·tokens with tokens = Σ_{j≤k} (α′α)^j, so that nothing is divided by 1 − α.
    tokens = _geometric(inner_alpha * alpha, k + 1)
    phi = max(0.0, 1 - (1 - alpha) * tokens)
    reviewed = 1 + alpha * tokens * _geometric(phi, n)
    beyond: float = phi**n * tail_alpha * _geometric(tail_alpha, tail)
    return (reviewed + beyond) / (1 + n * c1 + (n * k + tail) * c2)


def horizontal_factor(alphas: Sequence[float], counts: Sequence[float], costs: Sequence[float]) -> float:
    """The speed-up of a horizontal cascade, (1 + Σⱼ ∏_{i≤j} αᵢ) / (1 + Σ nᵢ·cᵢ) (arXiv 2312.11462).

    Args:
        alphas: of each position the chance that its draft is accepted if those before it were.
        counts, costs: of each drafter how often it is called a target pass, and what a call costs relative to that.

    Raises ValueError for a chance outside 0…1, a negative count or cost, or counts without costs.
    """
    _check(alphas, (*counts, *costs))
    tokens: float = 1 + sum(accumulate(alphas, mul))
    return tokens / (1 + sum(count * cost for count, cost in zip(counts, costs, strict=True)))


def _geometric(y: float, n: float) -> float:
    """Σ_{j<n} y^j = (1 − yⁿ) / (1 − y) for y in 0…1, exact near 1; n need not be whole."""
    if y in (0.0, 1.0) or n == 0:
        return n if y else float(n > 0)
    return math.expm1(n * math.log(y)) / (y - 1)


def _check(chances: Iterable[float], sizes: Iterable[float]) -> None:
    wrong = next((chance for chance in chances if not 0.0 <= chance <= 1.0), None)
    if wrong is not None:
        raise ValueError(f"alpha must be between 0 and 1, got {wrong}")
    negative = next((size for size in sizes if size < 0), None)
    if negative is not None:
        raise ValueError(f"counts and costs must be at least 0, got {negative}")
