"""What `bench` takes on the command line beside the settings. No torch, no models, no plots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.prompts.datasets import PROMPT_FIELDS, paths_of
from app.settings.table import Field
from app.settings.types import LaneNames, NumberList, Switch, Text, Whole, WholeList
from utils.errors import UsageError
from utils.files import separate


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
    temperatures: tuple[float, ...] = ()
    report: Path | None = None
    batch_size: int = 1
    source: Path | None = None  # --from
    svg: Path | None = None


_PATH = Text(metavar="FILE", allowed="a file", optional=True)
BENCH_FIELDS = {
    **{name: PROMPT_FIELDS[name] for name in ("prompts", "ids", "turns")},
    "methods": Field("methods", LaneNames(), (), "lanes to time (default: those of --compare)", "bench"),
    "gammas": Field("gammas", WholeList(1, 64, "auto"), (1, 2, 4, 8), "gammas to time; auto may be one", "bench"),
    "temperatures": Field(
        "temperatures", NumberList(0, 5, once=True), (), "temperatures to time, each beside its own ar", "bench"
    ),
    "repeat": Field("repeat", Whole(1, 1000), 3, "times each prompt is answered", "bench"),
    "limit": PROMPT_FIELDS["limit"],
    "batch_size": Field("batch_size", Whole(1, 1024), 1, "prompts answered together, as one batch", "bench"),
    "out": Field("out", _PATH, None, "write every figure to this JSON file; a stopped run goes on", "bench"),
    "report": Field("report", _PATH, None, "write tables and plots to this HTML file", "bench"),
    "from": Field("from", _PATH, None, "measure nothing: make the page of what --out wrote to this file", "bench"),
    "svg": Field(
        "svg",
        Text(metavar="DIR", allowed="a folder", optional=True),
        None,
        "with --from: the plots as SVG files",
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
    values |= paths_of(values)
    svg, source = (values.pop(name, None) or None for name in ("svg", "from"))
    page = values.get("report")
    if source is None:
        if svg is not None:
            raise UsageError("--svg draws what --from names: give that too")
        return BenchArgs(**values)
    if page is None:
        raise UsageError("--from needs --report: the page to write")
    source = Path(os.path.expanduser(source))
    separate({"--report": page}, [source])
    return BenchArgs(source=source, report=page, svg=Path(os.path.expanduser(svg)) if svg else None)
