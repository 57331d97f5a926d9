"""The comparison of lanes: speed, and whether texts may differ and do; the rule that accepts drafts, in words and as
chances; how far equal texts can be promised, by the number format of the target's pass; the order of timed methods.

Works on figures and ids only; knows no text of the answer, no models and no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from app.settings.types import plain
from sampling.stats.summary import AS_FAST, disturbed, speedup
from utils.remote.server import is_server

if TYPE_CHECKING:
    from app.settings.table import Settings
    from sampling.stats.summary import Stats


Rule = Literal["argmax", "match", "ratio", "coupled"]

RULES: dict[Rule, str] = {
    "argmax": "greedy: a draft x is accepted if x = argmax p",
    "match": "point mass: the target draws its own token, x is accepted if that is x; chance p(x)",
    "ratio": "x drawn from q is accepted with chance min(1, p(x)/q(x))",
    "coupled": "drafter and target draw with the same noise; x is accepted if both drew it",
}

NEAR_TIE = 1e-3  # logit gap under which two tokens are tied in float32
ROUNDING = {"float32": (8e-5, NEAR_TIE), "float16": (0.11, 0.1), "bfloat16": (1.2, 0.5)}
"""By number format: how far the logits of passes of different width lie apart at most, and the gap under which two
tokens may change places, as measured on the default target (docs/notes.md, "The same token in passes of different
width")."""

PACKED_TIE = 1e-2
"""The gap under which kernels over packed weights and float32 over the same weights may choose differently: over 576
greedy tokens of the default target logits differ by up to 0.0094, gaps by up to 0.0041, and none chose differently."""
BY_CONSTRUCTION = "identical by construction"

Style = Literal["good", "bad", "alarm", "plain"]


def rule_of(temperature: float, *, sampled: bool, coupling: str = "rejection", draft_sampling: str = "law") -> Rule:
    """Return the rule of a lane. `sampled`: its drafter is a model (tables and n-grams are point masses)."""
    if temperature == 0:
        return "argmax"
    if not sampled or draft_sampling == "greedy":
        return "match"
    return "coupled" if coupling == "gumbel" else "ratio"


def may_differ(lane: Any, settings: Settings) -> bool:
    """Return whether the lane's text may rightly differ from that of `ar` with the same seed."""
    sampled = settings.temperature > 0 and settings.coupling == "rejection" and settings.draft_sampling == "law"
    return lane.name in ("draft", "beam") or is_server(lane.name) or (lane.drawn_drafts and sampled)


def chance(rule: Rule, q: float, p: float) -> float | None:
    """Return the target's chance to accept a draft; None for a rule without chance, or without a formula."""
    if rule == "match":
        return p
    # Theorem (Leviathan 2023): accepting x ~ q with min(1, p/q) leaves p(x) unchanged.
    return (min(1.0, p / q) if q > 0 else 0.0) if rule == "ratio" else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`text` in plain ASCII ("2.11x faster, same output") and the style it deserves."""

    text: str
    style: Style


def near_tie(precision: str) -> float:
    """Return the logit gap under which rounding may let two tokens change places; 0 if none may, or none is
    measured."""
    return ROUNDING.get(precision, (0.0, 0.0))[1]


def promise(precision: str, invariant: bool = False) -> str:
    """Return the promise about the output. `precision`: the dtype of the target's pass, or its quantization.
    `invariant`: the pass gives each row the same as if it were alone."""
    if invariant:
        return (
            f"the target's own, {BY_CONSTRUCTION}: the compiled pass over {precision} weights gives a token the same "
            "logits, bit for bit, whatever else is in the pass"
        )
    if precision not in ROUNDING:
        return f"the target's own up to {precision} rounding, which is not measured: tokens may change places"
    moved, tie = ROUNDING[precision]
    return (
        f"the target's own up to {precision} rounding: logits of passes of different width differ by up to {moved:g} "
        f"(default target, CPU), so two tokens closer than {tie:g} may change places"
    )


def difference(ids: Sequence[Any], other: Sequence[Any], *, prefix: bool = False) -> int | None:
    """Return the first position (from 0) where the ids (or two texts) differ, None if they do not.

    With `prefix` the shorter one may end early; otherwise ending early is a difference.
    """
    common = min(len(ids), len(other))
    at = next((index for index in range(common) if ids[index] != other[index]), None)
    return common if at is None and not prefix and len(ids) != len(other) else at


def speed_of(plain: Stats, other: Stats) -> tuple[str, Style]:
    """Return the speed of `other` beside plain decoding, in words; "" if it is not known."""
    ratio = speedup(plain, other)
    if not ratio:
        return "", "plain"
    if disturbed(plain, other):
        return f"timing disturbed: faster than {other.tokens_per_pass:.2f} tok/pass allows", "plain"
    if abs(ratio - 1) <= AS_FAST:
        return "as fast", "plain"
    return (f"{ratio:.2f}x faster", "good") if ratio > 1 else (f"{1 / ratio:.2f}x slower", "bad")


def gap_between(plain: Stats, other: Stats, position: int) -> float | None:
    """Return the target's top-2 gap at a position, from the answer that recorded it."""
    gaps = (stats.gap_at(position) for stats in (plain, other))
    return next((gap for gap in gaps if gap is not None), None)


def gap_text(gap: float | None, precision: str, invariant: bool = False) -> str:
    """Return a top-2 gap in words, by the target's number format."""
    if invariant:
        shown = "" if gap is None else f", top-2 gap {gap:.3g}"
        return f"{shown} (impossible in the compiled pass)"
    if gap is None:
        return "" if precision == "float32" else f" ({precision})"
    if precision not in ROUNDING:
        return f", top-2 gap {gap:.3f} ({precision} rounding is not measured)"
    if precision != "float32":
        return f", top-2 gap {gap:.3f} ({'within' if gap < near_tie(precision) else 'beyond'} {precision} rounding)"
    if gap < NEAR_TIE:
        return f", top-2 gap {gap:.1e} (near tie)" if gap else ", top-2 gap 0 (tie)"
    return f", top-2 gap {gap:.3f}"


@dataclass(frozen=True)
class Variant:
    """A method to time, at one gamma if it drafts. `temperature`: None for that of the settings."""

    method: str
    gamma: int | str | None = None
    temperature: float | None = None

    @property
    def label(self) -> str:
        gamma = "" if self.gamma is None else f" gamma {self.gamma}"
        return self.method + gamma + ("" if self.temperature is None else f" temperature {plain(self.temperature)}")


def order(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """Return the variants in the order of round `turn`: rotated by one each time, reversed every other time."""
    start = (turn // 2) % len(variants)
    rotated = [*variants[start:], *variants[:start]]
    return rotated[::-1] if turn % 2 else rotated
