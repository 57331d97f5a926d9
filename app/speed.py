"""How long a pass over n tokens takes here, what drafting costs and where a round's time goes: `check --speed`.

Times passes over 1 … 16 tokens of the target and of a drafter that runs alone, against plain transformers'
own one-token pass, and the drafter's own `propose`. Everything is measured in turns, so that a machine that
slows down slows all of it down, and the medians are compared; then some rounds of the real loop
(app/round_speed.py). Knows no texts: the tokens are random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.lane import Lane
from app.lanes import Engine
from app.round_speed import ROUNDS, Pass, Round, drafting_lane, measure_rounds, proposals
from app.settings import Settings
from sampling.cache import CrossCache
from sampling.causal import CausalLM
from sampling.encdec_network import EncDecNetwork, is_encoder_decoder
from sampling.types import Network
from utils.packed_linear import unpacked_copy
from utils.timing import Stopwatch

if TYPE_CHECKING:
    from utils.loading import LoadedModel

COUNTS = range(1, 17)
BUDGET = 60.0  # seconds after which no further repeat is begun
SECOND_COPY = 4e9  # bytes of weights up to which a plain copy is made to compare with
BUSY = 1.4  # median over minimum, above which the repeats were disturbed
Key = TypeVar("Key")


def measure_costs(
    model: Network | CausalLM, counts: Iterable[int] = COUNTS, context: int = 256, repeats: int = 15
) -> dict[int, float]:
    """Seconds of one pass over n new tokens behind `context` cached ones, logits of all n included.

    The median of `repeats`, taken in turns over all `counts` after a warm-up.
    """
    network = model.network if isinstance(model, CausalLM) else model
    laps = timed(passes(network, counts, context), repeats, network.device)
    return {count: statistics.median(seconds) for count, seconds in laps.items()}


def passes(network: Network, counts: Iterable[int], context: int) -> dict[int, Pass]:
    """For each n a pass over n tokens that leaves the cache as it found it."""
    counts = sorted(set(counts))
    context = max(1, min(context, network.context - counts[-1]))
    ids, positions = _tokens(network.vocab_size, context + counts[-1], network.device)
    cache = network.new_cache(1)
    if isinstance(network, EncDecNetwork):
        assert isinstance(cache, CrossCache)
        network.read(cache, ids[:, :context].tolist())
    with torch.inference_mode():
        network.forward(ids[:, :context], positions[:, :context], None, cache, 1)

    def one(count: int) -> Pass:
        new, places = ids[:, context : context + count], positions[:, context : context + count]

        def run() -> None:
            with torch.inference_mode():
                network.forward(new, places, None, cache, count)
                cache.crop(context)

        return run

    return {count: one(count) for count in counts}


def plain_pass(model: Any, context: int) -> Pass:
    """The one-token pass of transformers' own forward, with its own cache, behind `context` tokens."""
    ids, positions = _tokens(model.config.vocab_size, context + 1, model.device)
    new, places = ids[:, context:], positions[:, context:]
    if is_encoder_decoder(model):
        return _plain_decoder_pass(model, ids[:, :context], new)
    with torch.inference_mode():
        cache = model(ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values

    def run() -> None:
        with torch.inference_mode():
            model(new, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-1)

    return run


def _plain_decoder_pass(model: Any, before: torch.Tensor, new: torch.Tensor) -> Pass:
    """The same of a decoder, whose encoder has read as many tokens."""
    with torch.inference_mode():
        begun = model(input_ids=before, decoder_input_ids=before, use_cache=True)
    states, cache = (begun.encoder_last_hidden_state,), begun.past_key_values

    def run() -> None:
        with torch.inference_mode():
            model(encoder_outputs=states, decoder_input_ids=new, past_key_values=cache, use_cache=True)
            cache.crop(-1)

    return run


def speed_table(
    engine: Engine, settings: Settings | None = None, context: int = 256, repeats: int = 15, rounds: int = ROUNDS
) -> RenderableType:
    """Measure a pair and lay it out: milliseconds and v(n) = T(n) / T(1), what drafting costs, a round's parts.

    Takes some 20 s for the default pair, a minute for slow ones; prints nothing.
    """
    networks = {"target": engine.target.network}
    if isinstance(engine.drafter, CausalLM):
        networks["drafter"] = engine.drafter.network
    turns: dict[tuple[str, int], Pass] = {}
    for role, network in networks.items():
        turns |= {(role, count): run for count, run in passes(network, COUNTS, context).items()}
    if (plain := _plain_twin(engine.loaded.target)) is not None:
        turns["plain", 1] = plain_pass(plain, context)
    lane, prompt = drafting_lane(engine, settings or Settings(), context, rounds)
    turns |= {("drafts", count): run for count, run in proposals(lane, prompt).items()}
    laps = timed(turns, repeats, engine.loaded.target.device)
    costs = {key: statistics.median(seconds) for key, seconds in laps.items()}
    engine.forget()  # what was measured is no conversation
    around = measure_rounds(*drafting_lane(engine, settings or Settings(), context, rounds), rounds)
    engine.forget()
    lines = [*_lines(costs, context), *_drafting(costs, lane, around), str(around), *_doubts(laps)]
    return Group(_table(costs, list(networks)), *(Text(line) for line in lines))


def _table(costs: dict[tuple[str, int], float], roles: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("n", justify="right")
    for role in roles:
        table.add_column(f"{role} ms", justify="right")
        table.add_column("v(n)", justify="right")
    for count in COUNTS:
        row = [str(count)]
        for role in roles:
            seconds = costs[role, count]
            row += [f"{seconds * 1e3:.1f}", f"{seconds / costs[role, 1]:.2f}"]
        table.add_row(*row)
    return table


def _lines(costs: dict[tuple[str, int], float], context: int) -> list[str]:
    own = costs["target", 1]
    lines = [f"a pass over n tokens behind {context} cached ones; v(8) = {costs['target', 8] / own:.2f}"]
    if ("plain", 1) in costs:
        plain = costs["plain", 1]
        lines.append(
            f"one-token pass: {own * 1e3:.1f} ms, {own / plain:.2f}x plain transformers' ({plain * 1e3:.1f} ms)"
        )
    return lines


def _drafting(costs: dict[tuple[str, int], float], lane: Lane, around: Round) -> list[str]:
    """c by the drafter's own `propose` and by the loop, and what each position adds."""
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
        lines.append(f"in the loop, what is to be caught up included, c = {around.drafted / own:.2g}")
    return lines


def _doubts(laps: dict[tuple[str, int], list[float]]) -> list[str]:
    """A warning where the repeats scatter so much that something else must have been running."""
    scatter = statistics.median(statistics.median(seconds) / min(seconds) for seconds in laps.values())
    if scatter <= BUSY:
        return []
    return [f"the machine is busy: a pass takes {scatter:.1f}x its best time, so these figures say little"]


def timed(turns: dict[Key, Pass], repeats: int, device: torch.device) -> dict[Key, list[float]]:
    """Seconds of each pass: all in turn, `repeats` times or as often as the budget allows, at least three."""
    laps: dict[Key, list[float]] = {key: [] for key in turns}
    begun = time.monotonic()
    for run in turns.values():
        run()
    for repeat in range(max(1, repeats)):
        if repeat >= 3 and time.monotonic() - begun > BUDGET:
            break
        for key, run in turns.items():
            watch = Stopwatch(device)
            run()
            laps[key].append(watch.lap())
    return laps


def _plain_twin(target: LoadedModel) -> Any | None:
    """The target as plain transformers runs it: itself if nothing in it was packed, else an unpacked copy.

    None where a second copy of the weights would be too large.
    """
    return unpacked_copy(target.model) if target.bytes <= SECOND_COPY else None


def _tokens(vocab_size: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` random ids [1, count], always the same ones, and their positions."""
    ids = torch.randint(0, vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return ids.to(device), torch.arange(count, device=device)[None]
