"""Which pair is loaded, and the loading of one behind the prompt or before the user's eyes.

One piece of work runs in a thread, with its progress and a way to call it off. A pair that fails to load leaves the one
before in its place. Knows no decoding; what loads is given as a function, so it imports no torch itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Console
from rich.text import Text

from app.screen.terminal import InPlace, Interrupts
from utils.errors import UserError

if TYPE_CHECKING:
    from app.lanes.lane import Engine
    from app.settings.layers import ModelOptions
    from utils.catalogue.specs import PairSpec


T = TypeVar("T")
Progress = Callable[[str, float | None], None]
Work = Callable[[Progress, Callable[[], bool]], T]

Cancelled = Callable[[], bool]
Loader = Callable[["PairSpec", "ModelOptions", Progress, Cancelled], "Engine"]


class Job(Generic[T]):
    """Runs `work(progress, cancelled)` in a daemon thread from :meth:`start` on.

    `changed` is called, in that thread, whenever the status line may have changed.
    """

    def __init__(self, work: Work[T], changed: Callable[[], None] = lambda: None) -> None:
        self._work, self._changed = work, changed
        self._stage, self._fraction = "starting", None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._cancelled, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)

    _fraction: float | None

    def start(self) -> Job[T]:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._value = self._work(self._progress, self._cancelled.is_set)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            self._changed()

    def _progress(self, stage: str, fraction: float | None) -> None:
        before = self.status
        self._stage, self._fraction = stage, fraction
        if self.status != before:
            self._changed()

    @property
    def status(self) -> str:
        """What it is doing: "converting 42%", or "" once it has ended."""
        if self.done:
            return ""
        share = "" if self._fraction is None else f" {100 * min(1.0, max(0.0, self._fraction)):.0f}%"
        return f"{self._stage}{share}"

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once it has ended."""
        return self._error if self.done else None

    def cancel(self) -> None:
        """Ask it to end early; it does so at its next look, with an error of its own."""
        self._cancelled.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended within so many seconds."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """What it made; raises what it raised. Waits for the end."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def load_engine(spec: PairSpec, options: ModelOptions, progress: Progress, cancelled: Cancelled) -> Engine:
    """Load a pair and make it ready to decode: one pass is run, so that the first answer's figures are fair.

    Where the pair's tables or trained drafter cannot be used, n-grams of the conversation draft instead and a
    note says why: the console is of use without them.
    """
    progress("starting", None)
    from app.lanes.drafters import UnusableDrafterError
    from app.lanes.lane import Engine
    from app.lanes.pairing import load_options, with_drafter
    from app.lanes.processes import load_pair
    from utils.loading.loading import load_drafter

    given = load_options(options)
    loaded = load_pair(spec, given, progress, cancelled)
    try:
        engine = Engine(loaded)
    except UnusableDrafterError as error:
        note = f"{error.why}: drafting by n-gram instead"
        engine = Engine(replace(load_drafter(loaded, with_drafter(spec, "ngram"), given), notes=(note,)))
    return warm(engine, progress)


def load_another_drafter(
    engine: Engine, name: str, options: ModelOptions, progress: Progress, cancelled: Cancelled
) -> Engine:
    """The same target with another drafter."""
    from app.lanes.lane import Engine
    from app.lanes.pairing import load_options, with_drafter
    from utils.loading.loading import load_drafter

    spec = with_drafter(engine.loaded.spec, name)
    return warm(Engine(load_drafter(engine.loaded, spec, load_options(options), progress, cancelled)), progress)


def warm(engine: Engine, progress: Progress) -> Engine:
    """Run two small passes, and a trained drafter's: the first ones of a process are slower than any after them."""
    from app.settings.layers import Settings
    from sampling.types import Draft

    progress("warming up", None)
    for width in (8, 9):
        ids = [0] * width
        engine.open(ids).score([ids], Draft.empty(1))
    if engine.loaded.student is not None:
        for _ in engine.lane("spec", Settings(max_new_tokens=4)).run(ids):
            pass
        engine.forget()
    return engine


def watch(job: Job[Any], label: str, console: Console, stop: Interrupts, *, live: bool, hint: str) -> bool:
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
        self.engine: Engine | None = None
        self.spec: PairSpec | None = None  # of the engine, or of the first load
        self.job: Job[Engine] | None = None
        self._started: list[Job[Engine]] = []

    def begin(self, spec: PairSpec) -> None:
        """Load the first pair behind the prompt."""
        self.spec = spec
        self.job = self._start(lambda progress, cancelled: self.loader(spec, self.options, progress, cancelled))

    def _start(self, work: Work[Engine]) -> Job[Engine]:
        job = Job(work, self._changed).start()
        self._started.append(job)
        return job

    @property
    def name(self) -> str:
        return self.spec.name if self.spec else "no pair"

    def collect(self) -> Engine | None:
        """The first pair's engine when it has just become ready, once; raises what loading raised, once."""
        job = self.job
        if job is None or not job.done:
            return None
        self.job = None
        try:
            self.engine = job.result()
        except Exception as error:
            name = self.name
            self.spec = None
            raise UserError(f"{name} could not be loaded: {one_line(error)} (/pair NAME loads another)") from error
        self.spec = self.engine.loaded.spec  # another drafter may have taken the place of one that cannot be used
        return self.engine

    def switch(self, label: str, work: Work[Engine], console: Console, stop: Interrupts, *, live: bool) -> Engine:
        """Load in the foreground. Raises UserError if it fails or Ctrl-C calls it off; the old engine stays."""
        if self.job is not None:
            self.job.cancel()
            self.job, self.spec = None, None
        job = self._start(work)
        if not watch(job, label, console, stop, live=live, hint="Ctrl-C calls it off"):
            job.cancel()
            raise UserError(f"loading {label} was called off ({self._still()})")
        try:
            self.engine = job.result()
        except Exception as error:
            raise UserError(f"{one_line(error)} ({self._still()})") from error
        return self.engine

    def _still(self) -> str:
        return f"still {self.name}" if self.engine else "no pair is loaded: /pair NAME loads one"

    def leave(self) -> bool:
        """Call off what is loading; True if some of it does not end at once."""
        for job in self._started:
            job.cancel()
        return not all(job.wait(0.2) for job in self._started)
