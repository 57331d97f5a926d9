"""Two lanes against each other: speed-up, the measured costs c and v, and the speed-up they let expect.

Pure arithmetic over :class:`sampling.stats.summary.Stats` and :mod:`sampling.stats.theory`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from sampling.stats.summary import TARGET, Stats, least, ratio
from sampling.stats.theory import expected_speedup, horizontal_factor, vertical_factor

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


def modelled(drafted: Stats, plain: Stats, gamma: int) -> float | None:
    """The speed-up to expect of `gamma` at the alpha, c and v measured in these very runs (expected
    speed-up S of :func:`sampling.stats.theory.expected_speedup`); None where the drafter often fell short of gamma, or
    drafted trees, which cost and bring something else than a chain of gamma drafts."""
    c, v = cost_ratio(drafted, plain), verify_ratio(drafted, plain)
    most = gamma * drafted.target_passes
    full = gamma > 0 and FULL * most <= drafted.draft_n <= most
    if not full or drafted.branched or drafted.alpha is None or c is None or v is None:
        return None
    return expected_speedup(drafted.alpha, gamma, c, v)


def expected(drafted: Stats, plain: Stats, gamma: int | str | None) -> float | None:
    """The speed-up to expect of a lane at what was measured in these very runs; `plain` is a run of `ar`.

    `gamma` is its number (:func:`modelled`), None for a drafter that ignores gamma (:func:`cascaded`), or "auto",
    which no one number describes.
    """
    if gamma is None:
        return cascaded(drafted, plain)
    return modelled(drafted, plain, gamma) if isinstance(gamma, int) else None


def cascaded(drafted: Stats, plain: Stats) -> float | None:
    """The same of a cascade: with one reviewer :func:`sampling.stats.theory.vertical_factor`, with none
    :func:`sampling.stats.theory.horizontal_factor`; None with more, or where nothing was drafted.

    Costs are those of calls, so drafts without a model cost nothing; a target pass costs v of a one-token pass.
    """
    v, one = verify_ratio(drafted, plain), ratio(plain.verify_ms, plain.target_passes)
    if not drafted.draft_n or not v or not one or len(drafted.reviews) > 1:
        return None
    wide = v * one  # milliseconds of a target pass over drafts
    return (_vertical(drafted, wide) if drafted.reviews else _horizontal(drafted, wide)) / v


def _vertical(drafted: Stats, wide: float) -> float:
    """n, k and the tail are means; the reviewed drafts and those behind them have an alpha each."""
    ((reviewer, (passed, seen_below)),) = drafted.reviews.items()
    behind, kept, seen = drafted.tail
    examined = drafted.draft_n_accepted + drafted.draft_n_rejected
    calls, passes = drafted.calls[reviewer], drafted.target_passes
    below = drafted.reviewed[reviewer] + behind  # tokens of draft 2
    spent = sum(spent for model, spent in drafted.call_ms.items() if model not in (TARGET, reviewer))
    return vertical_factor(
        alpha=ratio(drafted.draft_n_accepted - kept, examined - seen) or 0.0,
        inner_alpha=ratio(passed, seen_below) or 0.0,
        n=calls / passes,
        k=(ratio(drafted.reviewed[reviewer], calls) or 0.0),
        c1=(ratio(drafted.call_ms[reviewer], calls) or 0.0) / wide,
        c2=(ratio(spent, below) or 0.0) / wide,
        tail=behind / passes,
        tail_alpha=ratio(kept, seen) or 0.0,
    )


def _horizontal(drafted: Stats, wide: float) -> float:
    """αⱼ is the share of position j drafted and accepted where j − 1 was accepted: a short chain is not overrated."""
    reached = [drafted.target_passes, *drafted.accepted_at]
    models = [model for model in drafted.calls if model != TARGET]
    return horizontal_factor(
        [ratio(here, before) or 0.0 for before, here in pairwise(reached)],
        [drafted.calls[model] / drafted.target_passes for model in models],
        [(ratio(drafted.call_ms[model], drafted.calls[model]) or 0.0) / wide for model in models],
    )
