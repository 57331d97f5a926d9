"""The speed-up to expect of a pair on this machine, from c, v(n) and the accepted drafts on a few prompts.

v(n) is timed as in `check --plan`; c is the cost of a drafted token in the answers, where lookups miss and models catch
up. The mathematics is sampling/stats/theory.py's. Decoding is greedy; drafts are chains. Where the drafter grows trees
the prompts are answered once more with the pair's own drafts.
Knows loaded pairs, not how they are loaded; prints nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from app.lanes.answers import run_lane
from app.lanes.lane import PairEngine
from app.measure.plan import GAMMA, Option, measured
from app.prompts.questions import BUILT_IN, fitting_prompts
from app.settings.table import Settings
from sampling.drafters.registry import HEADS
from sampling.stats.summary import Stats, merge
from sampling.stats.theory import break_even, efficiency
from utils.errors import UsageError
from utils.progress import Cancelled

PROMPTS, TOKENS = 3, 32  # answered to count accepted drafts
GROWN = 64  # tokens of an answer under gamma auto, which has to find its number first
WARM_UP = 8  # tokens, not counted: one-time costs are no costs of drafting
MOST = 16  # highest gamma considered: passes are measured up to 17 tokens
PAYS = 1.05  # least speed-up at which drafting pays
FAINT, USUAL = 3.0, 0.3  # ratio of alpha by the card to alpha here that is questioned; alpha of a head without a card
DEAR = 0.2  # c from which on the drafter, not its agreement, is blamed
SELDOM = 0.3  # share of rounds with drafts below which that is blamed


@dataclass(frozen=True)
class Grown:
    """A round with trees under gamma auto: tokens a pass, nodes drafted, cost of drafting in one-token passes."""

    tokens: float
    nodes: float
    drafting: float

    def speedup(self, v: Callable[[int], float]) -> float:
        """Return the speed-up over plain decoding; v is taken as linear between two numbers of tokens."""
        whole = int(self.nodes)
        part = self.nodes - whole
        return self.tokens / (self.drafting + (1 - part) * v(whole + 1) + part * v(whole + 2))


@dataclass(frozen=True)
class Forecast:
    """`option`: c and v(n). `alpha`: accepted / examined drafts, None without drafts. `share`: of the rounds that
    drafted. `tokens`: answered on `prompts` prompts. `own`: drafts a round, of a drafter with a fixed number. `grown`:
    a round with trees, of a drafter that grows them. `usual`: alpha of a trained head by its card, or its usual least
    value; 0 for other drafters.
    """

    option: Option
    alpha: float | None
    share: float
    prompts: int
    tokens: int
    own: int | None = None
    grown: Grown | None = None
    usual: float = 0.0

    def speedup(self, gamma: int) -> float:
        """Return the speed-up over plain decoding; a round without drafts costs a pass and gives a token."""
        gained = self.share * efficiency(self.alpha or 0.0, gamma)
        spent = self.share * (gamma * self.option.c + self.option.v(gamma + 1))
        return (gained + 1 - self.share) / (spent + 1 - self.share)

    @property
    def gamma(self) -> int:
        """The gamma of 1…16 with the highest speed-up, or the drafter's own number."""
        return self.own or max(range(1, MOST + 1), key=self.speedup)

    @property
    def gain(self) -> float:
        """The speed-up of the better way: chains at the best gamma, or trees."""
        trees = 0.0 if self.grown is None else self.grown.speedup(self.option.v)
        return max(self.speedup(self.gamma), trees)

    @property
    def pays(self) -> bool:
        return self.alpha is not None and self.gain >= PAYS

    def lines(self) -> list[str]:
        """Return the measurements, and the verdict in one sentence."""
        c, v, seconds = self.option.c, self.option.v, self.option.t_verify or 0.0
        passes = ", ".join(f"v({n}) {v(n):.2f}" for n in (2, 5, 9))
        lines = [f"costs here: c {c:.3g}, {passes}, a pass {seconds * 1e3:.3g} ms"]
        if self.alpha is None:
            return [*lines, f"verdict: it drafted nothing in {self.tokens} tokens, so it brings nothing. {_LOOKUP}"]
        lines.append(
            f"agreement: alpha {self.alpha:.2f}, drafts in {self.share:.0%} of the rounds ({self.prompts} prompts, "
            f"{self.tokens} tokens, greedily, gamma {self.own or GAMMA})"
        )
        gain = f"{self.speedup(self.gamma):.2f}x plain decoding at gamma {self.gamma}"
        even = break_even(c, v, MOST)
        pays = "no alpha pays at these costs" if even is None else f"it pays from alpha {even:.2f} on"
        lines.append(f"predicted: {gain}, the best of chains; {pays}")
        if (grown := self.grown) is not None:
            lines.append(
                f"with trees and gamma auto: {grown.speedup(v):.2f}x ({grown.tokens:.2f} tokens a pass, "
                f"{grown.nodes:.1f} drafts a round)"
            )
        if self.alpha < self.usual / FAINT:
            lines.append(
                f"it accepts next to nothing (alpha {self.alpha:.2f}, {self.usual:.2f} by its card or a head's usual): "
                "is this head this target's? Layers numbered one off look alike."
            )
        return [*lines, f"verdict: {'it pays here.' if self.pays else self._why(even)}"]

    def _why(self, even: float | None) -> str:
        """Return why it does not pay, and a drafter that would."""
        c, free = self.option.c, break_even(0.0, self.option.v, MOST)
        word = "hardly pays" if self.gain >= 1 else "does not pay"
        if free is None or free > 0.9:
            return f"it {word}: a pass over several tokens costs nearly as many passes here, so no drafter would."
        if even is None or c >= DEAR:
            return f"it {word}: a drafted token costs {c:.2g} of a pass. A cheaper drafter would: {_CHEAP}."
        if self.share < SELDOM:
            return f"it {word}: it drafts in {self.share:.0%} of the rounds. {_LOOKUP}"
        return f"it {word}: too few drafts are accepted (alpha {self.alpha:.2f}). {_CLOSER}"


