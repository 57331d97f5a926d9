"""Passes timed on this machine, and the warm-up of a loaded pair: its passes and drafter run once, and their costs are
remembered.

Passes leave the cache as it was and are timed in turns, so that a machine that slows down slows all of them down. The
first calls of a process take many times as long as later ones. They are made here, outside any answer: passes of 1 to
16 tokens and a few rounds with the pair's drafter. Their costs seed `gamma auto`, so that the first round of the first
answer drafts as many tokens as pay. The measurements of earlier starts on this machine are kept in the cache folder,
in case other programs disturb this start; errors in reading or writing them are ignored. For an encoder-decoder model a
few tokens are decoded and nothing is measured. Knows no text.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, TypeVar

import torch
from pydantic import Field, TypeAdapter

from app.lanes.lane import PairEngine, make_sampler
from app.settings.table import Settings
from sampling.events import Step
from sampling.gamma.acceptance import Acceptance
from sampling.gamma.controller import Controller
from sampling.gamma.costs import Costs
from sampling.loop import generate
from sampling.models.cache import CrossCache
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import EncDecNetwork
from sampling.types import Draft, Drafter, FixedPace, Limits, Network, Session
from utils.catalogue.specs import ModelSpec
from utils.errors import UserError
from utils.files import write_bytes
from utils.loading.cache import cache_folder
from utils.machine import cpu_name, version
from utils.processes import broadcast
from utils.timing import Stopwatch

COUNTS = range(1, 17)  # tokens of the passes that are timed
BUDGET = 60.0  # seconds after which no further repeat is begun
Key = TypeVar("Key")

WarmPass = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Seconds of a pair's passes over n tokens, by n, and of a drafted token (None: it drafts none)."""

    passes: dict[int, Annotated[float, Field(gt=0)]]
    drafted: Annotated[float, Field(ge=0)] | None

    @property
    def plain(self) -> float:
        """Seconds of a one-token pass."""
        return self.passes[1]

    def beside(self, earlier: Sequence["Measured"]) -> "Measured":
        """Return this measurement with every cost, in one-token passes, cut to the second largest of earlier starts.

        Memory and arithmetic get faster and slower independently, so wide passes cost more at one start than at the
        next. Another program makes them cost more still: the second largest ignores one such start.
        """

        def usual(seconds: float, others: list[float]) -> float:
            return self.plain * min(seconds / self.plain, sorted(others)[-2:][0]) if others else seconds

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
    return medians(passes(network, counts, context), repeats, network.device)


def passes(network: Network, counts: Iterable[int], context: int) -> dict[int, WarmPass]:
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


def timed(turns: dict[Key, WarmPass], repeats: int, device: torch.device) -> dict[Key, list[float]]:
    """Return the seconds of each pass: all in turn, `repeats` times, or fewer (at least three) after BUDGET seconds."""
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


def medians(turns: dict[Key, WarmPass], repeats: int, device: torch.device) -> dict[Key, float]:
    """Return the median seconds of each pass; see :func:`timed`."""
    return {key: statistics.median(laps) for key, laps in timed(turns, repeats, device).items()}


