"""What the file of `bench --out` holds: every answer, what was measured and on what machine; and the same read back and
checked, for a report.

Figures that older files lack are None. Knows neither tables nor plots, and no figures over more than one answer
(app/bench/summary.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, JsonValue, ValidationError

from app.bench.plan import Item, Measurement
from app.bench.summary import Amount, Count, Key, SummaryRow, TimedVariant, looping_share
from app.lanes.answers import Answer, compared, parting, results, shown_settings
from app.lanes.comparison import Variant
from app.settings.types import got, named
from utils.errors import UsageError
from utils.machine import machine

Value = float | None
PARTS = ("draft", "verify", "sample", "rest", "not split")


class TimedAnswer(TimedVariant, frozen=True):
    """One answer: how many tokens, and where the time went."""

    predicted_n: Count = 0
    openings: Count = 1
    predicted_ms: Amount = 0.0
    draft_ms: Amount = 0.0
    verify_ms: Amount = 0.0
    sample_ms: Amount = 0.0


class Prompt(BaseModel, frozen=True):
    """One prompt and all answers to it."""

    question_id: int | str | None = None
    category: str | None = None
    turn: Count = 0
    prompt: str = ""
    results: list[TimedAnswer] = []


class Loops(BaseModel, frozen=True):
    """How much of the reference's answers repeats itself."""

    method: str
    period: Count
    repeats: Count
    above: Amount
    share: Amount | None = None
    prompts: Count
    looping: Count
    temperature: Amount | None = None


class Part(BaseModel, frozen=True):
    """What one start of a run that was stopped and went on has measured, and on what machine."""

    machine: dict[str, JsonValue] = {}
    answers: Count = 0


class Run(BaseModel, frozen=True, extra="allow"):
    """A whole file; what is not named here is a fact to be shown as it is."""

    __pydantic_extra__: dict[str, JsonValue]

    summary: Annotated[list[SummaryRow], Field(min_length=1)]
    machine: dict[str, JsonValue] = {}
    settings: dict[str, JsonValue] = {}
    prompts: list[Prompt] = []
    loops: Loops | None = None
    parts: list[Part] = []
    loops_by_temperature: list[Loops] = []
    complete: bool = True
    notes: list[str] = []
    skipped: list[str] = []


def time_split(run: Run, key: Key) -> tuple[Value, ...] | None:
    """Milliseconds a token for each of PARTS, over all answers of a variant; None without any.

    What an answer opens with (one token in our lanes), and the time to it, are in no rate. Where nothing was timed
    apart all is "not split".
    """
    answers = [answer for prompt in run.prompts for answer in prompt.results if answer.key == key]
    tokens = sum(max(0, answer.predicted_n - answer.openings) for answer in answers)
    if not tokens:
        return None
    whole = sum(answer.predicted_ms for answer in answers)
    parts = [sum(getattr(answer, f"{name}_ms") for answer in answers) for name in PARTS[:3]]
    if not any(parts):
        return (None, None, None, None, round(whole / tokens, 4))
    return *(round(part / tokens, 4) for part in (*parts, max(0.0, whole - sum(parts)))), None


def read_run(path: Path) -> Run:
    """The file at `path`; UsageError in one line if it is none of bench's."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return Run.model_validate_json(data)
    except ValidationError as error:
        raise UsageError(f"{path} is no file of bench --out: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first: dict[str, Any] = dict(error.errors(include_url=False)[0])
    place = ".".join(named(str(part)) for part in first["loc"])
    value = "" if first["type"] in ("missing", "json_invalid") else f", got {got(first['input'])}"
    return f"{place}: {first['msg']}{value}" if place else f"{first['msg']}{value}"


def facts(bench: Measurement) -> dict[str, Any]:
    """What was measured, on what machine, when."""
    loaded = bench.engine.loaded
    return {
        "pair": loaded.spec.name,
        "target": loaded.target.name,
        "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_kind,
        "machine": machine(loaded),
        "settings": shown_settings(bench.settings),
        "prompts_file": None if bench.args.prompts is None else str(bench.args.prompts),
        "methods": list(dict.fromkeys(variant.method for variant in bench.variants)),
        "gammas": list(bench.args.gammas),
        "temperatures": list(bench.args.temperatures) or None,
        "repeat": bench.args.repeat,
        "limit": bench.args.limit,
        "ids_file": None if bench.args.ids is None else str(bench.args.ids),
        "turns": bench.args.turns,
        "batch_size": bench.args.batch_size,
        "complete": not bench.interrupted,
        "skipped": bench.skipped,
        "resumed": len(bench.parts) - 1,
        "parts": bench.parts,
    }


def prompt_rows(bench: Measurement) -> list[dict[str, Any]]:
    """Of every prompt that was answered all answers, as `run --json` tells them, with gamma and repeat."""
    return [_prompt(bench, item) for item in bench.items if any(item.answers)]


def _prompt(bench: Measurement, item: Item) -> dict[str, Any]:
    return {
        "question_id": item.question.question_id,
        "category": item.question.category,
        "turn": item.turn,
        "pair": bench.engine.loaded.spec.name,
        "prompt": item.prompt,
        "settings": shown_settings(bench.settings),
        "results": [
            _result(variant, repeat, row, bench.references[variant.temperature])
            for repeat, row in enumerate(item.answers)
            for variant in bench.variants
            if variant in row
        ],
    }


def _result(variant: Variant, repeat: int, row: dict[Variant, Answer], reference: Variant) -> dict[str, Any]:
    answer = replace(row[variant], method=variant.method)
    plain = row.get(reference) if reference.method == "ar" else None
    parted = None if plain is None or variant == reference else parting(plain, row[variant])
    return {
        **results([answer], plain)[0],
        "gamma": variant.gamma,
        "temperature": variant.temperature,
        "repeat": repeat,
        "looping": round(looping_share(answer.ids), 4),
        "parting": None if parted is None else parted.to_json(),
        **compared([answer] if plain is None or variant == reference else [plain, answer]),
    }