_CHEAP = "ngram or tables, whose drafts cost next to nothing"
_CLOSER = "A drafter closer to the target would: one of its family, or one trained for it (infer.py distill)."
_LOOKUP = "Text that repeats itself would do better with it; else tables (distill --stage tables) or a drafter model."


def forecast(engine: PairEngine, settings: Settings, interrupt: Callable[[], bool]) -> Forecast | None:
    """Measure costs and agreement of the pair's own drafter; None for a pair without drafts.

    UsageError where no prompt leaves room for an answer in the pair's context, Cancelled after an interrupt.
    """
    own = settings.changed(temperature=0, gamma="auto")
    trees = engine.lane("spec", own).drafter.traits.tree
    engine.forget()
    settings = settings.changed(temperature=0, gamma=GAMMA, expand="none")
    lane = engine.lane("spec", settings)
    if not lane.drafts:
        return None
    prompts = list(islice(fitting_prompts(engine, BUILT_IN, settings), PROMPTS))
    if not prompts:
        raise UsageError(f"no built-in prompt fits into the pair's context of {engine.context} tokens")

    def answered(settings: Settings, tokens: int, prompts: list[list[int]]) -> Stats:
        settings, answers = settings.changed(max_new_tokens=tokens), list[Stats]()
        for ids in prompts:
            lane = engine.lane("spec", settings)
            answers.append(run_lane(lane, ids, lambda ids: "", interrupt=interrupt).stats)
            if interrupt():
                raise Cancelled("interrupted: nothing is predicted of a part")
        engine.forget()
        return merge(answers)

    answered(settings, WARM_UP, prompts[:1])
    stats = answered(settings, TOKENS, prompts)
    (option,) = measured(engine, settings, ["spec"])
    engine.forget()
    if stats.draft_n and option.t_verify:
        option = replace(option, c=stats.draft_ms / stats.draft_n / (1e3 * option.t_verify))
    rounds = sum(stats.draft_histogram)
    share = 1 - stats.draft_histogram[0] / rounds if rounds else 0.0
    grown = None
    if trees and (whole := answered(own, GROWN, prompts)).tokens_per_pass and option.t_verify:
        passes = whole.target_passes
        cost = whole.draft_ms / (1e3 * passes * option.t_verify)
        grown = Grown(whole.tokens_per_pass or 0.0, whole.draft_n / passes, cost)
    kind = engine.loaded.drafter_kind
    usual = (engine.drafters.alphas(kind) or (USUAL,))[0] if kind in HEADS else 0.0
    return Forecast(option, stats.alpha, share, len(prompts), stats.predicted_n, lane.most, grown, usual)
