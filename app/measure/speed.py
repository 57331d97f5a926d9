"""`check --speed`: the time of a pass over n tokens, and the cost of drafting.

Times passes over 1 … 16 tokens of the target and of a drafter that runs alone, and the drafter's own `propose`.
Everything is measured in turns and the medians are compared. Knows no texts: tokens are random, and the prompt of the
drafter repeats itself, so that a drafter that looks tokens up has matches.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.lanes.lane import Lane, PairEngine, make_sampler
from app.lanes.pass_times import COUNTS, Pass, passes, timed
from app.settings.table import Settings
from sampling.events import Step
from sampling.models.causal import CausalLM
from sampling.types import Budget, Limits

BUSY = 1.4  # median over minimum, above which the repeats were disturbed

GAMMA = 4  # drafts a round
ROUNDS = 40  # that the lane has room for
PERIOD = 7  # of the prompt


def speed_table(
    engine: PairEngine, settings: Settings | None = None, context: int = 256, repeats: int = 15
) -> RenderableType:
    """Measure a pair and return the table: milliseconds and v(n) = T(n) / T(1), and the cost of drafting.

    Takes some 20 s for the default pair, a minute for slow ones; prints nothing.
    """
    networks = {"target": engine.target.network}
    if isinstance(engine.drafter, CausalLM):
        networks["drafter"] = engine.drafter.network
    turns: dict[tuple[str, int], Pass] = {}
    for role, network in networks.items():
        turns |= {(role, count): run for count, run in passes(network, COUNTS, context).items()}
    lane, prompt = drafting_lane(engine, settings or Settings(), context)
    turns |= {("drafts", count): run for count, run in proposals(lane, prompt).items()}
    laps = timed(turns, repeats, engine.loaded.target.device)
    costs = {key: statistics.median(seconds) for key, seconds in laps.items()}
    engine.forget()  # the measured tokens belong to no conversation
    v = costs["target", 8] / costs["target", 1]
    lines = [f"a pass over n tokens after {context} cached ones; v(8) = {v:.2f}"]
    return Group(_table(costs, list(networks)), *map(Text, [*lines, *_drafting(costs, lane), *_doubts(laps)]))


def _table(costs: dict[tuple[str, int], float], roles: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("n", *(name for role in roles for name in (f"{role} ms", "v(n)"))):
        table.add_column(name, justify="right")
    for count in COUNTS:
        seconds = [(costs[role, count], costs[role, 1]) for role in roles]
        table.add_row(
            str(count), *(cell for each, first in seconds for cell in (f"{each * 1e3:.1f}", f"{each / first:.2f}"))
        )
    return table


def _drafting(costs: dict[tuple[str, int], float], lane: Lane) -> list[str]:
    """Return c by the drafter's own `propose`, and the cost of each position."""
    own, counts = costs["target", 1], sorted(count for role, count in costs if role == "drafts")
    if not lane.drafts:
        return []
    if not counts:
        return ["the drafter proposed nothing here: its cost is unknown"]
    seconds = costs["drafts", counts[-1]] / counts[-1]
    steps = [costs["drafts", count] - costs.get(("drafts", count - 1), 0.0) for count in counts]
    by_position = ", ".join(f"{max(0.0, step) * 1e3:.3g}" for step in steps)
    return [
        f"a drafted token costs c = {seconds / own:.2g} of a one-token pass of the target: {seconds * 1e3:.3g} ms, "
        f"by position {by_position} ms"
    ]


def _doubts(laps: dict[tuple[str, int], list[float]]) -> list[str]:
    """Return a warning if the repeats scatter so much that something else must have been running."""
    scatter = statistics.median(statistics.median(seconds) / min(seconds) for seconds in laps.values())
    if scatter <= BUSY:
        return []
    return [f"the machine is busy: a pass takes {scatter:.1f}x its best time, so these figures say little"]


def drafting_lane(engine: PairEngine, settings: Settings, context: int, method: str = "spec") -> tuple[Lane, list[int]]:
    """Return a drafting lane at gamma 4 (the pair's own, if no method is named) without a stop, and a prompt for it."""
    lane = engine.lane(method, settings.changed(gamma=GAMMA))
    length = max(1, min(context, lane.context // 2))
    room = min(ROUNDS * (GAMMA + 1) + 2, lane.context - length)
    prompt = [position % PERIOD for position in range(length)]
    return replace(lane, limits=Limits(room, frozenset(), lane.context)), prompt


def proposals(lane: Lane, prompt: list[int]) -> dict[int, Pass]:
    """Return the drafter's own `propose` after the opening round, for 1 … 4 drafts; {} if it drafts nothing."""
    if not lane.drafts:
        return {}
    opening = lane.run(prompt)
    next(event for event in opening if isinstance(event, Step))
    # Not the target's own token: a prompt that repeats itself has matches for a drafter that looks tokens up.
    rows = [[*prompt, len(prompt) % PERIOD]]
    sampler = make_sampler(lane.settings).drafting(torch.tensor([[0, len(rows[0])]]))
    lengths = {
        count: lane.drafter.propose(rows, Budget([count]), sampler).tokens.shape[1] for count in range(1, GAMMA + 1)
    }

    def run(count: int) -> object:
        return lane.drafter.propose(rows, Budget([count]), sampler), opening  # held: the drafter reads its session

    return {count: partial(run, count) for count, length in lengths.items() if length == count}
