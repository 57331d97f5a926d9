"""`infer.py demo`: the guided tour with a loaded pair, or the recorded one.

The steps are data (app/replay/player.py); each answer has a separate conversation.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence

from app.console.answer import answer
from app.console.state import ConsoleState
from app.lanes.answers import run_lane
from app.prompts.questions import conversation, fitting
from app.replay.player import BASE_SETTINGS, Answers, PlayedStep, chosen, play_recorded, slowness, walk
from app.screen.live import Track
from app.screen.output import load_engine
from app.screen.terminal import Interrupts, is_live, make_console, quiet_keys
from app.screen.view import drafting, heading, models_of, question
from app.settings.table import Layers, ModelOptions, Settings
from utils.errors import UserError
from utils.progress import INTERRUPTED
from utils.visible import to_stderr


def run_demo(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Play the tour with the loaded pair, or the recorded one; return the exit code."""
    steps = chosen(args.step)
    if play_recorded(settings, steps) if args.recorded else _live(settings, options, steps):
        return 0
    to_stderr("the demo was left: infer.py demo N plays a step alone")
    return INTERRUPTED


def _live(settings: Settings, options: ModelOptions, steps: Sequence[tuple[int, PlayedStep]]) -> bool:
    """Play the tour of the pair that the options name; return whether it came to its end."""
    out = make_console(settings)
    with quiet_keys(), Interrupts() as stop:
        engine = load_engine(settings, options, stop)
        state = ConsoleState(Layers(flags=dict(settings)), options, out, out, lambda *_: engine, live=is_live(out))
        state.stop, state.touring, state.can_continue = stop, True, False
        state.pairs.engine, state.pairs.spec = engine, engine.loaded.spec
        try:
            tour = Tour(state)
            tour.warm_up(steps[0][1])
            return walk(steps, tour.play, state)
        finally:
            if state.log is not None:
                state.log.close()


class Tour:
    """The tour of the loaded pair."""

    def __init__(self, state: ConsoleState) -> None:
        self.state, self.engine, self.layers = state, state.engine(), state.layers
        self.slow = state.settings.slow

    def play(self, step: PlayedStep) -> Answers | None:
        """Return the answers of a step, None after Ctrl-C; an answer that these models cannot give is left out."""
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
        self.state.layers = self.layers.with_console_changes(**{**BASE_SETTINGS, "slow": self.slow, **changes})
        return self.state.settings

    def _answer(self, step: PlayedStep, changes: Mapping[str, object]) -> list[Sequence[Track]]:
        """Return a list of one answer, as its lanes; an empty one if Ctrl-C came before its first token."""
        state, settings = self.state, self._set(changes)
        self.engine.lanes(settings)  # missing parts are reported before the question
        state.session, state.chat = None, conversation(self.engine, settings)
        plan = state.chat.plan(step.question)
        fitting(plan.prompt, self.engine.context)
        if not settings.quiet:
            models = drafting(models_of(self.engine), settings.compare)
            state.say("", heading(models, settings, state.look), question(step.question, state.look))
        return [state.answers[-1].tracks] if answer(plan, state) else []

    def warm_up(self, step: PlayedStep) -> None:
        """Decode a first answer, which is not shown, since first passes are slow. The rate of plain decoding after it
        sets how much the tour is slowed.
        """
        for compare in (step.plays[0].get("compare", BASE_SETTINGS["compare"]), "ar"):
            settings = self._set({**step.plays[0], "compare": compare, "max_new_tokens": 8})
            chat = conversation(self.engine, settings)
            for lane in self.engine.lanes(settings):
                answer = run_lane(lane, chat.plan(step.question).prompt, chat.text, interrupt=self.state.stop)
        self.slow = slowness(self.layers.settings, answer.stats.predicted_per_second)
