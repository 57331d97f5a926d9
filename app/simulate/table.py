"""The tables of `simulate` on the screen: drafters and gammas, then tokens a round by prompt. Knows rows, no models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from app.screen.output import screen, small_table

if TYPE_CHECKING:
    from rich.table import Table

    from app.settings.layers import Settings


MANY = 8  # prompts that have a column each
WIDE = 76  # columns for all figures
_FROM = {"flags": "as given", "recording": "as recorded", "measured": "measured here"}


def print_simulation(
    told: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: Settings, stream: TextIO
) -> None:
    """Everything, in order; at most 100 columns where it goes to no terminal."""
    console = screen(settings, stream)

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False)

    count = f"{told['answers']} answer{'s' * (told['answers'] != 1)}"
    stopped = "" if told["complete"] else f" of {told['of']} (interrupted)"
    line(f"{told['target'] or 'a recording'}: {count}{stopped}; rates leave prefill out", "italic")
    console.print(_methods(rows, settings, console.width < WIDE))
    plain = rows[0]["plain_throughput"]
    if plain is None:
        line("no speeds: nothing tells what target passes take (--t-verify, or --pair to measure)")
    else:
        shown = {n: 1000 * seconds for n, seconds in told["pass_seconds"].items() if n in ("1", "2", "5", "9", "17")}
        passes = ", ".join(f"{n}: {milliseconds:.3g}" for n, milliseconds in shown.items())
        line(f"plain decoding {plain:.1f} tok/s; ms of a pass, {_FROM[told['pass_seconds_from']]}, by tokens: {passes}")
    for note in told["notes"]:
        line(f"note: {note}")
    line("\ntokens a round (TAR) by prompt", "italic")
    console.print(_prompts(rows, settings))


def _methods(rows: Sequence[Mapping[str, Any]], settings: Settings, narrow: bool) -> Table:
    table = small_table(settings)
    table.add_column("drafter", no_wrap=True)
    cells = [
        {
            "gamma": _cell(row["gamma"], "d"),
            "TAR": _cell(row["tokens_per_pass"], ".3f"),
            "accepted": _cell(row["acceptance_rate"], ".0%"),
            "alpha": _cell(row["alpha"], ".2f"),
            "draft ms": _cell(row["t_draft"], ".3g", 1000),
            "round ms": _cell(row["t_round"], ".3g", 1000),
            "tok/s": _cell(row["throughput"], ".1f"),
            "speed-up": _cell(row["speedup"], ".2f") + ("x" if row["speedup"] is not None else ""),
        }
        for row in rows
    ]
    left_out = ("accepted", "round ms") if narrow else ()
    names = [name for name in cells[0] if name not in left_out]
    for name in names:
        table.add_column(name, justify="right")
    for row, told in zip(rows, cells, strict=True):
        table.add_row(row["method"], *(told[name] for name in names))
    return table


def _prompts(rows: Sequence[Mapping[str, Any]], settings: Settings) -> Table:
    """A column a prompt; of many the lowest, the middle and the highest."""
    table = small_table(settings)
    count = len(rows[0]["prompts"])
    few = count <= MANY
    table.add_column("drafter", no_wrap=True)
    table.add_column("gamma", justify="right")
    for name in map(str, range(1, count + 1)) if few else ("lowest", "median", "highest"):
        table.add_column(name, justify="right")
    for row in rows:
        each = [one["tokens_per_pass"] for one in row["prompts"]]
        known = [tar for tar in each if tar is not None] or [0.0]
        told = each if few else [min(known), statistics.median(known), max(known)]
        table.add_row(row["method"], _cell(row["gamma"], "d"), *(_cell(tar, ".2f") for tar in told))
    return table


def _cell(value: Any, form: str, factor: float = 1) -> str:
    return "-" if value is None else format(value * factor, form)
