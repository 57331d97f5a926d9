"""`check`'s figures: the time of a pass over n tokens and the cost of drafting (`--speed`); the speed-up to expect over
gamma and alpha, for drafters and a target measured or only described (`--plan`); and that of a pair on this machine,
from these costs and the accepted drafts on a few prompts (:func:`forecast`).

Passes and drafts are timed in turns and their medians compared. The formulas are in sampling/stats/theory.py. Timed
passes read random tokens; the prompt of timed drafts repeats itself, so that a drafter that looks tokens up has
matches. Knows no texts but the built-in prompts of the forecast.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from app.lanes.answers import run_lane
from app.lanes.lane import Lane, PairEngine, make_sampler
from app.lanes.warm import COUNTS, WarmPass, medians, passes
from app.prompts.questions import BUILT_IN, fitting_prompts
from app.screen.output import load_engine, screen, small_table
from app.screen.rows import in_short, plural, share
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.events import Step
from sampling.gamma.costs import pass_times
from sampling.models.causal import CausalLM
from sampling.stats.summary import Stats, merge
from sampling.stats.theory import best_gamma, break_even, efficiency, expected_speedup, roofline
from sampling.types import Budget, Draft, Limits
from utils.catalogue.heads import HEAD_KINDS
from utils.errors import UsageError, holding
from utils.objects import Json
from utils.progress import Cancelled

GAMMA = 4  # drafts a round
ROUNDS = 40  # rounds for which a measured lane has room
PERIOD = 7  # tokens after which the prompt repeats itself


def speed_table(
    engine: PairEngine, settings: Settings | None = None, context: int = 256, repeats: int = 15
) -> RenderableType:
    """Measure a pair and return the table: milliseconds and v(n) = T(n) / T(1), and the cost of drafting.

    Takes some 20 s for the default pair, a minute for slow ones; prints nothing.
    """
    networks = {"target": engine.target.network}
    if isinstance(engine.drafters.model, CausalLM):
        networks["drafter"] = engine.drafters.model.network
    lane, prompt = drafting_lane(engine, settings or Settings(), context)
    runs = {role: passes(network, COUNTS, context) for role, network in networks.items()}
    costs = _medians({**runs, "drafts": proposals(lane, prompt)}, repeats, engine)
    engine.forget()  # the measured tokens belong to no conversation
    v = costs["target", 8] / costs["target", 1]
    return Group(
        _times_table(costs, list(networks)),
        *map(Text, [f"a pass over n tokens after {context} cached ones; v(8) = {v:.2f}", *_drafting(costs, lane)]),
    )


def _medians(runs: dict[str, dict[int, WarmPass]], repeats: int, engine: PairEngine) -> dict[tuple[str, int], float]:
    """Return the median seconds of passes, by their role and number of tokens, timed in turns."""
    turns = {(role, count): run for role, each in runs.items() for count, run in each.items()}
    return medians(turns, repeats, engine.loaded.target.device)


def _times_table(costs: dict[tuple[str, int], float], roles: list[str]) -> Table:
    names = ("n", *(name for role in roles for name in (f"{role} ms", "v(n)")))
    table = Table(
        *(Column(name, justify="right") for name in names),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    for count in COUNTS:
        seconds = [(costs[role, count], costs[role, 1]) for role in roles]
        table.add_row(
            str(count), *(cell for each, first in seconds for cell in (f"{each * 1e3:.1f}", f"{each / first:.2f}"))
        )
    return table


def _drafting(costs: dict[tuple[str, int], float], lane: Lane) -> list[str]:
    """Return a line with c, as timed calls of the drafter's `propose` give it."""
    if not lane.drafts:
        return []
    if not (each := [seconds / count for (role, count), seconds in costs.items() if role == "drafts"]):
        return ["the drafter proposed nothing here: its cost is unknown"]
    c = each[0] / costs["target", 1]
    return [f"a drafted token costs c = {c:.2g} of a one-token pass of the target: {each[0] * 1e3:.3g} ms"]


