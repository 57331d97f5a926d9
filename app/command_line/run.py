"""`run`: one prompt, one answer (or one JSON object) on standard output, everything else on standard error.

The lanes of `--compare` run one after another, each reading the prompt itself, so that every time
is the lane's own. The last lane's text is written as it is produced. Knows no decoding.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING

from app.lanes.answers import Answer, compared, judged, results, run_lane, shown_settings
from app.lanes.costs import terms_of
from app.prompts.questions import fitting, given_prompt
from app.replay.log_writer import Asked, recorder_of, take_of
from app.screen.output import load_engine
from app.screen.rows import visible
from app.screen.terminal import Interrupts
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes.lane import Engine, Lane
    from app.replay.log_writer import Recorder
    from app.settings.layers import ModelOptions, Settings
    from sampling.events import Event


_WIDTH = 120  # columns of figures that go to no terminal


def run_once(settings: Settings, options: ModelOptions, prompt: str | None, as_json: bool) -> int:
    """Answer one prompt; the exit code. None reads standard input as one prompt.

    Raises UsageError for an empty prompt, one longer than the context, or a lane that cannot run.
    """
    text = given_prompt(prompt, sys.stdin)
    with Interrupts() as interrupt, recorder_of(settings) or nullcontext() as recorder:
        engine = load_engine(settings, options, interrupt)
        shot = OneShot(engine, settings, text, interrupt, recorder)
        return shot.as_json() if as_json else shot.as_text()


class OneShot:
    """One prompt under the lanes of `settings.compare`."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        text: str,
        interrupt: Callable[[], bool],
        recorder: Recorder | None = None,
    ) -> None:
        from app.prompts.questions import conversation

        self.engine, self.settings, self.text, self.interrupt = engine, settings, text, interrupt
        self.recorder = recorder
        self.lanes = engine.lanes(settings)
        chat = conversation(engine, settings)
        if settings.chat and not (chat.templated or chat.single) and not settings.quiet:
            sys.stderr.write(f"{engine.loaded.target.name} has no chat template: the text is simply continued\n")
        self.decode: Callable[[list[int]], str] = chat.text
        self.prompt = fitting(chat.plan(text).prompt, min(lane.context for lane in self.lanes))

    def as_json(self) -> int:
        """One JSON object on standard output, nothing else."""
        answers = self._answers(lambda lane: None)
        result = {
            "pair": self.engine.loaded.spec.name,
            "prompt": self.text,
            "settings": shown_settings(self.settings),
            "results": results(answers),
            **compared(answers),
        }
        plain = (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf8sig")
        sys.stdout.write(json.dumps(result, ensure_ascii=plain, allow_nan=False) + "\n")
        sys.stdout.flush()
        return INTERRUPTED if answers[-1].interrupted else 0

    def as_text(self) -> int:
        """The last lane's text on standard output; figures and verdict on standard error."""
        writer = Writer(sys.stdout, self.decode)
        last = self.lanes[-1]
        answers = self._answers(lambda lane: writer.feed if lane is last else None)
        writer.finish(answers[-1].text)
        if not self.settings.quiet:
            report(answers, self.settings)
        return INTERRUPTED if answers[-1].interrupted else 0

    def _answers(self, show: Callable[[Lane], Callable[[Event], None] | None]) -> list[Answer]:
        """Run the lanes in order; after an interrupt the rest are skipped. At least one answer."""
        answers: list[Answer] = []
        asked = Asked(self.text, self.prompt)
        take = take_of(self.recorder, self.engine, self.lanes, asked, self.settings, self.decode)
        for index, lane in enumerate(self.lanes):
            terms = terms_of(lane, self.engine)
            shown = show(lane) if take is None else take.listening(index, show(lane))
            answer = run_lane(lane, self.prompt, self.decode, interrupt=self.interrupt, show=shown, terms=terms)
            answers.append(answer)
            if answers[-1].interrupted:
                break
        if take is not None and (problem := take.end()):
            sys.stderr.write(f"{problem}\n")
        return answers


class Writer:
    """Writes an answer's text as its ids arrive; characters split over tokens wait until they are whole.

    On a terminal control characters of the answer are left out: a model must not move the cursor.
    """

    def __init__(self, stream: IO[str], decode: Callable[[list[int]], str]) -> None:
        self._stream, self._decode = stream, decode
        self._ids: list[int] = []
        self._written = ""
        self._safe = not stream.isatty()
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")

    def feed(self, event: Event) -> None:
        """Take in an event and write what it added."""
        emitted = getattr(event, "emitted", ())
        if emitted:
            self._ids += emitted
            self._write(self._decode(self._ids).rstrip("\ufffd"))

    def finish(self, text: str) -> None:
        """Write what is missing of the whole text, and a closing newline."""
        self._write(text)
        self._put("" if self._written.endswith("\n") else "\n")

    def _write(self, text: str) -> None:
        if text.startswith(self._written):
            self._put(text[len(self._written) :])
            self._written = text

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text if self._safe else visible(text))
            self._stream.flush()


def report(answers: list[Answer], settings: Settings) -> None:
    """The lines of figures and the verdict, on standard error."""
    from rich.console import Console

    from app.screen.figures import PaneData, StatsLines, note
    from app.screen.palette import Look, want_color

    color = want_color(settings, sys.stderr, os.environ)
    width = None if sys.stderr.isatty() else int(os.environ.get("COLUMNS") or _WIDTH)
    console = Console(file=sys.stderr, width=width, force_terminal=color, no_color=not color, highlight=False)
    look = Look(width=console.width, color=color, ascii=settings.ascii, palette=settings.palette)
    panes = [
        PaneData(
            answer.method,
            stats=answer.stats,
            state="stopped" if answer.interrupted else "done",
            limit=settings.max_new_tokens,
        )
        for answer in answers
    ]
    console.print(StatsLines(panes, look), end="")
    found = judged(answers)
    if found is not None:
        console.print(found.text, style=look.style(found.style) or "", markup=False)
    told = note(panes[-1]).removesuffix(", /continue")
    if told:
        console.print(told, markup=False)
