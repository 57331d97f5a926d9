"""The state of a running console: settings, pair, conversation, answers, and how lines are shown; and loading a pair in
the background or while the user waits.

A change that is refused leaves everything as it was, and if a pair fails to load, the one before stays. Knows no
commands and no keys. Importing this imports no torch: the functions that load a pair import it when they are called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from app.chat.conversation import ChatModels, ChatSettings, Conversation, Plan, as_text
from app.lanes.pairing import catalogue, drafter_words, load, load_options, with_drafter
from app.replay.session_log import log_writer_of
from app.screen.terminal import SECOND_WITHIN, InPlace, Interrupts, page
from app.screen.view import Surface, heading, models_of
from app.settings.table import Layers, ModelOptions, Settings
from utils.errors import UserError
from utils.progress import Progress, Remaining

if TYPE_CHECKING:
    from app.chat.saved import Answered
    from app.lanes.lane import PairEngine
    from sampling.drafters.tables.suffix import SuffixIndex
    from sampling.types import Session
    from utils.catalogue.specs import PairSpec


Work = Callable[[Progress], "PairEngine"]
Loader = Callable[["PairSpec", "ModelOptions", Progress], "PairEngine"]


class Loading(threading.Thread):
    """Runs `work(progress)` in a daemon thread, at once.

    `status`: the stage of the work ("converting 42%"), "" at the end; `changed` is called, in that thread, whenever it
    changes. `engine`: the result.
    """

    def __init__(self, work: Work, changed: Callable[[], None]) -> None:
        super().__init__(name="loading", daemon=True)
        self._work, self._changed, self.cancelled = work, changed, threading.Event()
        self.status, self._remaining = "starting", Remaining()
        self.engine: futures.Future[PairEngine] = futures.Future()
        self.start()

    def run(self) -> None:
        try:
            self.engine.set_result(self._work(Progress(self._progress, self.cancelled.is_set)))
        except BaseException as error:
            self.engine.set_exception(error)
        self.status = ""
        self._changed()

    def _progress(self, stage: str, fraction: float | None) -> None:
        before, self.status = self.status, f"{stage}{self._remaining.text(stage, fraction)}"
        if self.status != before:
            self._changed()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the work has ended."""
        return bool(futures.wait([self.engine], seconds).done)


def load_engine(spec: PairSpec, options: ModelOptions, progress: Progress) -> PairEngine:
    """Load a pair and warm it up, so that the first answer's figures are comparable.

    If the pair's tables or trained drafter cannot be used, the n-gram drafter replaces them and a note says why: the
    console works without them.
    """
    progress("starting")
    from app.lanes.drafters import UnusableDrafterError
    from app.lanes.lane import PairEngine
    from utils.loading.loading import load_drafter

    given = load_options(options)
    with drafter_words(spec):
        loaded = load(spec, given, progress)
    try:
        engine = PairEngine(loaded)
    except UnusableDrafterError as error:
        notes = (f"{error.why}: drafting by n-gram instead",)
        engine = PairEngine(replace(load_drafter(loaded, with_drafter(spec, "ngram"), given), notes=notes))
    return warm(engine, progress)


def load_another_drafter(engine: PairEngine, name: str, options: ModelOptions, progress: Progress) -> PairEngine:
    """Return an engine of the same target with another drafter."""
    from app.lanes.lane import PairEngine
    from utils.loading.loading import load_drafter

    spec = with_drafter(engine.loaded.spec, name)
    with drafter_words(spec):
        loaded = load_drafter(engine.loaded, spec, load_options(options), progress)
    return warm(PairEngine(loaded), progress)


def warm(engine: PairEngine, progress: Progress) -> PairEngine:
    """Warm the pair up (app/lanes/warm.py)."""
    from app.lanes.warm import warm_up

    progress("warming up")
    warm_up(engine)
    return engine


def watch(job: Loading, label: str, console: Console, stop: Interrupts, *, live: bool, hint: str) -> bool:
    """Wait for a job, if `live` with its progress on the last line; return False if Ctrl-C ended the waiting."""
    with InPlace(console) if live else nullcontext() as surface:
        while not job.wait(0.1 if live else 0.02):
            if surface is not None:
                surface.draw(Text(f"{label}: {job.status}  ({hint})", style="dim", overflow="ellipsis", no_wrap=True))
            if stop():
                return False
    return True


