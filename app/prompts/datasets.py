"""Data sets by name: spec_bench, mt_bench, gsm8k, mmlu and hellaswag as questions; the prompts of published runs.

Each is a jsonl file of the folder that `data_dir` names. Every record becomes an object of a prompt file
(app/prompts/questions.py) first. Knows no models and no right answers: only speed is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from app.prompts.questions import (
    Question,
    chosen,
    numbered_lines,
    parsed,
    question_of,
    read_questions,
    stratified,
)
from app.settings.table import Field
from app.settings.types import Text, Whole
from utils.errors import UsageError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class DataSet:
    """`files`: its names in the folder, of which the first that exists counts.

    `entry` makes an object of a prompt file of a record, None if that is no part of the set.
    """

    files: tuple[str, ...]
    entry: Callable[[Record], dict[str, Any] | None]


def _gsm8k(row: Record) -> dict[str, Any]:
    return {"prompt": row["question"]}


def _mmlu(row: Record) -> dict[str, Any]:
    """Return the layout of Hendrycks et al. (2021): a header, the question, lettered choices, "Answer:"."""
    subject = row["subject"]
    choices = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, _choices(row), strict=False)]
    header = f"The following is a multiple choice question about {subject.replace('_', ' ')}."
    return {"prompt": "\n".join([header, "", row["question"], *choices, "Answer:"]), "category": subject}


def _choices(row: Record) -> list[Any]:
    if not isinstance(row["choices"], list):
        raise TypeError
    return row["choices"]


def _gsm8k_cascade(row: Record) -> dict[str, Any]:
    """Return the prompt of Cascade Speculative Drafting's runs (arXiv 2312.11462, csd_datasets.py), blanks included."""
    return {"prompt": f"Reason the math question below step by step. Question: {row['question']}.\n Answer: "}


def _mmlu_cascade(row: Record) -> dict[str, Any]:
    """Return the same for mmlu; four choices."""
    choices = " ".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", _choices(row), strict=False))
    prompt = f"Question: {row['question']}\n{choices}\n Answer: \n Let's think step by step. "
    return {"prompt": prompt, "category": row["subject"]}


def _hellaswag(row: Record) -> dict[str, Any]:
    return {"prompt": row["prompt"] if "prompt" in row else row["ctx"]}


def _mt_bench(row: Record) -> dict[str, Any] | None:
    """Return a question of two turns; other questions of Spec-Bench are not MT-Bench's."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or len(turns) != 2:
        return None
    return {
        "turns": turns,
        "category": row.get("category"),
        "question_id": row.get("prompt_id", row.get("question_id")),
    }


DATASETS: Mapping[str, DataSet] = {
    "spec_bench": DataSet(("spec_bench.jsonl",), dict),
    "mt_bench": DataSet(("mt_bench.jsonl", "spec_bench.jsonl"), _mt_bench),
    "gsm8k": DataSet(("gsm8k_test.jsonl",), _gsm8k),
    "mmlu": DataSet(("mmlu_sample.jsonl",), _mmlu),
    "gsm8k_cascade": DataSet(("gsm8k_test.jsonl",), _gsm8k_cascade),
    "mmlu_cascade": DataSet(("mmlu_sample.jsonl",), _mmlu_cascade),
    "hellaswag": DataSet(("hellaswag_prompts.jsonl",), _hellaswag),
}


NAMED = tuple(DATASETS)
_PROMPTS = (
    Field(
        "prompts",
        Text("FILE|NAME", f"a file or one of {', '.join(NAMED)}", NAMED, optional=True),
        None,
        f"one JSON object a line, with prompt or turns; or {', '.join(NAMED)}",
        "bench",
    ),
    Field(
        "ids",
        Text("FILE", "a file", optional=True),
        None,
        "only the prompts whose question_id this file lists, one a line",
        "bench",
    ),
    Field("turns", Whole(1), None, "ask only the first N turns of each prompt", "bench"),
    Field("limit", Whole(1), None, "take N prompts, spread over the categories", "bench"),
)
PROMPT_FIELDS: Mapping[str, Field] = {field.name: field for field in _PROMPTS}  # of the commands that ask many


def selected(args: Any, data_dir: str = "") -> list[Question]:
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
    known = DATASETS[prompts]
    folder = Path(os.path.expanduser(data_dir)) if data_dir else None
    paths = [folder / name for name in known.files] if folder else []
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        files = " or ".join(known.files)
        missing = f"no {files} in {folder}" if folder else f"no folder is given for its file {files}"
        raise UsageError(f"no data set {prompts}: {missing}; --data-dir or SPEC_DATA_DIR names the folder")
    questions = []
    for number, line in numbered_lines(file):
        where = f"{file}:{number}"
        row = parsed(line, where)
        try:
            entry = known.entry(row)
        except KeyError as error:
            raise UsageError(f'{where}: needs "{error.args[0]}", has {", ".join(sorted(row)) or "nothing"}') from None
        except (AttributeError, TypeError):
            raise UsageError(f"{where}: subject and question must be text, choices a list") from None
        if entry is not None:
            name = entry.get("question_id")  # without one a question is known by its number
            questions.append(question_of({**entry, "question_id": number if name is None else name}, where, number))
    if not questions:
        raise UsageError(f"{file} holds no questions of {prompts}")
    return questions
