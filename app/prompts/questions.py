"""Prompts: one from standard input, many from a file, a data set or the built-in ones, and the ids that a model reads.

A .txt file has a prompt a line, any other a JSON object a line: `prompt` or `turns`, and optionally `category` and
`question_id`. Data sets by name are jsonl files in the folder `data_dir`; each record is first turned into an object
of a prompt file. The built-in prompts have Spec-Bench's kinds of task, in words of this project. An error names the
number of the wrong line. Knows no models beyond their tokenizer and no right answers.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from string import ascii_uppercase
from typing import IO, TYPE_CHECKING

from app.chat.conversation import ChatSettings, Conversation, Plan, clean
from app.settings.table import Field, Settings, by_name
from app.settings.types import Text, Whole, got
from utils.errors import UsageError, raise_first
from utils.files import numbered_lines, object_in, read_text
from utils.loading.loaded import NO_LIMIT
from utils.objects import Json

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


_BRIDGE = (
    "The old stone bridge at Harrow Mill was closed to cars on Monday after an inspector found cracks in its middle "
    "pier. The town had planned to repair it next year for 40,000 euros. The council now expects twice that sum, "
    "because the pier must be rebuilt from the river bed up. Until then a ferry carries people on foot and on bicycles "
    "between seven in the morning and nine at night. Drivers have to take the road over Upper Harrow, which is eleven "
    "kilometres longer. The school bus leaves twenty minutes earlier from Wednesday on."
)
_GARDEN = (
    "Minutes of the garden club, 4 May. Present: nine members. Ines reported that the greenhouse heating failed on two "
    "nights in April and that about sixty seedlings were lost. Tom has found a second-hand heater for 120 euros; the "
    "club agreed to buy it. The plant sale moves from the 11th to the 18th of May, as the hall is taken. Ruth will "
    "print new posters. Nobody has yet offered to run the cake stand. The next meeting is on the 1st of June."
)
_WHALES = (
    "[1] The blue whale is the largest animal that has ever lived; adults reach 30 metres.\n"
    "[2] Sperm whales dive deeper than 1,000 metres for squid and can stay below for more than an hour.\n"
    "[3] Humpback whales sing; a song may last twenty minutes and is repeated for hours.\n"
    "[4] Baleen whales filter small animals out of the water; toothed whales hunt single prey."
)
_LIBRARY = (
    "Opening hours: Tuesday to Friday 10 to 18, Saturday 10 to 14. Books are lent for four weeks and may be renewed "
    "twice unless somebody has reserved them. Films are lent for one week and cannot be renewed. The fee for a day's "
    "delay is 20 cents a book and 1 euro a film. Children under 14 pay no fees."
)

FIRST_QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it line by line."

# (category, turns) of each prompt; their question_id is their number, from 1.
PROMPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("writing", ("Write a short story about a lighthouse keeper who finds a message in a bottle.",)),
    ("coding", (FIRST_QUESTION,)),
    ("reasoning", ("A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show your steps.",)),
    ("extraction", ("List the colours in this text: a red barn, two white horses, a green tractor.",)),
    ("rewriting", ("Rewrite in formal English, then as a poem: thanks a lot, see you all at the beach!",)),
    ("explaining", ("Explain in simple words why the sky is blue and why sunsets are red.",)),
    (
        "chat",
        (
            "I have a free weekend and like walking and old trains. What could I do?",
            "That sounds good. Make a packing list for it, with at most eight things.",
        ),
    ),
    ("translation", ("Translate German to English: Der Zug nach Hamburg hat heute vierzig Minuten Verspätung.",)),
    ("translation", ("Translate French to English: Le marché ouvre à huit heures, mais il vaut mieux venir tôt.",)),
    ("summarisation", (f"Summarise in two sentences: {_BRIDGE}",)),
    ("summarisation", (f"Summarise for a member who was away: {_GARDEN}",)),
    ("qa", ("Which planet of our solar system has the shortest year, and how long is it?",)),
    ("maths", ("A baker sells 36 rolls at 45 cents and 8 loaves at 3.20 euros. How much is that in all?",)),
    ("maths", ("Anna is three times as old as Ben. In ten years she will be twice as old. How old are they now?",)),
    ("retrieval", (f"Use only these notes. Which whales dive deepest, and what for?\n\n{_WHALES}",)),
    ("retrieval", (f"{_LIBRARY}\n\nI am 30 and bring a book and a film back three days late. What do I pay?",)),
)


@dataclass(frozen=True)
class Question:
    """One entry of a prompt file: the user's messages, turn by turn."""

    turns: tuple[str, ...]
    category: str | None = None
    question_id: int | str | None = None
    line: int = 0


BUILT_IN = tuple(Question(turns, category, number) for number, (category, turns) in enumerate(PROMPTS, start=1))


def conversation(engine: PairEngine, settings: Settings) -> Conversation:
    """Return an empty chat under these settings, without a limit of context (:func:`fitting` checks that)."""
    return Conversation(engine.tokenizer, engine.stop_ids, NO_LIMIT, engine.encodes, *ChatSettings.of(settings))


