"""What the figures of an answer are read with, and what they say about its models: calls, reviews, who proposed what,
the standardised walltime improvement. Knows lanes and pairs by their parts, not how they decode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sampling.stats.summary import TARGET, Stats
from sampling.stats.swi import MEASURED, Model, every_swi
from utils.catalogue.specs import HEAD_KINDS
from utils.errors import UserError
from utils.remote.server import is_server

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine


LOOKED_UP = ("match", "suffix")  # sources that copy from earlier answers
SEEN = 0.5  # share of an answer's tokens that earlier answers have, above which it is called seen before

Swi = Mapping[str, float | None]

BY = {
    MEASURED: "time",
    "model_parameters": "parameters",
    "previous_work": "previous work",
    "published": "published sizes",
}
"""What a call's cost is taken from, in words, in the order of the screen."""


@dataclass(frozen=True)
class Terms:
    """What a lane's figures cannot tell by themselves.

    `drafts`: it has a drafter. `gamma`: its number, "auto", or None where the drafter ignores gamma (or there is none).
    `models`: what the calls' names stand for. `sources`: the drafter's names. `precision` and `invariant`: the
    target's, as :func:`app.lanes.comparison.promise` takes them. `seen`: earlier answers of the session have this text.
    """

    drafts: bool = False
    gamma: int | str | None = None
    models: Mapping[str, Model] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    precision: str = "float32"
    invariant: bool = False
    seen: bool = False


def terms_of(lane: Lane, engine: PairEngine) -> Terms:
    """The terms of one of the engine's lanes as it is set now."""
    if is_server(lane.name):
        return Terms()
    precision, invariant = engine.loaded.target.precision, engine.invariant
    if not lane.drafts:
        return Terms(models=models_of(engine, (lane.lm.name,)), precision=precision, invariant=invariant)
    gamma = None if ignores_gamma(lane) else lane.settings.gamma
    names = tuple(lane.source_names)
    models = models_of(engine, (lane.lm.name, *names))
    return Terms(True, "auto" if lane.pace is not None else gamma, models, names, precision, invariant)


def ignores_gamma(lane: Lane) -> bool:
    """Whether the lane drafts by a plan of its own (a cascade, a chain), whatever number gamma is."""
    return lane.drafts and not lane.takes_gamma


def models_of(engine: PairEngine, names: Sequence[str]) -> dict[str, Model]:
    """What these names of calls stand for; a drafter without a model is left out."""
    loaded = engine.loaded
    known: dict[str, Any] = {TARGET: loaded.target, "drafter": loaded.drafter, **loaded.cascade_models}
    found: dict[str, Model] = {}
    for name in names:
        if (model := known.get(name)) is not None:
            found[name] = Model(model.name, model.parameters)
        elif name == "mtp":
            found[name] = Model(name, None)
        elif name in HEAD_KINDS:
            found[name] = Model(name, None)
            with suppress(UserError):
                found[name] = Model(name, stored_parameters(engine.drafters.folder(name)))
    return found


def stored_parameters(folder: Path) -> int | None:
    """How many numbers the draft head's own tensors hold, by the head of its file; None if that cannot be read.

    What it shares with its target is not stored, and not counted.
    """
    from safetensors import SafetensorError, safe_open

    from sampling.drafters.draft_heads.checkpoint import IDS, WEIGHTS

    try:
        with safe_open(folder / WEIGHTS, "np") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys() if name != IDS]  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return sum(map(math.prod, shapes))


def swi_of(stats: Stats, terms: Terms) -> dict[str, float | None] | None:
    """The SWI by every table, None where it does not apply; None as a whole for a lane that does not draft."""
    if not terms.drafts:
        return None
    return {name: None if value is None else round(value, 4) for name, value in every_swi(stats, terms.models).items()}


def applying(swi: Swi | None) -> list[str]:
    """The tables whose SWI is worth a place: `published` only where it differs from `model_parameters`."""
    told = {name: value for name, value in (swi or {}).items() if value is not None}
    if told.get("published") == told.get("model_parameters"):
        told.pop("published", None)
    return [name for name in BY if name in told]


def cost_lines(stats: Stats, terms: Terms) -> list[str]:
    """What an answer's models did and cost, a line each; empty for a lane whose drafter calls no model and is one."""
    modelled = any(model != TARGET for model in stats.calls)
    several = sum(drafted > 0 for drafted, _ in stats.sources) > 1
    if not terms.drafts or not (modelled or several or stats.reviews):
        return []
    each = [f"{model} {n} of {stats.call_ms.get(model, 0.0) / n:.1f} ms" for model, n in stats.calls.items() if n]
    lines = [f"calls: {', '.join(each)}"] if modelled else []
    lines += [f"{model} passed {kept} of {seen} drafts" for model, (kept, seen) in stats.reviews.items()]
    lines += [f"accepted of what each proposed: {proposed(stats, terms.sources)}"] if several else []
    told = swi_of(stats, terms) or {}
    shown = [f"{told[name]:.2f}x by {BY[name]}" for name in applying(told)] if modelled else []
    return lines + ([f"walltime improvement (SWI) {', '.join(shown)}"] if shown else [])


def seen_before(stats: Stats, terms: Terms) -> bool:
    """Whether earlier answers have the text and most accepted drafts were looked up: the figures say how well it is
    remembered, not how well it is guessed."""
    looked_up = sum(kept for name, (_, kept) in zip(terms.sources, stats.sources, strict=False) if name in LOOKED_UP)
    return terms.seen and 2 * looked_up > stats.draft_n_accepted


def proposed(stats: Stats, names: Sequence[str]) -> str:
    """Accepted / drafted by source: "glide 12/20, maxgram 30/60"."""
    return ", ".join(
        f"{names[index] if index < len(names) else index} {accepted}/{drafted}"
        for index, (drafted, accepted) in enumerate(stats.sources)
        if drafted
    )
