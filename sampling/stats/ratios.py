"""Two lanes against each other: speed-up, the measured costs c and v, and the speed-up they let expect.

Pure arithmetic over :class:`sampling.stats.summary.Stats` and :mod:`sampling.stats.theory`.
"""

from __future__ import annotations

from collections.abc import Iterable

from sampling.stats.summary import TARGET, Stats, least, ratio
from sampling.stats.theory import expected_speedup

AS_FAST = 0.02  # rates this close (as a share) are called equal
FULL = 0.9  # share of gamma a drafter must fill for the expected speed-up to describe it


def speedup(plain: Stats, other: Stats) -> float | None:
    """How many times faster `other` emits tokens than `plain`; None where either has no rate."""
    mine, theirs = other.predicted_per_second, plain.predicted_per_second
    return None if mine is None or theirs is None else ratio(mine, theirs)


def speedup_over(pairs: Iterable[tuple[Stats, Stats]]) -> float | None:
    """Seconds that plain decoding takes for the other answers' tokens / seconds that the others took.

    `pairs` are (plain, other) of the same prompts; of equal texts it is Σ time_plain / Σ time_other. Where texts differ
    it is still a mean of the pairs' own speed-ups, weighted by the time of the others, and so never beyond them. None
    where no pair has both rates.
    """
    known = [(factor, other.predicted_ms) for plain, other in pairs if (factor := speedup(plain, other)) is not None]
    return ratio(sum(factor * spent for factor, spent in known), sum(spent for _, spent in known))


def disturbed(plain: Stats, other: Stats) -> bool:
    """Whether the timing cannot be right: `other` is faster than its tokens a pass allow, its passes no shorter.

    A round yields `tokens_per_pass` tokens and takes at least one pass; where a pass over more tokens is not shorter
    than one over a single token (v ≥ 1), that bounds the speed-up. A disturbance can only lengthen a pass, so v is
    judged by the shortest ones. False where these were not timed, and for another model than the target.
    """
    gained, most = speedup(plain, other), other.tokens_per_pass
    one, wide = least((plain.least_pass_ms, other.least_pass_ms)), other.least_wide_ms
    timed = wide is not None or other.least_pass_ms is not None
    if gained is None or most is None or one is None or not timed or TARGET not in other.calls:
        return False
    return gained > (1 + AS_FAST) * most and (wide is None or wide >= (1 - AS_FAST) * one)


def cost_ratio(drafted: Stats, plain: Stats) -> float | None:
    """c: seconds a drafted token / seconds of a one-token target pass; `plain` is a run of `ar`."""
    token, one = ratio(drafted.draft_ms, drafted.draft_n), ratio(plain.verify_ms, plain.target_passes)
    return None if token is None or one is None else ratio(token, one)


def verify_ratio(drafted: Stats, plain: Stats) -> float | None:
    """v: seconds of a target pass over drafts / seconds of a one-token pass; `plain` is a run of `ar`."""
    many, one = ratio(drafted.verify_ms, drafted.target_passes), ratio(plain.verify_ms, plain.target_passes)
    return None if many is None or one is None else ratio(many, one)


def expected(drafted: Stats, plain: Stats, gamma: int | str | None) -> float | None:
    """Return the speed-up to expect at the alpha, c and v of these runs; `plain` is a run of `ar`.

    None for "auto", for a drafter that ignores gamma (None), where drafts often were shorter than gamma, and for trees:
    the formula (:func:`sampling.stats.theory.expected_speedup`) describes chains of `gamma` drafts.
    """
    if not isinstance(gamma, int) or gamma < 1 or drafted.branched:
        return None
    most = gamma * drafted.target_passes
    c, v = cost_ratio(drafted, plain), verify_ratio(drafted, plain)
    if not FULL * most <= drafted.draft_n <= most or drafted.alpha is None or c is None or v is None:
        return None
    return expected_speedup(drafted.alpha, gamma, c, v)
