"""What `write` takes on the command line beside the settings. No torch, no models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench_fields import BENCH_FIELDS, paths_of
from app.fields import Field
from app.kinds import RefusedError, Whole
from app.kinds_lists import NumberList
from training.stems import KINDS
from utils.errors import UsageError

_GROUP = "write"


@dataclass(frozen=True)
class KindList:
    """A comma list of kinds of task, any of them more than once; `all` is each of them once."""

    metavar: str = "LIST|all"
    allowed: str = f"all or a comma list of {', '.join(KINDS)}"
    choices: tuple[str, ...] = ("all", *KINDS)

    def read(self, value: object) -> tuple[str, ...]:
        if value == "all":
            return tuple(KINDS)
        parts = tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else ()
        if not parts or any(part not in KINDS for part in parts):
            raise RefusedError(self.allowed)
        return parts

    def show(self, value: Any) -> str:
        return ",".join(value)


WRITE_FIELDS: Mapping[str, Field] = {
    "tokens": Field("tokens", Whole(1), 200_000, "answer tokens to write", _GROUP),
    "kinds": Field("kinds", KindList(), ("chat",), "what the user's turns are about, in turn", _GROUP),
    "prompts": BENCH_FIELDS["prompts"],
    "temperatures": Field("temperatures", NumberList(0, 5), (0.0, 0.7, 1.0), "of the answers, in turn", _GROUP),
    "answer_tokens": Field("answer_tokens", Whole(1, 65_536), 256, "longest answer, in tokens", _GROUP),
    "batch": Field("batch", Whole(1, 4096), 32, "chats that are written at once", _GROUP),
}


@dataclass(frozen=True)
class WriteArgs:
    """What `write` takes beside the settings. `tokens` is None for as many as there are prompts for."""

    file: Path
    tokens: int | None = 200_000
    kinds: tuple[str, ...] = ("chat",)
    prompts: Path | str | None = None  # a file, or the name of a data set
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    answer_tokens: int = 256
    batch: int = 32


def write_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> WriteArgs:
    """The arguments read from their texts; UsageError in one line."""
    texts = {name: given[name] for name in WRITE_FIELDS if name in given}
    values = {name: WRITE_FIELDS[name].read(text, label=f"--{name.replace('_', '-')}") for name, text in texts.items()}
    if not given.get("file"):
        raise UsageError("write needs a file to write: python infer.py write FILE.jsonl")
    file = Path(os.path.expanduser(given["file"]))
    if file.suffix != ".jsonl":
        raise UsageError(f"{file}: the file must end in .jsonl, as its readers expect")
    if "kinds" in values and values.get("prompts"):
        raise UsageError("--kinds and --prompts contradict each other: give one")
    if values.get("prompts"):
        values.setdefault("tokens", None)
    return WriteArgs(file, **{**values, **paths_of(values)})
