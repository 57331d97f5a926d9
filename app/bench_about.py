"""What makes a benchmark this benchmark: what a journal's run and a new one must have in common to be one.

Everything here is plain JSON and, but for the machine, known before a model is loaded. Knows no answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from app.answers import shown_settings

if TYPE_CHECKING:
    from app.bench_fields import BenchArgs
    from app.prompts import Question
    from app.settings import ModelOptions, Settings

_ELSEWHERE = ("prompts", "ids", "limit", "turns", "methods", "out", "check_identity")  # told otherwise, or no matter
_MODELS = {"drafter_device", "drafter_quantization", "attn_implementation", "revision"}
_SAME = ("device", "gpu", "dtype", "quantization")  # of the machine: a run is timed on one kind of device
About = Mapping[str, Any]


def about(settings: Settings, options: ModelOptions, args: BenchArgs, questions: Sequence[Question]) -> dict[str, Any]:
    """What makes a run this run, known before a model is loaded; plain JSON values."""
    from app.pairing import choose_pair

    spec = choose_pair(options)
    models = options.model_dump(include=_MODELS)
    own = {name: value for name, value in vars(args).items() if name not in _ELSEWHERE}
    found = {
        "pair": spec.name,
        "target": spec.target.source,
        "drafter": spec.drafter_name,
        **models,
        **shown_settings(settings),
        "methods": args.methods or settings.compare,
        **own,
        "prompts": [_digest(question) for question in questions],
    }
    told: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return told


def _digest(question: Question) -> str:
    text = json.dumps([question.turns, question.category, question.question_id])
    return sha256(text.encode()).hexdigest()[:12]


def difference(there: About, here: About) -> str | None:
    """What the journal's run and this one differ in, in words: the first such thing; None if they are the same."""
    for name in dict.fromkeys([*here, *there]):
        if there.get(name) != here.get(name):
            if name == "prompts":
                return _other_prompts(there.get(name) or [], here.get(name) or [])
            return f"{name} {_shown(there.get(name))} there, {_shown(here.get(name))} here"
    return None


def difference_of_machines(there: About, here: About) -> str | None:
    """The same of two machines: figures of several devices are no figures of one run."""
    return difference(*({name: machine.get(name) for name in _SAME} for machine in (there, here)))


def _other_prompts(there: Sequence[str], here: Sequence[str]) -> str:
    if len(there) != len(here):
        return f"{len(there)} prompts there, {len(here)} here"
    number = next(number for number, pair in enumerate(zip(there, here, strict=True), start=1) if pair[0] != pair[1])
    return f"other prompts (the first that differs is the {number}. of {len(here)})"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)
