"""What `report` takes on the command line. No torch, no plots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.fields import Field
from app.kinds import Text
from utils.errors import UsageError


@dataclass(frozen=True)
class ReportArgs:
    """The bench run's file, and the page to write."""

    file: Path
    out: Path


REPORT_FIELDS = {
    "out": Field(
        "out",
        Text(metavar="FILE", allowed="a file", optional=True),
        None,
        "the HTML file to write (default: the name of FILE, ending in .html)",
        "report",
    ),
}


def report_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> ReportArgs:
    """The arguments read from their texts; UsageError in one line."""
    if not given.get("file"):
        raise UsageError("report needs a file that bench --out wrote: python infer.py report FILE.json")
    file = Path(os.path.expanduser(given["file"]))
    told = REPORT_FIELDS["out"].read(given["out"], label="--out") if "out" in given else None
    out = Path(os.path.expanduser(told)) if told else file.with_suffix(".html")
    if out == file:
        raise UsageError(f"--out {out} is the file to be read: name another")
    return ReportArgs(file, out)
