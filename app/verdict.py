"""Is it faster, and is it the same? One line about the last lane against plain decoding.

Works on figures and ids only; knows no text of the answer, no models and no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sampling.metrics import Stats

AS_FAST = 0.02  # speeds this close (as a share) are called equal
NEAR_TIE = 1e-3  # logit gap under which two tokens are tied in float32

Style = Literal["good", "bad", "alarm", "plain"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text` in plain ASCII ("2.11x faster, same output") and the style it deserves."""

    text: str
    style: Style


def verdict(
    stats_ar: Stats | None,
    stats_last: Stats | None,
    ids_ar: Sequence[int],
    ids_last: Sequence[int],
    *,
    may_differ: bool,
    searched: bool = False,
    label: str = "",
) -> Verdict | None:
    """The verdict on the last lane, or None without two lanes that emitted something.

    `may_differ`: the drafts were sampled, so another text of the same distribution is right;
    otherwise (greedy, or noise keyed to the position) any difference is an alarm. `searched`: the last
    lane looked for a better text than plain decoding's, so that another one is no other draw. If a lane was
    stopped, what both have is compared. `label` names the last lane, where there are more than two.
    """
    if stats_ar is None or stats_last is None or not ids_ar or not ids_last:
        return None
    stopped = "interrupted" in (stats_ar.stop_reason, stats_last.stop_reason)
    position = difference(ids_ar, ids_last, prefix=stopped)
    speed, style = _speed(stats_ar, stats_last)
    ending = ", stopped" if stopped else ""
    if position is not None and not may_differ:
        gap = _gap(stats_ar, stats_last, position)
        parts = [f"differs at token {position + 1}{gap}{ending}", speed]
        return _verdict(label, "; ".join(part for part in parts if part), "alarm")
    if position is not None:
        same = "another text, as beam search may find" if searched else "same distribution, different draw"
    else:
        same = "same output so far" if stopped else "same output"
    return _verdict(label, (f"{speed}, " if speed else "") + same + ending, style)


def difference(one: Sequence[int], other: Sequence[int], *, prefix: bool = False) -> int | None:
    """The first position (from 0) where the ids differ, None if they do not.

    With `prefix` the shorter one may end early; otherwise ending early is a difference.
    """
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if prefix or len(one) == len(other) else min(len(one), len(other))


def _verdict(label: str, text: str, style: Style) -> Verdict:
    return Verdict(f"{label}: {text}" if label else text, style)


def _speed(plain: Stats, other: Stats) -> tuple[str, Style]:
    mine, theirs = other.predicted_per_second, plain.predicted_per_second
    if not mine or not theirs:
        return "", "plain"
    ratio = mine / theirs
    if abs(ratio - 1) <= AS_FAST:
        return "as fast", "plain"
    return (f"{ratio:.2f}x faster", "good") if ratio > 1 else (f"{1 / ratio:.2f}x slower", "bad")


def gap_between(plain: Stats, other: Stats, position: int) -> float | None:
    """The target's top-2 gap at a position, from the answer that recorded it."""
    gap = plain.gap_at(position)
    return other.gap_at(position) if gap is None else gap


def _gap(plain: Stats, other: Stats, position: int) -> str:
    gap = gap_between(plain, other, position)
    if gap is None:
        return ""
    if gap < NEAR_TIE:
        return f", top-2 gap {gap:.1e} (near tie)" if gap else ", top-2 gap 0 (tie)"
    return f", top-2 gap {gap:.3f}"
