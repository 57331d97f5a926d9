"""`run`: one prompt, one answer (or one JSON object) on standard output, everything else on standard error.

The lanes of `--compare` run one after another, each reading the prompt itself, so that every time
is the lane's own. The last lane's text is written as it is produced. Knows no decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING

from app.lanes.answers import Answer, compared, comparison_of, results, run_lane, shown_settings
from app.lanes.costs import terms_of
from app.prompts.questions import conversation, fitting, given_prompt
from app.replay.log_writer import Asked, answer_log_of, log_writer_of
from app.screen.output import load_engine, screen
from app.screen.rows import visible
from app.screen.terminal import Interrupts
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.settings.table import ModelOptions, Settings
    from sampling.events import Event


_WIDTH = 120  # columns of figures that go to no terminal


def run_once(settings: Settings, options: ModelOptions, prompt: str | None, as_json: bool) -> int:
    """Answer one prompt under the lanes of `settings.compare`; the exit code. None reads standard input as one prompt.

    Text: the last lane's on standard output, figures and comparison on standard error. JSON: one object on standard
    output. After an interrupt the other lanes are skipped. Raises UsageError for an empty prompt, one longer than the
    context, or a lane that cannot run.
    """
    text = given_prompt(prompt, sys.stdin)
    with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as log:
        engine = load_engine(settings, options, interrupt)
        lanes, chat = engine.lanes(settings), conversation(engine, settings)
        if settings.chat and not (chat.templated or chat.single or settings.quiet):
            sys.stderr.write(f"{engine.loaded.target.name} has no chat template: the text is simply continued\n")
        asked = Asked(text, fitting(chat.plan(text).prompt, min(lane.context for lane in lanes)))
        answer_log = answer_log_of(log, engine, lanes, asked, settings, chat.text)
        writer = None if as_json else AnswerWriter(sys.stdout, chat.text)
        answers: list[Answer] = []
        for index, lane in enumerate(lanes):
            show = writer.feed if writer is not None and lane is lanes[-1] else None
            heard = show if answer_log is None else answer_log.listening(index, show)
            terms = terms_of(lane, engine)
            answers.append(run_lane(lane, list(asked.ids), chat.text, interrupt=interrupt, show=heard, terms=terms))
            if answers[-1].interrupted:
                break
        if answer_log is not None and (problem := answer_log.end()):
            sys.stderr.write(f"{problem}\n")
        if writer is None:
            head = {"pair": engine.loaded.spec.name, "prompt": text, "settings": shown_settings(settings)}
            write_json({**head, "results": results(answers), **compared(answers)})
        else:
            writer.finish(answers[-1].text)
            if not settings.quiet:
                report(answers, settings)
    return INTERRUPTED if answers[-1].interrupted else 0


def write_json(data: object) -> None:
    """One line on standard output, in ASCII where that is no UTF-8."""
    plain = (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf8sig")
    sys.stdout.write(json.dumps(data, ensure_ascii=plain, allow_nan=False) + "\n")
    sys.stdout.flush()


class AnswerWriter:
    """Writes an answer's text as its ids arrive; characters split over tokens wait until they are whole.

    On a terminal control characters of the answer are left out: a model must not move the cursor.
    """

    def __init__(self, stream: IO[str], decode: Callable[[list[int]], str]) -> None:
        self._stream, self._decode = stream, decode
        self._ids: list[int] = []
        self._written = ""
        self._safe = not stream.isatty()

    def feed(self, event: Event) -> None:
        """Take in an event and write what it added."""
        if emitted := getattr(event, "emitted", ()):
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
    """The lines of figures and how the lanes compare, on standard error."""
    from app.screen.figures import PaneData, StatsLines, note
    from app.screen.palette import Look

    console = screen(settings, sys.stderr, _WIDTH)
    look = Look(width=console.width, color=not console.no_color, ascii=settings.ascii, palette=settings.palette)
    ends = ["stopped" if answer.interrupted else "done" for answer in answers]
    panes = [
        PaneData(answer.method, stats=answer.stats, state=end, limit=settings.max_new_tokens)  # type: ignore[arg-type]
        for answer, end in zip(answers, ends, strict=True)
    ]
    console.print(StatsLines(panes, look), end="")
    if (found := comparison_of(answers)) is not None:
        console.print(found.text, style=look.style(found.style) or "")
    if cut := note(panes[-1], goes_on=False):
        console.print(cut)
