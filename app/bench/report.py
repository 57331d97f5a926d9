"""The tables of `bench` on the screen, and its report: one HTML page without scripts, with every table and plot of a
`bench --out` file.

The file is read and checked here. jinja2 fills the page (app/bench/report.html) and escapes every text; the page loads
no other file. Columns and cells come from the table of columns in app/bench/summary.py. Knows figures, no models.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, Field, JsonValue, ValidationError
from rich.console import Console
from rich.table import Table

from app.bench.plots import plots
from app.bench.summary import ALARM, DISTURBED, MARKS, SummaryFields, SummaryRow, shown, times, variant_name
from app.lanes.answers import OTHER_TEXT
from app.lanes.costs import BY, applying
from app.screen.output import fitted, print_table
from app.screen.palette import Look
from app.screen.panes import reported_line
from app.screen.rows import plural
from app.settings.table import Settings
from app.settings.types import got, named
from sampling.drafters.registry import is_simulated
from sampling.stats.summary import TARGET
from utils.errors import UsageError
from utils.files import write_text
from utils.objects import Json
from utils.remote.pieces import ServerFigures
from utils.visible import to_stderr, visible


def show_tables(summary: Sequence[SummaryFields], settings: Settings, console: Console) -> None:
    """Print the table of methods, how texts differ, and the speed-ups over `ar`, overall and by category."""
    answers, prompts = (max(row[name] for row in summary) for name in ("answers", "prompts"))
    print_table(
        console,
        f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answer{'s' * (answers != 1)} a method; "
        "rates leave prefill out",
        _figures(summary, "methods", settings, console),
    )
    alarm = Look(palette=settings.palette).style("alarm line")
    for line in (*_differences(summary), *disturbances(summary), *by_servers(summary)):
        console.print(line, style=alarm if line.startswith(ALARM) else None, markup=False)
    if compared := [row for row in summary if row["speedup"] is not None]:
        repeats = max(len(row["speedup_per_repeat"]) for row in compared)
        print_table(
            console,
            f"\nspeed-up over ar, median of {repeats} repeat{'s' * (repeats != 1)}",
            _figures(compared, "speedups", settings, console),
        )
    if categories := sorted({name for row in compared for name in row["categories"]}):
        by_variant = {variant_name(row).replace(" ", "\n"): row["categories"] for row in compared}
        cells = [
            {"category": name, **{head: times(own.get(name, {}).get("speedup")) for head, own in by_variant.items()}}
            for name in categories
        ]
        print_table(console, "\nspeed-up by category", fitted(console, settings, cells))


def _figures(rows: Sequence[SummaryFields], view: str, settings: Settings, console: Console) -> Table:
    """Return the table called `view`, with as many columns as fit."""
    columns = shown(view)
    heads = {key: column.head(view) for key, column in columns.items()}
    cells = [
        {"method": variant_name(row), **{heads[key]: column.cell(row, key) for key, column in columns.items()}}
        for row in rows
    ]
    if settings.ascii:
        cells = [{head: text.replace("±", "+-") for head, text in row.items()} for row in cells]
    leaving = sorted((column.leaves, heads[key]) for key, column in columns.items() if column.leaves)
    return fitted(console, settings, cells, [head for _, head in leaving])


def _differences(summary: Sequence[SummaryFields]) -> list[str]:
    """Return the meaning of the marks in `differs`, then the alarms."""
    known = [text for key, _, text in MARKS if any(row[key] for row in summary)]
    lines = [f"differs: {'; '.join(known)}"] if known else []
    return lines + [
        f"{ALARM}: {variant_name(row)} differs from ar beyond a near tie in {row['beyond_ties']} of {row['compared']} "
        "answers"
        for row in summary
        if row["beyond_ties"]
    ]


def disturbances(summary: Sequence[SummaryFields]) -> list[str]:
    """Return a line for each row that leaves out repeats, because their timing was disturbed."""
    rows = ((variant_name(row), row["disturbed"], row["disturbed"] + len(row["speedup_per_repeat"])) for row in summary)
    return [f"{name}: {DISTURBED} of {count} of {whole} repeats" for name, count, whole in rows if count]


def by_servers(summary: Sequence[SummaryFields]) -> list[str]:
    """Return a line with a server's figures of its drafts, for each server that reports them."""
    texts = {variant_name(row): reported_line(ServerFigures(**row["reported"])) for row in summary}
    return [f"{name}, {text}" for name, text in texts.items() if text]


# -- the costs of models that draft -----------------------------------------------------------------


def calls_cell(row: SummaryFields) -> str:
    """Return, for every model but the target, its calls per pass of the target."""
    return ", ".join(f"{model} {calls or 0:.2f}" for model, calls in row["calls_per_pass"].items() if model != TARGET)


def reviews_cell(row: SummaryFields) -> str:
    """Return, for each reviewer of a cascade, the drafts that it accepted over those that it examined."""
    return ", ".join(f"{model} {n['accepted']}/{n['examined']}" for model, n in row["reviews"].items()) or "-"


