"""A benchmark's report: one HTML page without scripts, with every table and plot of a `bench --out` file.

The file is read and checked here. The page (app/bench/report.html) is filled by jinja2, which escapes every text; it
loads nothing. Knows figures, no models.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, Field, JsonValue, ValidationError

from app.bench.plots import Variants, plots
from app.bench.summary import MARKS, OTHER_TEXT, Key, Row, SummaryRow, shown, times, variant_name
from app.bench.table import calls_cell, disturbances, modelled, reviews_cell, swi_tables
from app.lanes.costs import BY
from app.screen.rows import visible
from app.settings.table import Settings
from app.settings.types import got, named
from sampling.drafters.registry import is_simulated
from utils.errors import UsageError
from utils.files import writable, write_text

_PAGE = Path(__file__).with_name("report.html")
MEANINGS = {
    "predicted_per_second": "tokens a second after the first token: the mean of the repeats, ± their deviation",
    "speedup": "the rate over that of plain decoding (ar) in the same run, the median of the repeats",
    "speedup_per_repeat": "the least and the most speed-up of a repeat",
    "expected_speedup": "the speed-up that the formula gives for the alpha, c and v measured here",
    "tokens_per_pass": "tokens said over passes of the target, its own tokens included",
    "acceptance_rate": "accepted drafts over drafted tokens",
    "alpha": "accepted drafts over examined ones; a draft after a rejected one is not examined",
    "c": "the time of a drafted token, in one-token passes of the target",
    "v": "the time of a pass that checks drafts, in one-token passes of the target",
    "ttft_ms": "the time to the first token",
    "prompt_per_second": "tokens of the prompt read a second",
    "differs": "answers whose text is not plain decoding's, of those compared with it",
}
"""By column of the table of methods."""
SWI = "standardised walltime improvement: the speed-up if calls of models cost what a table says, such as their sizes"


# -- the file ---------------------------------------------------------------------------------------


class Run(BaseModel, frozen=True, extra="allow"):
    """A whole file; further keys are facts, which are shown as they are."""

    __pydantic_extra__: dict[str, JsonValue]

    summary: Annotated[list[SummaryRow], Field(min_length=1)]
    machine: dict[str, JsonValue] = {}
    settings: dict[str, JsonValue] = {}
    prompts: list[JsonValue] = []  # read, not shown
    complete: bool = True
    skipped: list[str] = []


def read_run(path: Path) -> Run:
    """Read the file at `path`; UsageError in one line if it is no file of bench."""
    try:
        return Run.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False)[0])
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    key = "".join(f"{named(str(part))}." for part in first["loc"]).removesuffix(".")
    value = "" if first["type"] in ("missing", "json_invalid") else f", got {got(first['input'])}"
    raise UsageError(f"{path} is no file of bench --out: {f'{key}: ' if key else ''}{first['msg']}{value}")


# -- the page ---------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A figure as it is read, the summary's own number, and its name there."""

    text: str
    value: Any = None
    key: str = ""


def report_of(source: Path, settings: Settings, args: Namespace) -> int:
    """Write the page of a file that `bench --out` wrote; return the exit code."""
    assert args.report is not None
    writable(args.report, "--report")
    write_text(args.report, page(read_run(source), source.name))
    if not settings.quiet:
        sys.stderr.write(f"written: {args.report}\n")
    return 0


def write_report(data: dict[str, Any], path: Path) -> None:
    """Write the page of what `bench` has just measured."""
    write_text(path, page(Run.model_validate_json(json.dumps(data)), ""))