def drafting_lane(engine: PairEngine, settings: Settings, context: int, method: str = "spec") -> tuple[Lane, list[int]]:
    """Return a drafting lane (by default the pair's own) at gamma 4, which no token stops, and a prompt for it."""
    lane = engine.lane(method, settings.changed(gamma=GAMMA))
    length = max(1, min(context, lane.context // 2))
    lane = replace(lane, limits=Limits(min(ROUNDS * (GAMMA + 1) + 2, lane.context - length), frozenset(), lane.context))
    return lane, [position % PERIOD for position in range(length)]


def proposals(lane: Lane, prompt: list[int]) -> dict[int, WarmPass]:
    """Return {n: a call of the drafter's `propose` for n tokens after the prompt and one more}, with the largest n of
    1 … 4 that it drafts here; {} if it drafts nothing."""
    if not lane.drafts:
        return {}
    opening = lane.run(prompt)
    next(event for event in opening if isinstance(event, Step))
    # The prompt's next token replaces the target's own, so that a drafter that looks tokens up has matches.
    rows = [[*prompt, len(prompt) % PERIOD]]
    sampler = make_sampler(lane.settings).drafting([(0, len(rows[0]))])

    def run(count: int) -> tuple[Draft, object]:
        return lane.drafter.propose(rows, Budget([count]), sampler), opening  # keeps the session, which it reads, alive

    drafted = [count for count in range(1, GAMMA + 1) if run(count)[0].width == count]
    return {count: partial(run, count) for count in drafted[-1:]}


LIMIT = 64  # highest gamma that the plan considers
REPEATS = 7  # times each pass is measured, few for speed
CONTEXT = 256  # tokens before a measured pass


@dataclass(frozen=True)
class Option:
    """The costs of a drafter and its target: `c` of a drafted token, v(n) of a pass over n tokens, both in one-token
    passes."""

    name: str
    c: float
    v: Callable[[int], float]
    t_verify: float | None = None  # seconds of the one-token pass, if known


def run_plan(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Print the plan; return the exit code."""
    if args.target_params is not None or args.c:  # no model is needed
        priced_options = _described(args)
    else:
        with Interrupts() as interrupt:
            engine = load_engine(settings, options, interrupt)
        priced_options = measured(engine, settings, args.methods)
    surfaces = [surface(option, args.gammas, args.alphas) for option in priced_options]
    if args.json:
        sys.stdout.write(json.dumps({"options": surfaces}, ensure_ascii=False, allow_nan=False) + "\n")
        return 0
    console = screen(settings, sys.stdout)
    console.print("S: tokens a second over plain decoding's, by gamma (rows) and alpha (columns)\n", markup=False)
    for plan in surfaces:
        passes = ", ".join(f"v({n}) {value:.2f}" for n, value in plan["v"].items() if n in ("2", "5", "9"))
        seconds = "" if plan["t_verify"] is None else f", a pass {plan['t_verify'] * 1000:.3g} ms"
        console.print(f"{plan['drafter']}: c {plan['c']:.3g}, {passes}{seconds}", style="italic", markup=False)
        console.print(_table(plan, settings))
        even = plan["break_even_alpha"]
        pays = f"pays from alpha {even:.2f} on" if even is not None else "never pays, whatever is accepted"
        console.print(f"{pays}\n", markup=False)
    return 0


def surface(option: Option, gammas: Sequence[int], alphas: Sequence[float]) -> Json:
    """Return the expected speed-ups S[gamma][alpha] of an option, its best gamma at each alpha, and its break-even
    alpha."""
    best = [best_gamma(alpha, option.c, option.v, LIMIT) for alpha in alphas]
    even = break_even(option.c, option.v, LIMIT)
    return {
        "drafter": option.name,
        "c": round(option.c, 6),
        "v": {str(n): round(option.v(n), 4) for n in (1, 2, 3, 5, 9, 17)},
        "t_verify": option.t_verify,
        "alphas": list(alphas),
        "gammas": list(gammas),
        "expected_speedup": [
            [round(expected_speedup(alpha, gamma, option.c, option.v(gamma + 1)), 4) for alpha in alphas]
            for gamma in gammas
        ],
        "best_gamma": [gamma for gamma, _ in best],
        "best_speedup": [round(speedup, 4) for _, speedup in best],
        "break_even_alpha": None if even is None else round(even, 4),
    }


# -- costs ------------------------------------------------------------------------------------------


def _described(args: Namespace) -> list[Option]:
    """Return costs as --c gives them, or estimated from the sizes of models and the speed of a machine. Without a
    described target every pass costs as much as one over a single token."""
    machine = (args.target_bytes, args.bandwidth, args.flops)
    if args.target_params is None:
        return [Option("given", c, lambda n: 1.0) for c in args.c]
    times = roofline(args.target_params, *machine)
    if not (costs := [("given", c) for c in args.c]):
        drafters = {size: roofline(size, *machine) for size in args.drafter_params}
        costs = [(f"{in_short(size)} parameters", drafter(1) / times(1)) for size, drafter in drafters.items()]
    return [Option(name, c, lambda n: times(n) / times(1), times(1)) for name, c in costs]


def measured(engine: PairEngine, settings: Settings, methods: Sequence[str]) -> list[Option]:
    """Return the costs of these lanes' drafters, timed in turns with passes over 1 … 17 tokens."""
    runs = {"": passes(engine.target.network, range(1, 18), CONTEXT)}
    runs |= {method: proposals(*drafting_lane(engine, settings, CONTEXT, method=method)) for method in methods}
    seconds = _medians(runs, REPEATS, engine)
    plain = seconds["", 1]
    times = pass_times({n: each for (role, n), each in seconds.items() if not role})
    costs = {role: each / n for (role, n), each in seconds.items()}
    return [Option(name, costs.get(name, 0.0) / plain, lambda n: times(n) / times(1), plain) for name in methods]


def _table(plan: Json, settings: Settings) -> Table:
    """Return a table with a row for each gamma and a column for each alpha, and below each alpha's best gamma."""
    heads = ["gamma \\ alpha", *(share(alpha) if alpha < 1 else "1" for alpha in plan["alphas"])]
    table = small_table(settings, *(Column(head, justify="right") for head in heads))
    tops = [max(column) for column in zip(*plan["expected_speedup"], strict=True)]
    for gamma, row in zip(plan["gammas"], plan["expected_speedup"], strict=True):
        cells = [Text(f"{value:.2f}", "bold" if value == top else "") for value, top in zip(row, tops, strict=True)]
        table.add_row(str(gamma), *cells)
    table.add_section()
    table.add_row("best gamma", *map(str, plan["best_gamma"]))
    table.add_row("its S", *(f"{value:.2f}" for value in plan["best_speedup"]))
    return table


PROMPTS, TOKENS = 3, 32  # prompts, and tokens of each answer, over which accepted drafts are counted
GROWN = 64  # tokens of an answer under gamma auto, which has to find its gamma first
WARM_UP = 8  # first tokens, which are not counted, since they include one-time costs
MOST = 16  # highest gamma that the forecast considers: passes are measured up to 17 tokens
PAYS = 1.05  # least speed-up at which drafting pays
# FAINT: if alpha here is below the card's by more than this factor, the head may be another target's. USUAL: the alpha
# that is expected of a head without a card.
FAINT, USUAL = 3.0, 0.3
DEAR = 0.2  # c from which on the verdict names the drafter's cost, not its alpha
SELDOM = 0.3  # share of rounds with drafts below which the verdict names that share


@dataclass(frozen=True)
class Grown:
    """The mean round with trees under gamma auto: tokens, nodes drafted, cost of drafting in one-token passes."""

    tokens: float
    nodes: float
    drafting: float

    def speedup(self, v: Callable[[int], float]) -> float:
        """Return the speed-up over plain decoding; v is interpolated between two numbers of tokens."""
        whole = int(self.nodes)
        part = self.nodes - whole
        return self.tokens / (self.drafting + (1 - part) * v(whole + 1) + part * v(whole + 2))


@dataclass(frozen=True)
class Forecast:
    """`option`: c and v(n). `alpha`: accepted / examined drafts, None without drafts. `share`: the share of rounds that
    drafted. `tokens`: the tokens of the answers to `prompts` prompts. `own`: drafts a round, if the drafter has a fixed
    number. `grown`: a round with trees, if the drafter grows them. `usual`: alpha of a trained head by its card, or
    USUAL without one; 0 for other drafters.
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
        """The gamma of 1 … 16 with the highest speed-up, or the drafter's fixed number."""
        return self.own or max(range(1, MOST + 1), key=self.speedup)

    @property
    def gain(self) -> float:
        """The speed-up of the better way: chains at the best gamma, or trees."""
        return max(self.speedup(self.gamma), self.grown.speedup(self.option.v) if self.grown else 0.0)

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
        gain = f"{self.speedup(self.gamma):.2f}x plain decoding at gamma {self.gamma}"
        even = break_even(c, v, MOST)
        pays = "no alpha pays at these costs" if even is None else f"it pays from alpha {even:.2f} on"
        lines += [
            f"agreement: alpha {self.alpha:.2f}, drafts in {self.share:.0%} of the rounds "
            f"({plural(self.prompts, 'prompt')}, {plural(self.tokens, 'token')}, greedily, gamma {self.own or GAMMA})",
            f"predicted: {gain}, the best of chains; {pays}",
        ]
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
        whys = {
            "a pass over several tokens costs nearly as many passes here, so no drafter would.": (
                free is None or free > 0.9
            ),
            f"a drafted token costs {c:.2g} of a pass. A cheaper drafter would: ngram or tables, whose drafts cost "
            "next to nothing.": even is None or c >= DEAR,
            f"it drafts in {self.share:.0%} of the rounds. {_LOOKUP}": self.share < SELDOM,
            f"too few drafts are accepted (alpha {self.alpha:.2f}). A drafter closer to the target would: one of its "
            "family, or one trained for it (infer.py distill).": True,
        }
        return f"it {word}: {holding(whys)[0]}"


_LOOKUP = "Text that repeats itself would do better with it; else tables (distill --stage tables) or a drafter model."


def forecast(engine: PairEngine, settings: Settings, interrupt: Callable[[], bool]) -> Forecast | None:
    """Measure costs and agreement of the pair's own drafter; None for a pair without drafts.

    UsageError if no prompt leaves room for an answer in the pair's context, Cancelled after an interrupt.
    """
    own = settings.changed(temperature=0, gamma="auto")
    trees = engine.lane("spec", own).drafter.traits.tree
    engine.forget()
    settings = settings.changed(temperature=0, gamma=GAMMA, expand="none")
    if not (lane := engine.lane("spec", settings)).drafts:
        return None
    if not (prompts := list(islice(fitting_prompts(engine, BUILT_IN, settings), PROMPTS))):
        raise UsageError(f"no built-in prompt fits into the pair's context of {engine.context} tokens")

    def answered(settings: Settings, tokens: int, prompts: list[list[int]]) -> Stats:
        settings, answers = settings.changed(max_new_tokens=tokens), list[Stats]()
        for ids in prompts:
            answers.append(run_lane(engine.lane("spec", settings), ids, lambda ids: "", interrupt=interrupt).stats)
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
        grown = Grown(
            tokens=whole.tokens_per_pass or 0.0,
            nodes=whole.draft_n / whole.target_passes,
            drafting=whole.draft_ms / (1e3 * whole.target_passes * option.t_verify),
        )
    word = engine.loaded.drafter_word
    usual = (engine.drafters.alphas(word) or (USUAL,))[0] if word in HEAD_KINDS else 0.0
    return Forecast(option, stats.alpha, share, len(prompts), stats.predicted_n, lane.most, grown, usual)
