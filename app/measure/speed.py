"""`check --speed`: the time of a pass over n tokens, the cost of drafting, and the parts of a round.

Times passes over 1 … 16 tokens of the target and of a drafter that runs alone, against plain transformers'
own one-token pass, and the drafter's own `propose`. Everything is measured in turns and the medians are compared; then
some rounds of the real loop after the prompts given. Knows no texts: tokens are random, and without a prompt that of
the loop repeats itself, so that a drafter that looks tokens up has matches.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.lanes.lane import Lane, PairEngine, make_sampler
from app.lanes.pass_times import COUNTS, Pass, passes, random_tokens, timed
from app.settings.table import Settings
from sampling.events import Step
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import is_encoder_decoder
from sampling.types import Budget, Limits
from utils.kernels.packed_linear import unpacked_copy
from utils.timing import Stopwatch

SECOND_COPY = 4e9  # bytes of weights up to which a plain copy is made to compare with, and a long context is read
LONG = 4000  # cached tokens after which a pass is timed too, if the target takes as many
BUSY = 1.4  # median over minimum, above which the repeats were disturbed

GAMMA = 4  # drafts a round
ROUNDS = 40
PERIOD = 7  # of the prompt


def plain_pass(model: Any, context: int) -> Pass:
    """Return the one-token pass of transformers' own forward, with its own cache, after `context` tokens."""
    ids, positions = random_tokens(model.config.vocab_size, context + 1, model.device)
    before, new = ids[:, :context], ids[:, context:]
    with torch.inference_mode():
        if is_encoder_decoder(model):  # its encoder has read as many tokens
            begun = model(input_ids=before, decoder_input_ids=before, use_cache=True)
            more = {"encoder_outputs": (begun.encoder_last_hidden_state,), "decoder_input_ids": new}
        else:
            begun = model(before, use_cache=True, logits_to_keep=1)
            more = {"input_ids": new, "position_ids": positions[:, context:], "logits_to_keep": 1}
    cache = begun.past_key_values

    def run() -> None:
        with torch.inference_mode():
            model(past_key_values=cache, use_cache=True, **more)
            cache.crop(-1)

    return run


def speed_table(
    engine: PairEngine,
    settings: Settings | None = None,
    context: int = 256,
    repeats: int = 15,
    rounds: int = ROUNDS,
    prompts: Sequence[list[int]] = (),
) -> RenderableType:
    """Measure a pair and return the table: milliseconds and v(n) = T(n) / T(1), the cost of drafting, the parts of a
    round (of `rounds` after each of `prompts`).

    Takes some 20 s for the default pair, a minute for slow ones; prints nothing.
    """
    networks = {"target": engine.target.network}
    if isinstance(engine.drafter, CausalLM):
        networks["drafter"] = engine.drafter.network
    target, settings = engine.loaded.target, settings or Settings()
    turns: dict[tuple[str, int], Pass] = {}
    for role, network in networks.items():
        turns |= {(role, count): run for count, run in passes(network, COUNTS, context).items()}
    if target.bytes <= SECOND_COPY:  # plain transformers has no packed layers
        turns["plain", 1] = plain_pass(unpacked_copy(target.model), context)
        if networks["target"].context > LONG > context:
            turns["far", 1] = passes(networks["target"], (1,), LONG)[1]
    lane, prompt = drafting_lane(engine, settings, context, rounds)
    turns |= {("drafts", count): run for count, run in proposals(lane, prompt).items()}
    laps = timed(turns, repeats, target.device)
    costs = {key: statistics.median(seconds) for key, seconds in laps.items()}
    engine.forget()  # the measured tokens belong to no conversation
    lane, prompt = drafting_lane(engine, settings, context, rounds)
    around = measure_rounds(lane, prompts or [prompt], rounds)
    engine.forget()
    own = costs["target", 1]
    lines = [f"a pass over n tokens after {context} cached ones; v(8) = {costs['target', 8] / own:.2f}"]
    if plain := costs.get(("plain", 1)):
        lines.append(
            f"one-token pass: {own * 1e3:.1f} ms, {own / plain:.2f}x plain transformers' ({plain * 1e3:.1f} ms)"
        )
    if far := costs.get(("far", 1)):
        lines.append(f"after {LONG:,} cached tokens: {far * 1e3:.1f} ms, {(far - own) * 1e3:.1f} more")
    lines += [*_drafting(costs, lane, around), str(around), *_doubts(laps)]
    return Group(_table(costs, list(networks)), *map(Text, lines))


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


def _drafting(costs: dict[tuple[str, int], float], lane: Lane, around: RoundParts) -> list[str]:
    """Return c by the drafter's own `propose` and by the loop, and the cost of each position."""
    own, counts = costs["target", 1], sorted(count for role, count in costs if role == "drafts")
    if not lane.drafts:
        return []
    if not counts:
        return ["the drafter proposed nothing here: its cost is unknown"]
    seconds = costs["drafts", counts[-1]] / counts[-1]
    steps = [costs["drafts", count] - costs.get(("drafts", count - 1), 0.0) for count in counts]
    by_position = ", ".join(f"{max(0.0, step) * 1e3:.3g}" for step in steps)
    lines = [
        f"a drafted token costs c = {seconds / own:.2g} of a one-token pass of the target: {seconds * 1e3:.3g} ms, "
        f"by position {by_position} ms"
    ]
    if around.drafted is not None:
        lines.append(f"in the loop, catching up included, c = {around.drafted / own:.2g}")
    return lines


