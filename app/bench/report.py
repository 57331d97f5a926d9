"""A benchmark's report: one HTML page without scripts, with every table and plot of a `bench --out` file.

The page (app/bench/report.html) is filled by jinja2, which escapes every text; nothing in it is fetched from anywhere.
Knows checked figures (app/bench/results.py), no models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.bench.options import BenchArgs
from app.bench.results import Run, read_run
from app.bench.summary import MARKS, OTHER_TEXT, Key, Row, SummaryRow, named, shown, times
from app.bench.table import calls_cell, disturbances, loops_line, modelled, reviews_cell, swi_tables
from app.lanes.costs import BY
from app.screen.rows import visible
from app.settings.table import Settings
from sampling.drafters.registry import is_simulated
from utils.files import writable, writable_folder, write_text

if TYPE_CHECKING:
    from app.bench.plots import Variants


_PAGE = Path(__file__).with_name("report.html")
_CUT = 100  # characters of a prompt
MEANINGS = {
    "predicted_per_second": "tokens a second after the first token: the mean of the repeats, ± their deviation",
    "speedup": "the rate over that of plain decoding (ar) in the same run, the median of the repeats",
    "speedup_per_repeat": "the least and the most speed-up of a repeat",
    "expected_speedup": "the speed-up that the formula gives for the alpha, c and v measured here",
    "speedup_without_loops": "the speed-up over the prompts of whose plain answer at most a quarter lies in loops",
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


class Cell(NamedTuple):
    """A figure as it is read, the summary's own number, and its name there."""

    text: str
    value: Any = None
    key: str = ""


def report_of(source: Path, settings: Settings, args: BenchArgs) -> int:
    """Write the page of a file that `bench --out` wrote, and its drawings; the exit code."""
    assert args.report is not None
    writable(args.report, "--report")
    if args.svg is not None:
        writable_folder(args.svg, "--svg")
    run, drawn = read_run(source), []
    write_text(args.report, page(run, source.name))
    if args.svg is not None:
        drawn = write_drawings(run, args.svg)
    if not settings.quiet:
        sys.stderr.writelines(f"written: {path}\n" for path in (args.report, *drawn))
    return 0


def write_drawings(run: Run, folder: Path) -> list[Path]:
    """Write every drawing of the page as an SVG file of its own into `folder`; their paths."""
    from app.bench.plots import plots, rates

    found = [rates(run.summary, _names(run.summary))]
    for index, temperature in enumerate(_temperatures(run)):
        found += plots(run, _variants(run, temperature, index))
    drawn = {folder / f"{plot.name}.svg": plot.drawing for plot in found if plot.drawing}
    folder.mkdir(parents=True, exist_ok=True)
    for path, drawing in drawn.items():
        write_text(path, f"{drawing}\n")
    return list(drawn)


def write_report(data: dict[str, Any], path: Path) -> None:
    """Write the page of what `bench` has just measured."""
    write_text(path, page(Run.model_validate_json(json.dumps(data)), ""))


def page(run: Run, name: str) -> str:
    """The page as text; `name` is that of the file it was made from."""
    from jinja2 import Environment, StrictUndefined

    from app.bench.plots import rates

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    temperatures = _temperatures(run)
    return template.render(
        run=run,
        name=name,
        sentences=[_sentence(run, temperature) for temperature in temperatures],
        rates=rates(run.summary, _names(run.summary)),
        parts=[_part(run, temperature, index) for index, temperature in enumerate(temperatures)],
        facts=_facts(run),
        machine=[(key.replace("_", " "), _said(value)) for key, value in run.machine.items() if value is not None],
        settings=[(key, _said(value)) for key, value in run.settings.items()],
        resumed=_resumed(run),
        loops=[loops_line(one.model_dump()) for one in run.loops_by_temperature or filter(None, [run.loops])],
        counts=_counts(run),
        disturbances=disturbances([row.model_dump() for row in run.summary]),
        prompts=[(one, _cut(one.prompt)) for one in run.prompts],
        visible=visible,
    )


def _temperatures(run: Run) -> list[float | None]:
    return list(dict.fromkeys(row.temperature for row in run.summary))


def _names(rows: Sequence[SummaryRow]) -> dict[Key, str]:
    return {row.key: named(row.model_dump()) for row in rows}


