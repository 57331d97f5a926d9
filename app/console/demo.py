"""/demo and `infer.py demo`: the guided tour with the loaded pair. Conversation and settings stay as they were.

The steps are data (app/replay/steps.py); each is answered beside the conversation, by an engine of its own. Knows no
decoding and no drawing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.chat.answered import Answered
from app.console.answer import answer
from app.console.state import ConsoleState
from app.console.tryout import loaded
from app.lanes.answers import run_lane
from app.prompts.questions import conversation, fitting
from app.replay.steps import BASE, Step, chosen, slowness
from app.replay.tour import Answers, Played, ended, play_recorded, played, steps_of, walk
from app.screen.live import Track, look_of
from app.screen.output import load_engine
from app.screen.terminal import Interrupts, is_live, make_console, quiet_keys
from app.screen.view import drafting, heading, question
from app.settings.layers import Layers
from utils.errors import UserError
from utils.files import writable, write_text
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from app.replay.options import DemoArgs
    from app.settings.table import ModelOptions, Settings

_WARM_UP = 8  # tokens


def demo(state: ConsoleState, number: int | None) -> None:
    """Go through the steps, or play one of them."""
    engine = loaded(state, f"/demo {number or ''}".strip())
    steps = chosen(number)
    whole = Tour(state, engine).walk(steps)
    state.note_stop()
    state.hint(ended(steps, whole))


class Tour:
    """The tour of an engine, beside a conversation; `answers` are those of each step."""

    def __init__(self, state: ConsoleState, engine: PairEngine) -> None:
        from app.lanes.lane import PairEngine

        self.state, self.aside = state, copy.copy(state)
        # An engine of its own: what the conversation's drafters have learned stays.
        self.aside.pairs = copy.copy(state.pairs)
        self.engine = self.aside.pairs.engine = PairEngine(engine.loaded)
        self.aside.answers, self.aside.touring, self.aside.goes_on = [], True, False
        self.answers: dict[Step, list[Answered]] = {}
        self.slow = state.settings.slow

    def walk(self, steps: Sequence[tuple[int, Step]]) -> bool:
        """Go through them; False if Ctrl-C ended it."""
        self._warm_up(steps[0][1])
        return walk(steps, self.play, self.state)

    def play(self, step: Step) -> Answers | None:
        """The answers of a step; one that these models cannot give is left out."""
        for changes in step.plays:
            try:
                self._answer(step, changes)
            except UserError as error:
                self.state.fail(f"left out: {error}")
            if self.state.stop():
                return None
        return [one.tracks for one in self.answers.get(step, [])]

    def _set(self, changes: Mapping[str, object]) -> Settings:
        """The settings of an answer, from here on those of the tour."""
        self.aside.layers = self.state.layers.with_set(**{**BASE, "slow": self.slow, **changes})
        return self.aside.settings

    def _answer(self, step: Step, changes: Mapping[str, object]) -> None:
        aside, settings = self.aside, self._set(changes)
        self.engine.lanes(settings)  # what they lack is said before the question
        aside.session, aside.chat = None, conversation(self.engine, settings)
        plan = aside.chat.plan(step.question)
        fitting(plan.prompt, self.engine.context)
        if not settings.quiet:
            look = look_of(aside.out, settings)
            aside.say("")
            aside.say(heading(drafting(self._models(), settings.compare), settings, look))
            aside.say(question(step.question, look))
        if answer(plan, aside):
            self.answers.setdefault(step, []).append(aside.answers[-1])

    def _models(self) -> Any:
        from app.screen.view import models_of

        return models_of(self.engine)

    def _warm_up(self, step: Step) -> None:
        """The first answer of a process pays for memory that is touched first: it is none of the tour's, but what is
        decoded plainly behind it says how much slower the tour is shown.
        """
        for compare in (step.plays[0].get("compare", BASE["compare"]), "ar"):
            settings = self._set({**step.plays[0], "compare": compare, "max_new_tokens": _WARM_UP})
            chat = conversation(self.engine, settings)
            for lane in self.engine.lanes(settings):
                told = run_lane(lane, chat.plan(step.question).prompt, chat.text, interrupt=self.state.stop)
        self.slow = slowness(self.state.settings, told.stats.predicted_per_second)

    def played(self) -> list[tuple[Step, list[Played]]]:
        """What was shown, to be drawn on a page."""
        return [(step, [_again(one) for one in answers]) for step, answers in self.answers.items()]


def _again(answered: Answered) -> Played:
    """An answer before anything of it had happened."""
    tracks = [
        Track(one.lane, one.decode, one.meter.stats.prompt_n, one.limit, (), one.terms) for one in answered.tracks
    ]
    events = [(index, event) for index, one in enumerate(answered.tracks) for event in one.events]
    models = drafting(answered.models, answered.settings.compare)
    return Played(models, answered.turn.user, answered.settings, tracks, events)


# -- the sub-command --------------------------------------------------------------------------------


def run_demo(settings: Settings, options: ModelOptions, args: DemoArgs) -> int:
    """The tour from the command line, of the pair or as it was recorded; the exit code."""
    if args.html is not None:
        writable(args.html, "--html")
    steps = chosen(args.step)
    if args.recorded:
        if args.html is None:
            return play_recorded(settings, steps)
        every = steps_of(settings)
        _write(args.html, [(step, [played(one) for one in every[number - 1]]) for number, step in steps], settings)
        return 0
    tour, whole = _live(settings, options, steps)
    if not whole:
        sys.stderr.write("the demo was left: infer.py demo N plays a step alone\n")
        return INTERRUPTED
    if args.html is not None:
        _write(args.html, tour.played(), settings)
    return 0


def _live(settings: Settings, options: ModelOptions, steps: Sequence[tuple[int, Step]]) -> tuple[Tour, bool]:
    """The tour of the pair that the options name, and whether it came to its end."""
    out = make_console(settings)
    with quiet_keys(), Interrupts() as stop:
        engine = load_engine(settings, options, stop)
        layers = Layers(flags=dict(settings))
        state = ConsoleState(layers, options, out, out, lambda *_: engine, live=is_live(out))
        state.stop = stop
        state.pairs.engine, state.pairs.spec = engine, engine.loaded.spec
        tour = Tour(state, engine)
        try:
            return tour, tour.walk(steps)
        finally:
            if state.log is not None:
                state.log.close()


def _write(path: Any, told: Any, settings: Settings) -> None:
    """The page."""
    from app.replay.tour_page import page

    write_text(path, page(told))
    if not settings.quiet:
        sys.stderr.write(f"written: {path}\n")
