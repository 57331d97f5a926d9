"""Two lanes against each other: speed-up, the measured costs c and v, and the speed-up they let expect.

Pure arithmetic over :class:`sampling.metrics.Stats` and :mod:`sampling.theory`.
"""

from __future__ import annotations

from sampling.metrics import Stats, ratio
from sampling.theory import expected_speedup

FULL = 0.9  # share of gamma a drafter must fill for the expected speed-up to describe it


def speedup(plain: Stats, other: Stats) -> float | None:
    """How many times faster `other` emits tokens than `plain`; None where either has no rate."""
    mine, theirs = other.predicted_per_second, plain.predicted_per_second
    return None if mine is None or theirs is None else ratio(mine, theirs)


def cost_ratio(drafted: Stats, plain: Stats) -> float | None:
    """c: seconds a drafted token / seconds of a one-token target pass; `plain` is a run of `ar`."""
    token, one = ratio(drafted.draft_ms, drafted.draft_n), ratio(plain.verify_ms, plain.target_passes)
    return None if token is None or one is None else ratio(token, one)


def verify_ratio(drafted: Stats, plain: Stats) -> float | None:
    """v: seconds of a target pass over drafts / seconds of a one-token pass; `plain` is a run of `ar`."""
    many, one = ratio(drafted.verify_ms, drafted.target_passes), ratio(plain.verify_ms, plain.target_passes)
    return None if many is None or one is None else ratio(many, one)


def modelled(drafted: Stats, plain: Stats, gamma: int) -> float | None:
    """The speed-up to expect of `gamma` at the alpha, c and v measured in these very runs (expected
    speed-up S of :func:`sampling.theory.expected_speedup`); None where the drafter often fell short of gamma."""
    c, v = cost_ratio(drafted, plain), verify_ratio(drafted, plain)
    full = gamma > 0 and drafted.draft_n >= FULL * gamma * drafted.target_passes
    if not full or drafted.alpha is None or c is None or v is None:
        return None
    return expected_speedup(drafted.alpha, gamma, c, v)
