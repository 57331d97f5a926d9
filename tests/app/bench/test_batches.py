"""`bench --batch-size`: rows answered together say what they say one by one, and their figures say what each cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.bench.measurement import run_rows
from app.bench.options import BenchArgs
from app.bench.run import run_bench
from app.lanes.lane import PairEngine
from app.prompts.questions import prompt_ids
from app.settings.table import ModelOptions, Settings
from sampling.events import Finished, Prefill, Step
from sampling.stats.summary import merge
from tests.support.tiny import write_prompts
from utils.errors import UsageError
from utils.progress import never

SHAPE = {"stop": True, "context": 300}

SETTINGS = Settings(max_new_tokens=10, quiet=True)
QUESTIONS = [
    {"turns": ["hello there", "and now?"], "category": "chat"},
    {"prompt": "x"},
    {"turns": ["what is 2 + 2 and what is it not?", "why?"], "category": "chat"},
    {"prompt": "y" * 400},  # longer than the context
    {"prompt": "red fish, blue fish, red fish, blue"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", QUESTIONS)


def ids_of(data: dict[str, Any]) -> dict[Any, list[int]]:
    return {
        (entry["prompt"], entry["turn"], result["method"], result["gamma"], result["repeat"]): result["ids"]
        for entry in data["prompts"]
        for result in entry["results"]
    }


def test_batches_say_what_single_prompts_say(
    options: ModelOptions, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Second turns are batches of their own; a prompt that does not fit is skipped alone."""
    told = {}
    for size in (1, 3):
        args = BenchArgs(
            prompts,
            methods=("ar", "spec", "ngram"),
            gammas=(3, "auto"),
            repeat=1 if size == 1 else 2,
            out=tmp_path / f"{size}.json",
            batch_size=size,
        )
        assert run_bench(SETTINGS, options, args) == 0
        told[size] = json.loads((tmp_path / f"{size}.json").read_text())
    one, three = (ids_of(told[size]) for size in (1, 3))
    assert len(three) == 2 * len(one) == 2 * 6 * 5
    assert {place: ids for place, ids in three.items() if place[-1] == 0} == one
    assert [row["differs"] for row in told[3]["summary"]] == [None, 0, 0, 0, 0]
    assert [row["batch_size"] for row in told[3]["summary"]] == [3] * 5
    assert (told[1]["batch_size"], told[3]["batch_size"]) == (1, 3)
    assert len(told[3]["skipped"]) == 1
    printed = capsys.readouterr().out
    assert printed.count(" at a time; rates leave prefill out") == 1
    assert told[3]["summary"][1]["tokens_per_pass"] == told[1]["summary"][1]["tokens_per_pass"] > 1


def test_the_rows_seconds_are_the_batchs(engine: PairEngine) -> None:
    """Rows that end at different times: what each cost adds up to what the lane took; the first token waits for all."""
    rows = [prompt_ids(engine, question, SETTINGS) for question in ("hello", "x" * 120, "what is it")]
    lane, events = engine.lane("spec", SETTINGS), []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(lane, name)

        def run_rows(self, *given: Any, **named: Any) -> Any:
            for event in lane.run_rows(*given, **named):
                events.append(event)
                yield event

    answers = run_rows(Watched(), rows, engine.tokenizer.decode, interrupt=never)  # type: ignore[arg-type]
    seconds = sum(event.seconds for event in events if not isinstance(event, Finished))
    total = merge(answer.stats for answer in answers)
    opening = [next(event for event in events if isinstance(event, Step) and event.row == row) for row in range(3)]
    drafting = sum(step.seconds - step.verify_s for step in opening)
    assert total.prompt_ms + total.predicted_ms + 1000 * drafting == pytest.approx(1000 * seconds)
    reading = sum(event.seconds for event in events if isinstance(event, Prefill))
    first = 1000 * (reading + sum(step.seconds for step in opening))
    assert [answer.stats.ttft_ms for answer in answers] == pytest.approx([first] * 3)
    assert [answer.stats.prompt_n for answer in answers] == list(map(len, rows))
    assert [answer.rows for answer in answers] == [3] * 3
    assert all(answer.stats.draft_n > 0 for answer in answers)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"methods": ("ar", "beam")}, "lane beam searches for one prompt at a time, got --batch-size 4"),
        ({"check_identity": True}, "--check-identity compares one prompt at a time, got --batch-size 4"),
    ],
)
def test_what_takes_one_prompt_at_a_time_is_refused_before_anything_is_loaded(more: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}$"):
        run_bench(SETTINGS, ModelOptions(target="/nowhere"), replace(BenchArgs(batch_size=4), **more))
