"""/prompts and /bench: many prompts asked or timed from the console, beside the conversation, which is left as it was.

Knows the console's state, no keys and no decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from app.bench.options import BenchArgs
from app.console.about import session_stats
from app.console.answer import answer
from app.console.state import ConsoleState, NotSentError
from app.prompts.datasets import NAMED
from app.prompts.questions import Question, conversation, fitting, read_questions, stratified
from app.screen.rows import visible
from utils.errors import UserError

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine

SMALL = 16  # prompts that /bench takes at most
_SHOWN = 400  # characters of a prompt


def ask_all(state: ConsoleState, name: str) -> None:
    """Ask the prompts of a file or data set one after another, each question in a chat of its own.

    Ctrl-C stops the run. /bench takes these prompts from now on.
    """
    from app.prompts.datasets import questions_of

    prompts = name if name in NAMED else Path(name)
    questions = questions_of(prompts, state.settings.data_dir)
    loaded(state, f"/prompts {name}")
    state.asked = questions
    before = len(state.answers)
    aside = copy.copy(state)  # the same models and answers, a session and chats of its own
    aside.session, aside.goes_on = None, False
    for number, question in enumerate(questions, start=1):
        _ask(aside, question, f"{number}/{len(questions)}")
        if state.note_stop():
            state.hint(f"stopped at prompt {number} of {len(questions)}; the conversation is as it was")
            break
    if len(state.answers) - before > 1:
        state.say(session_stats(state.answers[before:], state.out, state.settings))


def _ask(aside: ConsoleState, question: Question, place: str) -> None:
    """All turns of one question, with the target's cache of the one before."""
    engine = aside.engine()
    aside.chat = chat = conversation(engine, aside.settings)
    for text in question.turns:
        if not aside.settings.quiet:
            aside.say(_heading(place, question.category, text))
        try:
            plan = chat.plan(text)
            fitting(plan.prompt, engine.context)
        except UserError as error:
            return aside.fail(f"prompt {place} is left out: {error}")
        answer(plan, aside)
        if aside.stop():
            return None
    return None


def _heading(place: str, category: str | None, text: str) -> Text:
    shown = visible(text)
    cut = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN].rstrip()} …"
    return Text.assemble("\n", (f"{place}{f' {category}' if category else ''} ", "dim"), cut)


def time_lanes(state: ConsoleState, gammas: Sequence[int | str]) -> None:
    """Time the lanes of /compare at these gammas (without any: the setting's) over a small set of prompts."""
    from app.bench.measurement import Bench
    from app.bench.table import show_tables
    from app.lanes.lane import PairEngine

    settings = state.settings
    engine = loaded(state, f"/bench {','.join(map(str, gammas))}".strip())
    known = state.asked or read_questions(None)
    questions = stratified(known, SMALL)
    args = BenchArgs(methods=settings.compare, gammas=tuple(gammas) or (settings.gamma,), repeat=1)
    count = f"{len(questions)} of {len(known)} prompts" if len(known) > len(questions) else f"{len(known)} prompts"
    # An engine of its own: what the conversation's drafters have learned stays.
    bench = Bench(PairEngine(engine.loaded), settings, args, questions, state.stop)
    state.hint(f"{count} × {', '.join(variant.label for variant in bench.variants)}; Ctrl-C keeps what was measured")
    bench.run()
    for line in bench.skipped:
        state.hint(line)
    if bench.measured:
        show_tables(*bench.figures(), settings, state.out)
    if state.note_stop():
        state.hint(f"stopped after {bench.measured} answers")


def loaded(state: ConsoleState, line: str) -> PairEngine:
    """The loaded pair; where there is none yet the command goes back into the input line."""
    try:
        return state.engine()
    except NotSentError as error:
        state.next_line = line
        raise NotSentError(str(error).replace("the message", "the command")) from None