def one_line(error: BaseException) -> str:
    """Return an error in one line; any but a UserError or a lack of memory with its type."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return text
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        return "out of memory: a smaller model, --quantization or a shorter conversation needs less"
    return f"internal: {type(error).__name__}: {text}" if text else f"internal: {type(error).__name__}"


class Pairs:
    """The engine in use, and the job that loads the first pair in the background, while it runs. `changed` is called
    from the job's thread."""

    def __init__(self, options: ModelOptions, loader: Loader, changed: Callable[[], None]) -> None:
        self.options, self.loader, self._changed = options, loader, changed
        self.engine: PairEngine | None = None
        self.spec: PairSpec | None = None  # of the engine, or of the first load
        self.job: Loading | None = None
        self._started: list[Loading] = []

    def begin(self, spec: PairSpec) -> None:
        """Load the first pair in the background."""
        self.spec = spec
        self.job = self._start(lambda progress: self.loader(spec, self.options, progress))

    def _start(self, work: Work) -> Loading:
        self._started.append(Loading(work, self._changed))
        return self._started[-1]

    @property
    def name(self) -> str:
        return self.spec.name if self.spec else "no pair"

    def collect(self) -> PairEngine | None:
        """Return the first pair's engine once, when it is ready, else None; UserError once if loading failed."""
        job = self.job
        if job is None or not job.engine.done():
            return None
        self.job = None
        try:
            self.engine = job.engine.result()
        except Exception as error:
            name = self.name
            self.spec = None
            raise UserError(f"{name} could not be loaded: {one_line(error)} (/pair NAME loads another)") from error
        self.spec = self.engine.loaded.spec  # its drafter may have replaced one that cannot be used
        return self.engine

    def switch(self, label: str, work: Work, console: Console, stop: Interrupts, *, live: bool) -> PairEngine:
        """Load and return another engine while the user waits; a first pair that is still loading is given up.
        UserError if that fails or Ctrl-C cancels it."""
        if self.job is not None:
            self.job.cancelled.set()
            self.job, self.spec = None, None
        job = self._start(work)
        if not watch(job, label, console, stop, live=live, hint="Ctrl-C calls it off"):
            job.cancelled.set()
            raise UserError(f"loading {label} was called off ({self.still()})")
        try:
            return job.engine.result()
        except Exception as error:
            raise UserError(f"{one_line(error)} ({self.still()})") from error

    def still(self) -> str:
        """Return in words which pair is still in use, for errors about another one."""
        return f"still {self.name}" if self.engine else "no pair is loaded: /pair NAME loads one"

    def leave(self) -> bool:
        """Cancel loading; return True if some of it does not end at once."""
        for job in self._started:
            job.cancelled.set()
        return not all(job.wait(0.2) for job in self._started)


LONGEST_BACK = 1_000  # characters of a refused message that goes back into the input line


