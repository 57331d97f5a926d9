"""The steps of the demo as data: what each shows, what to look at, the settings it sets and what is asked.

Both tours follow them, that of the loaded pair (app/console/demo.py) and the recorded one (app/replay/tour.py). Knows
nothing of how a step is played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.settings.table import Settings
from sampling.stats.summary import AS_FAST

PACE = 10.0  # tokens a second at which plain decoding is shown: the eye can follow
RECORDED = Path(__file__).with_name("demo.jsonl")
"""The tour of the default pair, as `python infer.py demo --quiet --log FILE` has written it."""

_CODE = "Write a Python function that returns the n-th Fibonacci number, and explain it line by line."
_STORY = "Write a short story about a lighthouse keeper who finds a message in a bottle."
_LIST = "What are the benefits of drinking water every day? Give a numbered list."
_COPY = (
    "Repeat the following text:\n\nThe old stone bridge at Harrow Mill was closed to cars on Monday after an inspector "
    "found cracks in its middle pier. Until then a ferry carries people on foot and on bicycles between seven in the "
    "morning and nine at night."
)

_CHAIN = {"expand": "none", "max_new_tokens": 32}


class Figures(NamedTuple):
    """An answer of a step: the value that varies, the rates of plain decoding and of the lane beside it, what became of
    its drafts, and whether its text is plain decoding's."""

    value: str
    plain: float | None
    rate: float | None
    speedup: float | None
    per_pass: float | None
    accepted: float | None
    alpha: float | None
    same: bool


@dataclass(frozen=True, eq=False)
class Step:
    """One step: the question is asked once for each of `plays`, under its settings.

    `look` says in one sentence what to look at; the figures say what came of it (:func:`observed`). `traced`: its
    rounds follow, one a second. `varied` is the setting in which the answers differ, where there are several.
    """

    title: str
    look: str
    question: str
    plays: tuple[Mapping[str, object], ...]
    traced: bool = False
    varied: str = ""


BASE: Mapping[str, object] = {
    **{"compare": "ar,spec", "gamma": "auto", "expand": "auto", "verify": "token", "coupling": "rejection"},
    **{"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "no_repeat_ngram": 0},
    **{"max_new_tokens": 48, "seed": 42, "system": "", "chat": True, "view": "auto"},
}
"""What every step sets before its own settings, so that it shows the same whatever the user has chosen."""

STEPS = (
    Step(
        "A text that copies its source",
        "Where the answer repeats what was said, matches draft whole phrases: see the tokens a pass (tok/pass).",
        _COPY,
        ({"gamma": 8, "expand": "none", "max_new_tokens": 64},),
    ),
    Step(
        "Plain decoding against drafts",
        "Plain decoding runs the target once for every token; with drafts it runs once for every token that is marked "
        "as the target's own: count its passes.",
        _CODE,
        ({"max_new_tokens": 64},),
    ),
    Step(
        "Gamma: how much to draft",
        "One question at gamma 1, 4 and 16: what a longer draft brings in tokens a pass, and what it costs in drafts "
        "that are rejected.",
        _CODE,
        tuple({**_CHAIN, "gamma": gamma} for gamma in (1, 4, 16)),
        varied="gamma",
    ),
    Step(
        "Temperature: how often drafts are accepted",
        "The hotter the draw, the less there is to guess: compare alpha at temperature 0, 0.7 and 1.5.",
        _LIST,
        tuple({**_CHAIN, "gamma": 4, "temperature": heat} for heat in (0, 0.7, 1.5)),
        varied="temperature",
    ),
    Step(
        "A drafter that is often wrong",
        "It drafts 16 tokens a round. Its drafting and the wide passes take time whether a draft survives or not.",
        _STORY,
        ({"compare": "ar,plain", "expand": "none", "gamma": 16, "max_new_tokens": 32},),
    ),
    Step(
        "The tree of a round, slowly",
        "A round a second: what was drafted (q), what the target thinks of it (p), what was kept, and the target's own "
        "token behind it.",
        _CODE,
        ({"gamma": 4, "expand": "dynamic", "nodes": 8, "max_new_tokens": 20},),
        traced=True,
    ),
)


def observed(step: Step, figures: Sequence[Figures]) -> str:
    """What the figures of a step show, and nothing that they do not."""
    if not step.varied:
        return "; ".join(map(_result, figures))
    named = [("tok/pass", "per_pass", ".2f"), ("accepted", "accepted", ".0%"), ("alpha", "alpha", ".2f")]
    parts = [_course(name, [getattr(each, key) for each in figures], form) for name, key, form in named]
    timed = [each for each in figures if each.speedup]
    if timed:
        best = max(timed, key=lambda each: each.speedup or 0.0)
        parts.append(f"fastest at {step.varied} {best.value}: {_speed(best.speedup)}")
    return "; ".join(filter(None, parts))


def _result(figures: Figures) -> str:
    passes = "" if figures.per_pass is None else f"{figures.per_pass:.2f} tokens a pass"
    accepted = "" if figures.accepted is None else f"{figures.accepted:.0%} of the drafts accepted"
    text = "the same text" if figures.same else "another text"
    return ", ".join(filter(None, (_speed(figures.speedup), passes, accepted, text)))


def _speed(speedup: float | None) -> str:
    if speedup is None:
        return ""
    if abs(speedup - 1) <= AS_FAST:
        return "as fast as plain decoding"
    return f"{speedup:.2f} times the speed of plain decoding"


def _course(name: str, values: Sequence[float | None], form: str) -> str:
    """How a figure goes from answer to answer; "" where one lacks it."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    texts = [format(value, form) for value in known]
    if known == sorted(known) and known[0] < known[-1]:
        return f"{name} rises from {texts[0]} to {texts[-1]}"
    if known == sorted(known, reverse=True) and known[0] > known[-1]:
        return f"{name} falls from {texts[0]} to {texts[-1]}"
    return f"{name} neither rises nor falls throughout: {', '.join(texts)}"


def chosen(number: int | None) -> list[tuple[int, Step]]:
    """Every step with its number from 1, or the one of this number."""
    every = list(enumerate(STEPS, start=1))
    return every if number is None else [every[number - 1]]


def slowness(settings: Settings, rate: float | None) -> float:
    """How many times slower than it was to show what plainly ran at `rate` tokens a second; /slow outranks it."""
    return settings.times_slower if settings.times_slower > 1 else min(1000.0, float(max(1, round((rate or 0) / PACE))))
