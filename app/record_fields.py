"""What `record` takes on the command line beside the settings. No torch, no models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench_fields import BENCH_FIELDS, paths_of
from app.fields import Field
from app.kinds import Switch, Text, Whole
from utils.errors import UsageError

_GROUP = "record"
RECORD_FIELDS: Mapping[str, Field] = {
    **{name: BENCH_FIELDS[name] for name in ("prompts", "ids", "turns", "limit")},
    "out": Field("out", Text(metavar="FILE", allowed="a file", optional=True), None, "the recording, .jsonl", _GROUP),
    "costs": Field("costs", Switch(), False, "also record what passes over 1 to 17 tokens take here", _GROUP),
    "best": Field("best", Whole(1, 64), 3, "the target's likeliest ids to record at each token", _GROUP),
}


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
