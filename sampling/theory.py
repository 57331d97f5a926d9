"""The expected speed-up of speculative decoding from its three numbers alpha, c and v(n).

alpha is the chance that an examined draft is accepted, c the cost of one drafted token and v(n)
that of a target pass over n tokens, both relative to a one-token target pass. Pure arithmetic;
knows nothing of how they were measured. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 3.
"""

from __future__ import annotations

from collections.abc import Callable


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
