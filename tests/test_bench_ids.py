"""`bench --ids` and `--turns`: which questions are asked; the two fixed lists of the project."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from app.arguments import read_request
from app.bench import run_bench
from app.prompts import Question, chosen, cut
from app.settings import ModelOptions, Settings
from tests.tiny import write_prompts
from utils.errors import UsageError

QUESTIONS = [Question((f"question {name}",), None, name) for name in (11, 12, "a b", 12, None)]
LISTS = Path(__file__).parent.parent / "benchmarks"
SPEC_BENCH = {  # category: first and last question_id
    "writing": (81, 90),
    "coding": (121, 130),
    "extraction": (131, 140),
    "translation": (161, 240),
    "summarization": (241, 320),
    "qa": (321, 400),
    "math_reasoning": (401, 480),
    "rag": (481, 560),
}


def ids_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ids.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_listed_questions_are_asked_in_the_order_of_the_list(tmp_path: Path) -> None:
    path = ids_file(tmp_path, "# head\n\n a b \n11  # a number\n")
    assert chosen(QUESTIONS, path) == [QUESTIONS[2], QUESTIONS[0]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("11\n13\n", ':2: none of the 5 prompts have question id "13", not one (--prompts names their file)'),
        ("12\n", ':1: 2 of the 5 prompts have question id "12", not one (--prompts names their file)'),
        ("None\n", ':1: none of the 5 prompts have question id "None", not one (--prompts names their file)'),
        ("11\n# more\n11\n", ':3: question id "11" stands there twice'),
        ("# nothing\n", " holds no question ids"),
    ],
)
def test_a_wrong_list_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = ids_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        chosen(QUESTIONS, path)
    assert str(caught.value) == f"{path}{told}"


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the question ids"):
        chosen(QUESTIONS, tmp_path / "no.txt")


def test_nothing_is_loaded_for_a_wrong_list(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x", "question_id": 1}])
    request = read_request(["bench", "--prompts", str(prompts), "--ids", str(ids_file(tmp_path, "2\n"))], {})
    with pytest.raises(UsageError, match="question id"):
        run_bench(Settings(), ModelOptions(target="not/there"), request.own)


def test_only_the_first_turns_are_kept() -> None:
    three = Question(("a", "b", "c"), "x", 1, 1)
    assert cut([three], None) == [three]
    assert [question.turns for question in cut([three, QUESTIONS[0]], 2)] == [("a", "b"), ("question 11",)]


def test_the_flags_reach_the_benchmark() -> None:
    words = "bench --ids ~/dev.txt --turns 1 --against transformers:weights/plain"
    args = read_request(words.split(), {}).own
    assert (args.ids, args.turns, args.against) == (Path.home() / "dev.txt", 1, "transformers:weights/plain")
    assert read_request(["bench", "--temperatures", "0,0.7"], {}).own.temperatures == (0.0, 0.7)
    with pytest.raises(UsageError, match="--temperatures must be a comma list of numbers from 0 to 5, each once, got"):
        read_request(["bench", "--temperatures", "0,0.0"], {})
    for words in ("bench --turns 0", "bench --against vllm", "bench --against transformers:", "bench --ids"):
        with pytest.raises(UsageError, match=r"--turns must be|--against must be transformers or|--ids needs a value"):
            read_request(words.split(), {})


def fixed(name: str) -> list[tuple[int, str]]:
    lines = (LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"(\d+)  # (\w+)", line) for line in lines if not line.startswith("#")]
    return [(int(match[1]), match[2]) for match in found if match]


def test_the_fixed_lists_are_drawn_by_the_rule_in_their_heads() -> None:
    draw = random.Random(3)
    drawn: dict[str, list[tuple[int, str]]] = {"dev": [], "test": []}
    for category, (first, last) in SPEC_BENCH.items():
        ten = draw.sample(range(first, last + 1), 10)
        for name, half in (("dev", ten[:5]), ("test", ten[5:])):
            drawn[name] += [(number, category) for number in sorted(half)]
    for name, rows in drawn.items():
        assert fixed(name) == rows
        lines = (LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        assert sum(not line.startswith("#") for line in lines) == len(rows) == 40
    assert not set(fixed("dev")) & set(fixed("test"))
