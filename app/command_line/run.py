"""`run`: one prompt; its answer, a tree of answers or one JSON object on standard output, all else on standard error.

The lanes of `--compare` take turns as in the console (app/lanes/race.py), so that a machine that slows down slows all
of them down. The last lane's text is written as it is produced. Does not know how lanes decode.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import IO

from app.chat.conversation import Plan, as_text
from app.lanes.answers import Answer, compared, comparisons_of, logprobs_of, shown_settings
from app.lanes.costs import LaneRecord
from app.lanes.lane import Lane, PairEngine, ServerLane
from app.lanes.race import Race
from app.prompts.questions import conversation, fitting, given_prompt
from app.replay.session_log import SessionLogWriter, log_writer_of
from app.screen.live import Track, sampled, tokens_of, tracks_of
from app.screen.output import load_engine, screen
from app.screen.panes import PaneData, note, stats_lines
from app.screen.rows import Lines
from app.screen.samples import SampleTree, tree_of
from app.screen.terminal import Interrupts
from app.screen.view import look_of
from app.settings.table import ModelOptions, Settings
from sampling.events import Event
from sampling.models.remote import RemoteLM
from utils.errors import UsageError
from utils.growing_text import Decode
from utils.loading.fit import TokenBytes
from utils.processes import broadcast, is_first_process
from utils.visible import to_stderr, visible

_WIDTH = 120  # columns of output that goes to no terminal


class AnswerWriter:
    """Writes an answer's text as its ids arrive; a character that is split over tokens is written when it is complete.

    On a terminal control characters are written as visible escapes: a model must not move the cursor.
    """

    def __init__(self, stream: IO[str], decode: Decode) -> None:
        self._stream, self._decode = stream, decode
        self._ids: list[int] = []
        self._written = ""
        self._safe = not stream.isatty()

    def feed(self, event: Event) -> None:
        """Write the text that an event adds."""
        if emitted := getattr(event, "emitted", ()):
            self._ids += emitted
            self._write(self._decode(self._ids).rstrip("\ufffd"))

    def finish(self, text: str) -> None:
        """Write the rest of the answer, whose whole text is `text`, and a newline unless it ends with one.

        A text that does not begin with what was written, as of a malformed channel, is written whole on a new line.
        """
        if not text.startswith(self._written):
            self._stream.write("\n")
            self._written = ""
        self._write(text)
        self._write(self._written + "\n" * (not self._written.endswith("\n")))

    def _write(self, text: str) -> None:
        if text.startswith(self._written) and text != self._written:
            added, self._written = text[len(self._written) :], text
            self._stream.write(added if self._safe else visible(added))
            self._stream.flush()


def run_samples(settings: Settings, options: ModelOptions, prompt: str | None, as_json: bool, count: int) -> int:
    """Answer one prompt `count` times, as a tree or as JSON with probabilities; return the exit code."""
    text = broadcast(given_prompt(prompt, sys.stdin) if is_first_process() else "")
    with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as log:
        engine = load_engine(settings, options, interrupt, servers=True)
        chat = conversation(engine, settings)
        plan, decode = chat.plan(text), engine.pieces.beside(chat.text)
        fitting(plan.prompt, engine.context)
        tracks = sampled(engine, settings, plan.prompt, count, decode, interrupt, plan.messages)
        if log is not None:
            to_stderr(*filter(None, [log.log_answer(engine, track, plan) for track in tracks]))
    answers, tree = [track.answer() for track in tracks], tree_of([tokens_of(track) for track in tracks])
    if as_json:
        write_json(
            {
                "pair": engine.loaded.spec.name,
                "prompt": text,
                "settings": shown_settings(settings),
                "results": [answer.to_json() for answer in answers],
                "tree": [branch.model_dump() for branch in tree],
            }
        )
    else:
        console = screen(settings, sys.stdout, _WIDTH)
        console.print(Lines(SampleTree(tree).rows(look_of(console, settings).sized()), look_of(console, settings)))
    return _exit_code(answers, answers, log)


def _exit_code(answers: list[Answer], unsaid: list[Answer], log: SessionLogWriter | None) -> int:
    """Return the exit code, 1 where the log could not be written; say each problem of the `unsaid` answers once."""
    to_stderr(*dict.fromkeys(f"error: {answer.problem}" for answer in unsaid if answer.problem))
    return max(int(log is not None and log.failed), *(answer.exit_code for answer in answers))


def run_once(
    settings: Settings, options: ModelOptions, prompt: str | None, as_json: bool, logprobs: int | None = None
) -> int:
    """Answer one prompt (None: standard input) with the lanes of `settings.compare`; return the exit code.

    As text the last lane's answer goes to standard output, figures and comparison to standard error. As JSON one object
    goes to standard output, with the `logprobs` likeliest tokens of each position. An interrupt ends all lanes. Raises
    UsageError for an empty prompt, one longer than the context, or a lane that cannot run.
    """
    text = broadcast(given_prompt(prompt, sys.stdin) if is_first_process() else "")
    with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as log:
        engine = load_engine(settings, options, interrupt, servers=True)
        lane_settings = settings if logprobs is None else settings.changed(log_top=max(1, logprobs, settings.log_top))
        lanes, chat = engine.lanes(lane_settings), conversation(engine, settings)
        if logprobs is not None:
            _want_logprobs(lanes, logprobs)
        if settings.chat and not (chat.templated or chat.single or settings.quiet):
            to_stderr(f"{engine.loaded.target.name} has no chat template: the text is simply continued")
        plan, decode = chat.plan(text), engine.pieces.beside(chat.text)
        if (markers := chat.markers_in(plan)) and not settings.quiet:
            to_stderr(as_text(markers))
        fitting(plan.prompt, min(lane.context for lane in lanes))
        race = Race(lanes, engine, plan.prompt, interrupt=interrupt, messages=plan.messages)
        writer = None if as_json else AnswerWriter(sys.stdout, decode)
        answers = _decoded(race, plan, decode, settings, log, writer, logprobs)
        if writer is None:
            write_json(
                {
                    "pair": engine.loaded.spec.name,
                    "prompt": text,
                    "settings": shown_settings(settings),
                    "results": [answer.to_json() for answer in answers],
                    **compared(answers),
                }
            )
        else:
            writer.finish(answers[-1].text)
            if not settings.quiet:
                report(answers, settings)
    return _exit_code(answers, answers if writer is None or settings.quiet else answers[:-1], log)


def _decoded(
    race: Race,
    plan: Plan,
    decode: Decode,
    settings: Settings,
    log: SessionLogWriter | None,
    writer: AnswerWriter | None,
    logprobs: int | None,
) -> list[Answer]:
    """Run a race to its end, log it, and return the answers. `writer` gets the last lane's events."""
    engine, lanes = race.engine, race.lanes
    tracks = tracks_of(lanes, engine, plan.prompt, decode)
    records = [track.lane for track in tracks]
    answer_log = None if log is None else log.open_answer(engine, records, plan, settings, decode)
    for index, event in race if answer_log is None else answer_log.tee(race):
        tracks[index].feed(event)
        if writer is not None and lanes[index] is lanes[-1]:
            writer.feed(event)
    if answer_log is not None and (problem := answer_log.end()):
        to_stderr(problem)
    if logprobs is None:
        return [track.answer() for track in tracks]
    return [_with_logprobs(*pair, engine, logprobs) for pair in zip(tracks, lanes, strict=True)]


