"""A race on the screen: every lane's events become text and figures, which are drawn between rounds and printed at the
end; or the race is shown in steps, with a stop after drafting, the target's pass, accepting and committing.

Drawing happens while no lane computes, and a race that is shown in steps has run before, so neither is on a lane's
clock. The final print stays in the scrollback. The caller decides whether there is a terminal.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from app.lanes.answers import Answer, comparisons_of, may_differ, other_processors, plain_answer, rule_of, rule_text
from app.lanes.costs import LaneRecord, kept, record_of, seen_before
from app.lanes.race import timed
from app.screen.inspection import SaidToken, TokenReader
from app.screen.palette import Look
from app.screen.panes import PaneData, Round, State, note, stats_lines
from app.screen.rows import Lines, Row, chunk, flow, plural
from app.screen.spans import BeamReader, Span, Spanner, answer_text, committed_text, differing, span_parts, thoughts
from app.screen.terminal import InPlace, await_key
from app.screen.trace import ACCEPTED, DRAFTED, SCORED, Trace, read
from app.screen.view import Frame, Surface, look_of
from app.settings.table import Settings
from sampling.events import ENOUGH, Event, Finished, Prefill, Reason, Step, to_json
from sampling.stats.metrics import Meter
from utils.catalogue.templates import Thinking
from utils.errors import UsageError, UserError
from utils.growing_text import Window
from utils.objects import Json
from utils.remote.server import ServerMessage

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine

Draw = Callable[..., None]  # draws the lanes as they stand, with rows below them if some are given
FRAMES_A_SECOND = 12
DRAWING = 0.03  # largest share of time that drawing takes, working out the figures and texts included


_REST = 4  # latest rounds without drafts after which `gamma auto` counts as having stopped drafting


class Track:
    """One lane's answer so far: events, figures and coloured text.

    `before`: ids with which a continued answer begins and which are on the screen already; the last of them is shown
    again if the user `forced` it. `thinking`: the marks around the model's thinking. `running`: the lane itself, None
    for an answer from a file.
    """

    def __init__(
        self,
        lane: LaneRecord,
        decode: Callable[[list[int]], str],
        prompt_n: int,
        before: Sequence[int] = (),
        thinking: Thinking | None = None,
        forced: bool = False,
        running: Lane | None = None,
    ) -> None:
        self.lane, self.before, self.thinking, self.running = lane, tuple(before), thinking, running
        self._forced: tuple[Span, ...] = ()
        if forced:
            with suppress(ValueError):  # an older log does not have the text
                self._forced = (Span(decode([*before])[len(decode([*before[:-1]])) :], "forced"),)
        self.events: list[Event] = []
        self._meter = Meter(prompt_n=prompt_n)
        self._spanner = (
            Spanner(decode, lane.terms.drafts, context=before) if lane.beams is None else BeamReader(decode, before)
        )
        self._taken = 0  # number of events that are in the figures and the text
        self._rounds: list[Round] = []
        self.decode = decode
        self.waiting = ""  # shown until the first event: what the lane waits for
        self._state: State = "waiting"
        self._progress = ""

    def feed(self, event: Event) -> None:
        """Add an event. Figures and text are updated when they are read, since many events at once cost less."""
        self.events.append(event)
        match event:
            case Prefill(done=done, total=total):
                self._state, self._progress = "prefill", f"reading {done:,} / {total:,} tokens"
            case Finished(reason=reason):
                self._state = "stopped" if reason == "interrupted" else "done"
            case _:
                self._state = "running"

    def _catch_up(self) -> None:
        """Bring figures and text up to date with the events."""
        new, self._taken = self.events[self._taken :], len(self.events)
        for event in new:
            if isinstance(event, Step) and self._meter.ids:
                self._rounds.append(Round(event.seconds, len(event.emitted), len(event.drafted), len(event.path)))
            self._meter.add(event)
            self._spanner.feed(event)

    @property
    def meter(self) -> Meter:
        """The figures so far."""
        self._catch_up()
        return self._meter

    @property
    def spanner(self) -> Spanner | BeamReader:
        """The text so far."""
        self._catch_up()
        return self._spanner

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def reason(self) -> Reason:
        """Why the lane ended; "interrupted" if it has not."""
        return self._finished.reason if self._finished else "interrupted"

    @property
    def _finished(self) -> Finished | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished) else None

    def pane(self) -> PaneData:
        """Return the lane as it stands, for the screen; `gamma`: the mean number of drafts a round, under `auto`."""
        auto, stats = self.lane.terms.gamma == "auto", self.meter.stats
        return PaneData(
            self.lane,
            (*self._forced, *self.spanner.spans),
            stats,
            self._state,
            self._progress or self.waiting,
            gamma=stats.draft_n / stats.target_passes if auto and stats.target_passes else None,
            resting=self._resting(),
            seen=seen_before(stats, self.lane.terms),
            rounds=self._rounds,
        )

    def pane_as(self, settings: Settings, plain: Answer | None = None) -> PaneData:
        """Return :meth:`pane` with the thinking as set, and in a lossy lane the differences from `plain` marked."""
        spans: Sequence[Span] = self.spanner.spans
        if plain is not None and not plain.interrupted and rule_of(self.lane) == "typical":
            spans = differing(spans, plain.text)
        if self.thinking is not None:
            stretches = thoughts(self.text, self.thinking, settings.thinking, self.decode(list(self.before)))
            spans = span_parts(spans, stretches, settings.thinking)
        return replace(self.pane(), spans=(*self._forced, *spans))

    def _resting(self) -> tuple[float, float | None] | None:
        """Return c and alpha of this answer if `gamma auto` stopped drafting in it; no alpha if it never drafted."""
        rounds, stats = self.steps[1:], self.meter.stats
        latest = rounds[-_REST:]
        stopped = not any(step.gamma for step in latest) or any(step.calls[:-1] for step in latest)
        if (
            self.lane.terms.gamma != "auto"
            or len(rounds) < _REST
            or any(step.drafted for step in latest)
            or not stopped
        ):
            return None
        plain = statistics.median(step.verify_s for step in rounds if not step.drafted)
        drafts = stats.draft_n or sum(step.gamma > 0 for step in rounds)
        return (stats.draft_ms / 1000 / drafts / plain, stats.alpha) if plain and drafts else None

    def answer(self) -> Answer:
        """Return the lane's answer with its figures."""
        ids, differs = tuple(self.meter.ids), may_differ(self.lane)
        text = self.decode(list(ids)) if self._finished else self.text
        return Answer(self.lane.name, ids, text, self.meter.stats, differs, self.lane.terms)

    @property
    def text(self) -> str:
        """The answer so far, as it stands on the screen."""
        return committed_text(self.spanner.spans)

    def record(self) -> Json:
        """Return the lane with its events, for /save."""
        return {
            **self.answer().to_json(),
            "lane": self.lane.to_json(),
            "events": [to_json(kept(event, self.lane.settings.log_top)) for event in self.events],
        }


