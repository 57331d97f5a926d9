"""Which pair is loaded, and loading one in the background or in front of the user.

One piece of work runs in a thread, with its progress and a way to call it off. A pair that fails to load leaves the one
before in its place. Knows no decoding; what loads is given as a function, so it imports no torch itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from app.screen.terminal import InPlace, Interrupts
from utils.errors import UserError
from utils.progress import Remaining

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from app.settings.table import ModelOptions
    from utils.catalogue.specs import PairSpec


Progress = Callable[[str, float | None], None]
Cancelled = Callable[[], bool]
Work = Callable[[Progress, Cancelled], "PairEngine"]
Loader = Callable[["PairSpec", "ModelOptions", Progress, Cancelled], "PairEngine"]


class Loading(threading.Thread):
    """Runs `work(progress, cancelled)` in a daemon thread, at once.

    `status` is what it is doing: "converting 42%", or "" in the end; `changed` is called, in that thread, whenever
    that may have changed. `engine` is the result.
    """

    def __init__(self, work: Work, changed: Callable[[], None]) -> None:
        super().__init__(name="loading", daemon=True)
        self._work, self._changed, self.cancelled = work, changed, threading.Event()
        self.status, self._remaining = "starting", Remaining()
        self.engine: futures.Future[PairEngine] = futures.Future()
        self.start()

    def run(self) -> None:
        try:
            self.engine.set_result(self._work(self._progress, self.cancelled.is_set))
        except BaseException as error:
            self.engine.set_exception(error)
        self.status = ""
        self._changed()

    def _progress(self, stage: str, fraction: float | None) -> None:
        before, self.status = self.status, f"{stage}{self._remaining.text(stage, fraction)}"
        if self.status != before:
            self._changed()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`."""
        return bool(futures.wait([self.engine], seconds).done)


def load_engine(spec: PairSpec, options: ModelOptions, progress: Progress, cancelled: Cancelled) -> PairEngine:
    """Load a pair and make it ready to decode: one pass is run, so that the first answer's figures are fair.

    Where the pair's tables or trained drafter cannot be used, n-grams of the conversation draft instead and a
    note says why: the console is of use without them.
    """
    progress("starting", None)
    from app.lanes.drafters import UnusableDrafterError
    from app.lanes.lane import PairEngine
    from app.lanes.pairing import drafter_words, load, load_options, with_drafter
    from utils.loading.loading import load_drafter

    given = load_options(options)
    with drafter_words(spec):
        loaded = load(spec, given, progress, cancelled)
    try:
        engine = PairEngine(loaded)
    except UnusableDrafterError as error:
        note = f"{error.why}: drafting by n-gram instead"
        engine = PairEngine(replace(load_drafter(loaded, with_drafter(spec, "ngram"), given), notes=(note,)))
    return warm(engine, progress)


def load_another_drafter(
    engine: PairEngine, name: str, options: ModelOptions, progress: Progress, cancelled: Cancelled
) -> PairEngine:
    """The same target with another drafter."""
    from app.lanes.lane import PairEngine
    from app.lanes.pairing import drafter_words, load_options, with_drafter
    from utils.loading.loading import load_drafter

    if engine.reads_text:
        raise UserError(f"{engine.loaded.spec.name} is a server: nothing drafts for it here")
    spec = with_drafter(engine.loaded.spec, name)
    with drafter_words(spec):
        loaded = load_drafter(engine.loaded, spec, load_options(options), progress, cancelled)
    return warm(PairEngine(loaded), progress)


def warm(engine: PairEngine, progress: Progress) -> PairEngine:
    """Warm the pair up (app/lanes/warm.py)."""
    from app.lanes.warm import warm_up

    progress("warming up", None)
    warm_up(engine)
    return engine


def watch(job: Loading, label: str, console: Console, stop: Interrupts, *, live: bool, hint: str) -> bool:
    """Wait for a job with its progress on the last line; False if Ctrl-C ended the waiting."""
    with InPlace(console) if live else nullcontext() as place:
        while not job.wait(0.1 if live else 0.02):
            if place is not None:
                line = Text(f"{label}: {job.status}  ({hint})", style="dim", overflow="ellipsis", no_wrap=True)
                with stop.whole():
                    place.draw(line)
            if stop():
                return False
    return True


def one_line(error: BaseException) -> str:
    """What went wrong, in one line; an error that is no UserError says its kind."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return text
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        return "out of memory: a smaller model, --quantization or a shorter conversation needs less"
    return f"internal: {type(error).__name__}: {text}" if text else f"internal: {type(error).__name__}"


class Pairs:
    """The engine in use and the job that is loading one, if any. `changed` is called from the job's thread."""

    def __init__(self, options: ModelOptions, loader: Loader, changed: Callable[[], None]) -> None:
        self.options, self.loader, self._changed = options, loader, changed
        self.engine: PairEngine | None = None
        self.spec: PairSpec | None = None  # of the engine, or of the first load
        self.job: Loading | None = None
        self._started: list[Loading] = []

    def begin(self, spec: PairSpec) -> None:
        """Load the first pair in the background."""
        self.spec = spec
        self.job = self._start(lambda progress, cancelled: self.loader(spec, self.options, progress, cancelled))

    def _start(self, work: Work) -> Loading:
        self._started.append(Loading(work, self._changed))
        return self._started[-1]

    @property
    def name(self) -> str:
        return self.spec.name if self.spec else "no pair"

    def collect(self) -> PairEngine | None:
        """The first pair's engine when it has just become ready, once; raises what loading raised, once."""
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
        self.spec = self.engine.loaded.spec  # another drafter may have taken the place of one that cannot be used
        return self.engine

    def switch(self, label: str, work: Work, console: Console, stop: Interrupts, *, live: bool) -> PairEngine:
        """Load in the foreground, to be taken over. UserError if that fails or Ctrl-C calls it off."""
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
        """What holds where another pair was refused."""
        return f"still {self.name}" if self.engine else "no pair is loaded: /pair NAME loads one"

    def leave(self) -> bool:
        """Cancel loading; return True if some of it does not end at once."""
        for job in self._started:
            job.cancelled.set()
        return not all(job.wait(0.2) for job in self._started)
