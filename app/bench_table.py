"""A benchmark's answers → one summary row per method and gamma, and the tables on the screen.

A rate is Σ tokens / Σ seconds over all prompts of a repeat, a speed-up the ratio of two rates over
the same prompts: with equal texts that is Σ time_ar / Σ time_method. Over repeats: mean and spread
(standard deviation) of rates, median of speed-ups. Knows no models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, TextIO

from app.answers import Answer, agrees
from sampling.metrics import Stats, merge
from sampling.ratios import cost_ratio, modelled, speedup, verify_ratio

if TYPE_CHECKING:
    from app.bench import Item, Variant
    from app.settings import Settings

_WIDTH = 120  # columns of a table that goes to no terminal
_COLUMNS = ("gamma", "tok/s", "speed-up", "expected", "tok/pass", "accepted", "alpha", "c", "v", "TTFT", "differs")


def summarise(items: Sequence[Item], variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """One row per variant, JSON-able; figures that are undefined are None."""
    plain = next((variant for variant in variants if variant.method == "ar"), None)
    return [_row(items, variant, plain) for variant in variants]


def _row(items: Sequence[Item], variant: Variant, plain: Variant | None) -> dict[str, Any]:
    answers = [row[variant] for item in items for row in item.answers if variant in row]
    both = list(_pairs(items, variant, plain))
    total = merge(answer.stats for answer in answers)
    categories = sorted({item.question.category for item in items if item.question.category is not None})
    return {
        "method": variant.method,
        "gamma": variant.gamma,
        "mean_gamma": _mean_gamma(answers, variant),
        "prompts": sum(any(variant in row for row in item.answers) for item in items),
        "answers": len(answers),
        "predicted_n": total.predicted_n,
        "predicted_per_second": _spread(_rates(items, variant)),
        "ttft_ms": _short(total.ttft_ms),
        "speedup": _median(_speedups(items, variant, plain)),
        "speedup_per_repeat": [_short(value) for value in _speedups(items, variant, plain)],
        "tokens_per_pass": _short(total.tokens_per_pass),
        "acceptance_rate": _short(total.acceptance_rate),
        "alpha": _short(total.alpha),
        "alpha_per_position": [_short(value) for value in total.alpha_per_position],
        **_model(variant, total, merge(one.stats for one, _ in both)),
        **_differences(both if variant != plain else []),
        "categories": {name: _category(items, name, variant, plain) for name in categories},
    }


def _category(items: Sequence[Item], name: str, variant: Variant, plain: Variant | None) -> dict[str, Any]:
    within = [item for item in items if item.question.category == name]
    return {
        "prompts": sum(any(variant in row for row in item.answers) for item in within),
        "predicted_per_second": _spread(_rates(within, variant))["mean"],
        "speedup": _median(_speedups(within, variant, plain)),
    }


def _repeats(items: Iterable[Item]) -> list[list[dict[Variant, Answer]]]:
    """What was measured, by repeat: of each prompt the answers of that repeat."""
    rows = [item.answers for item in items]
    return [[row[repeat] for row in rows if repeat < len(row)] for repeat in range(max(map(len, rows), default=0))]


def _pairs(items: Iterable[Item], variant: Variant, plain: Variant | None) -> list[tuple[Answer, Answer]]:
    """(ar's answer, the variant's answer) of every round that has both."""
    if plain is None:
        return []
    rows = [row for item in items for row in item.answers]
    return [(row[plain], row[variant]) for row in rows if plain in row and variant in row]


def _rates(items: Iterable[Item], variant: Variant) -> list[float]:
    merged = [merge(row[variant].stats for row in rows if variant in row) for rows in _repeats(items)]
    return [stats.predicted_per_second for stats in merged if stats.predicted_per_second is not None]


def _speedups(items: Iterable[Item], variant: Variant, plain: Variant | None) -> list[float]:
    """One per repeat, over the prompts that both answered in it."""
    if plain is None or variant == plain:
        return []
    found = []
    for rows in _repeats(items):
        both = [row for row in rows if plain in row and variant in row]
        found.append(speedup(merge(row[plain].stats for row in both), merge(row[variant].stats for row in both)))
    return [value for value in found if value is not None]


def _spread(rates: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": _short(fmean(rates)) if rates else None,
        "spread": _short(stdev(rates)) if len(rates) > 1 else None,
        "repeats": [_short(rate) for rate in rates],
    }


def _model(variant: Variant, total: Stats, plain: Stats) -> dict[str, Any]:
    """c and v as measured in these very runs, and the speed-up they let expect."""
    c, v = cost_ratio(total, plain), verify_ratio(total, plain)
    gamma = variant.gamma if isinstance(variant.gamma, int) else 0
    return {
        "c": _short(c) if variant.gamma else None,
        "v": _short(v) if gamma else None,  # of passes over gamma + 1 tokens, where gamma is one number
        "expected_speedup": _short(modelled(total, plain, gamma)),
    }


def _mean_gamma(answers: Sequence[Answer], variant: Variant) -> float | None:
    """Tokens asked of the drafter a round; the gamma itself where it is fixed."""
    if variant.gamma != "auto":
        return None if variant.gamma is None else float(variant.gamma)
    rounds = sum(answer.stats.target_passes for answer in answers)
    return _short(sum(answer.asked for answer in answers) / rounds) if rounds else None


def _differences(both: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """How many answers differ from ar's; None where they may rightly."""
    told = [agrees(one, other) for one, other in both]
    known = [same for same in told if same is not None]
    return {"compared": len(known), "differs": known.count(False) if known else None}


