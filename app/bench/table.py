"""The tables of `bench` on the screen: methods, speed-ups, categories. At most 100 columns where it goes to a file.

Knows rows (app/bench/summary.py), no answers and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from app.lanes.comparison import NEAR_TIE
from app.lanes.costs import BY, applying
from app.screen.output import fitted, print_table, screen, small_table, table_width
from sampling.stats.summary import TARGET

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from app.settings.layers import Settings

# Columns that a narrow console goes without, the least missed first.
_LEAST = ("v", "c", "TTFT", "alpha", "accepted", "tok/pass")
_LEAST_SPEEDUPS = ("expected", "range", "no loops", "worst category")

ALARM = "ALARM"
_MARKS = (
    ("near_ties", "tie", f"tie: two best logits closer than rounding ({NEAR_TIE:g} in float32)"),
    ("beyond_ties", ALARM, f"{ALARM}: elsewhere"),
    ("other_draws", "draw", "draw: another draw of the same distribution"),
    ("other_texts", "text", "text: of another model, or of a search"),
)

Rows = Sequence[dict[str, Any]]


def print_tables(summary: Rows, loops: Rows, settings: Settings, stream: TextIO) -> None:
    """The tables on a stream."""
    show_tables(summary, loops, settings, screen(settings, stream))


def show_tables(summary: Rows, loops: Rows, settings: Settings, console: Console) -> None:
    """The table of methods; where something was compared with `ar` the speed-ups, in all and by category; where
    drafters call models what they cost; how texts differ; loops, of each temperature."""
    answers, prompts = (max(row[name] for row in summary) for name in ("answers", "prompts"))
    counted = f"{prompts} prompt{'s' * (prompts != 1)}, {answers} answer{'s' * (answers != 1)} a method"
    if (together := max(row["batch_size"] for row in summary)) > 1:
        counted += f", {together} at a time"
    methods = [method_cells(row, settings.ascii) for row in summary]
    print_table(console, f"{counted}; rates leave prefill out", fitted(console, settings, methods, _LEAST))
    for line in _differences(summary):
        console.print(line, style="bold red" if line.startswith(ALARM) else None, markup=False)
    compared = [row for row in summary if row["speedup"] is not None]
    if compared:
        repeats = max(len(row["speedup_per_repeat"]) for row in compared)
        title = f"\nspeed-up over ar, median of {repeats} repeat{'s' * (repeats != 1)}"
        worst, looping = any(row["worst_category"] for row in summary), any(one["looping"] for one in loops)
        rival = next((row["over_rivals"]["rival"] for row in summary if row["over_rivals"]), None)
        cells = [_speedup_cells(row, looping, worst, rival) for row in compared]
        print_table(console, title, fitted(console, settings, cells, _LEAST_SPEEDUPS))
    if any(row["categories"] for row in compared):
        print_table(console, "\nspeed-up by category", _by_category(compared, settings, console))
    modelled = [row for row in summary if _others(row)]
    if modelled:
        title = "\nmodel calls a target pass; standardised walltime improvement by what calls cost"
        print_table(console, title, _costs(modelled, settings))
    for one in loops:
        console.print(f"\n{loops_line(one, settings.ascii)}", markup=False)


def _differences(summary: Rows) -> list[str]:
    """What the marks behind `differs` mean, where there are any; then the alarms."""
    known = [text for key, _, text in _MARKS if any(row[key] for row in summary)]
    lines = [f"differs: {'; '.join(known)}"] if known else []
    return lines + [
        f"{ALARM}: {_named(row)} differs from ar beyond a near tie in {row['beyond_ties']} of {row['compared']} answers"
        for row in summary
        if row["beyond_ties"]
    ]


def _differs(row: dict[str, Any]) -> str:
    """Of how many answers the text differs from ar's, and how: 1/6 tie. Older files do not tell how."""
    if row["differs"] is None and not row.get("may_differ"):
        return "-"
    marks = [mark for key, mark, _ in _MARKS if row.get(key)]
    of_all = f"{row['differs']}/{row['compared']}"
    if row["differs"] is None:
        of_all = f"{row['other_draws'] + row['other_texts']}/{row['may_differ']}"
    return " ".join([of_all, *marks])


def method_cells(row: dict[str, Any], plain: bool = False) -> dict[str, str]:
    """A row of the table of methods, by column; `plain` is ASCII."""
    rate = row["predicted_per_second"]
    spread = "" if rate["spread"] is None else f" {'+-' if plain else '±'}{rate['spread']:.1f}"
    return {
        "method": _named(row),
        "tok/s": _shown(rate["mean"], ".1f") + spread,
        "speed-up": _times(row["speedup"]),
        "tok/pass": _shown(row["tokens_per_pass"], ".2f"),
        "accepted": _shown(row["acceptance_rate"], ".0%"),
        "alpha": _shown(row["alpha"], ".2f"),
        "c": _shown(row["c"], ".3f"),
        "v": _shown(row["v"], ".2f"),
        "TTFT": f"{row['ttft_ms']:.0f} ms" if row["ttft_ms"] is not None else "-",
        "differs": _differs(row),
    }


def _speedup_cells(row: dict[str, Any], looping: bool, worst: bool, rival: str | None) -> dict[str, str]:
    """Each speed-up with its range over the repeats, the modelled one, its worst category, and without loops."""
    cells = {"method": _named(row), "median": _times(row["speedup"]), "range": between(row)}
    cells["expected"] = _times(row["expected_speedup"])
    if looping:
        cells["no loops"] = _times(row["speedup_without_loops"])
    if worst:
        told = row["worst_category"]
        cells["worst category"] = f"{told['name']} {_times(told['speedup'])}" if told else "-"
    if rival:
        cells[f"over {rival}"] = _times((row["over_rivals"] or {}).get("speedup"))
    return cells


def between(row: dict[str, Any]) -> str:
    """The range of a speed-up over the repeats; "-" for one repeat."""
    told = row["speedup_per_repeat"]
    return f"{min(told):.2f}-{_times(max(told))}" if len(told) > 1 else "-"


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
    wide, tall = table_width(across, console), table_width(down, console)
    return across if wide <= console.width or wide <= tall else down


def _of_category(row: dict[str, Any], name: str) -> str:
    return _times(row["categories"].get(name, {}).get("speedup"))


def loops_line(loops: dict[str, Any], plain: bool = False) -> str:
    """How much of the reference's answers lies in loops, and how many prompts loop."""
    share, most = _shown(loops["share"], ".0%"), "<=" if plain else "≤"
    heat = loops.get("temperature")
    where = "" if heat is None else f" at temperature {heat:g}"
    ending = ', "no loops" is without them' if loops["looping"] else ""
    return (
        f"loops: {share} of {loops['method']}'s tokens{where} lie in one (period {most} {loops['period']}, "
        f"{loops['repeats']} times or more);\n{loops['looping']} of {loops['prompts']} prompts loop "
        f"(more than {loops['above']:.0%} of the tokens){ending}"
    )


def _named(row: dict[str, Any]) -> str:
    """Method, gamma and temperature, if it has them: spec 4 T0.7, or spec auto(2.7) with what it drafted."""
    gamma, mean = row["gamma"], row["mean_gamma"]
    if gamma == "auto" and mean is not None:
        gamma = f"auto({mean:.1f})"
    heat = [] if row.get("temperature") is None else [f"T{row['temperature']:g}"]
    return " ".join([str(row["method"]), *([] if gamma is None else [str(gamma)]), *heat])


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
