"""The tables of `bench` on the screen: methods, speed-ups, categories. At most 100 columns where it goes to a file.

Which columns there are and what stands in them say the rows' own table (app/bench/summary.py); knows no answers and no
models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from app.bench.summary import ALARM, DISTURBED, MARKS, Row, named, shown, times
from app.lanes.costs import BY, applying
from app.screen.output import fitted, print_table, small_table, table_width
from app.screen.palette import Look
from app.settings.table import Settings
from sampling.stats.summary import TARGET

Rows = Sequence[Row]


def show_tables(summary: Rows, loops: Rows, settings: Settings, console: Console) -> None:
    """The table of methods; where something was compared with `ar` the speed-ups, in all and by category; where
    drafters call models what they cost; how texts differ; loops, of each temperature."""
    answers, prompts = (max(row[name] for row in summary) for name in ("answers", "prompts"))
    counted = f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answer{'s' * (answers != 1)} a method"
    if (together := max(row["batch_size"] for row in summary)) > 1:
        counted += f", at most {together} at a time"
    print_table(console, f"{counted}; rates leave prefill out", _figures(summary, "methods", settings, console))
    alarm = Look(palette=settings.palette).style("alarm line")
    for line in (*_differences(summary), *disturbances(summary)):
        console.print(line, style=alarm if line.startswith(ALARM) else None, markup=False)
    compared = [row for row in summary if row["speedup"] is not None]
    if compared:
        repeats = max(len(row["speedup_per_repeat"]) for row in compared)
        title = f"\nspeed-up over ar, median of {repeats} repeat{'s' * (repeats != 1)}"
        absent = set() if any(row["worst_category"] for row in summary) else {"worst_category"}
        if not any(one["looping"] for one in loops):
            absent.add("speedup_without_loops")
        print_table(console, title, _figures(compared, "speedups", settings, console, absent))
    if any(row["categories"] for row in compared):
        print_table(console, "\nspeed-up by category", _by_category(compared, settings, console))
    if calling := modelled(summary):
        title = "\nmodel calls a target pass; standardised walltime improvement by what calls cost"
        print_table(console, title, _costs(calling, settings))
    for one in loops:
        console.print(f"\n{loops_line(one, settings.ascii)}", markup=False)


def _figures(rows: Rows, view: str, settings: Settings, console: Console, absent: Collection[str] = ()) -> Table:
    """The columns of a table, as many as fit."""
    columns = {key: column for key, column in shown(view).items() if key not in absent}
    heads = {key: column.head(view) for key, column in columns.items()}
    cells = [
        {"method": named(row), **{heads[key]: column.cell(row, key) for key, column in columns.items()}} for row in rows
    ]
    if settings.ascii:
        cells = [{head: text.replace("±", "+-") for head, text in row.items()} for row in cells]
    leaving = sorted((column.leaves, heads[key]) for key, column in columns.items() if column.leaves)
    return fitted(console, settings, cells, [head for _, head in leaving])


def _differences(summary: Rows) -> list[str]:
    """What the marks behind `differs` mean, where there are any; then the alarms."""
    known = [text for key, _, text in MARKS if any(row[key] for row in summary)]
    lines = [f"differs: {'; '.join(known)}"] if known else []
    return lines + [
        f"{ALARM}: {named(row)} differs from ar beyond a near tie in {row['beyond_ties']} of {row['compared']} answers"
        for row in summary
        if row["beyond_ties"]
    ]


def disturbances(summary: Rows) -> list[str]:
    """The rows that repeats with a disturbed timing are left out of."""
    rows = ((named(row), row["disturbed"], row["disturbed"] + len(row["speedup_per_repeat"])) for row in summary)
    return [f"{name}: {DISTURBED} of {count} of {whole} repeats" for name, count, whole in rows if count]


# -- what drafting models cost ----------------------------------------------------------------------


def modelled(summary: Rows) -> list[Row]:
    """The rows of drafters that call models."""
    return [row for row in summary if row["swi"] and calls_cell(row)]


def calls_cell(row: Row) -> str:
    """The calls a target pass of every model but the target."""
    return ", ".join(f"{model} {calls or 0:.2f}" for model, calls in row["calls_per_pass"].items() if model != TARGET)


def reviews_cell(row: Row) -> str:
    """Of each reviewer the drafts that it passed, of those that it examined."""
    return ", ".join(f"{model} {one['accepted']}/{one['examined']}" for model, one in row["reviews"].items()) or "-"


def swi_tables(summary: Rows) -> list[str]:
    """Every table of costs that applies to one of the rows."""
    known = {name for row in summary for name in applying(row["swi"])}
    return [name for name in BY if name in known]


def _costs(summary: Rows, settings: Settings) -> Table:
    """What the models of drafting lanes are called for and let pass, and SWI by every table that applies."""
    table, names = small_table(settings), swi_tables(summary)
    reviewed = any(row["reviews"] for row in summary)
    table.add_column("method", no_wrap=True)
    for head in ("calls a pass", *(["reviews passed"] if reviewed else [])):
        table.add_column(head)
    for name in names:
        table.add_column(f"by {BY[name]}", justify="right")
    for row in summary:
        reviews = [reviews_cell(row)] if reviewed else []
        table.add_row(named(row), calls_cell(row), *reviews, *(times(row["swi"][name]) for name in names))
    return table


def _by_category(summary: Rows, settings: Settings, console: Console) -> Table:
    """Methods as rows or as columns, whichever fits the console."""
    names = sorted({name for row in summary for name in row["categories"]})
    across, down = (small_table(settings) for _ in range(2))
    for head in ("method", *names):
        across.add_column(head, justify="left" if head == "method" else "right")
    down.add_column("category")
    for row in summary:
        across.add_row(named(row), *(_of_category(row, name) for name in names))
        down.add_column(named(row).replace(" ", "\n"), justify="right")
    for name in names:
        down.add_row(name, *(_of_category(row, name) for row in summary))
    wide, tall = table_width(across, console), table_width(down, console)
    return across if wide <= console.width or wide <= tall else down


def _of_category(row: Row, name: str) -> str:
    return times(row["categories"].get(name, {}).get("speedup"))


def loops_line(loops: Row, plain: bool = False) -> str:
    """How much of the reference's answers lies in loops, and how many prompts loop."""
    share, most = "-" if loops["share"] is None else f"{loops['share']:.0%}", "<=" if plain else "≤"
    where = "" if loops["temperature"] is None else f" at temperature {loops['temperature']:g}"
    ending = ', "no loops" is without them' if loops["looping"] else ""
    return (
        f"loops: {share} of {loops['method']}'s tokens{where} lie in one (period {most} {loops['period']}, "
        f"{loops['repeats']} times or more);\n{loops['looping']} of {loops['prompts']} prompts loop "
        f"(more than {loops['above']:.0%} of the tokens){ending}"
    )