def tracks_of(
    lanes: Sequence[Lane],
    engine: PairEngine,
    prompt: Sequence[int],
    decode: Callable[[list[int]], str],
    before: Sequence[int] = (),
    thinking: Thinking | None = None,
    forced: bool = False,
) -> list[Track]:
    """Return the tracks of an engine's lanes; see :class:`Track`."""
    return [
        Track(record_of(lane, engine), decode, len(prompt), before, thinking, forced, running=lane) for lane in lanes
    ]


def sampled(
    engine: PairEngine,
    settings: Settings,
    prompt: list[int],
    count: int,
    decode: Callable[[list[int]], str],
    interrupt: Callable[[], bool],
    messages: Sequence[ServerMessage] = (),
) -> list[Track]:
    """Return `count` answers that the target draws as one batch, each as a finished lane with its alternatives; where
    a server answers instead, its answers to `messages`, one after the other. UserError at temperature 0.
    """
    if not settings.temperature:
        raise UsageError("at temperature 0 all answers are the same (--temperature 0.8, /temperature 0.8)")
    name = engine.sampled_lane(settings)
    lane = engine.lane(name, settings)
    if lane.served:
        lanes = [engine.lane(name, settings.changed(seed=settings.seed + number)) for number in range(count)]
        tracks = tracks_of(lanes, engine, prompt, decode)
        for lane, track in zip(lanes, tracks, strict=True):
            lane.top_logprobs = 0
            for event in lane.run(prompt, interrupt=interrupt, messages=messages):
                track.feed(event)
        return tracks
    tracks = [track for _ in range(count) for track in tracks_of([lane], engine, prompt, decode)]
    for event in lane.run_rows([prompt] * count, interrupt=interrupt, alternatives=ENOUGH):
        for track in tracks if isinstance(event, Prefill) else [tracks[event.row]]:
            track.feed(event if isinstance(event, Prefill) else replace(event, row=0))
    return tracks


