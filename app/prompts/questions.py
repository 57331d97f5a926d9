"""Prompts: one from standard input, many from a file, and the ids that a model reads for a text.

Files are jsonl (`prompt`, or `turns`; optionally `category` and `question_id`) or plain text with a
prompt a line. Knows no models beyond their tokenizer; a wrong line is named by its number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from app.chat.conversation import Conversation, clean
from app.prompts.built_in import PROMPTS
from utils.errors import UsageError
from utils.files import read_text
from utils.loading.loaded import NO_LIMIT

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from app.settings.table import Settings


@dataclass(frozen=True)
class Question:
    """One entry of a prompt file: the user's messages, turn by turn."""

    turns: tuple[str, ...]
    category: str | None = None
    question_id: int | str | None = None
    line: int = 0


BUILT_IN = tuple(Question(turns, category, number) for number, (category, turns) in enumerate(PROMPTS, start=1))


def conversation(engine: PairEngine, settings: Settings) -> Conversation:
    """Return an empty chat under these settings, without a limit: see :func:`fitting`."""
    return Conversation(
        engine.tokenizer,
        engine.stop_ids,
        NO_LIMIT,
        system=settings.system,
        chat=settings.chat,
        single=engine.encodes,
        template=settings.template,
    )


def fitting(ids: list[int], context: int) -> list[int]:
    """Return the ids of a prompt; UsageError if there are none, or if they leave an answer no room."""
    if not ids:
        raise UsageError("the prompt has no tokens: give some text")
    if len(ids) >= context:
        raise UsageError(f"the prompt is {len(ids):,} tokens, the context holds {context:,} with room for an answer")
    return ids


def prompt_ids(engine: PairEngine, text: str, settings: Settings) -> list[int]:
    """Return the ids of a message, in the chat template unless the settings turn it off. UsageError if too long."""
    return fitting(conversation(engine, settings).plan(text).prompt, engine.context)


def fitting_prompts(engine: PairEngine, questions: Iterable[Question], settings: Settings) -> Iterator[list[int]]:
    """Yield the ids of the first turns of those questions that fit into the pair's context."""
    for question in questions:
        try:
            ids = prompt_ids(engine, question.turns[0], settings)
        except UsageError:
            continue
        yield ids


def given_prompt(prompt: str | None, stream: IO[str]) -> str:
    """Return the prompt of `run`: the argument, or for None all of the pipe as one prompt. UsageError if empty."""
    if prompt is None and stream.isatty():
        raise UsageError('no prompt: give one (run "…"), or pipe it in')
    if prompt is None:
        raw = getattr(stream, "buffer", None)
        piped = raw.read().decode("utf-8", errors="replace") if raw is not None else stream.read()
        text = clean(piped.removeprefix("\ufeff").rstrip("\r\n"))
    else:
        text = clean(prompt)
    if not text.strip() and prompt is None:
        raise UsageError('no terminal to chat on, and standard input is empty: give a prompt (run "…"), or pipe it in')
    if not text.strip():
        raise UsageError("the prompt is empty: give some text")
    return text


def read_questions(path: str | Path | None) -> list[Question]:
    """Read the questions of a file (.jsonl, else a prompt a line), or the built-in ones. UsageError names the line."""
    if path is None:
        return list(BUILT_IN)
    file = Path(os.path.expanduser(path))
    questions = []
    for number, line in numbered_lines(file):
        where = f"{file}:{number}"
        plain = file.suffix == ".txt"
        questions.append(question_of({"prompt": line} if plain else parsed(line, where), where, number))
    if not questions:
        raise UsageError(f"{file} holds no prompts")
    return questions


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines of a prompt file that are not blank, with their numbers. UsageError if it cannot be read."""
    if not file.exists():
        raise UsageError(f"no prompt file {file}: name an existing .jsonl or .txt file")
    return [(number, line.strip()) for number, line in enumerate(read_text(file).split("\n"), start=1) if line.strip()]


def chosen(questions: Sequence[Question], file: str | Path) -> list[Question]:
    """Return the questions whose ids `file` lists, one a line (# begins a comment), in its order. UsageError names a
    line."""
    path = Path(os.path.expanduser(file))
    known: dict[str, list[Question]] = {}
    for question in questions:
        if question.question_id is not None:
            known.setdefault(str(question.question_id), []).append(question)
    selected: dict[str, Question] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        name = line.partition("#")[0].strip()
        same = known.get(name, [])
        if not name:
            continue
        if name in selected:
            raise UsageError(f"{path}:{number}: question id {_short(name)} is listed twice")
        if len(same) != 1:
            have = f"{len(same) or 'none'} of the {len(questions)} prompts"
            raise UsageError(
                f"{path}:{number}: {have} have question id {_short(name)}, not one (--prompts names their file)"
            )
        selected[name] = same[0]
    if not selected:
        raise UsageError(f"{path} holds no question ids")
    return list(selected.values())


def parsed(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a line; UsageError begins with `where`."""
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f'{where}: must be an object with "prompt" or "turns", got {_short(data)}')
    return data


def question_of(data: Mapping[str, Any], where: str, number: int) -> Question:
    """Return the question of an object of a prompt file; UsageError begins with `where`."""
    if ("prompt" in data) == ("turns" in data):
        keys = ", ".join(sorted(map(str, data))) or "nothing"
        raise UsageError(f'{where}: needs "prompt" or "turns" (one of them), has {keys}')
    turns = data.get("turns", [data.get("prompt")])
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        kind = "prompt must be text" if "prompt" in data else "turns must be a list of texts"
        raise UsageError(f"{where}: {kind} and not empty, got {_short(data.get('prompt', turns))}")
    category, name = data.get("category"), data.get("question_id")
    if category is not None and not isinstance(category, str):
        raise UsageError(f"{where}: category must be text, got {_short(category)}")
    known = name if isinstance(name, int | str) else None
    return Question(tuple(clean(turn) for turn in turns), category, known, number)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


def stratified(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Return at most `limit` questions, as evenly from the categories as possible, in the order of the file."""
    if limit is None or limit >= len(questions):
        return list(questions)
    piles: dict[str | None, list[int]] = {}
    for index, question in enumerate(questions):
        piles.setdefault(question.category, []).append(index)
    deepest = max(map(len, piles.values()))
    rounds = [pile[depth] for depth in range(deepest) for pile in piles.values() if depth < len(pile)]
    return [questions[index] for index in sorted(rounds[:limit])]
