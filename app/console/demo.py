"""/demo and `infer.py demo`: the guided tour with the loaded pair. Conversation and settings stay as they were.

The steps are data (app/replay/steps.py); each is answered beside the conversation, by a separate engine. Knows no
decoding and no drawing.
"""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.console.answer import answer
from app.console.state import ConsoleState
from app.lanes.answers import run_lane
from app.prompts.questions import conversation, fitting
from app.replay.steps import BASE, Step, chosen, slowness
from app.replay.tour import Answers, ended, play_recorded, walk
from app.screen.live import Track, look_of
from app.screen.output import load_engine
from app.screen.terminal import Interrupts, is_live, make_console, quiet_keys
from app.screen.view import drafting, heading, models_of, question
from app.settings.layers import Layers
from utils.errors import UserError
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from app.settings.table import ModelOptions, Settings

_WARM_UP = 8  # tokens


def demo(state: ConsoleState, number: int | None) -> None:
    """Go through the steps, or play one of them."""
    engine = state.engine_for(f"/demo {number or ''}".strip())
    steps = chosen(number)
    whole = Tour(state, engine).walk(steps)
    state.note_stop()
    state.hint(ended(steps, whole))


class Tour:
    """The tour of an engine, beside a conversation."""

    def __init__(self, state: ConsoleState, engine: PairEngine) -> None:
        from app.lanes.lane import PairEngine

        self.state, self.aside = state, copy.copy(state)
        # A separate engine, so the conversation's drafters keep their estimates.
        self.aside.pairs = copy.copy(state.pairs)
        self.engine = self.aside.pairs.engine = PairEngine(engine.loaded)
        self.aside.answers, self.aside.touring, self.aside.goes_on = [], True, False
        self.slow = state.settings.slow

    def walk(self, steps: Sequence[tuple[int, Step]]) -> bool:
        """Go through them; False if Ctrl-C ended it."""
        self._warm_up(steps[0][1])
        return walk(steps, self.play, self.state)

    def play(self, step: Step) -> Answers | None:
        """The answers of a step; one that these models cannot give is left out."""
        answers: list[Sequence[Track]] = []
        for changes in step.plays:
            try:
                answers += self._answer(step, changes)
            except UserError as error:
                self.state.fail(f"left out: {error}")
            if self.state.stop():
                return None
        return answers

    def _set(self, changes: Mapping[str, object]) -> Settings:
        """The settings of an answer, from here on those of the tour."""
        self.aside.layers = self.state.layers.with_set(**{**BASE, "slow": self.slow, **changes})
        return self.aside.settings

    def _answer(self, step: Step, changes: Mapping[str, object]) -> list[Sequence[Track]]:
        """The lanes of an answer; none where Ctrl-C came before its first token."""
        aside, settings = self.aside, self._set(changes)
        self.engine.lanes(settings)  # missing parts are reported before the question
        aside.session, aside.chat = None, conversation(self.engine, settings)
        plan = aside.chat.plan(step.question)
        fitting(plan.prompt, self.engine.context)
        if not settings.quiet:
            look = look_of(aside.out, settings)
            aside.say("")
            aside.say(heading(drafting(models_of(self.engine), settings.compare), settings, look))
            aside.say(question(step.question, look))
        return [aside.answers[-1].tracks] if answer(plan, aside) else []

    def _warm_up(self, step: Step) -> None:
        """The first answer of a process pays for memory that is touched first: it is not shown, but the
        plain decoding after it sets how much slower the tour is shown.
        """
        for compare in (step.plays[0].get("compare", BASE["compare"]), "ar"):
            settings = self._set({**step.plays[0], "compare": compare, "max_new_tokens": _WARM_UP})
            chat = conversation(self.engine, settings)
            for lane in self.engine.lanes(settings):
                answer = run_lane(lane, chat.plan(step.question).prompt, chat.text, interrupt=self.state.stop)
        self.slow = slowness(self.state.settings, answer.stats.predicted_per_second)


# -- the sub-command --------------------------------------------------------------------------------


def run_demo(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """The tour from the command line, of the pair or as it was recorded; the exit code."""
    steps = chosen(args.step)
    if args.recorded:
        return play_recorded(settings, steps)
    if not _live(settings, options, steps):
        sys.stderr.write("the demo was left: infer.py demo N plays a step alone\n")
        return INTERRUPTED
    return 0


def _live(settings: Settings, options: ModelOptions, steps: Sequence[tuple[int, Step]]) -> bool:
    """Play the tour of the pair that the options name; whether it came to its end."""
    out = make_console(settings)
    with quiet_keys(), Interrupts() as stop:
        engine = load_engine(settings, options, stop)
        layers = Layers(flags=dict(settings))
        state = ConsoleState(layers, options, out, out, lambda *_: engine, live=is_live(out))
        state.stop = stop
        state.pairs.engine, state.pairs.spec = engine, engine.loaded.spec
        try:
            return Tour(state, engine).walk(steps)
        finally:
            if state.log is not None:
                state.log.close()
