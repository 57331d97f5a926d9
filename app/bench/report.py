"""A benchmark's report: one HTML page without scripts, with every table and plot of a `bench --out` file.

The page (app/bench/report.html) is filled by jinja2, which escapes every text; nothing in it is fetched from anywhere.
Knows checked figures (app/bench/results.py), no models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.bench.results import Run, Summary, read_run
from app.bench.table import between, loops_line, method_cells
from app.lanes.costs import BY, applying
from app.screen.rows import visible
from sampling.stats.summary import TARGET
from utils.files import writable, write_text

if TYPE_CHECKING:
    from app.bench.options import ReportArgs
    from app.bench.plots import Plot
    from app.settings.layers import ModelOptions, Settings


_PAGE = Path(__file__).with_name("report.html")
_KEYS = ("rate", "speedup", "tokens_per_pass", "acceptance_rate", "alpha", "c", "v", "ttft_ms", "differs")
COLUMNS = ("method", "tok/s", "speed-up", "tok/pass", "accepted", "alpha", "c", "v", "TTFT", "differs")
_CUT = 100  # characters of a prompt


class Cell(NamedTuple):
    """A figure as it is read, the summary's own number, and its name there."""

    text: str
    value: Any = None
    key: str = ""


@dataclass(frozen=True)
class Part:
    """All of one temperature ("" where the file tells none by row)."""

    temperature: str
    methods: list[list[Cell]]
    plots: list[Plot]
    swi_head: list[str]
    swi: list[list[Cell]]


def run_report(settings: Settings, options: ModelOptions, args: ReportArgs) -> int:
    """Write the page of a file; the exit code."""
    writable(args.out)
    write_text(args.out, page(read_run(args.file), args.file.name))
    if not settings.quiet:
        sys.stderr.write(f"written: {args.out}\n")
    return 0


def write_report(data: dict[str, Any], path: Path) -> None:
    """Write the page of what `bench` has just measured."""
    write_text(path, page(Run.model_validate_json(json.dumps(data)), ""))


def page(run: Run, name: str) -> str:
    """The page as text; `name` is that of the file it was made from."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    temperatures = list(dict.fromkeys(row.temperature for row in run.summary))
    return template.render(
        run=run,
        name=name,
        columns=(*COLUMNS[:3], "range", "expected", "no loops", *COLUMNS[3:]),
        parts=[_part(run, temperature, index) for index, temperature in enumerate(temperatures)],
        facts=_facts(run),
        machine=[(key.replace("_", " "), _said(value)) for key, value in run.machine.items() if value is not None],
        settings=[(key, _said(value)) for key, value in run.settings.items()],
        loops=[loops_line(one.model_dump()) for one in run.loops_by_temperature or filter(None, [run.loops])],
        counts=_counts(run),
        prompts=[(one, _cut(one.prompt)) for one in run.prompts],
        visible=visible,
    )


def _part(run: Run, temperature: float | None, index: int) -> Part:
    from app.bench.plots import Variants, plots

    rows = [row for row in run.summary if row.temperature == temperature]
    names = {row.key: _cells(row)["method"] for row in rows}
    variants = Variants(rows, names, f"t{index}-")
    return Part(
        "" if temperature is None else f"{temperature:g}",
        [_methods(row) for row in rows],
        plots(run, variants),
        *_swi(rows),
    )


def _cells(row: Summary) -> dict[str, str]:
    return method_cells(row.model_dump())


def _methods(row: Summary) -> list[Cell]:
    """A row of the table of methods: the screen's cells with the summary's numbers."""
    name, *texts = (_cells(row)[column] for column in COLUMNS)
    values = [row.predicted_per_second.mean, *(getattr(row, key) for key in _KEYS[1:])]
    cells = [Cell(*one) for one in zip(texts, values, _KEYS, strict=True)]
    ranged = " ".join(map(str, row.speedup_per_repeat))
    further = [
        Cell(between(row.model_dump()), ranged or None, "speedup_per_repeat"),
        *(_figure(getattr(row, key), "x", key) for key in ("expected_speedup", "speedup_without_loops")),
    ]
    return [Cell(name), *cells[:2], *further, *cells[2:]]


def _figure(value: float | None, unit: str = "", key: str = "") -> Cell:
    return Cell("-" if value is None else f"{value:.2f}{unit}", value, key)


def _swi(rows: Sequence[Summary]) -> tuple[list[str], list[list[Cell]]]:
    """Head and rows of what drafters' models are called for, and the standardised walltime improvement."""
    modelled = [row for row in rows if row.swi and any(model != TARGET for model in row.calls_per_pass)]
    tables = [name for name in BY if any(name in applying(row.swi) for row in modelled)]
    head = ["method", "calls a target pass", "reviews passed", *(f"by {BY[name]}" for name in tables)]
    return head, [
        [
            Cell(_cells(row)["method"]),
            Cell(
                ", ".join(f"{model} {calls or 0:.2f}" for model, calls in row.calls_per_pass.items() if model != TARGET)
            ),
            Cell(", ".join(f"{model} {one.accepted}/{one.examined}" for model, one in row.reviews.items()) or "-"),
            *(_figure((row.swi or {}).get(name), "x", name) for name in tables),
        ]
        for row in modelled
    ]


def _facts(run: Run) -> list[tuple[str, str]]:
    """Everything else that the file says of the run, in its order."""
    extra = run.__pydantic_extra__
    return [(key.replace("_", " "), _said(value)) for key, value in extra.items() if value is not None]


def _said(value: Any) -> str:
    """A fact in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)


def _counts(run: Run) -> str:
    prompts, answers = (max(getattr(row, name) for row in run.summary) for name in ("prompts", "answers"))
    return f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answers a method; rates leave prefill out"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _CUT else f"{text[: _CUT - 1]}…"