def _doubts(laps: dict[tuple[str, int], list[float]]) -> list[str]:
    """Return a warning if the repeats scatter so much that something else must have been running."""
    scatter = statistics.median(statistics.median(seconds) / min(seconds) for seconds in laps.values())
    if scatter <= BUSY:
        return []
    return [f"the machine is busy: a pass takes {scatter:.1f}x its best time, so these figures say little"]


@dataclass(frozen=True)
class RoundParts:
    """Seconds of the parts of a round (medians over rounds), and of a drafted token within them."""

    verifying: float
    drafting: float
    sampling: float
    overhead: float
    drafted: float | None  # None: nothing was drafted
    beside: float  # all but the passes of the target and of the drafter
    drafter_pass: float | None  # None: there was none
    rounds: int

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("verifying", "drafting", "sampling", "overhead")}
        whole = sum(parts.values())
        shares = (f"{name} {100 * seconds / whole:.1f}%" for name, seconds in parts.items())
        passes = "" if self.drafter_pass is None else f"; a pass of the drafter {self.drafter_pass * 1e3:.2f} ms"
        return (
            f"a round: {', '.join(shares)} of {whole * 1e3:.1f} ms ({self.rounds} rounds, gamma {GAMMA})\n"
            f"a round beside its passes: {self.beside * 1e3:.2f} ms{passes}"
        )


def drafting_lane(
    engine: PairEngine, settings: Settings, context: int, rounds: int = ROUNDS, method: str = "spec"
) -> tuple[Lane, list[int]]:
    """Return a drafting lane at gamma 4 (the pair's own, if no method is named), with room for `rounds` rounds and no
    stop, and a prompt for it."""
    lane = engine.lane(method, settings.changed(gamma=GAMMA))
    length = max(1, min(context, lane.context // 2))
    room = min(rounds * (GAMMA + 1) + 2, lane.context - length)
    prompt = [position % PERIOD for position in range(length)]
    return replace(lane, limits=Limits(room, frozenset(), lane.context)), prompt


def _opened(lane: Lane, prompt: list[int]) -> Any:
    """Return the rounds of an answer after its opening one, which drafts nothing."""
    events = lane.run(prompt)
    next(event for event in events if isinstance(event, Step))
    return events


def proposals(lane: Lane, prompt: list[int]) -> dict[int, Pass]:
    """Return the drafter's own `propose` after the opening round, for 1 … 4 drafts; {} if it drafts nothing."""
    if not lane.drafts:
        return {}
    opening = _opened(lane, prompt)
    # Not the target's own token: a prompt that repeats itself has matches for a drafter that looks tokens up.
    rows = [[*prompt, len(prompt) % PERIOD]]
    sampler = make_sampler(lane.settings).drafting(torch.tensor([[0, len(rows[0])]]))
    lengths = {
        count: lane.drafter.propose(rows, Budget([count]), sampler).tokens.shape[1] for count in range(1, GAMMA + 1)
    }

    def run(count: int) -> object:
        return lane.drafter.propose(rows, Budget([count]), sampler), opening  # held: the drafter reads its session

    return {count: partial(run, count) for count, length in lengths.items() if length == count}


def measure_rounds(lane: Lane, prompts: Sequence[list[int]], rounds: int = ROUNDS) -> RoundParts:
    """Run the real loop for `rounds` rounds after each prompt and take the medians; overhead is the rest of a round."""
    timed_rounds: list[tuple[float, float, float, float, float]] = []
    drafted: list[float] = []
    drafter_passes: list[float] = []
    for prompt in prompts:
        events, ends = _opened(lane, prompt), len(timed_rounds) + rounds
        watch = Stopwatch(lane.lm.device)
        for event in events:
            whole = watch.lap()
            if isinstance(event, Step):
                parts = (event.verify_s, event.draft_s, event.sample_s)
                calls = event.calls[:-1]  # the last one is the target's own
                passes = event.verify_s + sum(call.seconds for call in calls)
                timed_rounds.append((*parts, max(0.0, whole - sum(parts)), max(0.0, whole - passes)))
                drafted += [event.draft_s / len(event.drafted)] if event.drafted else []
                drafter_passes += [call.seconds / call.passes for call in calls if call.passes]
            if len(timed_rounds) >= ends:
                break
        events.close()
    verify, draft, sample, rest, beside = (statistics.median(part) for part in zip(*timed_rounds, strict=True))
    token, call = (statistics.median(times) if times else None for times in (drafted, drafter_passes))
    return RoundParts(verify, draft, sample, rest, token, beside, call, len(timed_rounds))
