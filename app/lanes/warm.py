"""Warm up a loaded pair: run once what answers run, measure what it costs here, and remember that.

The first calls of a process take many times as long as later ones. They are made here, on nobody's clock: passes of 1
to 16 tokens and a few rounds with the pair's drafter. What they cost seeds `gamma auto`, so that the first round of the
first answer drafts as many tokens as pay. The measurements of earlier starts on this machine stand beside today's in
the cache folder; a folder that cannot be written harms nothing. Knows no text: the tokens are random.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from app.lanes.lane import make_sampler
from app.lanes.pass_times import Measured, random_tokens
from app.settings.table import Settings
from sampling.events import Step
from sampling.gamma.acceptance import Acceptance
from sampling.gamma.controller import Controller
from sampling.gamma.costs import Costs
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.types import Draft, Drafter, FixedPace, Limits, Session
from utils.errors import UserError
from utils.files import write_json
from utils.loading.cache import cache_folder
from utils.machine import cpu_name, version
from utils.timing import Stopwatch

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine

SECONDS = 1.0  # that passes may take in all; a large target is measured at fewer widths
QUICK = 0.02  # seconds of a one-token pass up to which every width is measured, three times
WIDTHS, FEW_WIDTHS = range(1, 17), (1, 2, 4, 8, 16)
PROMPT, ROUNDS, DRAFTED = 64, 8, 4  # tokens of the prompt; rounds with the drafter, and tokens drafted in each
REMEMBERED = 5  # starts whose measurements are kept
FILE = "costs.json"


def warm_up(engine: PairEngine) -> None:
    """Warm a pair up; its controllers begin with what that measured, beside what earlier starts did."""
    if not isinstance(engine.target, CausalLM) or engine.encodes:
        ids = [0] * 8
        engine.open(ids).score([ids], Draft.empty(1))
        return
    engine.measured = _remembered(_key(engine), _measured(engine))


def _measured(engine: PairEngine) -> Measured:
    settings = Settings()
    drafter = engine.drafters.make(engine.loaded.drafter_kind, settings.changed(gamma="auto"))
    length = max(1, min(PROMPT, engine.context - WIDTHS[-1] - 1))
    prompt: list[int] = random_tokens(engine.target.vocab_size, length, torch.device("cpu"))[0][0].tolist()
    session = engine.open(prompt, hidden=drafter.traits.needs_hidden)
    plain, v = _passes(session, prompt)
    return Measured(plain, v, _c(engine, drafter, prompt, settings, Costs(None, v, plain)))


def _passes(session: Session, prompt: list[int]) -> tuple[float, dict[int, float]]:
    """Seconds of a one-token pass and v(n) behind the prompt; the least of three times where passes are quick."""
    seconds: dict[int, float] = {}

    def run(width: int) -> float:
        watch = Stopwatch(session.device)
        session.score([prompt], Draft(torch.tensor([prompt[:1] * (width - 1)], dtype=torch.long)))
        return watch.lap()

    session.score([prompt], Draft.empty(1))  # reads the prompt
    run(1)
    quick = run(1) <= QUICK
    begun = time.monotonic()
    for width in [*WIDTHS] * 3 if quick else FEW_WIDTHS:
        if time.monotonic() - begun > SECONDS and len(seconds) > 1:
            break
        seconds[width] = min(run(width), seconds.get(width, float("inf")))
    plain = seconds[1]
    return plain, {width: max(1.0, time / plain) for width, time in seconds.items() if width > 1}


def _c(engine: PairEngine, drafter: Drafter, prompt: list[int], settings: Settings, costs: Costs) -> float | None:
    """c of the drafter by rounds of the real loop; None where it drafts nothing."""
    whole = drafter.traits.most
    if not drafter.traits.names or whole == 0:
        return None
    limits = Limits(ROUNDS * (DRAFTED + 1), frozenset(), engine.context)
    pace = FixedPace(DRAFTED if whole is None else whole)
    events = generate(engine.target, [prompt], drafter, make_sampler(settings), limits, pace=pace)
    watcher = Controller(Acceptance(), costs, tree=drafter.traits.tree)
    for step in islice((event for event in events if isinstance(event, Step)), 1, ROUNDS + 1):
        watcher.observe([step])
    return costs.c if costs.drafting_known else None


def _key(engine: PairEngine) -> str:
    """What measurements depend on: the machine, the models and their numbers, the drafter, this version."""
    loaded = engine.loaded
    target = loaded.target
    drafter = loaded.draft_head or ", ".join(model.name for model in loaded.drafting_models)
    models = f"{target.name} {target.precision} {target.bytes} on {target.device}, {loaded.drafter_kind} {drafter}"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {models}, {version()}"


def _remembered(key: str, measured: Measured) -> Measured:
    """The least times of the latest starts, this one added to them."""
    file = cache_folder() / FILE
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(file.read_text()))
    starts = [
        one
        for one in _read(known.get(key))
        if (one.c is None) == (measured.c is None) and one.v.keys() == measured.v.keys()
    ]
    starts = [*starts, measured][-REMEMBERED:]
    kept = [{"plain": one.plain, "v": {str(n): value for n, value in one.v.items()}, "c": one.c} for one in starts]
    with suppress(OSError, UserError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {**known, key: kept})
    # Other programs only make a pass longer, so the least time of each is nearest to the truth.
    plain = min(one.plain for one in starts)
    v = {n: max(1.0, min(one.v[n] * one.plain for one in starts) / plain) for n in measured.v}
    drafting = [one.c * one.plain for one in starts if one.c is not None]
    return Measured(plain, v, min(drafting) / plain if drafting else None)


def _read(entries: Any) -> Iterable[Measured]:
    """The measurements of an entry of the file; what is damaged is left out."""
    for entry in entries if isinstance(entries, list) else ():
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            c, v = entry["c"], {int(n): float(value) for n, value in entry["v"].items()}
            one = Measured(float(entry["plain"]), v, None if c is None else float(c))
            if one.plain > 0 and all(value >= 1 for value in v.values()) and (one.c or 0.0) >= 0:
                yield one