def _median(values: Sequence[float]) -> float | None:
    return _short(median(values)) if values else None


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# -- the screen ---------------------------------------------------------------------------------


def print_tables(summary: Sequence[dict[str, Any]], settings: Settings, stream: TextIO) -> None:
    """The table of methods and, where prompts have categories, the speed-ups by category."""
    from rich.console import Console

    from app.cli import want_color

    color = want_color(settings, stream, os.environ)
    width = None if stream.isatty() else int(os.environ.get("COLUMNS") or _WIDTH)
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False)
    console.print(_methods(summary, settings))
    if any(row["categories"] for row in summary):
        console.print(_by_category(summary, settings))


def _table(settings: Settings, title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.ASCII2 if settings.ascii else box.SIMPLE_HEAD, title_justify="left")


def _methods(summary: Sequence[dict[str, Any]], settings: Settings) -> Any:
    answers = max(row["answers"] for row in summary)
    prompts = max(row["prompts"] for row in summary)
    counted = f"{prompts} prompt{'s' * (prompts != 1)}"
    table = _table(settings, f"{counted}, {answers} answers a method; rates leave prefill out")
    table.add_column("method")
    for name in (
        "gamma",
        "tok/s",
        "speed-up",
        "expected",
        "tok/pass",
        "accepted",
        "alpha",
        "c",
        "v",
        "TTFT",
        "differs",
    ):
        table.add_column(name, justify="right")
    sign = "+-" if settings.ascii else "±"
    for row in summary:
        rate = row["predicted_per_second"]
        spread = "" if rate["spread"] is None else f" {sign} {rate['spread']:.1f}"
        differs = "-" if row["differs"] is None else f"{row['differs']}/{row['compared']}"
        table.add_row(
            row["method"],
            _gamma(row),
            _shown(rate["mean"], ".1f") + spread,
            _times(row["speedup"]),
            _times(row["expected_speedup"]),
            _shown(row["tokens_per_pass"], ".2f"),
            _shown(row["acceptance_rate"], ".0%"),
            _shown(row["alpha"], ".2f"),
            _shown(row["c"], ".3f"),
            _shown(row["v"], ".2f"),
            f"{row['ttft_ms']:.0f} ms" if row["ttft_ms"] is not None else "-",
            differs,
        )
    return table


def _by_category(summary: Sequence[dict[str, Any]], settings: Settings) -> Any:
    table = _table(settings, "speed-up by category")
    table.add_column("method")
    table.add_column("gamma", justify="right")
    names = sorted({name for row in summary for name in row["categories"]})
    for name in names:
        table.add_column(name, justify="right")
    for row in summary:
        if row["method"] != "ar":
            cells = [_times(row["categories"].get(name, {}).get("speedup")) for name in names]
            table.add_row(row["method"], _gamma(row), *cells)
    return table


def _gamma(row: dict[str, Any]) -> str:
    """4, or auto(2.7): what it asked for on average."""
    mean = row["mean_gamma"]
    return f"auto({mean:.1f})" if row["gamma"] == "auto" and mean is not None else str(row["gamma"] or "-")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
