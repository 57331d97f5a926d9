"""The steps of the demo as data: what each shows, what to look at, the settings it sets and what is asked.

Both tours follow them, that of the loaded pair (app/console/demo.py) and the recorded one (app/replay/tour.py). Knows
nothing of how a step is played.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.settings.table import Settings

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

_CHAIN = {"compare": "spec", "expand": "none", "max_new_tokens": 32}


@dataclass(frozen=True, eq=False)
class Step:
    """One step: the question is asked once for each of `plays`, under its settings.

    `look` says in one sentence what to look at. `traced`: the rounds follow, one a second. `varied` is the setting in
    which the answers differ, where there are several.
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
    **{"max_new_tokens": 48, "seed": 42, "system": "", "chat": True, "view": "auto", "drafts": "all"},
}
"""What every step sets before its own settings, so that it shows the same whatever the user has chosen."""

STEPS = (
    Step(
        "Plain decoding against drafts",
        "Both lanes write the same text; plain decoding runs the target once for every token, speculative decoding "
        "only for the tokens marked as the target's own: count its passes.",
        _CODE,
        ({"max_new_tokens": 64},),
    ),
    Step(
        "Gamma: how much to draft",
        "One question at gamma 1, 4 and 16: tokens a pass rise, but so do rejected drafts, and each one costs time.",
        _CODE,
        tuple({**_CHAIN, "gamma": gamma} for gamma in (1, 4, 16)),
        varied="gamma",
    ),
    Step(
        "Temperature: how often drafts are accepted",
        "The hotter the draw, the less a drafter can guess: compare alpha at temperature 0, 0.7 and 1.5.",
        _LIST,
        tuple({**_CHAIN, "gamma": 4, "temperature": heat} for heat in (0, 0.7, 1.5)),
        varied="temperature",
    ),
    Step(
        "A bad drafter, and why it loses",
        "It drafts 16 tokens a round and few survive: its drafting and the wide passes take longer than they save, so "
        "the lane is slower than plain decoding, and its text is still the same.",
        _STORY,
        ({"compare": "ar,plain", "expand": "none", "gamma": 16, "max_new_tokens": 32},),
    ),
    Step(
        "The tree of a round, slowly",
        "A round a second: what was drafted (q), what the target thinks of it (p), what was kept, and the target's own "
        "token behind it.",
        _CODE,
        ({"compare": "spec", "gamma": 4, "expand": "dynamic", "nodes": 8, "max_new_tokens": 20},),
        traced=True,
    ),
    Step(
        "A text that copies its source",
        "Where the answer repeats what was said, matches draft whole phrases: see the tokens a pass (tok/pass).",
        _COPY,
        ({"gamma": 4, "expand": "none", "max_new_tokens": 64},),
    ),
)


def chosen(number: int | None) -> list[tuple[int, Step]]:
    """Every step with its number from 1, or the one of this number."""
    every = list(enumerate(STEPS, start=1))
    return every if number is None else [every[number - 1]]


def slowness(settings: Settings, rate: float | None) -> float:
    """How many times slower than it was to show what plainly ran at `rate` tokens a second; /slow outranks it."""
    return settings.slow if settings.slow > 1 else min(1000.0, float(max(1, round((rate or 0) / PACE))))
