"""The rules by which drafts are accepted, in words and as chances. Knows no screen, no events and no models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from app.settings import Settings

Rule = Literal["argmax", "match", "ratio", "coupled"]

RULES: dict[Rule, str] = {
    "argmax": "greedy: a draft x is accepted if x = argmax p",
    "match": "point mass: the target draws its own token, x is accepted if that is x; chance p(x)",
    "ratio": "x drawn from q is accepted with chance min(1, p(x)/q(x))",
    "coupled": "drafter and target draw with the same noise; x is accepted if both drew it",
}


def rule_of(temperature: float, *, sampled: bool, coupling: str = "rejection", draft_sampling: str = "law") -> Rule:
    """The rule of a lane: `sampled` says that its drafter is a model (tables and n-grams are point masses)."""
    if temperature == 0:
        return "argmax"
    if not sampled or draft_sampling == "greedy":
        return "match"
    return "coupled" if coupling == "gumbel" else "ratio"


def may_differ(lane: Any, settings: Settings) -> bool:
    """Whether the lane's text may rightly differ from that of `ar` with the same seed."""
    sampled = settings.temperature > 0 and settings.coupling == "rejection" and settings.draft_sampling == "law"
    return lane.name in ("draft", "beam") or (lane.law_drafts and sampled)


def chance(rule: Rule, q: float, p: float) -> float | None:
    """How likely the target was to accept a draft; None where the rule leaves nothing to chance, or no formula."""
    if rule == "match":
        return p
    return ratio(q, p) if rule == "ratio" else None


def ratio(q: float, p: float, lenience: float = 1.0) -> float:
    """The chance that x ~ q is accepted; `lenience` is that of a review before the target's."""
    # Theorem (Leviathan 2023): accepting x ~ q with min(1, p/q) leaves p(x) unchanged.
    return min(1.0, lenience * p / q) if q > 0 else 0.0


def reviews(rule: Rule, lenience: float | None, letter: str = "lambda") -> str:
    """The rule of the reviews inside a cascade; `lenience` is None where it is not known, `letter` its name."""
    decides = "only the target's decides the text"
    if lenience is None:
        return f"reviews inside may be lenient: {decides}"
    if lenience == 1:
        return f"reviews inside are as strict as the target's ({letter} 1), but {decides}"
    enough = f"chance min(1, {lenience:g} p(x)/q(x))" if rule == "ratio" else f"p(x) > q(x)/{lenience:g} is enough"
    return f"reviews inside may be lenient ({letter} {lenience:g}), {enough}: {decides}"