MEANINGS = {  # by column of the table of methods
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

SWI = "standardised walltime improvement: the speed-up if calls of models cost what a table says, such as their sizes"


# -- the file ---------------------------------------------------------------------------------------


class Run(BaseModel, frozen=True, extra="allow"):
    """A whole file of bench --out; keys other than these are facts, which the page shows as they are."""

    __pydantic_extra__: dict[str, JsonValue]

    summary: Annotated[list[SummaryRow], Field(min_length=1)]
    machine: dict[str, JsonValue] = {}
    settings: dict[str, JsonValue] = {}
    prompts: list[JsonValue] = []  # not on the page
    complete: bool = True
    skipped: list[str] = []


def read_run(path: Path) -> Run:
    """Read the file at `path`; UsageError in one line if it is no file of bench."""
    try:
        return Run.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first: Json = dict(error.errors(include_url=False)[0])
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    key = "".join(f"{named(str(part))}." for part in first["loc"]).removesuffix(".")
    value = "" if first["type"] in ("missing", "json_invalid") else f", got {got(first['input'])}"
    raise UsageError(f"{path} is no file of bench --out: {f'{key}: ' if key else ''}{first['msg']}{value}")


# -- the page ---------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A cell: the text that the page shows, the number in the summary, and its key there."""

    text: str
    value: JsonValue = None
    key: str = ""


def report_of(source: Path, settings: Settings, args: Namespace) -> int:
    """Write the page of a file that `bench --out` wrote; return the exit code."""
    write_text(args.report, page(read_run(source), source.name))
    if not settings.quiet:
        to_stderr(f"written: {args.report}")
    return 0


def write_report(data: Json, path: Path) -> None:
    """Write the page of the results that `bench` has just measured."""
    write_text(path, page(Run.model_validate_json(json.dumps(data)), ""))


def page(run: Run, name: str) -> str:
    """Return the page as text; `name`: that of the file from which it is made, "" for a run that has just ended."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    prompts, answers = (max(getattr(row, key) for row in run.summary) for key in ("prompts", "answers"))
    figures = [row.model_dump() for row in run.summary]
    calling = [row for row in figures if row["swi"] and calls_cell(row)]  # rows of drafters that call models
    heads = {key: column.head("report") for key, column in shown("report").items()}
    columns = [key for key in heads if any(row[key] not in (None, []) for row in figures)]
    applied = {name for row in calling for name in applying(row["swi"])}
    tables, facts = [name for name in BY if name in applied], [*run.__pydantic_extra__.items()]
    return environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).render(
        run=run,
        name=name,
        sentence=_sentence(run.summary),
        columns=["method", *(heads[key] for key in columns)],
        methods=[[Cell(variant_name(row)), *(_cell(row, key) for key in columns)] for row in figures],
        plots=plots(run.summary),
        swi_head=["method", "calls a target pass", "reviews passed", *(f"by {BY[name]}" for name in tables)],
        swi=[
            [
                *map(Cell, (variant_name(row), calls_cell(row), reviews_cell(row))),
                *(Cell(times(row["swi"][name]), row["swi"][name], name) for name in tables),
            ]
            for row in calling
        ],
        legend=[
            *((heads[key], MEANINGS[key]) for key in columns),
            *((mark, words.partition(": ")[2]) for key, mark, words in MARKS if any(row[key] for row in figures)),
            *([("SWI", SWI)] if calling else []),
        ],
        facts=[(key.replace("_", " "), _in_words(value)) for key, value in facts if value is not None],
        machine=[(key.replace("_", " "), _in_words(value)) for key, value in run.machine.items() if value is not None],
        settings=[(key, _in_words(value)) for key, value in run.settings.items()],
        counts=f"{plural(prompts, 'prompt')}, {plural(answers, 'answer')} a method; rates leave prefill out",
        disturbances=disturbances(figures),
        by_servers=by_servers(figures),
        visible=visible,
    )


def _sentence(summary: Sequence[SummaryRow]) -> str:
    """Return a sentence that names the fastest method that gives the target's text, and its speed-up; "" for none."""
    rates = (
        (row.predicted_per_second.mean, row)
        for row in summary
        if row.method not in OTHER_TEXT and not is_simulated(row.method) and row.predicted_per_second.mean
    )
    if not (timed := sorted(rates, key=lambda pair: pair[0], reverse=True)):
        return ""
    mean, best = timed[0]
    does = "writes" if len(timed) == 1 else f"is the fastest of {len(timed)} methods:"
    text = f"{_spelled(best)} {does} {mean:.1f} tokens a second"
    text += "" if best.speedup is None else f", {times(best.speedup)} plain decoding"
    if best.method == "ar" and len(timed) > 1:
        rate, second = timed[1]
        text += f"; the fastest that drafts, {_spelled(second)}, writes {rate:.1f} ({times(rate / mean)})"
    return f"{text}."


def _spelled(row: SummaryRow) -> str:
    if row.method == "ar":
        return "plain decoding (ar)"
    return row.method if row.gamma is None else f"{row.method} at gamma {row.gamma}"


def _cell(row: SummaryFields, key: str) -> Cell:
    """Return a cell of the table of methods: the screen's text with the summary's number."""
    value, text = row[key], shown("report")[key].cell(row, key)
    if isinstance(value, dict):
        return Cell(text, value["mean"], "rate")
    return Cell(text, (" ".join(map(str, value)) or None) if isinstance(value, list) else value, key)


def _in_words(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