def frame(
    tracks: Sequence[Track],
    look: Look,
    settings: Settings,
    answers: Sequence[Answer] = (),
    notes: bool = True,
    can_continue: bool = True,
) -> Frame:
    """Return the lanes as they stand; the `answers` of all lanes are compared, and differences of a lossy one shown."""
    return Frame(
        [track.pane_as(settings, plain_answer(answers)) for track in tracks],
        look,
        layout=settings.view,  # type: ignore[arg-type]
        comparisons=comparisons_of(answers),
        show_discarded=settings.debug,
        notes=notes,
        can_continue=can_continue,
    )


def play(
    race: Iterable[tuple[int, Event]],
    tracks: Sequence[Track],
    draw: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run a race to its end, drawing between rounds at most 12 times a second, and less often where drawing takes long:
    frames are dropped, never tokens."""
    began = clock()
    draw()
    last = clock()
    for index, event in race:
        tracks[index].feed(event)
        if (now := clock()) >= last + max(1 / FRAMES_A_SECOND, (last - began) / DRAWING):
            began = now
            draw()
            last = clock()


@contextmanager
def streaming(
    tracks: Sequence[Track], console: Console, settings: Settings, can_continue: bool = True
) -> Iterator[Draw]:
    """Yield a function that draws the lanes at the bottom of a terminal; afterwards the drawing is erased."""
    with InPlace(console) as surface:

        def draw(below: Sequence[Row] = ()) -> None:
            look = look_of(console, settings)
            room = look.sized(height=max(2, (look.height or 2) - len(below)))
            surface.draw(Lines([*frame(tracks, room, settings, can_continue=can_continue).rows(), *below], look))

        yield draw


def undrawn(below: Sequence[Row] = ()) -> None:
    """Draw nothing: takes the place of the function of :func:`streaming` where there is no terminal."""


def show(tracks: Sequence[Track], text: str, surface: Surface) -> None:
    """Print a finished answer: its text alone, then panes, figures, comparison and legend."""
    settings, last = surface.settings, tracks[-1].pane()
    if settings.quiet:
        surface.out.print(text, soft_wrap=True)
        surface.say(stats_lines([last], surface.look.sized()))
        if cut := note(last, can_continue=surface.can_continue):
            surface.say(cut)
        return
    if not surface.touring:
        surface.say(answer_text(text, settings, live=surface.live, marks=tracks[-1].thinking), "")
    surface.say(panes(tracks, surface.out, settings, notes=not surface.touring, can_continue=surface.can_continue))
    if settings.view == "trace" and (track := explained_track(tracks)).lane.beams is None:
        surface.say(rounds_of(track, surface.look.sized()))


def panes(
    tracks: Sequence[Track], console: Console, settings: Settings, notes: bool = True, can_continue: bool = True
) -> RenderableType:
    """Return all lanes in full length, with comparison and legend."""
    look = look_of(console, settings).sized(height=None)
    return frame(tracks, look, settings, [track.answer() for track in tracks], notes, can_continue)


def explained_track(tracks: Sequence[Track]) -> Track:
    """Return the last lane that drafted or searched (the last lane, if none did)."""
    return next((track for track in reversed(tracks) if track.pane().drafts_or_searches), tracks[-1])


def token_reader(track: Track) -> TokenReader:
    """Return a reader of the lane's rounds."""
    return TokenReader(track.decode, track.lane.terms.sources, rule_of(track.lane), track.before)


def tokens_of(track: Track) -> list[SaidToken]:
    """Return the tokens that the lane's rounds emitted."""
    return list(chain.from_iterable(map(token_reader(track).read, track.steps)))


class LaneViews:
    """Works out all that the views of a lane show, so that an event that cannot be shown raises here."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self._window, self._tokens = Window(track.decode), token_reader(track)

    def feed(self, event: Event) -> None:
        """Add an event to the track."""
        self.track.feed(event)
        self.track.pane()
        if isinstance(event, Step):
            read(event, self._window)
            if event.positions:
                self._tokens.read(event)


def rounds_of(track: Track, look: Look, *, upcoming: Sequence[Step] = ()) -> Trace:
    """Return the rounds of a lane, and `upcoming` ones, which are not in it yet. UserError for a beam search."""
    lane, steps = track.lane, [*track.steps, *upcoming]
    if lane.beams is not None:
        raise UserError("a beam search has no rounds")
    return Trace(
        steps,
        track.decode,
        look,
        lane.terms.sources,
        rule=rule_of(lane),
        words=rule_text(lane),
        exact=not other_processors(lane.settings, "penalty_window"),
    )


KEYS = "any key: next phase  r: next round  q: run on"
_FRAME = 10  # rows that steps leave to panes and figures


def phases(step: Step) -> list[str]:
    """Return the phases of a round in words: draft, pass, accept, commit; without a draft the pass alone."""
    one_pass = (
        f"one pass of the target over {plural(len(step.drafted) + 1, 'position')} in {step.verify_s * 1000:.1f} ms"
    )
    if not step.drafted:
        return [one_pass if step.calls else f"a piece from the server after {step.verify_s * 1000:.1f} ms"]
    calls = ", ".join(f"{call.model} {call.passes}" for call in step.calls[:-1])
    ran = f", passes: {calls}" if calls else ""
    own = "no token from the target" if step.token is None else "then one token of the target's own"
    return [
        f"1 draft: {plural(len(step.drafted), 'token')} in {step.draft_s * 1000:.1f} ms{ran}",
        f"2 {one_pass}",
        f"3 accept: {len(step.path)} of {len(step.drafted)}, {own}",
        f"4 commit: {plural(len(step.emitted), 'token')} joined the text",
    ]


Pause = tuple[float, str]  # seconds at a phase, and the key that ended it


def stepped(
    race: Iterable[tuple[int, Event]],
    tracks: Sequence[Track],
    surface: Surface,
    draw: Draw,
    *,
    taken: list[Pause],
    known: Sequence[Pause] = (),
) -> Iterator[tuple[int, Event]]:
    """Yield the events of a race, which runs to its end first; a round's event follows when its phases have been shown.

    Each pause is added to `taken`. The first pauses last as long as the `known` ones of a recording and end with their
    keys, unless the user presses a key sooner.
    """

    def key() -> bytes:
        seconds, pressed = known[len(taken)] if len(taken) < len(known) else (math.inf, "")
        begun = time.monotonic()
        typed = await_key(surface.stop, seconds)
        typed = typed if typed or surface.stop() else pressed.encode("latin-1")
        taken.append((round(time.monotonic() - begun, 2), typed.decode("latin-1")))
        return typed

    return in_steps(race, tracks, draw, lambda: surface.look, key)


def in_steps(
    race: Iterable[tuple[int, Event]],
    tracks: Sequence[Track],
    draw: Draw,
    look: Callable[[], Look],
    key: Callable[[], bytes],
) -> Iterator[tuple[int, Event]]:
    """Yield the events of a race, stopping at each phase in the rounds of the last lane that drafts.

    `draw` shows the lanes as they stand, with rows below them, within `look()`. `key` waits for a key and returns it;
    b"" or q ends the steps.
    """
    drafting = max((index for index, track in enumerate(tracks) if track.lane.terms.drafts), default=None)
    stepping = drafting is not None

    def stop(text: str, rows: Sequence[Row] = ()) -> bool:
        """Stop with these words and rows; return False if a key skips the rest of the round."""
        nonlocal stepping
        rows = [*flow([chunk(text, "strong")], look()), *rows]
        room = max(1, (look().height or len(rows) + _FRAME + 1) - _FRAME)
        draw([*rows[: room - 1], *flow([chunk(KEYS, "faint")], look())[:1]])
        pressed = key()
        stepping = pressed not in (b"", b"q")
        return stepping and pressed != b"r"

    for _, lane, event in timed(list(race)):
        words = phases(event) if stepping and lane == drafting and isinstance(event, Step) and event.drafted else []
        seen = bool(words) and all(
            stop(text, rounds_of(tracks[lane], look().sized(), upcoming=[event]).so_far(phase))  # type: ignore[list-item]
            for text, phase in zip(words, (DRAFTED, SCORED, ACCEPTED), strict=False)
        )
        yield lane, event
        if seen:
            stop(words[-1])
