"""The demo's way through its steps, and the recorded tour, which needs no models and no torch.

:func:`walk` is the same for both: a step says what to look at, is played, and waits for Enter. Knows no engines
(app/console/demo.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.lanes.answers import plain_answer
from app.replay.player import Player
from app.replay.session_log import LoggedAnswer, read_log
from app.replay.steps import RECORDED, STEPS, Figures, Step, observed, slowness
from app.screen.live import Track, look_of, rounds_of, telling
from app.screen.output import fitted
from app.screen.terminal import Interrupts, await_enter, is_live, make_console, quiet_keys
from app.screen.view import Canvas, Surface
from app.settings.table import Settings
from sampling.stats.summary import disturbed, speedup
from utils.errors import UserError
from utils.progress import INTERRUPTED

_NAP = 0.05  # seconds after which a waiting show looks for Ctrl-C


Answers = Sequence[Sequence[Track]]  # of a step, the lanes of each


def walk(steps: Sequence[tuple[int, Step]], play: Callable[[Step], Answers | None], place: Surface) -> bool:
    """Go through the steps; `play` gives a step's answers, None where Ctrl-C ended it. False after one."""
    for index, (number, step) in enumerate(steps):
        place.say(Text.assemble("\n", (f"{number}/{len(STEPS)} {step.title}", "bold")))
        place.say(Text.assemble(("Look: ", "bold"), step.look))
        answers = play(step)
        if answers is None or (step.traced and answers and not _slowly(answers[-1], place)):
            return False
        if shown := [figures_of(step, tracks) for tracks in answers]:
            place.say("")
            place.say(table(step, shown, place.out, place.settings))
            place.say(Text.assemble(("Seen: ", "bold"), observed(step, shown)))
        place.say("")
        if index + 1 < len(steps):
            place.hint(f"Enter: step {number + 1} of {len(STEPS)}, {steps[index + 1][1].title}; Ctrl-C leaves")
            if not await_enter(place.stop):
                return False
    return True


def figures_of(step: Step, tracks: Sequence[Track]) -> Figures:
    """The last lane of an answer beside plain decoding."""
    lane = tracks[-1].lane
    last, plain = tracks[-1].answer(), plain_answer([track.answer() for track in tracks])
    timed = None if plain is None or plain is last or disturbed(plain.stats, last.stats) else plain
    return Figures(
        lane.settings.show(step.varied) if step.varied else lane.name,
        None if plain is None else plain.stats.predicted_per_second,
        last.stats.predicted_per_second,
        None if timed is None else speedup(timed.stats, last.stats),
        last.stats.tokens_per_pass,
        last.stats.acceptance_rate,
        last.stats.alpha,
        plain is not None and plain.ids == last.ids,
    )


def table(step: Step, figures: Sequence[Figures], out: Console, settings: Settings) -> Table:
    """The figures of each answer of a step, plain decoding's beside them."""
    names = (step.varied or "lane", "plain tok/s", "tok/s", "speed-up", "tok/pass", "accepted", "alpha")
    forms = ("", ".1f", ".1f", ".2f", ".2f", ".0%", ".2f")
    rows = []
    for each in figures:
        values = zip(names, each, forms, strict=False)  # the last line compares the texts
        rows.append({name: "-" if value is None else format(value, form) for name, value, form in values})
    return fitted(out, settings, rows, ["accepted", "alpha"])


def ended(steps: Sequence[tuple[int, Step]], whole: bool) -> str:
    """Return the line after a tour in the console, `whole` or left."""
    number = steps[0][0]
    again = f"/demo {number}" if len(steps) == 1 else f"/demo N, N from 1 to {len(STEPS)},"
    line = f"{'that was the demo' if whole else 'the demo was left'}: {again} plays a step alone"
    if whole and len(steps) == 1:
        line = f"that was step {number}: /demo plays all {len(STEPS)}"
    return f"{line}; conversation and settings are as they were"


def _slowly(tracks: Sequence[Track], place: Surface) -> bool:
    """The rounds, one a second on a terminal; False after Ctrl-C."""
    place.say("")
    look = look_of(place.out, place.settings).sized(height=None)
    for part in rounds_of(telling(tracks), look).parts():
        due = time.monotonic() + (1.0 if place.live else 0.0)
        place.say(part)
        while not place.stop() and time.monotonic() < due:
            time.sleep(_NAP)
        if place.stop():
            return False
    return True


# -- the recorded tour --------------------------------------------------------------------------


def steps_of(settings: Settings, path: Path = RECORDED) -> list[list[LoggedAnswer]]:
    """The answers of each step of a recorded tour, as slow as they are shown; UserError where the file is none."""
    answers = read_log(path).answers
    if len(answers) != sum(len(step.plays) for step in STEPS) or any(one.closing is None for one in answers):
        raise UserError(f"{path} is no recorded demo: python infer.py demo --quiet --log FILE records one")
    rate = answers[0].over()[0].meter.stats.predicted_per_second
    for answer in answers:
        answer.settings = answer.settings.changed(slow=slowness(settings, rate))
    each = iter(answers)
    return [list(islice(each, len(step.plays))) for step in STEPS]


def play_recorded(settings: Settings, steps: Sequence[tuple[int, Step]]) -> int:
    """Play the recorded tour; the exit code."""
    answers = dict(zip(STEPS, steps_of(settings), strict=True))
    console = make_console(settings)
    live = is_live(console) and not settings.quiet
    with quiet_keys(), Interrupts() as stop:
        place = Canvas(settings, console, live, stop, touring=True)
        player = Player(place, 1.0)

        def play(step: Step) -> Answers | None:
            for answer in answers[step]:
                place.say("")
                if not player.play(answer):
                    return None
            return [answer.over() for answer in answers[step]]

        if not walk(steps, play, place):
            sys.stderr.write("the demo was left: infer.py demo --recorded N plays a step alone\n")
            return INTERRUPTED
    return 0
