"""The facts of a lane that are needed to interpret its figures (:class:`Terms`), and the figures of its models: calls,
reviews, drafts by source, the standardised walltime improvement (SWI).

A :class:`LaneRecord` is a lane without the parts that run it. It is made when a lane begins to run; files have the same
record, and :func:`event_of` reads their events. Knows lanes and pairs by their parts, not how they decode. Imports no
torch, unless it counts the parameters of a draft head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AliasChoices, Field, JsonValue, TypeAdapter

from app.settings.table import SETTING_FIELDS, Settings
from sampling.events import KINDS, Event, Finished, Prefill, Step
from sampling.stats.summary import TARGET, Stats, rounded
from sampling.stats.swi import MEASURED, SwiModel, every_swi
from utils.catalogue.heads import HEAD_KINDS
from utils.errors import UserError
from utils.objects import Json
from utils.remote.server import address_of, is_server, is_url

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine


LOOKED_UP = ("match", "suffix")  # sources that copy: from the conversation, and from earlier answers
SEEN = 0.5  # share of an answer's tokens in earlier answers above which it counts as seen before

BY = {  # the tables that say what a call costs, and their names on the screen, in its order
    MEASURED: "time",
    "model_parameters": "parameters",
    "previous_work": "previous work",
    "published": "published sizes",
}


@dataclass(frozen=True)
class Terms:
    """Facts of a lane that are needed to interpret its figures.

    `drafts`: it has a drafter. `gamma`: its number, "auto", or None if the drafter ignores gamma (or there is none).
    `models`: the models by the names in `Stats.calls`. `sources`: the names of the drafter's sources. `precision` and
    `invariant`: the target's, as :func:`app.lanes.answers.promise` takes them. `seen`: earlier answers of the session
    have this text.
    """

    drafts: bool = False
    gamma: int | str | None = None
    models: Mapping[str, SwiModel] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    precision: str = "float32"
    invariant: bool = False
    seen: bool = False


def terms_of(lane: Lane, engine: PairEngine) -> Terms:
    """Return the terms of one of the engine's lanes with its present settings."""
    if lane.served:
        return Terms()
    names = tuple(lane.source_names) if lane.drafts else ()
    gamma = lane.settings.gamma if lane.takes_gamma else None
    return Terms(
        lane.drafts,
        "auto" if lane.pace is not None else gamma,
        models_of(engine, (lane.lm.name, *names)),
        names,
        engine.loaded.target.precision,
        engine.invariant,
    )


def models_of(engine: PairEngine, names: Sequence[str]) -> dict[str, SwiModel]:
    """Return the models by these names in `Stats.calls`; drafters without a model are left out."""
    loaded = engine.loaded
    known = {TARGET: loaded.target, "drafter": loaded.drafter, **loaded.cascade_models}
    models: dict[str, SwiModel] = {}
    for name in names:
        if (model := known.get(name)) is not None:
            models[name] = SwiModel(model.name, model.parameters)
        elif name in (*HEAD_KINDS, "mtp"):
            models[name] = SwiModel(name, None)
            if name in HEAD_KINDS:  # a layer that ships with the target has no folder
                with suppress(UserError):
                    models[name] = SwiModel(name, stored_parameters(engine.drafters.folder(name)))
    return models


def stored_parameters(folder: Path) -> int | None:
    """Return the number of parameters in the draft head's file, from its header; None if that cannot be read.

    Tensors shared with the target are not in the file, so they are not counted.
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
    """Return the SWI by every table, None for one that does not apply. A lane that does not draft has no SWI: None."""
    return {name: rounded(value) for name, value in every_swi(stats, terms.models).items()} if terms.drafts else None


def applying(swi: Mapping[str, float | None] | None) -> list[str]:
    """Return the tables with an SWI to show: `published` only where it differs from `model_parameters`."""
    known = {name: value for name, value in (swi or {}).items() if value is not None}
    same = known.get("published") == known.get("model_parameters")
    return [name for name in BY if name in known and not (same and name == "published")]


def cost_lines(stats: Stats, terms: Terms) -> list[str]:
    """Return the calls and costs of an answer's models, a line each; none for one drafter that calls no model."""
    modelled = any(model != TARGET for model in stats.calls)
    several = sum(drafted > 0 for drafted, _ in stats.sources) > 1
    if not terms.drafts or not (modelled or several or stats.reviews):
        return []
    calls = [f"{model} {n} of {stats.call_ms.get(model, 0.0) / n:.1f} ms" for model, n in stats.calls.items() if n]
    swi = swi_of(stats, terms) or {}
    shown = [f"{swi[name]:.2f}x by {BY[name]}" for name in applying(swi)] if modelled else []
    improvement = [
        f"walltime improvement (SWI) {', '.join(shown)}",
        "(SWI takes a pass over many tokens to cost as much as one over a single token)",
    ]
    return [
        *([f"calls: {', '.join(calls)}"] if modelled else []),
        *(f"{model} passed {kept} of {seen} draft{'s' * (seen != 1)}" for model, (kept, seen) in stats.reviews.items()),
        *([f"accepted of each source's drafts: {proposed(stats, terms.sources)}"] if several else []),
        *(improvement if shown else []),
    ]


