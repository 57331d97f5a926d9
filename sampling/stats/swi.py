"""Standardised walltime improvement: how many times fewer costs than plain decoding, whatever the machine
(Chen et al. 2023, arXiv 2312.11462).

SWI = N·c_target / Σ_m calls_m·c_m over the N tokens of those calls. Drafters without calls (max-gram, n-grams,
tables) cost nothing. Tables have the cost of a model by its published name; pure arithmetic, knows no models and
measures nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sampling.stats.summary import TARGET, Stats

_FLAN = {
    f"flan-t5-{size}": cost
    for size, cost in zip(("small", "base", "large", "xl", "xxl"), (60.0, 220.0, 770.0, 3000.0, 11300.0), strict=True)
}
_LLAMA = {"llama-68m": 68.0, "llama-160m": 160.0, "llama-7b": 7000.0}

# The cost of a call, by table and model; only ratios within a table matter.
TABLES: Mapping[str, Mapping[str, float]] = {
    "model_parameters": {**_FLAN, **_LLAMA},  # millions
    "previous_work": {"flan-t5-small": 0.02, "flan-t5-base": 0.04, "flan-t5-large": 0.11, "flan-t5-xxl": 1.0},
    "published": {**_FLAN, **_LLAMA, "llama-7b": 70000.0},  # an error of the published table
}
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class SwiModel:
    """The real name of a model in the calls, and its number of parameters (None: unknown)."""

    name: str
    parameters: int | None = None


def normalised(name: str) -> str:
    """Return a model's name in the tables: google/flan-t5-base → flan-t5-base, Llama-2-7b-chat-hf → llama-7b.

    Any other name is returned in small letters, without its owner.
    """
    bare = name.rsplit("/", 1)[-1].lower()
    words = re.split(r"[-_.\s]+", bare)
    if words[:2] == ["flan", "t5"] and f"flan-t5-{''.join(words[2:3])}" in _FLAN:
        return f"flan-t5-{words[2]}"
    size = next((word for word in words[1:] if f"llama-{word}" in _LLAMA), None)
    return f"llama-{size}" if words[0] == "llama" and size else bare


def swi(tokens: int, calls: Mapping[str, int], costs: Mapping[str, float], target: str = TARGET) -> float | None:
    """Return N·c_target / Σ_m calls_m·c_m; None if a cost is missing or nothing was called.

    Args:
        tokens: N, the tokens of the calls (without the opening round's token and calls).
        calls: forward passes by model.
        costs: of one call, by model.
        target: which of the models plain decoding would call once a token.
    """
    called = {model: passes for model, passes in calls.items() if passes}
    if target not in costs or not called.keys() <= costs.keys():
        return None
    spent = sum(passes * costs[model] for model, passes in called.items())
    return tokens * costs[target] / spent if spent else None


def costs_of(table: str, models: Mapping[str, SwiModel]) -> dict[str, float]:
    """Return the cost of a call of each model by one of TABLES; unknown models are left out.

    Under "model_parameters" a model that is not listed costs its own parameters, in millions.
    """
    named = {called: TABLES[table].get(normalised(model.name)) for called, model in models.items()}
    counted = {called: model.parameters / 1e6 for called, model in models.items() if model.parameters is not None}
    known = {called: cost for called, cost in named.items() if cost is not None}
    return counted | known if table == "model_parameters" else known


def every_swi(stats: Stats, models: Mapping[str, SwiModel]) -> dict[str, float | None]:
    """Return the SWI of a run by every table, and by the run's own times. `models` by the names of its calls."""
    mean_ms = {model: stats.call_ms.get(model, 0.0) / passes for model, passes in stats.calls.items() if passes}
    costs = {table: costs_of(table, models) for table in TABLES} | {MEASURED: mean_ms}
    return {name: swi(stats.predicted_n - stats.openings, stats.calls, cost) for name, cost in costs.items()}
