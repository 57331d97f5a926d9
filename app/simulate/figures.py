"""A drafter's rounds against a recording → its TAR and the speed they let expect. Pure arithmetic.

Seconds of a round = drafting + a target pass over 1 + drafted tokens + the rest (sampling, the loop itself). Where
every round drafts gamma tokens and the rest is nothing, that is TAR / (γ·t_draft + t_verify(γ + 1)) of Decoding
Speculative Decoding (arXiv 2402.01528). Rates leave the opening round out, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sampling.events import Step
from sampling.stats.summary import Stats, merge, ratio


@dataclass(frozen=True)
class Played:
    """One answer played: its figures, and its rounds behind the opening one."""

    stats: Stats
    rounds: tuple[Step, ...]


@dataclass(frozen=True)
class Costs:
    """Seconds. `verify(n)`: a target pass over n tokens, None where nobody knows; `draft` of a drafted token, `other`
    of the rest of a round, None: as each round took here; `plain_other` that of a round of plain decoding."""

    verify: Callable[[int], float] | None = None
    draft: float | None = None
    other: float | None = None
    plain_other: float = 0.0

    def seconds(self, step: Step) -> float:
        """What this round takes."""
        assert self.verify is not None
        drafted = len(step.drafted)
        drafting = step.draft_s if self.draft is None else drafted * self.draft
        rest = step.sample_s + step.overhead_s if self.other is None else self.other
        return drafting + self.verify(drafted + 1) + rest


def figures(method: str, gamma: int | str | None, played: Sequence[Played], costs: Costs) -> dict[str, Any]:
    """Everything about a drafter at a gamma, JSON-able; what cannot be told is None."""
    stats = merge([one.stats for one in played])
    rounds = [step for one in played for step in one.rounds]
    drafted = sum(len(step.drafted) for step in rounds)
    t_draft = costs.draft if costs.draft is not None else ratio(sum(step.draft_s for step in rounds), drafted)
    seconds = sum(map(costs.seconds, rounds)) if costs.verify is not None else None
    throughput = None if seconds is None else ratio(stats.predicted_n - stats.openings, seconds)
    plain = None if costs.verify is None else 1 / (costs.verify(1) + costs.plain_other)
    return {
        "method": method,
        "gamma": gamma,
        "tokens_per_pass": _short(stats.tokens_per_pass),
        "acceptance_rate": _short(stats.acceptance_rate),
        "alpha": _short(stats.alpha),
        "alpha_per_position": [_short(alpha) for alpha in stats.alpha_per_position],
        "predicted_n": stats.predicted_n,
        "target_passes": stats.target_passes,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "t_draft": _short(t_draft, 7),
        "t_round": None if seconds is None else _short(ratio(seconds, len(rounds)), 7),
        "throughput": _short(throughput),
        "throughput_formula": _short(_formula(stats, gamma, t_draft, costs)),
        "plain_throughput": _short(plain),
        "speedup": None if throughput is None or plain is None else _short(throughput / plain),
        "prompts": [
            {
                "prompt_n": one.stats.prompt_n,
                "predicted_n": one.stats.predicted_n,
                "target_passes": one.stats.target_passes,
                "tokens_per_pass": _short(one.stats.tokens_per_pass),
            }
            for one in played
        ],
    }


def _formula(stats: Stats, gamma: int | str | None, t_draft: float | None, costs: Costs) -> float | None:
    """TAR / (γ·t_draft + t_verify(γ + 1)), as printed: every round drafts gamma tokens."""
    tar = stats.tokens_per_pass
    if not isinstance(gamma, int) or tar is None or costs.verify is None:
        return None
    return tar / (gamma * (t_draft or 0.0) + costs.verify(gamma + 1))


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
