"""The time of a pass over n tokens on this machine: passes that leave the cache as it was, timed in turns.

In turns a machine that slows down slows all of them down. Knows no lanes and no texts: the tokens are random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

import torch
from pydantic import Field

from sampling.gamma.costs import Costs
from sampling.models.cache import CrossCache
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import EncDecNetwork
from sampling.types import Network
from utils.timing import Stopwatch

COUNTS = range(1, 17)
BUDGET = 60.0  # seconds after which no further repeat is begun
Key = TypeVar("Key")

Pass = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Seconds of a pair's passes over n tokens, by n, and of a drafted token (None: it drafts none)."""

    passes: dict[int, Annotated[float, Field(gt=0)]]
    drafted: Annotated[float, Field(ge=0)] | None

    @property
    def plain(self) -> float:
        """Seconds of a one-token pass."""
        return self.passes[1]

    def beside(self, earlier: Sequence[Measured]) -> Measured:
        """Return this measurement with every cost at most the median of earlier ones, in one-token passes.

        The costs of one start go together: memory and products get faster and slower independently. Another program
        makes a wide pass longer than it is; a cost that is too low is noticed within two rounds, since it is tried.
        """

        def usual(seconds: float, others: list[float]) -> float:
            return self.plain * min(seconds / self.plain, statistics.median(others)) if others else seconds

        passes = {
            n: usual(seconds, [start.passes[n] / start.plain for start in earlier if n in start.passes])
            for n, seconds in self.passes.items()
        }
        drafted = [start.drafted / start.plain for start in earlier if start.drafted is not None]
        return Measured(passes, None if self.drafted is None else usual(self.drafted, drafted))

    def costs(self, with_drafter: bool) -> Costs:
        """Return new costs seeded with these."""
        c = self.drafted / self.plain if with_drafter and self.drafted is not None else None
        return Costs(c, {n: max(1.0, each / self.plain) for n, each in self.passes.items() if n > 1}, self.plain)


def measure_costs(
    model: Network | CausalLM, counts: Iterable[int] = COUNTS, context: int = 256, repeats: int = 15
) -> dict[int, float]:
    """Measure the seconds of one pass over n new tokens after `context` cached ones, logits of all n included.

    The median of `repeats`, taken in turns over all `counts` after a warm-up.
    """
    network = model.network if isinstance(model, CausalLM) else model
    laps = timed(passes(network, counts, context), repeats, network.device)
    return {count: statistics.median(seconds) for count, seconds in laps.items()}


def passes(network: Network, counts: Iterable[int], context: int) -> dict[int, Pass]:
    """Return a pass over n tokens that leaves the cache as it was, for each n."""
    counts = sorted(set(counts))
    context = max(1, min(context, network.context - counts[-1]))
    ids, positions = random_tokens(network.vocab_size, context + counts[-1], network.device)
    cache = network.new_cache(1)
    if isinstance(network, EncDecNetwork):
        assert isinstance(cache, CrossCache)
        network.read(cache, ids[:, :context].tolist())
    with torch.inference_mode():
        network.forward(ids[:, :context], positions[:, :context], None, cache, 1)

    def run(count: int) -> None:
        new = slice(context, context + count)
        with torch.inference_mode():
            network.forward(ids[:, new], positions[:, new], None, cache, count)
            cache.crop(context)

    return {count: partial(run, count) for count in counts}


def timed(turns: dict[Key, Pass], repeats: int, device: torch.device) -> dict[Key, list[float]]:
    """Time each pass: all in turn, `repeats` times or as often as the budget allows, at least three. In seconds."""
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


def random_tokens(vocab_size: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` random ids [1, count], always the same ones, and their positions."""
    ids = torch.randint(0, vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return ids.to(device), torch.arange(count, device=device)[None]
