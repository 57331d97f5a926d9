"""The tables of `bench` on the screen: methods, speed-ups, categories. At most 100 columns where it goes to a file.

Knows rows (app/bench_figures.py), no answers and no models.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from app.costs import BY, applying
from sampling.stats import TARGET

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from app.settings import Settings

_WIDTH = 100  # columns of a table that goes to no terminal
_COLUMNS = ("tok/s", "speed-up", "tok/pass", "accepted", "alpha", "c", "v", "TTFT", "differs")

Rows = Sequence[dict[str, Any]]


def print_tables(summary: Rows, loops: dict[str, Any], settings: Settings, stream: TextIO) -> None:
    """The table of methods; where something was compared with `ar` the speed-ups, in all and by category; where
    drafters call models what they cost; loops."""
    console = screen(settings, stream)
    answers, prompts = (max(row[name] for row in summary) for name in ("answers", "prompts"))
    counted = f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answers a method"
    _print(console, f"{counted}; rates leave prefill out", _methods(summary, settings))
    compared = [row for row in summary if row["speedup"] is not None]
    if compared:
        repeats = max(len(row["speedup_per_repeat"]) for row in compared)
        title = f"\nspeed-up over ar, median of {repeats} repeat{'s' * (repeats != 1)}"
        _print(console, title, _speedups(compared, loops, settings))
    if any(row["categories"] for row in compared):
        _print(console, "\nspeed-up by category", _by_category(compared, settings, console))
    modelled = [row for row in summary if _others(row)]
    if modelled:
        title = "\nmodel calls a target pass; standardised walltime improvement by what calls cost"
        _print(console, title, _costs(modelled, settings))
    console.print(f"\n{_loops_line(loops, settings)}", markup=False)


def screen(settings: Settings, stream: TextIO) -> Console:
    """The console for tables on `stream`: --color outranks the environment; 100 columns where it is no terminal."""
    from rich.console import Console

    from app.cli import want_color

    color = want_color(settings, stream, os.environ)
    width = None if stream.isatty() else int(os.environ.get("COLUMNS") or _WIDTH)
    return Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False)


def _print(console: Console, title: str, table: Table) -> None:
    """The title has the console's width, not the table's."""
    console.print(title, style="italic", markup=False)
    console.print(table)


def small_table(settings: Settings) -> Table:
    """A table without frame."""
    from rich import box
    from rich.table import Table

    lines = box.ASCII if settings.ascii else box.SIMPLE_HEAD
    narrow: dict[str, Any] = {"show_edge": False, "pad_edge": False, "padding": (0, 0, 0, 1)}
    return Table(box=lines, **narrow)


def _methods(summary: Rows, settings: Settings) -> Table:
    table = small_table(settings)
    table.add_column("method", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in summary:
        rate = row["predicted_per_second"]
        spread = "" if rate["spread"] is None else f" {'+-' if settings.ascii else '±'}{rate['spread']:.1f}"
        table.add_row(
            _named(row),
            _shown(rate["mean"], ".1f") + spread,
            _times(row["speedup"]),
            _shown(row["tokens_per_pass"], ".2f"),
            _shown(row["acceptance_rate"], ".0%"),
            _shown(row["alpha"], ".2f"),
            _shown(row["c"], ".3f"),
            _shown(row["v"], ".2f"),
            f"{row['ttft_ms']:.0f} ms" if row["ttft_ms"] is not None else "-",
            "-" if row["differs"] is None else f"{row['differs']}/{row['compared']}",
        )
    return table


def _speedups(summary: Rows, loops: dict[str, Any], settings: Settings) -> Table:
    """Each speed-up with its range over the repeats, the modelled one, its worst category, and without loops."""
    table = small_table(settings)
    rivals = [row["over_rivals"]["rival"] for row in summary if row["over_rivals"]]
    worst = any(row["worst_category"] for row in summary)
    table.add_column("method", no_wrap=True)
    for name in ("median", "range", "expected", *(["no loops"] if loops["looping"] else [])):
        table.add_column(name, justify="right")
    if worst:
        table.add_column("worst category", justify="right")
    if rivals:
        table.add_column(f"over {rivals[0]}", justify="right")
    for row in summary:
        low, high = min(row["speedup_per_repeat"]), max(row["speedup_per_repeat"])
        between = f"{low:.2f}-{_times(high)}" if len(row["speedup_per_repeat"]) > 1 else "-"
        cells = [_times(row["speedup"]), between, _times(row["expected_speedup"])]
        if loops["looping"]:
            cells.append(_times(row["speedup_without_loops"]))
        if worst:
            told = row["worst_category"]
            cells.append(f"{told['name']} {_times(told['speedup'])}" if told else "-")
        if rivals:
            cells.append(_times((row["over_rivals"] or {}).get("speedup")))
        table.add_row(_named(row), *cells)
    return table


def _others(row: dict[str, Any]) -> dict[str, float]:
    """Of a lane that drafts, the calls a pass of every model but the target."""
    return {model: calls for model, calls in row["calls_per_pass"].items() if model != TARGET} if row["swi"] else {}


def _costs(summary: Rows, settings: Settings) -> Table:
    """What the models of drafting lanes are called for and let pass, and SWI by every table that applies."""
    table = small_table(settings)
    table.add_column("method", no_wrap=True)
    table.add_column("calls a pass")
    reviewed = any(row["reviews"] for row in summary)
    if reviewed:
        table.add_column("reviews passed")
    known = {name for row in summary for name in applying(row["swi"])}
    tables = [name for name in BY if name in known]
    for name in tables:
        table.add_column(f"by {BY[name]}", justify="right")
    for row in summary:
        cells = [", ".join(f"{model} {calls:.2f}" for model, calls in _others(row).items())]
        if reviewed:
            shares = [f"{model} {one['accepted']}/{one['examined']}" for model, one in row["reviews"].items()]
            cells.append(", ".join(shares) or "-")
        table.add_row(_named(row), *cells, *(_times(row["swi"][name]) for name in tables))
    return table


def _by_category(summary: Rows, settings: Settings, console: Console) -> Table:
    """Methods as rows or as columns, whichever fits the console."""
    from rich.measure import Measurement

    names = sorted({name for row in summary for name in row["categories"]})
    across, down = (small_table(settings) for _ in range(2))
    for head in ("method", *names):
        across.add_column(head, justify="left" if head == "method" else "right")
    down.add_column("category")
    for row in summary:
        across.add_row(_named(row), *(_of_category(row, name) for name in names))
        down.add_column(_named(row).replace(" ", "\n"), justify="right")
    for name in names:
        down.add_row(name, *(_of_category(row, name) for row in summary))
    room = console.options.update(max_width=10_000)
    wide, tall = (Measurement.get(console, room, table).maximum for table in (across, down))
    return across if wide <= console.width or wide <= tall else down


def _of_category(row: dict[str, Any], name: str) -> str:
    return _times(row["categories"].get(name, {}).get("speedup"))


def _loops_line(loops: dict[str, Any], settings: Settings) -> str:
    share, most = _shown(loops["share"], ".0%"), "<=" if settings.ascii else "≤"
    ending = ', "no loops" is without them' if loops["looping"] else ""
    return (
        f"loops: {share} of {loops['method']}'s tokens lie in one (period {most} {loops['period']}, "
        f"{loops['repeats']} times or more);\n{loops['looping']} of {loops['prompts']} prompts loop "
        f"(more than {loops['above']:.0%} of the tokens){ending}"
    )


def _named(row: dict[str, Any]) -> str:
    """Method and gamma, if it has one: spec 4, or spec auto(2.7) with what it asked for on average."""
    gamma, mean = row["gamma"], row["mean_gamma"]
    if gamma == "auto" and mean is not None:
        gamma = f"auto({mean:.1f})"
    return str(row["method"]) if gamma is None else f"{row['method']} {gamma}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
