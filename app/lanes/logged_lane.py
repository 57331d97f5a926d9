"""A lane as files keep it: the parts that the screen, the figures and /trace use, without those that run it.

A running lane is written as a LoggedLane (:func:`known`); read again, it stands in for the lane, and its events are
read by :func:`event_of`. No models, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import AliasChoices, Field, TypeAdapter

from app.lanes.costs import Terms
from app.settings.table import SETTING_FIELDS, Settings
from sampling.beam.plan import BeamPlan
from sampling.events import KINDS, Event, Finished, Prefill, Step
from utils.errors import UserError

_EVENTS: dict[Any, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in KINDS.items()}
_MOST = 1_000_000  # drafts of a round: the figures have a place for each


@dataclass(frozen=True)
class LoggedLane:
    """The parts of app/lanes/lane.py's Lane by the same names. `auto`: gamma was chosen from round to round.

    `settings` are those of its answer, which a file has elsewhere.
    """

    name: str
    drafts: bool = False
    source_names: tuple[str, ...] = ()
    drawn_drafts: Annotated[bool, Field(validation_alias=AliasChoices("drawn_drafts", "law_drafts"))] = False
    auto: bool = False
    beams: BeamPlan | None = None
    terms: Terms = field(default_factory=Terms)
    settings: Settings = field(default_factory=Settings)

    @property
    def pace(self) -> object | None:
        """Not None if gamma was chosen from round to round."""
        return self.auto or None

    def to_json(self) -> dict[str, Any]:
        """Return everything but the settings, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}


def known(lane: Any, terms: Terms) -> LoggedLane:
    """Return the parts of a lane that a file keeps."""
    same = {
        name: getattr(lane, name) for name in ("name", "drafts", "source_names", "drawn_drafts", "beams", "settings")
    }
    return LoggedLane(**same, auto=lane.pace is not None, terms=terms)


def kept(event: Event, log_top: int) -> Event:
    """Return an event as files keep it: without the alternatives of its positions unless `log_top` is set."""
    return event if log_top or not isinstance(event, Step) else replace(event, positions=())


def settings_of(row: Mapping[str, Any]) -> Settings:
    """Return the settings of an answer in a file; unknown names are ignored."""
    return Settings(**{name: value for name, value in row.items() if name in SETTING_FIELDS})


def event_of(row: Mapping[str, Any]) -> Event:
    """Return the event that `to_json` wrote; UserError or ValueError for an impossible one."""
    kind = _EVENTS.get(row.get("event"))
    if kind is None:
        raise UserError(f"no event is called {row.get('event')!r:.40}")
    event: Event = kind.validate_python(row)
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
