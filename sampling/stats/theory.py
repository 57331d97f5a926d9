"""The expected speed-up of speculative decoding from its three numbers alpha, c and v(n).

alpha is the chance that an examined draft is accepted, c the cost of one drafted token and v(n)
that of a target pass over n tokens, both relative to a one-token target pass. Pure arithmetic;
knows nothing of how they were measured. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 3.
"""

from bisect import bisect_left
from collections.abc import Callable

_STEPS = 1 << 40  # steps of alpha in the search of the least one that pays


def efficiency(alpha: float, gamma: int) -> float:
    """E = (1 − α^(γ+1)) / (1 − α): expected tokens of a target pass (Leviathan 2023, equation 1)."""
    return float(gamma + 1) if alpha == 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """S = E / (γ·c + v): the speed-up over plain decoding; `v` is v(γ+1), relative like `c`."""
    return efficiency(alpha, gamma) / (gamma * c + v)


def best_gamma(alpha: float, c: float, v: Callable[[int], float] | None = None, limit: int = 64) -> tuple[int, float]:
    """The gamma in 0…`limit` of the highest expected speed-up, and that speed-up; ties go to the smaller.

    `v(n)` is the cost of a target pass over n tokens relative to one token; None means flat.
    """
    cost = v or (lambda n: 1.0)
    best, gamma = max((expected_speedup(alpha, gamma, c, cost(gamma + 1)), -gamma) for gamma in range(limit + 1))
    return -gamma, best


def break_even(c: float, v: Callable[[int], float] | None = None, limit: int = 64) -> float | None:
    """The least alpha from which on drafting loses nothing: the best gamma of 1…`limit` has a speed-up of at least 1.

    `v` as in :func:`best_gamma`. None where even certain acceptance does not pay. With v flat it is c itself, at
    gamma 1, where S = (1 + α) / (1 + c); a longer draft needs more.
    """
    cost = v or (lambda n: 1.0)
    costs = [(gamma, gamma * c + cost(gamma + 1)) for gamma in range(1, limit + 1)]

    def pays(alpha: float) -> bool:
        return any(efficiency(alpha, gamma) >= spent for gamma, spent in costs)

    # S grows with alpha for every gamma, and so does the best one.
    step = bisect_left(range(_STEPS + 1), True, key=lambda step: pays(step / _STEPS))
    return None if step > _STEPS else step / _STEPS


def roofline(
    parameters: float, weight_bytes: float, bandwidth: float, flops: float | None = None
) -> Callable[[int], float]:
    """Return the function n → seconds of a pass over n tokens of a dense model (the roofline model of Williams et al.
    2009): the weights are read once a pass, two operations are done with each weight for each token, and the slower
    of reading and computing counts.

    Attention, caches, launches and communication between machines are left out: the seconds are a lower bound, and
    v(n) is flat up to the n from which computing takes longer than reading.

    Args:
        parameters: of the model.
        weight_bytes: of one parameter.
        bandwidth: bytes read a second.
        flops: operations a second; None: computing is never the slower.
    """
    reading = parameters * weight_bytes / bandwidth
    each = 0.0 if flops is None else 2 * parameters / flops
    return lambda n: max(reading, n * each)
