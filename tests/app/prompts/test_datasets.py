"""Prompts by a data set's name: from a folder, or one clear line; limits over them."""

from pathlib import Path
from typing import Any

import pytest

from app.bench.run import run_bench
from app.command_line.arguments import read_request
from app.prompts.questions import DATASETS, NAMED, PROMPT_FIELDS, Question, questions_of
from app.settings.table import ModelOptions, Settings
from tests.support.bench import bench_with
from tests.support.refusals import refused
from tests.support.tiny import write_prompts
from utils.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows: dict[str, list[dict[str, Any]]] = {
        "spec_bench.jsonl": [
            {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
            {"question_id": 161, "category": "translation", "turns": ["three"]},
            {"question_id": 82, "category": "coding", "turns": ["four", "five"]},
        ],
        "gsm8k_test.jsonl": [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "3?", "answer": "3"}],
        "mmlu_sample.jsonl": [
            {"subject": "high_school_physics", "question": "How far?", "choices": ["1 m", "2 m"], "answer": "B"}
        ],
        "hellaswag_prompts.jsonl": [{"prompt": "[header] How to"}],
    }
    for name, lines in rows.items():
        write_prompts(tmp_path / name, lines)
    return tmp_path


def test_the_names_that_the_flags_know_are_the_data_sets() -> None:
    assert PROMPT_FIELDS["prompts"].kind.choices == NAMED == tuple(DATASETS)


def test_each_set_reads_as_its_questions(folder: Path) -> None:
    read = {name: questions_of(name, str(folder)) for name in NAMED}
    assert [question.question_id for question in read["spec_bench"]] == [81, 161, 82]
    assert read["mt_bench"] == [read["spec_bench"][0], read["spec_bench"][2]]
    assert read["gsm8k"] == [Question(("2 + 2?",), None, 1, 1), Question(("3?",), None, 2, 2)]
    text = "The following is a multiple choice question about high school physics.\n\nHow far?\nA. 1 m\nB. 2 m\nAnswer:"
    assert read["mmlu"] == [Question((text,), "high_school_physics", 1, 1)]
    # as csd_datasets.py of the published program puts them
    text = "Reason the math question below step by step. Question: 2 + 2?.\n Answer: "
    assert read["gsm8k_cascade"][0] == Question((text,), None, 1, 1)
    text = "Question: How far?\n(A) 1 m (B) 2 m\n Answer: \n Let's think step by step. "
    assert read["mmlu_cascade"] == [Question((text,), "high_school_physics", 1, 1)]
    assert read["hellaswag"] == [Question(("[header] How to",), None, 1, 1)]


def test_mt_bench_has_a_file_of_its_own_where_there_is_one(folder: Path) -> None:
    write_prompts(folder / "mt_bench.jsonl", [{"question_id": 9, "category": "stem", "turns": ["a", "b"]}])
    assert [question.question_id for question in questions_of("mt_bench", str(folder))] == [9]


def test_a_name_is_the_set_and_a_path_the_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").write_text('{"prompt": "mine"}\n')
    for word, turns in (("gsm8k", "2 + 2?"), ("./gsm8k", "mine")):
        request = read_request(["bench", "--prompts", word, "--data-dir", str(folder)], {})
        assert questions_of(request.own.prompts, request.flags["data_dir"])[0].turns == (turns,)


def test_the_folder_may_come_from_the_environment(folder: Path) -> None:
    from app.command_line.main import layers_of

    request = read_request(["bench", "--prompts", "gsm8k"], {"SPEC_DATA_DIR": str(folder)})
    assert layers_of(request).settings.data_dir == str(folder)


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert (
        refused(
            run_bench,
            Settings(data_dir=str(tmp_path)),
            ModelOptions(target="not/there"),
            bench_with("gsm8k"),
            kind=UsageError,
        )
        == f"no data set gsm8k: no gsm8k_test.jsonl in {tmp_path}; --data-dir or SPEC_DATA_DIR names the folder"
    )
    assert refused(questions_of, "spec_bench", kind=UsageError) == (
        "no data set spec_bench: no folder is given for its file spec_bench.jsonl; "
        "--data-dir or SPEC_DATA_DIR names the folder"
    )


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("gsm8k", '{"prompt": "x"}', 'gsm8k_test.jsonl:3: needs "question", has prompt'),
        ("gsm8k", "{", "gsm8k_test.jsonl:3: no JSON"),
        ("gsm8k", '{"question": 4}', "gsm8k_test.jsonl:3: prompt must be text"),
        ("mmlu", '{"subject": 1, "question": "x", "choices": []}', "mmlu_sample.jsonl:2: subject and question must be"),
        ("mmlu", '{"subject": "a", "question": "x", "choices": "ab"}', "mmlu_sample.jsonl:2: subject and question"),
        ("hellaswag", "{}", 'hellaswag_prompts.jsonl:2: needs "ctx", has nothing'),
    ],
)
def test_a_wrong_record_is_named_by_its_line(folder: Path, name: str, line: str, told: str) -> None:
    with (folder / DATASETS[name][0][0]).open("a") as file:
        file.write(f"{line}\n")
    assert refused(questions_of, name, str(folder)).startswith(f"{folder}/{told}")