def fitting(ids: list[int], context: int) -> list[int]:
    """Return the ids of a prompt; UsageError if there are none, or if they leave an answer no room."""
    count = len(ids)
    raise_first(
        {
            "the prompt has no tokens: give some text": not ids,
            f"the prompt is {count:,} tokens, the context holds {context:,} with room for an answer": count >= context,
        }
    )
    return ids


def turns_of(
    engine: PairEngine, settings: Settings, question: Question, skipped: list[str]
) -> Iterator[tuple[int, Plan, Conversation]]:
    """Yield number (from 0), plan and chat of each turn of a question; the caller commits the answer before it takes
    the next.

    The first prompt that does not fit into the context ends the question: `skipped` gets a line about it.
    """
    chat = conversation(engine, settings)
    for turn, text in enumerate(question.turns):
        plan = chat.plan(text)
        try:
            fitting(plan.prompt, engine.context)
        except UsageError as error:
            skipped.append(f"prompt {question.line or question.question_id}, turn {turn + 1} skipped: {error}")
            return
        yield turn, plan, chat


def prompt_ids(engine: PairEngine, text: str, settings: Settings) -> list[int]:
    """Return the ids of a message, in the chat template unless the settings turn it off. UsageError if it is too long
    or has none."""
    return fitting(conversation(engine, settings).plan(text).prompt, engine.context)


def fitting_prompts(engine: PairEngine, questions: Iterable[Question], settings: Settings) -> Iterator[list[int]]:
    """Yield the ids of the first turns of those questions that fit into the pair's context."""
    for question in questions:
        with suppress(UsageError):
            yield prompt_ids(engine, question.turns[0], settings)


def given_prompt(prompt: str | None, stream: IO[str]) -> str:
    """Return the prompt of `run`: the argument, or for None all that is piped in. UsageError if it is empty."""
    empty = "the prompt is empty: give some text"
    if prompt is None:
        if stream.isatty():
            raise UsageError('no prompt: give one (run "…"), or pipe it in')
        raw = getattr(stream, "buffer", None)
        piped = raw.read().decode("utf-8", errors="replace") if raw is not None else stream.read()
        prompt = piped.removeprefix("\ufeff").rstrip("\r\n")
        empty = 'no terminal to chat on, and standard input is empty: give a prompt (run "…"), or pipe it in'
    if not clean(prompt).strip():
        raise UsageError(empty)
    return clean(prompt)


ReadRecord = Callable[[Json], Json | None]


def read_questions(path: str | Path | None, entry: ReadRecord = dict) -> list[Question]:
    """Read the questions of a file (.txt: a prompt a line; else JSON lines), or the built-in ones. UsageError names the
    line.

    `entry` turns a record into an object of a prompt file, or into None if it is left out.
    """
    if path is None:
        return list(BUILT_IN)
    file = Path(os.path.expanduser(path))
    questions = []
    if not file.exists():
        raise UsageError(f"no prompt file {file}: name an existing .jsonl or .txt file")
    for number, line in numbered_lines(file):
        where = f"{file}:{number}"
        row = {"prompt": line} if file.name.removesuffix(".gz").endswith(".txt") else object_in(line, where)
        try:
            data = entry(row)
        except KeyError as error:
            raise UsageError(f'{where}: needs "{error.args[0]}", has {", ".join(sorted(row)) or "nothing"}') from None
        except (AttributeError, TypeError):
            raise UsageError(f"{where}: subject and question must be text, choices a list") from None
        if data is not None:
            questions.append(question_of(data, where, number))
    if not questions:
        raise UsageError(f"{file} holds no prompts")
    return questions


def chosen(questions: Sequence[Question], file: str | Path) -> list[Question]:
    """Return the questions whose ids `file` lists, one a line (# begins a comment), in its order. UsageError names a
    line."""
    path = Path(os.path.expanduser(file))
    known = [(str(question.question_id), question) for question in questions if question.question_id is not None]
    selected: dict[str, Question] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        same = [question for question_id, question in known if question_id == name]
        have = f"{len(same) or 'none'} of the {len(questions)} prompts have question id {got(name)}, not one"
        raise_first(
            {
                f"{path}:{number}: question id {got(name)} is listed twice": name in selected,
                f"{path}:{number}: {have} (--prompts names their file)": len(same) != 1,
            }
        )
        selected[name] = same[0]
    if not selected:
        raise UsageError(f"{path} holds no question ids")
    return list(selected.values())


def question_of(data: Json, where: str, number: int) -> Question:
    """Return the question of an object of a prompt file; UsageError begins with `where`."""
    turns, category, name = data.get("turns", [data.get("prompt")]), data.get("category"), data.get("question_id")
    keys = ", ".join(sorted(map(str, data))) or "nothing"
    kind = "prompt must be text" if "prompt" in data else "turns must be a list of texts"
    texts = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)
    raise_first(
        {
            f'{where}: needs "prompt" or "turns" (one of them), has {keys}': ("prompt" in data) == ("turns" in data),
            f"{where}: {kind} and not empty, got {got(data.get('prompt', turns))}": not texts,
            f"{where}: category must be text, got {got(category)}": not isinstance(category, str | None),
        }
    )
    return Question(tuple(map(clean, turns)), category, name if isinstance(name, int | str) else None, number)


