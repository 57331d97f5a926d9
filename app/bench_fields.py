"""What `bench` takes on the command line beside the settings. No torch, no models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.fields import Field
from app.kinds import LANES, Switch, Text, Whole
from app.kinds_lists import Names, NumberList, WholeList


@dataclass(frozen=True)
class BenchArgs:
    """What `bench` takes beside the settings. `methods` is empty for the lanes of --compare."""

    prompts: Path | str | None = None  # a file, or (text) the name of a data set
    methods: tuple[str, ...] = ()
    gammas: tuple[int | str, ...] = (1, 2, 4, 8)
    repeat: int = 3
    limit: int | None = None
    out: Path | None = None
    check_identity: bool = False
    ids: Path | None = None
    turns: int | None = None
    against: str | None = None
    temperatures: tuple[float, ...] = ()
    report: Path | None = None
    batch_size: int = 1


NAMED = ("spec_bench", "mt_bench", "gsm8k", "mmlu", "hellaswag")  # what they are: app/datasets.py
FILES = ("prompts", "out", "report", "ids")
_PATH = Text(metavar="FILE", allowed="a file", optional=True)
_AGAINST = r"transformers(:\S.*)?"
BENCH_FIELDS = {
    "prompts": Field(
        "prompts",
        Text("FILE|NAME", f"a file or one of {', '.join(NAMED)}", NAMED, optional=True),
        None,
        f"one JSON object a line, with prompt or turns; or {', '.join(NAMED)}",
        "bench",
    ),
    "ids": Field("ids", _PATH, None, "only the prompts whose question_id this file lists, one a line", "bench"),
    "turns": Field("turns", Whole(1), None, "ask only the first N turns of each prompt", "bench"),
    "methods": Field("methods", Names(LANES), (), "lanes to time (default: those of --compare)", "bench"),
    "gammas": Field("gammas", WholeList(1, 64, "auto"), (1, 2, 4, 8), "gammas to time; auto may be one", "bench"),
    "temperatures": Field(
        "temperatures", NumberList(0, 5, once=True), (), "temperatures to time, each beside its own ar", "bench"
    ),
    "repeat": Field("repeat", Whole(1, 1000), 3, "times each prompt is answered", "bench"),
    "limit": Field("limit", Whole(1), None, "take N prompts, spread over the categories", "bench"),
    "batch_size": Field("batch_size", Whole(1, 1024), 1, "prompts answered together, as one batch", "bench"),
    "out": Field("out", _PATH, None, "write every figure to this JSON file; a stopped run goes on", "bench"),
    "report": Field("report", _PATH, None, "write tables and plots to this HTML file", "bench"),
    "against": Field(
        "against",
        Text("transformers[:DRAFTER]", "transformers or transformers:DRAFTER", optional=True, pattern=_AGAINST),
        None,
        "time transformers' own generate too: plain, prompt lookup, assisted",
        "bench",
    ),
    "check_identity": Field(
        "check_identity", Switch(), False, "compare every output with plain decoding and transformers", "bench"
    ),
}


def bench_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> BenchArgs:
    """The arguments read from their texts; UsageError in one line."""
    texts = {name: given[name] for name in BENCH_FIELDS if name in given}
    values = {name: BENCH_FIELDS[name].read(text, label=f"--{name.replace('_', '-')}") for name, text in texts.items()}
    return BenchArgs(**{**values, **paths_of(values)})


def paths_of(values: Mapping[str, Any]) -> dict[str, Path]:
    """The files among these values, names of data sets left out."""
    files = [name for name in FILES if values.get(name) and values[name] not in NAMED]
    return {name: Path(os.path.expanduser(values[name])) for name in files}