def seen_before(stats: Stats, terms: Terms) -> bool:
    """Return whether earlier answers have this text and most accepted drafts were copied, not predicted: then the
    figures measure memory."""
    looked_up = sum(kept for name, (_, kept) in zip(terms.sources, stats.sources, strict=False) if name in LOOKED_UP)
    return terms.seen and 2 * looked_up > stats.draft_n_accepted


def proposed(stats: Stats, names: Sequence[str]) -> str:
    """Return accepted/drafted tokens by source: "glide 12/20, maxgram 30/60"."""
    return ", ".join(
        f"{names[index] if index < len(names) else index} {accepted}/{drafted}"
        for index, (drafted, accepted) in enumerate(stats.sources)
        if drafted
    )


_EVENTS: dict[str, TypeAdapter[Event]] = {name: TypeAdapter(kind) for name, kind in KINDS.items()}
_MOST = 1_000_000  # largest gamma in a file: the figures keep a count for each position of a draft


@dataclass(frozen=True)
class LaneRecord:
    """A lane without the parts that run it, as screens, figures and files know it.

    `drawn_drafts`: that of :class:`app.lanes.lane.Lane`. `beams`: the plan of a beam search. `settings`: those of the
    lane's answer, which a file stores with the answer.
    """

    name: str
    terms: Terms = field(default_factory=Terms)
    drawn_drafts: Annotated[bool, Field(validation_alias=AliasChoices("drawn_drafts", "law_drafts"))] = False
    beams: dict[str, JsonValue] | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def served(self) -> bool:
        """Whether a server answers, as in :class:`app.lanes.lane.Lane`; by its name, since files do not say it."""
        return is_server(self.name)

    @property
    def address(self) -> str:
        """HOST:PORT of the server that the lane is named after; "" for any other lane."""
        return address_of(self.name) if is_url(self.name) else ""

    def to_json(self) -> Json:
        """Return everything but the settings, as plain values."""
        terms = self.terms
        return {
            **{"name": self.name, "drafts": terms.drafts, "source_names": terms.sources},
            **{"drawn_drafts": self.drawn_drafts, "auto": terms.gamma == "auto", "beams": self.beams},
            "terms": asdict(terms),
        }


def record_of(lane: Lane, engine: PairEngine) -> LaneRecord:
    """Return the record of one of the engine's lanes with its present settings."""
    beams = None if lane.beams is None else asdict(lane.beams)
    return LaneRecord(lane.name, terms_of(lane, engine), lane.drawn_drafts, beams, lane.settings)


def kept(event: Event, log_top: int) -> Event:
    """Return an event as files keep it: with `log_top` alternatives at each of its positions, besides the tokens that
    were examined or emitted; without positions if `log_top` is 0."""
    if not isinstance(event, Step):
        return event
    needed = [{token} for token in event.emitted]
    for node in (*event.path, *event.rejected) if event.positions else ():
        needed[event.depths[node]].add(event.drafted[node])
    return replace(
        event,
        positions=tuple(
            each.trimmed(log_top, own) for each, own in zip(event.positions, needed, strict=False) if log_top
        ),
    )


def settings_of(row: Json) -> Settings:
    """Return the settings of an answer in a file; unknown names are ignored."""
    return Settings(**{name: value for name, value in row.items() if name in SETTING_FIELDS})


def event_of(row: Json) -> Event:
    """Return the event that `to_json` wrote; UserError or ValueError for an impossible one."""
    if (kind := _EVENTS.get(str(row.get("event")))) is None:
        raise UserError(f"no event is called {row.get('event')!r:.40}")
    event = kind.validate_python(row)
    if not all(map(math.isfinite, _spent(event))):
        raise UserError("an event took no finite time")
    if isinstance(event, Step) and event.gamma > _MOST:
        raise UserError(f"gamma {event.gamma} is more than a round can draft")
    return event


def _spent(event: Event) -> Iterator[float]:
    if isinstance(event, Finished):
        return
    yield event.seconds
    if not isinstance(event, Prefill):
        yield from (call.seconds for call in event.calls)
    for inner in event.inner if isinstance(event, Step) else ():
        yield from _spent(inner)