def stratified(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Return at most `limit` questions, as evenly from the categories as possible, in the order of the file."""
    if limit is None or limit >= len(questions):
        return list(questions)
    categories = [question.category for question in questions]
    piles = ([at for at, name in enumerate(categories) if name == category] for category in dict.fromkeys(categories))
    in_turn = [index for turn in zip_longest(*piles) for index in turn if index is not None]
    return [questions[index] for index in sorted(in_turn[:limit])]


def _mmlu(row: Json) -> Json:
    """Return the layout of Hendrycks et al. (2021): a header, the question, lettered choices, "Answer:"."""
    subject = row["subject"]
    choices = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, _choices(row), strict=False)]
    header = f"The following is a multiple choice question about {subject.replace('_', ' ')}."
    return {"prompt": "\n".join([header, "", row["question"], *choices, "Answer:"]), "category": subject}


def _choices(row: Json) -> list[str]:
    if not isinstance(row["choices"], list):
        raise TypeError
    return row["choices"]


def _gsm8k_cascade(row: Json) -> Json:
    """Return the prompt of Cascade Speculative Drafting's runs (arXiv 2312.11462, csd_datasets.py), blanks included."""
    return {"prompt": f"Reason the math question below step by step. Question: {row['question']}.\n Answer: "}


def _mmlu_cascade(row: Json) -> Json:
    """Return the same for mmlu; four choices."""
    choices = " ".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", _choices(row), strict=False))
    prompt = f"Question: {row['question']}\n{choices}\n Answer: \n Let's think step by step. "
    return {"prompt": prompt, "category": row["subject"]}


def _mt_bench(row: Json) -> Json | None:
    """Return a question of two turns; other questions of Spec-Bench are not MT-Bench's."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or len(turns) != 2:
        return None
    return {
        "turns": turns,
        "category": row.get("category"),
        "question_id": row.get("prompt_id", row.get("question_id")),
    }


# By a set's name: the names of its file in the folder, of which the first that exists is read; and the function that
# turns a record into an object of a prompt file, or into None if it is not part of the set.
DATASETS: Mapping[str, tuple[tuple[str, ...], ReadRecord]] = {
    "spec_bench": (("spec_bench.jsonl",), dict),
    "mt_bench": (("mt_bench.jsonl", "spec_bench.jsonl"), _mt_bench),
    "gsm8k": (("gsm8k_test.jsonl",), lambda row: {"prompt": row["question"]}),
    "mmlu": (("mmlu_sample.jsonl",), _mmlu),
    "gsm8k_cascade": (("gsm8k_test.jsonl",), _gsm8k_cascade),
    "mmlu_cascade": (("mmlu_sample.jsonl",), _mmlu_cascade),
    "hellaswag": (("hellaswag_prompts.jsonl",), lambda row: {"prompt": row["prompt" if "prompt" in row else "ctx"]}),
}

NAMED = tuple(DATASETS)
PROMPT_FIELDS = by_name(  # flags of the commands that answer many prompts
    Field(
        "prompts",
        Text("FILE|NAME", f"a file or one of {', '.join(NAMED)}", NAMED, optional=True),
        help=f"one JSON object a line, with prompt or turns; or {', '.join(NAMED)}",
    ),
    Field(
        "ids",
        Text("FILE", "a file", optional=True),
        help="only the prompts whose question_id this file lists, one a line",
    ),
    Field("turns", Whole(1), help="ask only the first N turns of each prompt"),
    Field("limit", Whole(1), help="take N prompts, spread over the categories"),
)


def selected(args: Namespace, data_dir: str = "") -> list[Question]:
    """Return the questions of --prompts that --ids and --limit choose, cut to their first --turns turns."""
    known = questions_of(args.prompts, data_dir)
    listed = known if args.ids is None else chosen(known, args.ids)
    return [replace(question, turns=question.turns[: args.turns]) for question in stratified(listed, args.limit)]


def questions_of(prompts: str | Path | None, data_dir: str = "") -> list[Question]:
    """Return the questions of a data set's name, of a file, or the built-in ones.

    A name means the set even if a file has that name (./NAME is the file). UsageError names the line, or the missing
    file of a set.
    """
    if not isinstance(prompts, str) or prompts not in DATASETS:
        return read_questions(prompts)
    names, entry = DATASETS[prompts]
    folder, files = os.path.expanduser(data_dir), " or ".join(names)
    paths = [Path(folder, name) for name in names if folder]
    if (file := next((path for path in paths if path.is_file()), None)) is None:
        missing = f"no {files} in {Path(folder)}" if folder else f"no folder is given for its file {files}"
        raise UsageError(f"no data set {prompts}: {missing}; --data-dir or SPEC_DATA_DIR names the folder")
    read = read_questions(file, entry)
    # The line's number is the id of a question that has none.
    return [each if each.question_id is not None else replace(each, question_id=each.line) for each in read]
