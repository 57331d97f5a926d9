"""The state of a running console: settings, loaded pair, conversation, answers, and the ways to speak.

Changes nothing half: a change that is refused leaves everything as it was. Knows no commands and no keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from app.chat.conversation import Conversation
from app.console.about import header
from app.console.loading import Loader, Pairs, one_line, watch
from app.lanes.pairing import catalogue
from app.replay.log_writer import log_writer_of
from app.screen.rows import visible
from app.screen.terminal import SECOND_WITHIN, Interrupts, page
from app.settings.layers import Layers
from app.settings.table import ModelOptions, Settings
from utils.errors import UserError

if TYPE_CHECKING:
    from app.chat.saved import Answered
    from app.lanes.lane import PairEngine
    from sampling.drafters.tables.suffix import SuffixIndex
    from sampling.types import Session
    from utils.catalogue.specs import PairSpec


LONGEST_BACK = 1_000  # characters of a refused message that goes back into the input line


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
        self.latest: Answered | None = None  # the one to look back at, also one that was loaded
        self.replaceable: set[Path] = set()  # files that /save wrote here, or whose owner was named
        self.next_line = ""  # what the next input line begins with
        self.leaving = False
        self.touring = False  # an answer is a step of the demo
        self.goes_on = True  # the answer belongs to the conversation, so /continue applies
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

    def take(self, layers: Layers, engine: PairEngine | None = None, spec: PairSpec | None = None) -> None:
        """Apply settings, and optionally switch the pair, after validation.

        UserError, with everything as it was, if something does.
        """
        before = self.settings
        if engine is not None:
            self._remember(engine)
        self._ask(layers.settings, engine or self.pairs.engine)
        self._go_on(layers, engine)
        if engine is not None:
            self.pairs.engine, self.pairs.spec = engine, spec or engine.loaded.spec
            self._welcome(engine)
        elif self.settings.chat and not before.chat:
            self._say_if_plain()

    def _ask(self, settings: Settings, engine: PairEngine | None) -> None:
        """UserError for lanes that were chosen now, or ran before, and cannot run with these models and settings."""
        before, loaded = self.settings, self.pairs.engine
        if engine is None or _runs(engine, settings):
            return
        if settings.compare == before.compare and (loaded is None or not _runs(loaded, before)):
            return
        engine.lanes(settings)

    def _go_on(self, layers: Layers, engine: PairEngine | None) -> None:
        """Conversation and session log under these settings, all or nothing."""
        settings, retokenised = layers.settings, False
        how: Any = {"system": settings.system, "chat": settings.chat, "template": settings.template}
        with nullcontext() if self.chat is None else self.chat.whole():
            if engine is None and self.chat is not None:
                self.chat.settle(**how)
            elif engine is not None:
                models = (engine.tokenizer, engine.stop_ids, engine.context)
                retokenised = self.chat is not None and self.chat.adopt(*models, single=engine.encodes, **how)
                self.chat = self.chat or Conversation(*models, single=engine.encodes, **how)
            # Last of all: it makes the file.
            log = self.log if settings.record == self.settings.record else log_writer_of(settings)
        self.layers = layers
        if self.log is not None and self.log is not log:
            self.log.close()
        self.log = log
        if retokenised:
            self.hint("another tokenizer: the conversation continues from its texts")

    # -- speaking: text is literal, without markup, and nothing in it is obeyed by the terminal --

    def say(self, what: Any) -> None:
        self.out.print(Text(visible(what)) if isinstance(what, str) else what)

    def page(self, what: Any) -> None:
        """Say what may be longer than the screen, on a terminal through the user's pager."""
        content = Text(visible(what)) if isinstance(what, str) else what
        if not (self.live and page(self.out, content)):
            self.say(what)

    def fail(self, text: str) -> None:
        self.errors.print(Text(visible(f"error: {' '.join(text.split())}"), style="red"))

    def hint(self, text: str) -> None:
        """A line that matters less; --quiet leaves it out."""
        if not self.settings.quiet:
            self.out.print(Text(visible(text), style="dim"))

    # -- the pair -----------------------------------------------------------------------------

    def _changed(self) -> None:
        """Called from the loading thread."""
        if self.reading:
            self.collect()
        self.refresh()

    def collect(self) -> None:
        """Switch to the pair that was loaded in the background, or say why it could not be loaded."""
        with self._collecting:
            try:
                engine = self.pairs.collect()
                if engine is not None:
                    self.adopt(engine)
            except Exception as error:  # also one that nobody expects: the loading thread may be calling
                self.fail(one_line(error))

    def adopt(self, engine: PairEngine) -> None:
        """Go on with these models; the conversation goes with them. UserError if it cannot."""
        self._remember(engine)
        self._go_on(self.layers, engine)
        self._welcome(engine)

    def _welcome(self, engine: PairEngine) -> None:
        """Return the models that answer from now on, and a line about them."""
        self.session = None
        if not self.settings.quiet:
            self.say(header(engine, self.settings, self.out))
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
                raise NotSentError("not sent: loading continues, the message is back in the input line")
            self.collect()
        if self.pairs.engine is None:
            raise NotSentError(f"no model is loaded: /pair NAME loads one of {', '.join(self.pair_names())}")
        return self.pairs.engine

    def engine_for(self, command: str) -> PairEngine:
        """The loaded pair; where there is none yet the command goes back into the input line."""
        try:
            return self.engine()
        except NotSentError as error:
            self.next_line = command
            raise NotSentError(str(error).replace("the message", "the command")) from None

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

    @contextmanager
    def sending(self, text: str) -> Iterator[None]:
        """While a message is planned and answered; without an answer, whatever the reason, it goes back into the
        input line. One that would fill the screen, and push the reason out of sight, only stays in the history.
        """
        before = self.latest
        try:
            yield
        finally:
            if self.latest is before and len(text) <= LONGEST_BACK:
                self.next_line = text

    def note_stop(self) -> bool:
        """Whether Ctrl-C stopped what was going on; one more, soon, means to leave."""
        if self.stop():
            self._stopped_at = time.monotonic()
        return self.stop()

    def just_stopped(self) -> bool:
        """Whether Ctrl-C stopped an answer so lately that another one means to leave."""
        return time.monotonic() - self._stopped_at < SECOND_WITHIN


def _runs(engine: PairEngine, settings: Settings) -> bool:
    """Whether the lanes of these settings can run."""
    try:
        return bool(engine.lanes(settings))
    except UserError:
        return False
