"""Warm up a loaded pair: run its passes and drafter once, measure their costs here, and remember them.

The first calls of a process take many times as long as later ones. They are made here, outside any answer: passes of 1
to 16 tokens and a few rounds with the pair's drafter. Their costs seed `gamma auto`, so that the first round of the
first answer drafts as many tokens as pay. The measurements of earlier starts on this machine are kept in the cache
folder, in case this one was disturbed; a folder that cannot be written harms nothing. Knows no text: the tokens are
random.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from itertools import islice

import torch
from pydantic import TypeAdapter

from app.lanes.lane import PairEngine, make_sampler
from app.lanes.pass_times import Measured, random_tokens
from app.settings.table import Settings
from sampling.events import Step
from sampling.gamma.acceptance import Acceptance
from sampling.gamma.controller import Controller
from sampling.gamma.costs import Costs
from sampling.loop import generate
from sampling.types import Draft, Drafter, FixedPace, Limits, Session
from utils.errors import UserError
from utils.files import write_bytes
from utils.loading.cache import cache_folder
from utils.machine import cpu_name, version
from utils.processes import agreed
from utils.timing import Stopwatch

SECONDS = 1.0  # that passes may take in all; a large target is measured at fewer widths
QUICK = 0.02  # seconds of a one-token pass up to which every width is measured, three times
WIDTHS, FEW_WIDTHS = range(1, 17), (1, 2, 4, 8, 16)
PROMPT, ROUNDS, DRAFTED = 64, 8, 4  # tokens of the prompt; rounds with the drafter, and tokens drafted in each
REMEMBERED = 5  # starts whose measurements are kept
FILE = "costs.json"
_FILE = TypeAdapter(dict[str, list[Measured]])  # by machine and pair, the latest starts


def warm_up(engine: PairEngine) -> None:
    """Warm a pair up; its controllers begin with these measurements and those of earlier starts."""
    if engine.server is not None:  # it runs elsewhere
        return
    if engine.encodes:  # some tokens of the lane spec; nothing is measured
        deque(engine.lane("spec", Settings(gamma=2, max_new_tokens=3)).run([0] * 8), maxlen=0)
        engine.forget()
    else:
        engine.measured = _remembered(_key(engine), _measured(engine))


def _measured(engine: PairEngine) -> Measured:
    settings = Settings()
    drafter = engine.drafters.make(engine.loaded.drafts_by, settings.changed(gamma="auto"))
    length = max(1, min(PROMPT, engine.context - WIDTHS[-1] - 1))
    prompt: list[int] = random_tokens(engine.target.vocab_size, length, torch.device("cpu"))[0][0].tolist()
    plain = Measured(_passes(engine.open(prompt, hidden=drafter.traits.needs_hidden), prompt), None)
    c = _c(engine, drafter, prompt, settings, plain.costs(with_drafter=False))
    return plain if c is None else Measured(plain.passes, c * plain.plain)


def _passes(session: Session, prompt: list[int]) -> dict[int, float]:
    """Return the seconds of passes over n tokens after the prompt, by n: the least of three times, within SECONDS."""
    seconds: dict[int, float] = {}

    def run(width: int) -> float:
        watch = Stopwatch(session.device)
        session.score([prompt], Draft(torch.tensor([prompt[:1] * (width - 1)], dtype=torch.long)))
        return watch.lap()

    session.score([prompt], Draft.empty(1))  # reads the prompt
    run(1)
    quick = agreed(run(1) <= QUICK)  # processes that share the target run the same passes
    begun = time.monotonic()
    for width in [*(WIDTHS if quick else FEW_WIDTHS)] * 3:
        if agreed(time.monotonic() - begun > SECONDS) and len(seconds) > 1:
            break
        seconds[width] = min(run(width), seconds.get(width, float("inf")))
    return seconds


def _c(engine: PairEngine, drafter: Drafter, prompt: list[int], settings: Settings, costs: Costs) -> float | None:
    """Return c of the drafter by rounds of the real loop; None if it drafts nothing."""
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
    """Return the key of measurements: the machine, the models and their numbers, the drafter, this version."""
    loaded = engine.loaded
    target = loaded.target
    drafter = loaded.draft_head or ", ".join(model.name for model in loaded.drafting_models)
    models = f"{target.name} {target.precision} {target.bytes} on {target.device}, {loaded.drafts_by} {drafter}"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {models}, {version()}"


def _remembered(key: str, measured: Measured) -> Measured:
    """Return this start's costs beside those of the latest ones, after adding this one."""
    file = cache_folder() / FILE
    known: dict[str, list[Measured]] = {}
    with suppress(OSError, ValueError):  # a damaged file counts as none
        known = _FILE.validate_json(file.read_bytes())
    earlier = known.get(key, [])
    with suppress(OSError, UserError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, _FILE.dump_json({**known, key: [*earlier, measured][-REMEMBERED:]}))
    return measured.beside(earlier)