def page(run: Run, name: str) -> str:
    """Return the page as text; `name` is that of the file it is made from."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    temperatures = list(dict.fromkeys(row.temperature for row in run.summary))
    prompts, answers = (max(getattr(row, key) for row in run.summary) for key in ("prompts", "answers"))
    facts = [*run.__pydantic_extra__.items()]
    return template.render(
        run=run,
        name=name,
        sentences=[_sentence(run, temperature) for temperature in temperatures],
        parts=[_part(run, temperature, index) for index, temperature in enumerate(temperatures)],
        facts=[(key.replace("_", " "), _in_words(value)) for key, value in facts if value is not None],
        machine=[(key.replace("_", " "), _in_words(value)) for key, value in run.machine.items() if value is not None],
        settings=[(key, _in_words(value)) for key, value in run.settings.items()],
        counts=f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answers a method; rates leave prefill out",
        disturbances=disturbances([row.model_dump() for row in run.summary]),
        visible=visible,
    )


def _names(rows: Sequence[SummaryRow]) -> dict[Key, str]:
    return {row.key: variant_name(row.model_dump()) for row in rows}


def _part(run: Run, temperature: float | None, index: int) -> dict[str, Any]:
    """Return all of one temperature ("" where the file has none by row)."""
    rows = [row for row in run.summary if row.temperature == temperature]
    figures = [row.model_dump() for row in rows]
    calling, heads = modelled(figures), {key: column.head("report") for key, column in shown("report").items()}
    columns = [key for key in heads if any(row[key] not in (None, []) for row in figures)]
    tables = swi_tables(calling)
    legend = [(heads[key], MEANINGS[key]) for key in columns]
    legend += [(mark, words.partition(": ")[2]) for key, mark, words in MARKS if any(row[key] for row in figures)]
    return {
        "temperature": "" if temperature is None else f"{temperature:g}",
        "columns": ["method", *(heads[key] for key in columns)],
        "methods": [_methods(row, columns) for row in figures],
        "plots": plots(Variants(rows, _names(rows), f"t{index}-")),
        "swi_head": ["method", "calls a target pass", "reviews passed", *(f"by {BY[name]}" for name in tables)],
        "swi": [
            [
                *map(Cell, (variant_name(row), calls_cell(row), reviews_cell(row))),
                *(Cell(times(row["swi"][name]), row["swi"][name], name) for name in tables),
            ]
            for row in calling
        ],
        "legend": legend + ([("SWI", SWI)] if calling else []),
    }


def _sentence(run: Run, temperature: float | None) -> str:
    """Name the fastest method of one temperature that gives the target's text, beside plain decoding; "" for none."""
    rows = [row for row in run.summary if row.temperature == temperature and row.method not in OTHER_TEXT]
    known = [(row.predicted_per_second.mean, row) for row in rows if not is_simulated(row.method)]
    timed = sorted(((mean, row) for mean, row in known if mean), key=lambda pair: pair[0], reverse=True)
    if not timed:
        return ""
    mean, best = timed[0]
    text = f"{_spelled(best)} is the fastest of {len(timed)} methods: {mean:.1f} tokens a second"
    if len(timed) == 1:
        text = f"{_spelled(best)} writes {mean:.1f} tokens a second"
    if best.speedup is not None:
        text += f", {times(best.speedup)} plain decoding"
    if best.method == "ar" and len(timed) > 1:
        rate, second = timed[1]
        text += f"; the fastest that drafts, {_spelled(second)}, writes {rate:.1f} ({times(rate / mean)})"
    return f"{text}."


def _spelled(row: SummaryRow) -> str:
    if row.method == "ar":
        return "plain decoding (ar)"
    return row.method if row.gamma is None else f"{row.method} at gamma {row.gamma}"


def _methods(row: Row, columns: Sequence[str]) -> list[Cell]:
    """Return a row of the table of methods: the screen's cells with the summary's numbers."""
    cells = [Cell(variant_name(row))]
    for key in columns:
        value, name = row[key], key
        if isinstance(value, list):
            value = " ".join(map(str, value)) or None
        if isinstance(value, dict):
            value, name = value["mean"], "rate"
        cells.append(Cell(shown("report")[key].cell(row, key), value, name))
    return cells


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
