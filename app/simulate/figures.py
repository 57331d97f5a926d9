"""A drafter's rounds against recorded answers → its TAR and the speed they let expect, as figures and as tables.

Seconds of a round = drafting + a target pass over 1 + drafted tokens + the rest (sampling, the loop itself). Where
every round drafts gamma tokens and the rest is nothing, that is TAR / (γ·t_draft + t_verify(γ + 1)) of Decoding
Speculative Decoding (arXiv 2402.01528). Rates leave the opening round out, as everywhere. Pure arithmetic: no models.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from app.screen.output import screen, small_table
from app.settings.table import Settings
from sampling.events import Step
from sampling.stats.summary import Stats, merge, ratio

MANY = 8  # prompts that have a column each
WIDE = 76  # columns for all figures
_FROM = {"flags": "as given", "recording": "as recorded", "measured": "measured here"}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Played:
    """One answer played: its figures, and its rounds behind the opening one."""

    stats: Stats
    rounds: tuple[Step, ...]


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds. `verify(n)`: a target pass over n tokens, None where nobody knows; `draft` of a drafted token, `other`
    of the rest of a round, None: as each round took here; `plain_other` that of a round of plain decoding."""

    verify: Callable[[int], float] | None = None
    draft: float | None = None
    other: float | None = None
    plain_other: float = 0.0


def figures(method: str, gamma: int | str | None, played: Sequence[Played], costs: RoundSeconds) -> dict[str, Any]:
    """Everything about a drafter at a gamma, JSON-able; what is not known is None."""
    stats = merge([one.stats for one in played])
    rounds = [step for one in played for step in one.rounds]
    drafted = sum(len(step.drafted) for step in rounds)
    drafting = costs.draft if costs.draft is not None else ratio(sum(step.draft_s for step in rounds), drafted)
    return {
        "method": method,
        "gamma": gamma,
        "tokens_per_pass": _short(stats.tokens_per_pass),
        "acceptance_rate": _short(stats.acceptance_rate),
        "alpha": _short(stats.alpha),
        "alpha_per_position": [_short(alpha) for alpha in stats.alpha_per_position],
        "predicted_n": stats.predicted_n,
        "target_passes": stats.target_passes,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "t_draft": _short(drafting, 7),
        **_speeds(stats, gamma, rounds, drafting or 0.0, costs),
        "prompts": [
            {
                "prompt_n": one.stats.prompt_n,
                "predicted_n": one.stats.predicted_n,
                "target_passes": one.stats.target_passes,
                "tokens_per_pass": _short(one.stats.tokens_per_pass),
            }
            for one in played
        ],
    }


def _speeds(
    stats: Stats, gamma: int | str | None, rounds: Sequence[Step], drafting: float, costs: RoundSeconds
) -> dict[str, float | None]:
    """What follows from the seconds of target passes; all None where nobody knows these."""
    verify, names = costs.verify, ("t_round", "throughput", "throughput_formula", "plain_throughput", "speedup")
    if verify is None:
        return dict.fromkeys(names)
    spent = 0.0
    for step in rounds:
        drafted = len(step.drafted)
        rest = step.sample_s + step.overhead_s if costs.other is None else costs.other
        spent += (step.draft_s if costs.draft is None else drafted * costs.draft) + verify(drafted + 1) + rest
    throughput, plain = ratio(stats.predicted_n - stats.openings, spent), 1 / (verify(1) + costs.plain_other)
    tar, formula = stats.tokens_per_pass, None
    if isinstance(gamma, int) and tar is not None:  # as printed: every round drafts gamma tokens
        formula = tar / (gamma * drafting + verify(gamma + 1))
    speedup = None if throughput is None else throughput / plain
    found = (_short(ratio(spent, len(rounds)), 7), *map(_short, (throughput, formula, plain, speedup)))
    return dict(zip(names, found, strict=True))


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


# -- tables -----------------------------------------------------------------------------------------


def print_simulation(about: Mapping[str, Any], rows: Rows, settings: Settings) -> None:
    """Drafters and gammas, then tokens a round by prompt; at most 100 columns where it goes to no terminal."""
    console = screen(settings, sys.stdout)

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False)

    count = f"{about['answers']} answer{'s' * (about['answers'] != 1)}"
    stopped = "" if about["complete"] else f" of {about['of']} (interrupted)"
    line(f"{about['target'] or 'a recording'}: {count}{stopped}; rates leave prefill out", "italic")
    console.print(_methods(rows, settings, console.width < WIDE))
    if rows[0]["plain_throughput"] is None:
        line("no speeds: nothing tells what target passes take (--t-verify, or --pair to measure)")
    else:
        shown = {n: 1000 * seconds for n, seconds in about["pass_seconds"].items() if n in ("1", "2", "5", "9", "17")}
        passes = ", ".join(f"{n}: {milliseconds:.3g}" for n, milliseconds in shown.items())
        plain, source = f"plain decoding {rows[0]['plain_throughput']:.1f} tok/s", _FROM[about["pass_seconds_from"]]
        line(f"{plain}; ms of a pass, {source}, by tokens: {passes}")
    for note in about["notes"]:
        line(f"note: {note}")
    line("\ntokens a round (TAR) by prompt", "italic")
    console.print(_prompts(rows, settings))


def _methods(rows: Rows, settings: Settings, narrow: bool) -> Table:
    columns = {
        "gamma": ("gamma", "d", 1),
        "TAR": ("tokens_per_pass", ".3f", 1),
        "accepted": ("acceptance_rate", ".0%", 1),
        "alpha": ("alpha", ".2f", 1),
        "draft ms": ("t_draft", ".3g", 1000),
        "round ms": ("t_round", ".3g", 1000),
        "tok/s": ("throughput", ".1f", 1),
        "speed-up": ("speedup", ".2fx", 1),
    }
    chosen = {name: column for name, column in columns.items() if not narrow or name not in ("accepted", "round ms")}
    cells = [[_cell(row[key], form, factor) for key, form, factor in chosen.values()] for row in rows]
    return _table(chosen, rows, cells, settings)


def _prompts(rows: Rows, settings: Settings) -> Table:
    """A column a prompt; of many the lowest, the middle and the highest."""
    count, cells = len(rows[0]["prompts"]), []
    few = count <= MANY
    for row in rows:
        each = [one["tokens_per_pass"] for one in row["prompts"]]
        known = [tar for tar in each if tar is not None] or [0.0]
        shown = each if few else [min(known), statistics.median(known), max(known)]
        cells.append([_cell(row["gamma"], "d"), *(_cell(tar, ".2f") for tar in shown)])
    names = map(str, range(1, count + 1)) if few else ("lowest", "median", "highest")
    return _table(["gamma", *names], rows, cells, settings)


def _table(names: Iterable[str], rows: Rows, cells: Sequence[Sequence[str]], settings: Settings) -> Table:
    table = small_table(settings)
    table.add_column("drafter", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for row, each in zip(rows, cells, strict=True):
        table.add_row(row["method"], *each)
    return table


def _cell(value: Any, form: str, factor: float = 1) -> str:
    """The value in this form, with the unit x behind it if the form ends so."""
    return "-" if value is None else format(value * factor, form.removesuffix("x")) + "x" * form.endswith("x")
