"""The state of a running console: settings, loaded pair, conversation, answers, and the ways to speak.

Changes nothing half: a change that is refused leaves everything as it was. Knows no commands and no keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from app.chat.conversation import Conversation, Plan
from app.console.about import header
from app.console.loading import Loader, Pairs, watch
from app.lanes.pairing import catalogue
from app.replay.log_writer import log_writer_of
from app.screen.terminal import SECOND_WITHIN, Interrupts
from app.settings.layers import Layers
from app.settings.table import ModelOptions, Settings
from utils.errors import UserError

if TYPE_CHECKING:
    from app.chat.answered import Answered
    from app.lanes.lane import PairEngine
    from app.prompts.questions import Question
    from sampling.drafters.tables.suffix import SuffixIndex
    from sampling.types import Session


class NotSentError(UserError):
    """The message was not sent; it goes back into the input line."""


class ConsoleState:
    """Everything but the keyboard. `live`: there is a terminal to draw on; `out` and `errors` may be the same."""

    def __init__(
        self, layers: Layers, options: ModelOptions, out: Console, errors: Console, loader: Loader, live: bool
    ) -> None:
        self.layers, self.options, self.out, self.errors, self.live = layers, options, out, errors, live
        self.pairs = Pairs(options, loader, self._changed)
        self.chat: Conversation | None = None
        self.session: Session | None = None  # the target's, with the cache of what was said
        self.answers: list[Answered] = []  # all of this run
        self.said_before: dict[str | None, SuffixIndex] = {}  # by tokenizer: the answers that are over
        self.asked: list[Question] = []  # of the last /prompts
        self.latest: Answered | None = None  # the one to look back at, also one that was loaded
        self.next_line = ""  # what the next input line begins with
        self.editing = False  # the next message replaces the last one
        self.leaving = False
        self.touring = False  # an answer is a step of the demo
        self.reading = False  # the prompt is waiting for keys
        self.stop = Interrupts()  # of the command that is running
        self.log = log_writer_of(layers.settings)
        self._stopped_at = -SECOND_WITHIN  # when Ctrl-C last stopped an answer
        self.refresh: Callable[[], None] = lambda: None
        self._collecting = threading.Lock()

    # -- settings -----------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self.layers.settings

    def change(self, **changes: Any) -> None:
        """Change settings, all or none; UsageError, with what still holds, when one is refused."""
        self.take(self.layers.with_set(**changes))

    def take(self, layers: Layers) -> None:
        """Take settings over, after everything that could refuse them has had its say."""
        settings, before = layers.settings, self.settings
        log = self.log if settings.record == before.record else log_writer_of(settings)
        if self.pairs.engine is not None and settings.compare != before.compare:
            self.pairs.engine.lanes(settings)
        if self.chat is not None:
            if settings.system != self.chat.system:
                self.chat.set_system(settings.system)
            if settings.template != self.chat.template_name:
                self.chat.set_template(settings.template)
            self.chat.chat = settings.chat
        self.layers = layers
        if self.log is not None and self.log is not log:
            self.log.close()
        self.log = log
        if settings.chat and not before.chat:
            self._say_if_plain()

    # -- speaking: text is literal, without markup --------------------------------------------

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

    def adopt(self, engine: PairEngine) -> None:
        """Go on with these models; the conversation goes with them. UserError if it cannot."""
        models, settings, single = (engine.tokenizer, engine.stop_ids, engine.context), self.settings, engine.encodes
        if self.chat is None:
            self.chat = Conversation(
                *models, system=settings.system, chat=settings.chat, single=single, template=settings.template
            )
        elif self.chat.adopt(*models, single, settings.template):
            self.hint("another tokenizer: the conversation goes on from its texts")
        self.session = None
        self._remember(engine)
        if not settings.quiet:
            self.say(header(engine, settings, self.out))
        for note in engine.notes:
            self.hint(note)
        self._say_if_plain()

    def _remember(self, engine: PairEngine) -> None:
        """Its drafters look at what any pair of the same tokenizer answered in this session."""
        drafters = engine.drafters
        drafters.answers = self.said_before.setdefault(drafters.mark, drafters.answers)
        drafters.in_session = True

    def _say_if_plain(self) -> None:
        if self.chat is not None and self.chat.single:
            self.hint(f"{self.pairs.name} is an encoder-decoder model: it reads each message by itself, no history")
        elif self.chat is not None and self.settings.chat and not self.chat.template.present:
            self.hint(f"{self.pairs.name} has no chat template: messages are continued as plain text")

    def pair_names(self) -> list[str]:
        return list(catalogue(self.options).pairs)

    def engine(self) -> PairEngine:
        """The loaded pair; waits for it and shows how far it is. NotSentError if there is none in the end."""
        self.collect()
        job = self.pairs.job
        if job is not None:
            hint = "Ctrl-C: back to the prompt"
            if not watch(job, self.pairs.name, self.out, self.stop, live=self.live, hint=hint):
                raise NotSentError("not sent: loading goes on, the message is back in the input line")
            self.collect()
        if self.pairs.engine is None:
            raise NotSentError(f"no model is loaded: /pair NAME loads one of {', '.join(self.pair_names())}")
        return self.pairs.engine

    # -- the conversation ---------------------------------------------------------------------

    def conversation(self) -> Conversation:
        """The conversation with the loaded pair, be it empty; see :meth:`engine`."""
        self.engine()
        assert self.chat is not None
        return self.chat

    def said(self) -> Conversation:
        """The conversation so far. UserError if nothing was said."""
        if self.chat is None or not self.chat.turns:
            raise UserError("no message yet")
        return self.chat

    def plan(self, text: str, editing: bool) -> Plan | None:
        """A message as a turn, in the place of the last one if that is being edited; None where no pair is there."""
        try:
            chat = self.conversation()
        except NotSentError as error:
            self.fail(str(error))
            return None
        return chat.plan_edit(text) if editing and chat.turns else chat.plan(text)

    def note_stop(self) -> bool:
        """Whether Ctrl-C stopped what was going on; one more, soon, means to leave."""
        if self.stop():
            self._stopped_at = time.monotonic()
        return self.stop()

    def just_stopped(self) -> bool:
        """Whether Ctrl-C stopped an answer so lately that another one means to leave."""
        return time.monotonic() - self._stopped_at < SECOND_WITHIN
