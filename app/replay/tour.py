"""The demo's way through its steps, and the recorded tour, which needs no models and no torch.

:func:`walk` is the same for both: a step says what to look at, is played, and waits for Enter. Knows no engines
(app/console/demo.py) and no page (app/replay/tour_page.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from app.replay.player import Player
from app.replay.session_log import LoggedAnswer, read_log
from app.replay.steps import RECORDED, SLOW, STEPS, Step
from app.screen.live import Track, traced
from app.screen.terminal import Interrupts, await_enter, is_live, make_console, quiet_keys
from app.screen.trace import Trace
from app.screen.view import Canvas
from app.settings.table import Settings
from sampling.events import Event
from utils.errors import UserError
from utils.progress import INTERRUPTED

_NAP = 0.05  # seconds after which a waiting show looks for Ctrl-C


class Place(Protocol):
    """What a tour is shown on."""

    out: Console
    live: bool
    stop: Interrupts

    @property
    def settings(self) -> Settings: ...
    def say(self, what: Any) -> None: ...
    def hint(self, text: str) -> None: ...


@dataclass(frozen=True)
class Played:
    """An answer of a step: what was asked under which settings, its lanes before anything happened, its events."""

    models: Any
    question: str
    settings: Settings
    tracks: Sequence[Track]
    events: Sequence[tuple[int, Event]]


def walk(steps: Sequence[tuple[int, Step]], play: Callable[[Step], Sequence[Track] | None], place: Place) -> bool:
    """Go through the steps; `play` gives the tracks of its last answer, None where Ctrl-C ended it. False after one."""
    for index, (number, step) in enumerate(steps):
        place.say(Text.assemble("\n", (f"{number}/{len(STEPS)} {step.title}", "bold")))
        place.say(Text.assemble(("Look: ", "bold"), step.look))
        tracks = play(step)
        if tracks is None or (step.traced and not _slowly(tracks, place)):
            return False
        if index + 1 < len(steps):
            place.hint(f"Enter: step {number + 1}, {steps[index + 1][1].title}; Ctrl-C leaves")
            if not await_enter(place.stop):
                return False
    return True


def left(steps: Sequence[tuple[int, Step]]) -> str:
    """What is said where a tour was left."""
    again = f"/demo {steps[0][0]}" if len(steps) == 1 else f"/demo N, N from 1 to {len(STEPS)},"
    return f"the demo was left: {again} plays a step alone; conversation and settings are as they were"


def parts(tracks: Sequence[Track], out: Console, settings: Settings) -> Iterator[Any]:
    """The trace of the last lane that drafted, its head and then round by round."""
    found = traced(tracks, out, settings, None)
    yield from found.parts() if isinstance(found, Trace) else [found]


def _slowly(tracks: Sequence[Track], place: Place) -> bool:
    """The rounds, one a second on a terminal; False after Ctrl-C."""
    for part in parts(tracks, place.out, place.settings):
        due = time.monotonic() + (1.0 if place.live else 0.0)
        place.say(part)
        while not place.stop() and time.monotonic() < due:
            time.sleep(_NAP)
        if place.stop():
            return False
    return True


# -- the recorded tour --------------------------------------------------------------------------


def steps_of(path: Path = RECORDED) -> list[list[LoggedAnswer]]:
    """The answers of each step of a recorded tour; UserError where the file is none."""
    answers = read_log(path).answers
    if len(answers) != sum(len(step.plays) for step in STEPS) or any(one.closing is None for one in answers):
        raise UserError(f"{path} is no recorded demo: python infer.py demo --quiet --log FILE records one")
    each = iter(answers)
    found = [list(islice(each, len(step.plays))) for step in STEPS]
    for answer in answers:
        answer.settings = answer.settings.changed(slow=SLOW)
    return found


def played(answer: LoggedAnswer) -> Played:
    """A recorded answer, to be drawn on a page."""
    models = answer.head.model_dump()
    return Played(models, answer.opening.prompt, answer.settings, answer.tracks(), answer.events)


def play_recorded(settings: Settings, steps: Sequence[tuple[int, Step]]) -> int:
    """Play the recorded tour; the exit code."""
    answers = dict(zip(STEPS, steps_of(), strict=True))
    console = make_console(settings)
    live = is_live(console) and not settings.quiet
    with quiet_keys(), Interrupts() as stop:
        place = Canvas(settings, console, live, stop)
        player = Player(place, 1 / SLOW)

        def play(step: Step) -> Sequence[Track] | None:
            tracks: Sequence[Track] | None = None
            for answer in answers[step]:
                if not player.play(answer):
                    return None
                tracks = _over(answer)
            return tracks

        if not walk(steps, play, place):
            sys.stderr.write("the demo was left: infer.py demo --recorded N plays a step alone\n")
            return INTERRUPTED
    return 0


def _over(answer: LoggedAnswer) -> list[Track]:
    """Its lanes when all has happened."""
    tracks = answer.tracks()
    for index, event in answer.events:
        tracks[index].feed(event)
    return tracks