def _variants(run: Run, temperature: float | None, index: int) -> Variants:
    """The rows of one temperature, with the names of its drawings."""
    from app.bench.plots import Variants

    rows = [row for row in run.summary if row.temperature == temperature]
    return Variants(rows, _names(rows), f"t{index}-")


def _part(run: Run, temperature: float | None, index: int) -> dict[str, Any]:
    """All of one temperature ("" where the file tells none by row)."""
    from app.bench.plots import plots

    variants = _variants(run, temperature, index)
    figures = [row.model_dump() for row in variants.rows]
    calling = modelled(figures)
    columns = [key for key in shown("report") if any(row[key] not in (None, []) for row in figures)]
    tables = swi_tables(calling)
    return {
        "temperature": "" if temperature is None else f"{temperature:g}",
        "columns": ["method", *(shown("report")[key].head("report") for key in columns)],
        "methods": [_methods(row, columns) for row in figures],
        "plots": plots(run, variants),
        "swi_head": ["method", "calls a target pass", "reviews passed", *(f"by {BY[name]}" for name in tables)],
        "swi": [_costs(row, tables) for row in calling],
        "legend": _legend(columns, figures) + ([("SWI", SWI)] if calling else []),
    }


def _legend(columns: Sequence[str], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The meaning of each column, and of the marks that stand behind a difference."""
    heads = [(shown("report")[key].head("report"), MEANINGS[key]) for key in columns]
    return heads + [(mark, words.partition(": ")[2]) for key, mark, words in MARKS if any(row[key] for row in rows)]


def _sentence(run: Run, temperature: float | None) -> str:
    """The result of one temperature: the fastest of the methods that say the target's text, beside plain decoding."""
    rows = [row for row in run.summary if row.temperature == temperature and row.method not in OTHER_TEXT]
    rows = [row for row in rows if not is_simulated(row.method)]
    known = [(row.predicted_per_second.mean, row) for row in rows]
    timed = sorted(((mean, row) for mean, row in known if mean), key=lambda one: one[0], reverse=True)
    if not timed:
        return ""
    mean, best = timed[0]
    said = f"{_spelled(best)} is the fastest of {len(timed)} methods: {mean:.1f} tokens a second"
    if len(timed) == 1:
        said = f"{_spelled(best)} writes {mean:.1f} tokens a second"
    if best.speedup is not None:
        said += f", {times(best.speedup)} plain decoding"
    if best.method == "ar" and len(timed) > 1:
        rate, second = timed[1]
        said += f"; the fastest that drafts, {_spelled(second)}, writes {rate:.1f} ({times(rate / mean)})"
    return f"{said}."


def _spelled(row: SummaryRow) -> str:
    """A method with its gamma, for a sentence."""
    if row.method == "ar":
        return "plain decoding (ar)"
    return row.method if row.gamma is None else f"{row.method} at gamma {row.gamma}"


def _resumed(run: Run) -> list[list[str]]:
    """The parts of a run that was stopped and went on, under a head: answers, and what differs of their machines."""
    if len(run.parts) < 2:
        return []
    keys = dict.fromkeys(key for part in run.parts for key in part.machine)
    telling = [key for key in keys if len({_said(part.machine.get(key)) for part in run.parts}) > 1]
    rows = [
        [str(number), str(part.answers), *(_said(part.machine.get(key, "")) for key in telling)]
        for number, part in enumerate(run.parts, start=1)
    ]
    return [["part", "answers", *(key.replace("_", " ") for key in telling)], *rows]


def _methods(row: Row, columns: Sequence[str]) -> list[Cell]:
    """A row of the table of methods: the screen's cells with the summary's numbers."""
    cells = {key: Cell(shown("report")[key].cell(row, key), _number(row[key]), key) for key in columns}
    if rate := cells.get("predicted_per_second"):
        cells["predicted_per_second"] = rate._replace(key="rate")
    return [Cell(named(row)), *cells.values()]


def _number(value: Any) -> Any:
    """A figure as one number; of several repeats each."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or None
    return value["mean"] if isinstance(value, dict) else value


def _costs(row: Row, tables: Sequence[str]) -> list[Cell]:
    """What a drafter's models are called for, and the standardised walltime improvement."""
    walltimes = [Cell(times(row["swi"][name]), row["swi"][name], name) for name in tables]
    return [Cell(named(row)), Cell(calls_cell(row)), Cell(reviews_cell(row)), *walltimes]


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
