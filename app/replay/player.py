"""`replay`: a session log shown again, at its own speed, in any view. Needs no model and no tokenizer: no torch.

On a terminal each event appears when its lane's own clock has come to it; elsewhere only the end of each answer is
printed. Knows no format (app/replay/session_log.py) and draws nothing itself.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from app.lanes.race import paced
from app.replay.session_log import LoggedAnswer, read_log
from app.screen.inspection import Inspection, forced_hint
from app.screen.live import look_of, play, show, streaming, tokens_of
from app.screen.rows import Lines
from app.screen.stepping import stepped
from app.screen.terminal import Interrupts, await_key, is_live, make_console, quiet_keys
from app.screen.view import Canvas, heading, question
from app.screen.viewer import view
from utils.errors import UserError
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.settings.table import ModelOptions, Settings


LONGEST_WAIT = 10.0  # seconds between two answers


def replay(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Show a session log; the exit code. UserError for a file that is none."""
    log = read_log(args.file)
    answers = log.answer(args.answer)
    console = make_console(settings)
    live = is_live(console) and not settings.quiet and args.speed > 0
    if args.inspect and answers:
        return walk_over(answers[-1], Canvas(settings, console, is_live(console)))
    with quiet_keys(), Interrupts() as stop:
        player = Player(Canvas(settings, console, live, stop), args.speed)
        if not all(map(player.play, answers)):
            return INTERRUPTED
    notes = log.notes if answers else [*log.notes, f"{args.file} holds no answer yet"]
    sys.stderr.write("".join(f"{note}\n" for note in notes))
    return 0


def walk_over(answer: LoggedAnswer, place: Canvas) -> int:
    """Walk over an answer's tokens on a terminal, elsewhere list them; the exit code."""
    track = answer.over()[-1]
    if not any(step.positions for step in track.steps):
        raise UserError(f"{answer.place}: the answer was logged without its alternatives: --log-top 5 keeps them")
    before = track.decode(list(track.before)) if track.before else ""
    content, look = Inspection(tokens_of(track), before=before), look_of(place.out, place.settings)
    if place.live and find_spec("prompt_toolkit") is not None:  # what replay needs besides is less
        view(content, lambda: look_of(place.out, place.settings))
        return 0
    place.say(Lines(content.listed(look.sized()), look))
    return 0


class Player:
    """Shows answers one after the other on a place, at `speed` times their own, as slowly as they were shown or as the
    place's settings say.
    """

    def __init__(self, place: Canvas, speed: float) -> None:
        self.place, self.speed = place, speed
        self._shown = ""

    def play(self, answer: LoggedAnswer) -> bool:
        """Show one answer; False if Ctrl-C ended it."""
        try:
            return self._play(answer)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # figures that no run has
            raise UserError(f"{answer.place}: the answer cannot be shown: {error}") from None

    def _play(self, answer: LoggedAnswer) -> bool:
        place, tracks = self.place, answer.tracks()
        looks = place.settings if place.settings.slow != 1 else answer.settings
        if place.live and self._shown and answer.opening.waited:
            await_key(place.stop, min(LONGEST_WAIT, answer.opening.waited) / self.speed)
        if not place.settings.quiet:
            self._head(answer)
        if place.live:
            with streaming(tracks, place.out, place.settings, place.stop, goes_on=False) as draw:
                if looks.steps:
                    draw()
                    pauses = answer.closing.pauses if answer.closing and looks is answer.settings else ()
                    known = [(seconds / self.speed, key) for seconds, key in pauses]
                    play(stepped(answer.events, tracks, place, draw, taken=[], known=known), tracks)
                else:
                    speed = self.speed / looks.times_slower
                    play(paced(answer.events, speed, place.stop, idle=draw), tracks, draw)
        else:
            play(answer.events, tracks)
        if not place.stop():
            show(tracks, answer.turn(tracks).text, place)
        return not place.stop()

    def _head(self, answer: LoggedAnswer) -> None:
        """What ran, where that has changed, and what was asked."""
        look = look_of(self.place.out, self.place.settings)
        line = heading(answer.head.model_dump(), answer.settings, look)
        told = "".join(segment.text for row in line.rows() for segment in row)
        if told != self._shown:
            self.place.say(line)
        self._shown = told
        self.place.say(question(answer.opening.prompt, look))
        if answer.opening.forced:
            self.place.hint(forced_hint(answer.decode(list(answer.opening.before)), len(answer.opening.before), look))
