"""The tables of `bench` on the screen: methods, speed-ups, categories. At most 100 columns where it goes to a file.

The columns and their cells are those of the rows' own table (app/bench/summary.py). Knows no answers and no models.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from app.bench.summary import ALARM, DISTURBED, MARKS, Row, shown, times, variant_name
from app.lanes.costs import BY, applying
from app.screen.output import fitted, print_table, small_table
from app.screen.palette import Look
from app.settings.table import Settings
from sampling.stats.summary import TARGET

Rows = Sequence[Row]


def show_tables(summary: Rows, settings: Settings, console: Console) -> None:
    """Print the table of methods; the speed-ups over `ar`, in all and by category; how texts differ."""
    answers, prompts = (max(row[name] for row in summary) for name in ("answers", "prompts"))
    counted = f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answer{'s' * (answers != 1)} a method"
    print_table(console, f"{counted}; rates leave prefill out", _figures(summary, "methods", settings, console))
    alarm = Look(palette=settings.palette).style("alarm line")
    for line in (*_differences(summary), *disturbances(summary)):
        console.print(line, style=alarm if line.startswith(ALARM) else None, markup=False)
    compared = [row for row in summary if row["speedup"] is not None]
    if compared:
        repeats = max(len(row["speedup_per_repeat"]) for row in compared)
        title = f"\nspeed-up over ar, median of {repeats} repeat{'s' * (repeats != 1)}"
        print_table(console, title, _figures(compared, "speedups", settings, console))
    if categories := sorted({name for row in compared for name in row["categories"]}):
        table = small_table(settings)
        table.add_column("category", no_wrap=True)
        for row in compared:
            table.add_column(variant_name(row).replace(" ", "\n"), justify="right")
        for name in categories:
            table.add_row(name, *(times(row["categories"].get(name, {}).get("speedup")) for row in compared))
        print_table(console, "\nspeed-up by category", table)


def _figures(rows: Rows, view: str, settings: Settings, console: Console) -> Table:
    """Return the columns of a table, as many as fit."""
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


def _differences(summary: Rows) -> list[str]:
    """Return the meaning of the marks in `differs`, then the alarms."""
    known = [text for key, _, text in MARKS if any(row[key] for row in summary)]
    lines = [f"differs: {'; '.join(known)}"] if known else []
    return lines + [
        f"{ALARM}: {variant_name(row)} differs from ar beyond a near tie in {row['beyond_ties']} of {row['compared']} "
        "answers"
        for row in summary
        if row["beyond_ties"]
    ]


def disturbances(summary: Rows) -> list[str]:
    """Return a line for each row of which repeats with a disturbed timing are left out."""
    rows = ((variant_name(row), row["disturbed"], row["disturbed"] + len(row["speedup_per_repeat"])) for row in summary)
    return [f"{name}: {DISTURBED} of {count} of {whole} repeats" for name, count, whole in rows if count]


# -- the costs of models that draft -----------------------------------------------------------------


def modelled(summary: Rows) -> list[Row]:
    """Return the rows of drafters that call models."""
    return [row for row in summary if row["swi"] and calls_cell(row)]


def calls_cell(row: Row) -> str:
    """Return the calls a target pass of every model but the target."""
    return ", ".join(f"{model} {calls or 0:.2f}" for model, calls in row["calls_per_pass"].items() if model != TARGET)


def reviews_cell(row: Row) -> str:
    """Return the drafts that each reviewer passed, over those that it examined."""
    reviews = row["reviews"].items()
    return ", ".join(f"{model} {count['accepted']}/{count['examined']}" for model, count in reviews) or "-"


def swi_tables(summary: Rows) -> list[str]:
    """Return every table of costs that applies to a row."""
    known = {name for row in summary for name in applying(row["swi"])}
    return [name for name in BY if name in known]
