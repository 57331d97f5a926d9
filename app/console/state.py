"""The state of a running console: settings, loaded pair, conversation, answers, and the ways to speak.

Changes nothing half: a change that is refused leaves everything as it was. Knows no commands and no
keys; app/console/actions.py makes commands of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from app.chat.conversation import Conversation, Plan
from app.console.loading import Loader, Pairs, watch
from app.lanes.pairing import catalogue
from app.replay.log_writer import recorder_of
from app.screen.terminal import SECOND_WITHIN, Interrupts
from app.settings.layers import Layers, ModelOptions, Settings
from utils.errors import UserError

if TYPE_CHECKING:
    from app.chat.answered import Answered
    from app.lanes.lane import Engine
    from app.prompts.questions import Question
    from sampling.types import Session


class KeptError(UserError):
    """The message was not sent; it goes back into the input line."""


class Desk:
    """Everything but the keyboard. `live`: there is a terminal to draw on; `out` and `errors` may be the same."""

    def __init__(
        self, layers: Layers, options: ModelOptions, out: Console, errors: Console, loader: Loader, live: bool
    ) -> None:
        self.layers, self.options, self.out, self.errors, self.live = layers, options, out, errors, live
        self.pairs = Pairs(options, loader, self._changed)
        self.chat: Conversation | None = None
        self.session: Session | None = None  # the target's, with the cache of what was said
        self.answers: list[Answered] = []  # all of this run
        self.asked: list[Question] = []  # of the last /prompts
        self.latest: Answered | None = None  # the one to look back at, also one that was loaded
        self.kept = ""  # what the next input line begins with
        self.editing = False  # the next message replaces the last one
        self.leaving = False
        self.reading = False  # the prompt is waiting for keys
        self.stop = Interrupts()  # of the command that is running
        self.recorder = recorder_of(layers.settings)
        self._stopped_at = -SECOND_WITHIN  # when Ctrl-C last stopped an answer
        self.refresh: Callable[[], None] = lambda: None
        self._collecting = threading.Lock()

    # -- settings -----------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self.layers.settings

    @property
    def defaults(self) -> Settings:
        return self.layers.defaults

    def change(self, **changes: Any) -> None:
        self._apply(self.layers.with_set(**changes))

    def reset(self, *names: str) -> None:
        self._apply(self.layers.without_set(*names))

    def _apply(self, layers: Layers) -> None:
        """Take settings over, after everything that could refuse them has had its say."""
        settings, before = layers.settings, self.settings
        recorder = self.recorder if settings.record == before.record else recorder_of(settings)
        if self.pairs.engine is not None and settings.compare != before.compare:
            self.pairs.engine.lanes(settings)
        if self.chat is not None:
            if settings.system != self.chat.system:
                self.chat.set_system(settings.system)
            if settings.template != self.chat.template_name:
                self.chat.set_template(settings.template)
            self.chat.chat = settings.chat
        self.layers = layers
        if self.recorder is not None and self.recorder is not recorder:
            self.recorder.close()
        self.recorder = recorder
        if settings.chat and not before.chat:
            self._say_if_plain()

    # -- speaking -----------------------------------------------------------------------------

    def say(self, what: Any) -> None:
        self.out.print(Text(what) if isinstance(what, str) else what)

    def fail(self, text: str) -> None:
        self.errors.print(Text(f"error: {' '.join(text.split())}", style="red"))

    def hint(self, text: str) -> None:
        """A line that matters less; --quiet leaves it out."""
        if not self.settings.quiet:
            self.out.print(Text(text, style="dim"))

    # -- the pair -----------------------------------------------------------------------------

    def _changed(self) -> None:
        """Called from the loading thread."""
        if self.reading:
            self.collect()
        self.refresh()

    def collect(self) -> None:
        """Take over the pair that was loaded behind the prompt, or say why it could not be."""
        with self._collecting:
            try:
                engine = self.pairs.collect()
                if engine is not None:
                    self.adopt(engine)
            except UserError as error:
                self.fail(str(error))

    def adopt(self, engine: Engine) -> None:
        """Go on with these models; the conversation goes with them. UserError if it cannot."""
        from app.console.about import header

        if self.chat is None:
            text, chat, template = self.settings.system, self.settings.chat, self.settings.template
            models = (engine.tokenizer, engine.stop_ids, engine.context)
            single = engine.encodes
            self.chat = Conversation(*models, system=text, chat=chat, single=single, template=template)
        elif self.chat.adopt(engine.tokenizer, engine.stop_ids, engine.context, engine.encodes, self.settings.template):
            self.hint("another tokenizer: the conversation goes on from its texts")
        self.session = None
        if not self.settings.quiet:
            self.say(header(engine, self.settings, self.out))
        for note in engine.notes:
            self.hint(note)
        self._say_if_plain()

    def _say_if_plain(self) -> None:
        if self.chat is not None and self.chat.single:
            self.hint(f"{self.pairs.name} is an encoder-decoder model: it reads each message by itself, no history")
        elif self.chat is not None and self.settings.chat and not self.chat.template.present:
            self.hint(f"{self.pairs.name} has no chat template: messages are continued as plain text")

    def pair_names(self) -> list[str]:
        return list(catalogue(self.options).pairs)

    def engine(self) -> Engine:
        """The loaded pair; waits for it and shows how far it is. KeptError if there is none in the end."""
        self.collect()
        job = self.pairs.job
        if job is not None:
            hint = "Ctrl-C: back to the prompt"
            if not watch(job, self.pairs.name, self.out, self.stop, live=self.live, hint=hint):
                raise KeptError("not sent: loading goes on, the message is back in the input line")
            self.collect()
        if self.pairs.engine is None:
            raise KeptError(f"no model is loaded: /pair NAME loads one of {', '.join(self.pair_names())}")
        return self.pairs.engine

    # -- the conversation ---------------------------------------------------------------------

    def talk(self) -> Conversation:
        """The conversation so far. UserError if nothing was said."""
        if self.chat is None or not self.chat.turns:
            raise UserError("no message yet")
        return self.chat

    def send(self, text: str) -> None:
        """Answer a message. The text goes back into the input line if nothing came of it."""
        editing, self.editing = self.editing, False
        try:
            self.engine()
            assert self.chat is not None
            plan = self.chat.plan_edit(text) if editing and self.chat.turns else self.chat.plan(text)
            sent = self.decode(plan)
        except KeptError as error:
            sent = False
            self.fail(str(error))
        if not sent:
            self.kept, self.editing = text, editing

    def stopped(self) -> bool:
        """Whether Ctrl-C stopped what was going on; one more, soon, means to leave."""
        if self.stop():
            self._stopped_at = time.monotonic()
        return self.stop()

    def just_stopped(self) -> bool:
        """Whether Ctrl-C stopped an answer so lately that another one means to leave."""
        return time.monotonic() - self._stopped_at < SECOND_WITHIN

    def decode(self, plan: Plan) -> bool:
        """Answer a plan and enter the answer; False, and nothing changed, if no token came."""
        from app.console.answer import answer

        engine = self.engine()
        assert self.chat is not None
        previous, self.session = self.session, None
        answered, self.session = answer(plan, self.chat, engine, previous, self)
        self.stopped()
        if answered is None:
            self.hint("stopped before the first token: the conversation is unchanged")
            return False
        self.answers.append(answered)
        self.latest = answered
        return True
