"""What a pair will bring here: predicted from c, v(n) and how many drafts are accepted on a few prompts.

v(n) is timed as in `plan`; c is what a drafted token cost in the answers, where lookups miss and models catch up. The
mathematics is sampling/stats/theory.py's. Drafts are chains and decoding is greedy.
Knows loaded pairs, not how they are loaded; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.lanes.answers import run_lane
from app.measure.plan import Option, measured
from app.measure.speed import GAMMA
from app.prompts.questions import BUILT_IN, prompt_ids, stratified
from app.settings.table import Settings
from sampling.stats.summary import Stats, merge
from sampling.stats.theory import break_even, efficiency
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine

PROMPTS, TOKENS = 3, 32  # answered to count what is accepted
WARM_UP = 8  # tokens, not counted: what is compiled or read first is no cost of drafting
MOST = 16  # highest gamma that is thought of: passes are measured up to 17 tokens
PAYS = 1.05  # speed-up from which on drafting is said to pay
DEAR = 0.2  # c from which on the drafter, not its agreement, is blamed
SELDOM = 0.3  # share of rounds with drafts below which that is blamed


@dataclass(frozen=True)
class Forecast:
    """`option`: c and v(n). `alpha`: accepted / examined drafts, None where none was drafted. `share`: of the rounds
    those that drafted. `tokens`: answered on `prompts` prompts. `own`: what a round drafts where the drafter says so.
    """

    option: Option
    alpha: float | None
    share: float
    prompts: int
    tokens: int
    own: int | None = None

    def speedup(self, gamma: int) -> float:
        """Over plain decoding; a round without drafts costs a pass and gives a token."""
        gained = self.share * efficiency(self.alpha or 0.0, gamma)
        spent = self.share * (gamma * self.option.c + self.option.v(gamma + 1))
        return (gained + 1 - self.share) / (spent + 1 - self.share)

    @property
    def gamma(self) -> int:
        """The gamma of 1…16 with the highest speed-up, or the drafter's own number."""
        return self.own or max(range(1, MOST + 1), key=self.speedup)

    @property
    def pays(self) -> bool:
        return self.alpha is not None and self.speedup(self.gamma) >= PAYS

    def lines(self) -> list[str]:
        """What was measured, and the verdict in one sentence."""
        c, v, one = self.option.c, self.option.v, self.option.t_verify or 0.0
        passes = ", ".join(f"v({n}) {v(n):.2f}" for n in (2, 5, 9))
        found = [f"costs here: c {c:.3g}, {passes}, a pass {one * 1e3:.3g} ms"]
        if self.alpha is None:
            return [*found, f"verdict: it drafted nothing in {self.tokens} tokens, so it brings nothing. {_LOOKUP}"]
        found.append(
            f"agreement: alpha {self.alpha:.2f}, drafts in {self.share:.0%} of the rounds ({self.prompts} prompts, "
            f"{self.tokens} tokens, greedily, gamma {self.own or GAMMA})"
        )
        gain = f"{self.speedup(self.gamma):.2f}x plain decoding at gamma {self.gamma}"
        even = break_even(c, v, MOST)
        pays = "no alpha pays at these costs" if even is None else f"it pays from alpha {even:.2f} on"
        found.append(f"predicted: {gain}, the best of chains; {pays}")
        return [*found, f"verdict: {'it pays here.' if self.pays else self._why(even)}"]

    def _why(self, even: float | None) -> str:
        """Why it does not pay, and what would."""
        c, free = self.option.c, break_even(0.0, self.option.v, MOST)
        word = "hardly pays" if self.speedup(self.gamma) >= 1 else "does not pay"
        if free is None or free > 0.9:
            return f"it {word}: a pass over several tokens costs nearly as many passes here, so no drafter would."
        if even is None or c >= DEAR:
            return f"it {word}: a drafted token costs {c:.2g} of a pass. A cheaper drafter would: {_CHEAP}."
        if self.share < SELDOM:
            return f"it {word}: it drafts in {self.share:.0%} of the rounds. {_LOOKUP}"
        return f"it {word}: too few drafts are accepted (alpha {self.alpha:.2f}). {_CLOSER}"


_CHEAP = "ngram or tables, whose drafts cost next to nothing"
_CLOSER = "A drafter closer to the target would: one of its family, or one trained for it (infer.py distill)."
_LOOKUP = "Text that repeats itself would do better with it; else tables (infer.py tables) or a drafter model."


def forecast(engine: PairEngine, settings: Settings, interrupt: Callable[[], bool]) -> Forecast | None:
    """Measure costs and agreement of the pair's own drafter; None where nothing drafts.

    UsageError where no prompt leaves room for an answer in the pair's context.
    """
    settings = settings.changed(temperature=0, max_new_tokens=TOKENS, gamma=GAMMA, expand="none")
    lane = engine.lane("spec", settings)
    if not lane.drafts:
        return None
    prompts = _prompts(engine, settings)

    def answered(ids: list[int], tokens: int) -> Stats:
        lane = engine.lane("spec", settings.changed(max_new_tokens=tokens))
        return run_lane(lane, ids, lambda ids: "", interrupt=interrupt).stats

    answered(prompts[0], WARM_UP)
    engine.forget()
    stats = merge(answered(ids, TOKENS) for ids in prompts)
    engine.forget()
    (option,) = measured(engine, settings, ["spec"])
    engine.forget()
    if stats.draft_n and option.t_verify:
        option = replace(option, c=stats.draft_ms / stats.draft_n / (1e3 * option.t_verify))
    rounds = sum(stats.draft_histogram)
    share = 1 - stats.draft_histogram[0] / rounds if rounds else 0.0
    return Forecast(option, stats.alpha, share, len(prompts), stats.predicted_n, lane.most)


def _prompts(engine: PairEngine, settings: Settings) -> list[list[int]]:
    """The first built-in prompts of different kinds that fit."""
    found: list[Any] = []
    for question in stratified(list(BUILT_IN), len(BUILT_IN)):
        try:
            found.append(prompt_ids(engine, question.turns[0], settings))
        except UsageError:  # too long for the context
            continue
        if len(found) == PROMPTS:
            break
    if not found:
        raise UsageError(f"no built-in prompt fits into the pair's context of {engine.context} tokens")
    return found
