"""A race on the screen: every lane's events become text and figures, drawn between rounds.

Drawing happens while no lane computes, so it is on no lane's clock. Knows no models; whether there
is a terminal at all its caller decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from app.answers import Answer
from app.beams import BeamReader
from app.costs import Terms
from app.figures import PaneData, State
from app.known_lane import known
from app.palette import Look
from app.rules import may_differ
from app.spans import Spanner
from app.terminal import InPlace, Interrupts
from app.view import Frame, Layout
from sampling.events import BeamStep, Event, Finished, Prefill, Reason, Step, to_json
from sampling.metrics import Meter

if TYPE_CHECKING:
    from app.settings import Settings

FRAMES_A_SECOND = 12
_STATES: dict[str, State] = {"interrupted": "stopped"}


def look_of(console: Console, settings: Settings) -> Look:
    """The screen as it is now, with what the settings and the terminal allow to be drawn."""
    width, height = console.size
    encoding = (console.encoding or "").lower().replace("-", "")
    color = console.color_system is not None and not console.no_color
    plain = settings.ascii or not encoding.startswith("utf")
    return Look(width=width, height=max(2, height - 1), color=color, ascii=plain, palette=settings.palette)


class Track:
    """What one lane has made so far: events, figures and coloured text.

    `before` are ids of the answer that are on the screen already (a continuation); `terms` go with its answer.
    """

    def __init__(
        self,
        lane: Any,
        decode: Callable[[list[int]], str],
        prompt_n: int,
        limit: int,
        before: Sequence[int] = (),
        terms: Terms | None = None,
    ) -> None:
        self.lane, self.limit, self.terms = lane, limit, terms or Terms()
        self.events: list[Event] = []
        self.meter = Meter(prompt_n=prompt_n)
        self.beams = BeamReader(decode, before) if getattr(lane, "beams", None) is not None else None
        self.spanner = self.beams or Spanner(decode, bool(getattr(lane, "drafts", False)), context=before)
        self.decode = decode
        self._state: State = "waiting"
        self._progress = ""
        self.expected: float | None = None  # the speed-up that the figures measured let expect

    def feed(self, event: Event) -> None:
        """Take in an event of this lane."""
        self.events.append(event)
        self.meter.add(event)
        self.spanner.feed(event)
        if isinstance(event, Prefill):
            self._state, self._progress = "prefill", f"reading {event.done:,} / {event.total:,} tokens"
        else:
            self._state = "running" if isinstance(event, Step | BeamStep) else _STATES.get(event.reason, "done")

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def beam_steps(self) -> list[BeamStep]:
        return [event for event in self.events if isinstance(event, BeamStep)]

    @property
    def reason(self) -> Reason:
        """Why the lane ended; "interrupted" if it has not."""
        last = self.events[-1] if self.events else None
        return last.reason if isinstance(last, Finished) else "interrupted"

    def pane(self) -> PaneData:
        """The lane as it stands, for the screen."""
        return PaneData(
            self.lane.name,
            self.spanner.spans,
            self.meter.stats,
            self._state,
            self._progress,
            self.limit,
            expected=self.expected,
            gamma=self._gamma(),
            names=tuple(getattr(self.lane, "source_names", ())),
            beams=() if self.beams is None else self.beams.beams,
        )

    def _gamma(self) -> int | None:
        """What `gamma auto` chose for the last round; None where gamma is fixed."""
        last = self.events[-1] if self.events and getattr(self.lane, "pace", None) is not None else None
        return last.gamma if isinstance(last, Step) else None

    def answer(self) -> Answer:
        """The lane's result with its figures."""
        ids = tuple(self.meter.ids)
        differs = may_differ(self.lane, self.lane.settings)
        ended = bool(self.events) and isinstance(self.events[-1], Finished)
        text = self.decode(list(ids)) if ended else self.text
        return Answer(self.lane.name, ids, text, self.meter.stats, differs, terms=self.terms)

    @property
    def text(self) -> str:
        """The answer so far, as it stands on the screen."""
        return "".join(span.text for span in self.spanner.spans if span.committed)

    def record(self) -> dict[str, Any]:
        """The lane with its events, for /save."""
        lane, events = known(self.lane, self.terms).to_json(), [to_json(event) for event in self.events]
        return {**self.answer().to_json(), "lane": lane, "events": events}


def frame(tracks: Sequence[Track], look: Look, layout: str, **more: Any) -> Frame:
    """The lanes as they stand."""
    kind: Layout = layout  # type: ignore[assignment]
    return Frame([track.pane() for track in tracks], look, layout=kind, **more)


def play(
    race: Iterable[tuple[int, Event]],
    tracks: Sequence[Track],
    draw: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run a race to its end, drawing between rounds at most 12 times a second."""
    draw()
    last = clock()
    for index, event in race:
        tracks[index].feed(event)
        if clock() - last >= 1 / FRAMES_A_SECOND:
            draw()
            last = clock()


def play_live(
    race: Iterable[tuple[int, Event]],
    tracks: Sequence[Track],
    console: Console,
    settings: Settings,
    interrupts: Interrupts,
) -> None:
    """The same on a terminal: the lanes stream in place, and the place is clean again afterwards."""
    with InPlace(console) as place:

        def draw() -> None:
            with interrupts.whole():
                place.draw(frame(tracks, look_of(console, settings), settings.view, show_discarded=settings.debug))

        play(race, tracks, draw)
