"""Questions: files of prompts, a limit over their categories, a list of the questions to ask."""

from collections import Counter
from pathlib import Path

import pytest

from app.prompts.questions import Question, chosen, read_questions, stratified
from tests.support.refusals import refused
from tests.support.tiny import write_prompts
from utils.errors import UsageError

QUESTIONS = [Question((f"question {name}",), None, name) for name in (11, 12, "a b", 12, None)]


def test_prompts_and_turns_with_their_categories_are_read(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "p.jsonl", [{"prompt": "one", "category": "a"}, {"turns": ["two", "three"], "question_id": 7}]
    )
    assert read_questions(path) == [Question(("one",), "a", None, 1), Question(("two", "three"), None, 7, 2)]


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\ufefffirst\n\n  second \n", encoding="utf-8")
    assert [question.turns for question in read_questions(path)] == [("first",), ("second",)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{broken", "no JSON"),
        ("[1]", "must be a JSON object, got [1]"),
        ('{"question": "x", "answer": 2}', 'needs "prompt" or "turns" (one of them), has answer, question'),
        ('{"prompt": "x", "turns": ["y"]}', "one of them"),
        ('{"prompt": 3}', "prompt must be text and not empty, got 3"),
        ('{"prompt": "  "}', "prompt must be text and not empty"),
        ('{"turns": []}', "turns must be a list of texts and not empty, got []"),
        ('{"turns": ["x", 4]}', "turns must be a list of texts"),
        ('{"prompt": "x", "category": 5}', "category must be text, got 5"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    refusal = refused(read_questions, path)
    assert refusal.startswith(f"{path}:3: ")
    assert told in refusal


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, told in (
        ("none.jsonl", "no prompt file"),
        ("empty.jsonl", "no prompts"),
        ("binary.jsonl", "cannot read"),
    ):
        refused(read_questions, tmp_path / name, match=told)


def test_a_limit_takes_evenly_from_the_categories() -> None:
    questions = [Question((str(i),), "big" if i < 80 else ("small" if i < 90 else "tiny")) for i in range(93)]
    taken = stratified(questions, 20)
    assert Counter(question.category for question in taken) == {"big": 9, "small": 8, "tiny": 3}
    assert [questions.index(question) for question in taken] == sorted(map(questions.index, taken))
    assert stratified(questions, None) == stratified(questions, 100) == questions


def ids_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ids.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_listed_questions_are_asked_in_the_order_of_the_list(tmp_path: Path) -> None:
    assert chosen(QUESTIONS, ids_file(tmp_path, "# head\n\n a b \n11  # a number\n")) == [QUESTIONS[2], QUESTIONS[0]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("11\n13\n", ":2: none of the 5 prompts have question id 13, not one (--prompts names their file)"),
        ("12\n", ":1: 2 of the 5 prompts have question id 12, not one (--prompts names their file)"),
        ("None\n", ":1: none of the 5 prompts have question id 'None', not one (--prompts names their file)"),
        ("11\n# more\n11\n", ":3: question id 11 is listed twice"),
        ("# nothing\n", " holds no question ids"),
    ],
)
def test_a_wrong_list_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = ids_file(tmp_path, text)
    assert refused(chosen, QUESTIONS, path, kind=UsageError) == f"{path}{told}"