def random_tokens(vocab_size: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` random ids [1, count], always the same ones, and their positions."""
    ids = torch.randint(0, vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return ids.to(device), torch.arange(count, device=device)[None]


SECONDS = 1.0  # seconds after which no further pass of the warm-up is begun; a large target gets fewer widths
QUICK = 0.02  # seconds of a one-token pass up to which all COUNTS are measured; of a slower target FEW_COUNTS
FEW_COUNTS = (1, 2, 4, 8, 16)
PROMPT, ROUNDS, DRAFTED = 64, 8, 4  # tokens of the prompt; rounds with the drafter, and tokens drafted in each
REMEMBERED = 5  # starts whose measurements are kept
FILE = "costs.json"
_FILE = TypeAdapter(dict[str, list[Measured]])  # by machine and pair, the latest starts


def warm_up(engine: PairEngine) -> None:
    """Warm a pair up; its gamma controllers begin with these measurements and those of earlier starts."""
    if engine.server is not None:  # it runs elsewhere
        return
    if engine.encodes:  # some tokens of the lane spec; nothing is measured
        list(engine.lane("spec", Settings(gamma=2, max_new_tokens=3)).run([0] * 8))
        engine.forget()
    else:
        engine.measured = _remembered(_key(engine), _measured(engine))


def _measured(engine: PairEngine) -> Measured:
    settings = Settings()
    drafter = engine.drafters.make(engine.loaded.drafts_by, settings.changed(gamma="auto"))
    length = max(1, min(PROMPT, engine.context - COUNTS[-1] - 1))
    prompt: list[int] = random_tokens(engine.target.vocab_size, length, torch.device("cpu"))[0][0].tolist()
    plain = Measured(_passes(engine.open(prompt, hidden=drafter.traits.needs_hidden), prompt), None)
    c = _c(engine, drafter, prompt, settings, plain.costs(with_drafter=False))
    return plain if c is None else Measured(plain.passes, c * plain.plain)


def _passes(session: Session, prompt: list[int]) -> dict[int, float]:
    """Return the seconds of passes over n tokens after the prompt, by n: the least of three times, within SECONDS."""
    seconds: dict[int, float] = {}

    def run(width: int) -> float:
        watch = Stopwatch(session.device)
        session.score([prompt], Draft.of([prompt[:1] * (width - 1)]))
        return watch.lap()

    session.score([prompt], Draft.empty(1))  # reads the prompt
    run(1)
    quick = broadcast(run(1) <= QUICK)  # processes that share the target run the same passes
    begun = time.monotonic()
    for width in [*(COUNTS if quick else FEW_COUNTS)] * 3:
        if broadcast(time.monotonic() - begun > SECONDS) and len(seconds) > 1:
            break
        seconds[width] = min(run(width), seconds.get(width, float("inf")))
    return seconds


def _c(engine: PairEngine, drafter: Drafter, prompt: list[int], settings: Settings, costs: Costs) -> float | None:
    """Return c (the cost of a drafted token, in one-token passes), measured over rounds of the decode loop; None if the
    drafter drafts nothing."""
    fixed = drafter.traits.most
    if not drafter.traits.names or fixed == 0:
        return None
    events = generate(
        engine.target,
        [prompt],
        drafter,
        make_sampler(settings),
        Limits(ROUNDS * (DRAFTED + 1), frozenset(), engine.context),
        pace=FixedPace(DRAFTED if fixed is None else fixed),
    )
    watcher = Controller(Acceptance(), costs, tree=drafter.traits.tree)
    for step in islice((event for event in events if isinstance(event, Step)), 1, ROUNDS + 1):
        watcher.observe([step])
    return costs.c if costs.drafting_known else None


def _key(engine: PairEngine) -> str:
    """Return the key of measurements: processor and threads, the target with its precision, its activations' bits, size
    and device, the drafter, the version."""
    loaded = engine.loaded
    target = loaded.target
    drafter = loaded.draft_head or ", ".join(
        model.source for model in (loaded.spec.drafter, *loaded.spec.cascade_models) if isinstance(model, ModelSpec)
    )
    return (
        f"{cpu_name()}, {torch.get_num_threads()} threads, {target.name} {target.precision} "
        f"{target.activations} {target.bytes} on {target.device}, {loaded.drafts_by} {drafter}, {version()}"
    )


def _remembered(key: str, measured: Measured) -> Measured:
    """Save this start's costs with those of the latest starts, and return them limited by the earlier ones."""
    file = cache_folder() / FILE
    known: dict[str, list[Measured]] = {}
    with suppress(OSError, ValueError):  # a damaged file counts as none
        known = _FILE.validate_json(file.read_bytes())
    earlier = known.get(key, [])
    with suppress(OSError, UserError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, _FILE.dump_json({**known, key: [*earlier, measured][-REMEMBERED:]}))
    return measured.beside(earlier)
