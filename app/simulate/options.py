"""What `simulate` and `record` take on the command line beside the settings. No torch, no models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.settings.table import PROMPT_FIELDS, Field, paths_of
from app.settings.types import METHODS, Choice, Names, Number, PassSeconds, Switch, Text, Whole, WholeList
from utils.errors import UsageError

_GROUP = "simulate"
_SECONDS = Number(0, 1e6)

_RECORD = "record"
RECORD_FIELDS: Mapping[str, Field] = {
    **PROMPT_FIELDS,
    "out": Field("out", Text(metavar="FILE", allowed="a file", optional=True), None, "the recording, .jsonl", _RECORD),
    "costs": Field("costs", Switch(), False, "also record what passes over 1 to 17 tokens take here", _RECORD),
    "best": Field("best", Whole(1, 64), 3, "the target's likeliest ids to record at each token", _RECORD),
}


def _path(metavar: str = "FILE") -> Text:
    return Text(metavar=metavar, allowed="a file", optional=True)


_TABLE = (
    Field(
        "methods", Names(METHODS), ("spec",), "drafters to try, as the lanes of bench; spec: that of --drafter", _GROUP
    ),
    Field("gammas", WholeList(1, 64), (1, 2, 4, 8), "gammas to try", _GROUP),
    Field("t_draft", _SECONDS, None, "seconds of a drafted token (default: measured here)", _GROUP),
    Field("t_verify", PassSeconds(), None, "of a target pass over 1, 2, … tokens (default: as recorded)", _GROUP),
    Field("t_other", _SECONDS, None, "of the rest of a round (default: measured; 0 beside --t-verify)", _GROUP),
    Field("prompts", _path(), None, "the prompts of a recording that torch printed, row by row", _GROUP),
    Field(
        "prompt_tokens",
        Whole(0, 1_000_000),
        None,
        "tokens of each prompt in such rows; 0: rows, or a map's values, are answers alone",
        _GROUP,
    ),
    Field(
        "arch", Choice(("auto", "causal", "seq2seq")), "auto", "the recorded model's kind, where no model tells", _GROUP
    ),
    Field("end_id", Whole(0, 10_000_000), None, "id that ends an answer, where the recording tells none", _GROUP),
    Field("limit", Whole(1), None, "play the first N answers", _GROUP),
    Field("out", _path("F.json"), None, "write every figure to this JSON file", _GROUP),
)
SIMULATE_FIELDS: Mapping[str, Field] = {field.name: field for field in _TABLE}


@dataclass(frozen=True)
class SimulateArgs:
    """What `simulate` takes beside the settings. `t_verify` are pairs of tokens and seconds, none if not given."""

    file: Path = Path()
    methods: tuple[str, ...] = ("spec",)
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    t_draft: float | None = None
    t_verify: tuple[tuple[int, float], ...] = ()
    t_other: float | None = None
    prompts: Path | None = None
    prompt_tokens: int | None = None
    arch: Literal["auto", "causal", "seq2seq"] = "auto"
    end_id: int | None = None
    limit: int | None = None
    out: Path | None = None


def simulate_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> SimulateArgs:
    """The arguments read from their texts; UsageError in one line."""
    if not given.get("file"):
        raise UsageError("simulate needs a file: the recording to play (infer.py record makes one)")
    fields = {name: field for name, field in SIMULATE_FIELDS.items() if name in given}
    values = {name: field.read(given[name], label=f"--{name.replace('_', '-')}") for name, field in fields.items()}
    paths = {name: Path(os.path.expanduser(values[name])) for name in ("prompts", "out") if values.get(name)}
    return SimulateArgs(file=Path(os.path.expanduser(given["file"])), **{**values, **paths})


@dataclass(frozen=True)
class RecordArgs:
    """What `record` takes beside the settings."""

    out: Path = Path()
    prompts: Path | str | None = None  # a file, or the name of a data set
    ids: Path | None = None
    turns: int | None = None
    limit: int | None = None
    costs: bool = False
    best: int = 3


def record_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> RecordArgs:
    """The arguments read from their texts; UsageError in one line."""
    texts = {name: given[name] for name in RECORD_FIELDS if name in given}
    values = {name: RECORD_FIELDS[name].read(text, label=f"--{name}") for name, text in texts.items()}
    if not values.get("out"):
        raise UsageError("record needs --out: the file to write")
    return RecordArgs(**{**values, **paths_of(values)})