class ConsoleState(Surface):
    """The console's whole state but the prompt. `live`: there is a terminal to draw on; `out` and `errors` may be the
    same console."""

    can_continue = True

    def __init__(
        self, layers: Layers, options: ModelOptions, out: Console, errors: Console, loader: Loader, live: bool
    ) -> None:
        self.layers, self.options, self.out, self.errors, self.live = layers, options, out, errors, live
        self.pairs = Pairs(options, loader, self._changed)
        self.chat: Conversation | None = None
        self.session: Session | None = None  # the target's, with the cache of the chat so far
        self.answers: list[Answered] = []  # all of this run
        self.said_before: dict[str | None, SuffixIndex] = {}  # by tokenizer's fingerprint: finished answers, for drafts
        self.said_markers = False  # the user was shown that control tokens in messages are read as text
        self.latest: Answered | None = None  # the answer that /stats, /trace … are about; it may have been loaded
        self.replaceable: set[Path] = set()  # files that /save wrote, or refused once to replace: it may replace them
        self.next_line = ""  # the text with which the next input line begins
        self.leaving = False
        self.reading = False  # the prompt is waiting for keys
        self.stop = Interrupts()  # of the command that is running
        self.log = log_writer_of(layers.settings)
        self.stopped_at = -SECOND_WITHIN  # when Ctrl-C last stopped an answer
        self.refresh: Callable[[], None] = lambda: None
        self._collecting = threading.Lock()

    # -- settings -----------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:  # type: ignore[override]
        return self.layers.settings

    def change(self, **changes: object) -> None:
        """Change settings, all or none. UsageError, with the present value, for a wrong value; UserError if they do not
        fit the pair."""
        self.take(self.layers.with_console_changes(**changes))

    def take(self, layers: Layers, engine: PairEngine | None = None, spec: PairSpec | None = None) -> None:
        """Apply settings, and optionally switch the pair, after validation.

        Raises UserError and changes nothing if the settings do not fit the pair.
        """
        before = self.settings
        if engine is not None:  # its drafters look up answers of every pair with the same tokenizer in this session
            drafters = engine.drafters
            drafters.answers = self.said_before.setdefault(drafters.tokenizer_fingerprint, drafters.answers)
            drafters.in_session = True
        self._ask(layers.settings, engine or self.pairs.engine)
        self._go_on(layers, engine)
        if engine is not None:
            self.pairs.engine, self.pairs.spec = engine, spec or engine.loaded.spec
            self._welcome(engine)
        elif self.settings.chat and not before.chat:
            self._say_if_plain()

    def _ask(self, settings: Settings, engine: PairEngine | None) -> None:
        """Raise UserError if lanes chosen now, or that could run before, cannot run with these models and settings."""
        before, loaded = self.settings, self.pairs.engine
        if engine is None or _runs(engine, settings):
            return
        if settings.compare != before.compare or (loaded is not None and _runs(loaded, before)):
            engine.lanes(settings)

    def _go_on(self, layers: Layers, engine: PairEngine | None) -> None:
        """Continue conversation and session log under these settings; an error leaves both as they were."""
        settings, chat, models = layers.settings, self.chat, None
        if engine is not None:
            models = ChatModels(engine.tokenizer, engine.stop_ids, engine.context, engine.encodes)
            chat = chat or Conversation(*models, *ChatSettings.of(settings))
        if chat is not None:
            chat = chat.changed(models, **ChatSettings.of(settings)._asdict())
        # Last, since it creates the file.
        log = self.log if settings.record == self.settings.record else log_writer_of(settings)
        self.layers, self.chat = layers, chat
        if self.log is not None and self.log is not log:
            self.log.close()
        self.log = log
        if chat is not None and chat.retokenised:
            self.hint("another tokenizer: the conversation continues from its texts")

    # -- speaking -----------------------------------------------------------------------------

    def page(self, what: RenderableType) -> None:
        """Show text that may be longer than the screen, on a terminal through the user's pager."""
        if not (self.live and page(self.out, what)):
            self.say(what)

    def fail(self, text: str) -> None:
        self.errors.print(f"error: {' '.join(text.split())}", style="red")

    # -- the pair -----------------------------------------------------------------------------

    def _changed(self) -> None:
        """Redraw the status line; if the prompt waits, switch to a ready pair. The loading thread calls this."""
        if self.reading:
            self.collect()
        self.refresh()

    def collect(self) -> None:
        """Switch to the pair that was loaded in the background, or say why it could not be loaded."""
        with self._collecting:
            try:
                if (engine := self.pairs.collect()) is not None:
                    self.take(self.layers, engine)
            except Exception as error:  # any kind: the loading thread may be calling, and must not end by it
                self.fail(one_line(error))

    def _welcome(self, engine: PairEngine) -> None:
        """Print the models of the engine that was loaded, and its notes. Drop the session (the cache) of the
        target before it."""
        self.session = None
        if not self.settings.quiet:
            self.say(heading(models_of(engine), self.settings, self.look, engine.mean_drafted(self.settings)))
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

    def engine(self) -> PairEngine:
        """Return the loaded pair, after waiting for it with its progress shown. UserError if none gets loaded."""
        self.collect()
        if (job := self.pairs.job) is not None:
            if not watch(job, self.pairs.name, self.out, self.stop, live=self.live, hint="Ctrl-C: back to the prompt"):
                raise UserError("nothing was done: loading continues")
            self.collect()
        if self.pairs.engine is None:
            raise UserError(f"no model is loaded: /pair NAME loads one of {', '.join(self.pair_names())}")
        return self.pairs.engine

    def say_markers(self, plan: Plan) -> None:
        """Tell the user once that control tokens in the messages are read as text."""
        if not self.said_markers and (markers := self.conversation().markers_in(plan)):
            self.said_markers = True
            self.hint(as_text(markers))

    # -- the conversation ---------------------------------------------------------------------

    def conversation(self) -> Conversation:
        """Return the conversation, which may have no turn yet, after waiting for the pair as :meth:`engine` does."""
        self.engine()
        assert self.chat is not None
        return self.chat

    def said(self) -> Conversation:
        """Return the conversation. UserError if it has no turn."""
        if self.chat is None or not self.chat.turns:
            raise UserError("no message yet")
        return self.chat

    @contextmanager
    def sending(self, text: str) -> Iterator[None]:
        """A context in which a message is planned and answered. If there is no answer, for whatever reason, the message
        goes back into the input line, unless it would fill the screen; then it is only in the history.
        """
        before = self.latest
        try:
            yield
        finally:
            if self.latest is before and len(text) <= LONGEST_BACK:
                self.next_line = text

    def just_stopped(self) -> bool:
        """Return whether Ctrl-C has just stopped an answer, so that another one leaves the console."""
        return time.monotonic() - self.stopped_at < SECOND_WITHIN


def _runs(engine: PairEngine, settings: Settings) -> bool:
    try:
        return bool(engine.lanes(settings))
    except UserError:
        return False