def _want_logprobs(lanes: list[Lane], count: int) -> None:
    """Make the lanes of servers request the log-probabilities of their tokens. UsageError for a lane that has none."""
    for lane in lanes:
        if isinstance(lane, ServerLane):
            lane.top_logprobs = count
        elif lane.beams is not None or isinstance(lane.lm, RemoteLM):
            kind = "a beam search" if lane.beams is not None else "a server that verifies drafts"
            raise UsageError(f"lane {lane.name}: {kind} has no log-probabilities to show")


def _with_logprobs(track: Track, lane: Lane, engine: PairEngine, count: int) -> Answer:
    if not isinstance(lane, ServerLane):
        logprobs = logprobs_of(track.steps, TokenBytes(engine.tokenizer).spelled, count)
        return replace(track.answer(), logprobs=logprobs)
    if not lane.logprobs:
        to_stderr(f"{lane.server.address} gives no log-probabilities")
    return replace(track.answer(), logprobs={"refusal": None, "content": lane.logprobs or None})


def write_json(data: object) -> None:
    """Write one line to standard output, in ASCII unless its encoding is UTF-8."""
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf8sig")
    sys.stdout.write(json.dumps(data, ensure_ascii=ascii_only, allow_nan=False) + "\n")
    sys.stdout.flush()


def report(answers: list[Answer], settings: Settings) -> None:
    """Write the figures and comparisons of the lanes to standard error."""
    console = screen(settings, sys.stderr, _WIDTH)
    look = look_of(console, settings).sized()
    panes = [
        PaneData(
            LaneRecord(answer.method, settings=settings),
            stats=answer.stats,
            state="stopped" if answer.interrupted else "done",
        )
        for answer in answers
    ]
    console.print(stats_lines(panes, look), end="")
    for comparison in comparisons_of(answers):
        console.print(comparison.text, style=look.style(comparison.style) or "")
    if incomplete := note(panes[-1], can_continue=False):
        console.print(incomplete)
