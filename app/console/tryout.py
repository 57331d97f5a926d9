"""/prompts and /bench: many prompts asked or timed from the console, beside the conversation, which is left as it was.

Knows the desk, no keys and no decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from app.bench.options import BenchArgs
from app.console.state import Desk, KeptError
from app.prompts.datasets import NAMED
from app.prompts.questions import Question, conversation, fitting, read_questions, stratified
from app.screen.rows import visible
from utils.errors import UserError

if TYPE_CHECKING:
    from app.chat.answered import Answered
    from app.lanes.lane import Engine
    from sampling.types import Session


SMALL = 16  # prompts that /bench takes at most
_SHOWN = 400  # characters of a prompt


def ask_all(desk: Desk, name: str) -> None:
    """Ask the prompts of a file or data set one after another, each question in a chat of its own.

    Ctrl-C stops the run. /bench takes these prompts from now on.
    """
    from app.console.about import session_stats
    from app.prompts.datasets import questions_of

    prompts = name if name in NAMED else Path(name)
    questions = questions_of(prompts, desk.settings.data_dir, offline=desk.options.offline)
    engine = _engine(desk, f"/prompts {name}")
    desk.asked = questions
    before, session = len(desk.answers), None
    for number, question in enumerate(questions, start=1):
        session = _ask(desk, engine, question, f"{number}/{len(questions)}", session)
        if desk.stopped():
            desk.hint(f"stopped at prompt {number} of {len(questions)}; the conversation is as it was")
            break
    if len(desk.answers) - before > 1:
        desk.say(session_stats(desk.answers[before:], desk.out, desk.settings))


def _ask(desk: Desk, engine: Engine, question: Question, place: str, session: Session | None) -> Session | None:
    """All turns of one question, with the target's cache of the one before."""
    from app.console.answer import answer

    chat = conversation(engine, desk.settings)
    for text in question.turns:
        if not desk.settings.quiet:
            desk.say(_heading(place, question.category, text))
        try:
            plan = chat.plan(text)
            fitting(plan.prompt, engine.context)
        except UserError as error:
            desk.fail(f"prompt {place} is left out: {error}")
            return session
        answered: Answered | None
        answered, session = answer(plan, chat, engine, session, desk)
        if answered is not None:
            desk.answers.append(answered)
        if desk.stop():
            break
    return session


def _heading(place: str, category: str | None, text: str) -> Text:
    shown = visible(text)
    cut = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN].rstrip()} …"
    return Text.assemble("\n", (f"{place}{f' {category}' if category else ''} ", "dim"), cut)


def time_lanes(desk: Desk, gammas: Sequence[int | str]) -> None:
    """Time the lanes of /compare at these gammas (without any: the setting's) over a small set of prompts."""
    from app.bench.run import Bench
    from app.bench.table import show_tables
    from app.lanes.lane import Engine

    settings = desk.settings
    engine = _engine(desk, f"/bench {','.join(map(str, gammas))}".strip())
    known = desk.asked or read_questions(None)
    questions = stratified(known, SMALL)
    args = BenchArgs(methods=settings.compare, gammas=tuple(gammas) or (settings.gamma,), repeat=1)
    count = f"{len(questions)} of {len(known)} prompts" if len(known) > len(questions) else f"{len(known)} prompts"
    # An engine of its own: what the conversation's drafters have learned stays.
    bench = Bench(Engine(engine.loaded), settings, args, questions, desk.stop)
    desk.hint(f"{count} × {', '.join(variant.label for variant in bench.variants)}; Ctrl-C keeps what was measured")
    bench.run()
    for line in bench.skipped:
        desk.hint(line)
    if bench.measured:
        summary, looping = bench.figures()
        show_tables(summary, looping, settings, desk.out)
    if desk.stopped():
        desk.hint(f"stopped after {bench.measured} answers")


def _engine(desk: Desk, line: str) -> Engine:
    """The loaded pair; where there is none yet the command goes back into the input line."""
    try:
        return desk.engine()
    except KeptError as error:
        desk.kept = line
        raise KeptError(str(error).replace("the message", "the command")) from None
