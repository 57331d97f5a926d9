"""What `distill`, `write` and `tables` take: their flags from one table each, and the records they are read into. No
torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.settings.table import PROMPT_FIELDS, Field, paths_of
from app.settings.types import Choice, Number, NumberList, RefusedError, Text, Whole, WholeList, WholeOr
from training.text.dialogues import KINDS
from utils.errors import UsageError

SELF, NONE = "self", "none"
_GROUP = "distill"

_WRITE = "write"

_PATH = Text(metavar="FILE", allowed="a file", optional=True)
TABLES_FIELDS = {
    "from": Field("from", Text("self|FILES", "self or files"), None, "text to count: .jsonl, .txt, or self", "tables"),
    "out": Field("out", _PATH, None, "the tables' file", "tables"),
    "max_n": Field("max_n", Whole(1, 16), 5, "tokens of the longest context", "tables"),
    "max_mb": Field("max_mb", Number(0, 4000, without_low=True), 10.0, "largest file, in million bytes", "tables"),
    "choices": Field("choices", Whole(1, 8), 3, "most next tokens of a context: trees draft siblings", "tables"),
    "tokens": Field("tokens", Whole(1), 200_000, "answer tokens that self writes", "tables"),
}


@dataclass(frozen=True)
class Law:
    """What is learned of the target's law: all of it, its k likeliest ids, or the likeliest alone."""

    metavar: str = "full|K|hard"
    allowed: str = "full, hard or a whole number from 1 to 1000000"
    choices: tuple[str, ...] = ("full", "hard")

    def read(self, value: object) -> int | str:
        try:
            return "hard" if value == "hard" else WholeOr(1, 1_000_000, "full").read(value)
        except RefusedError:
            raise RefusedError(self.allowed) from None

    def show(self, value: Any) -> str:
        return str(value)


def _path(metavar: str, allowed: str) -> Text:
    return Text(metavar=metavar, allowed=allowed, optional=True)


def _above_0(most: float) -> Number:
    return Number(0, most, without_low=True)


_DATA = (
    Field("data", Text("self|FILES", "self or files"), SELF, "token files to learn from, or self", _GROUP),
    Field("prompts", _path("FILE", "a file"), None, "prompts that the target answers, as in bench", _GROUP),
    Field("tokens", Whole(1), 200_000, "answer tokens to write or to take", _GROUP),
    Field("temperatures", NumberList(0, 5), (0.0, 0.7, 1.0), "of the answers written, in turn", _GROUP),
    Field("longest", Whole(16, 65_536), 512, "longest sequence, in tokens", _GROUP),
)
_SHAPE = (
    Field("student", Choice(("plain", "glide", "feature")), "plain", "the kind of drafter", _GROUP),
    Field("layers", Whole(1, 100), 1, "its layers", _GROUP),
    Field("hidden", Whole(8, 65_536), None, "its width (default: the target's)", _GROUP),
    Field("heads", Whole(1, 1024), None, "its attention heads (default: the target's)", _GROUP),
    Field("intermediate", Whole(8, 1_000_000), None, "its MLP's width (default: the target's)", _GROUP),
    Field("start", _path("DIR", "a folder"), None, "a trained drafter of this shape to go on from", _GROUP),
    Field("init_layers", WholeList(0, 999, NONE), (NONE,), "target layers that its layers start from, or none", _GROUP),
    Field("short_list", Whole(0), 4096, "ids of its head, the most frequent ones; 0: all", _GROUP),
    Field(
        "head",
        Choice(("trained", "shared", "projected")),
        "trained",
        "its head: own rows, the target's, or those behind an own matrix",
        _GROUP,
    ),
)
_TRAINING = (
    Field("steps", Whole(1, 16), 3, "drafted steps to train over (feature)", _GROUP),
    Field("lag", Whole(1, 64), 5, "tokens its view of the target lags behind, at most (glide)", _GROUP),
    Field("recency", Choice(("off", "on")), "off", "a learned leaning towards the latest keys (glide)", _GROUP),
    Field("law", Law(), "full", "learn the full law, its K likeliest ids, or the likeliest", _GROUP),
    Field("hard_weight", Number(0, 1), 0.0, "share of the law moved to its likeliest id", _GROUP),
    Field("epochs", _above_0(1000), 4.0, "times the data is learned from", _GROUP),
    Field("lr", _above_0(1), 0.003, "highest learning rate", _GROUP),
    Field("batch_tokens", Whole(16), 1536, "tokens of a training batch", _GROUP),
    Field("minutes", _above_0(100_000), None, "end the training after so long", _GROUP),
    Field("patience", Whole(1, 1000), 4, "stop after so many evaluations without gain", _GROUP),
)
_WHERE = (
    Field("out", _path("DIR", "a folder"), None, "folder for the drafter; kept work in it is gone on with", _GROUP),
    Field("features", _path("DIR", "a folder"), None, "folder of what the target computes, for several runs", _GROUP),
    Field("batch", Whole(1, 4096), 32, "chats that are written at once", _GROUP),
    Field("export", _path("DIR", "a folder"), None, "also save a plain one as a transformers model", _GROUP),
)
DISTILL_FIELDS: Mapping[str, Field] = {field.name: field for field in (*_WHERE, *_DATA, *_SHAPE, *_TRAINING)}
TRAINING_NAMES = tuple(field.name for field in (*_SHAPE, *_TRAINING))
"""What a checkpoint depends on beside the data."""
DATA_NAMES = tuple(field.name for field in _DATA)
_ONLY_FOR = {"steps": "feature", "lag": "glide", "recency": "glide"}


@dataclass(frozen=True)
class DistillArgs:
    """What `distill` takes beside the settings. `command` is what was typed; `data` is ("self",) or files."""

    out: Path | None = None
    features: Path | None = None
    data: tuple[str, ...] = (SELF,)
    prompts: Path | None = None
    tokens: int = 200_000
    limited: bool = False  # --tokens was given
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    longest: int = 512
    batch: int = 32
    student: str = "plain"
    layers: int = 1
    hidden: int | None = None
    heads: int | None = None
    intermediate: int | None = None
    start: Path | None = None
    init_layers: tuple[int, ...] = ()
    short_list: int = 4096
    head: str = "trained"
    steps: int = 3
    lag: int = 5
    recency: str = "off"
    law: int | str = "full"
    hard_weight: float = 0.0
    epochs: float = 4.0
    lr: float = 0.003
    batch_tokens: int = 1536
    minutes: float | None = None
    patience: int = 4
    export: Path | None = None
    command: str = "python infer.py distill"

    @property
    def writes(self) -> bool:
        """Whether the target writes the data itself."""
        return self.data == (SELF,)

    def matters(self, name: str) -> bool:
        """Whether a setting says anything about this drafter."""
        if name in ("tokens", "temperatures") and not (self.writes or (name == "tokens" and self.limited)):
            return False  # of text that is there already
        given = getattr(self, name, "") is not None
        return given and _ONLY_FOR.get(name, self.student) == self.student

    def shown(self, name: str) -> str:
        """A setting's value as a user would type it."""
        value = getattr(self, name)
        if name == "data":
            return " ".join(value)
        if name == "init_layers":
            return ",".join(map(str, value)) or NONE
        return "(none)" if value is None else DISTILL_FIELDS[name].show(value)


def distill_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> DistillArgs:
    """The arguments read from their texts; UsageError in one line."""
    texts = {name: given[name] for name in DISTILL_FIELDS if name in given and name != "data"}
    values = {name: DISTILL_FIELDS[name].read(text, label=_flag(name)) for name, text in texts.items()}
    if not values.get("out"):
        raise UsageError("distill needs --out: the folder to write")
    if "data" in given:
        values["data"] = _sources(given)
    if "init_layers" in values:
        values["init_layers"] = _init_layers(values)
    for name in ("out", "prompts", "export", "features", "start"):
        if values.get(name):
            values[name] = Path(os.path.expanduser(values[name]))
    args = DistillArgs(**values, limited="tokens" in given, command=shlex.join(["python", "infer.py", *arguments]))
    for name, kind in _ONLY_FOR.items():
        if name in given and args.student != kind:
            raise UsageError(f"{_flag(name)} belongs to --student {kind}, the student is {args.student}")
    if args.start is not None and args.init_layers:
        raise UsageError("--start and --init-layers contradict each other: give one")
    if args.export is not None and (args.student != "plain" or args.short_list):
        raise UsageError("--export needs --student plain and --short-list 0: no ordinary model has another head")
    if args.heads is not None and args.hidden is not None and args.hidden % args.heads:
        raise UsageError(f"--hidden {args.hidden} cannot be shared out over --heads {args.heads}")
    return args


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _sources(given: Mapping[str, Any]) -> tuple[str, ...]:
    sources = tuple(given["data"])
    if SELF in sources and len(sources) > 1:
        raise UsageError(f"--data takes self or files, not both, got {' '.join(sources)}")
    if SELF not in sources and "prompts" in given:
        raise UsageError("--data FILES and --prompts contradict each other: give one")
    return sources


def _init_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    chosen: tuple[int | str, ...] = values["init_layers"]
    if chosen == (NONE,):
        return ()
    numbers = tuple(one for one in chosen if isinstance(one, int))
    wanted = values.get("layers", 1)
    if len(numbers) != len(chosen):
        raise UsageError(f"--init-layers takes layers or none, not both, got {','.join(map(str, chosen))}")
    if len(numbers) != wanted:
        raise UsageError(f"--init-layers names {len(numbers)} layers, --layers is {wanted}: one for each")
    return numbers


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
    "tokens": Field("tokens", Whole(1), 200_000, "answer tokens to write", _WRITE),
    "kinds": Field("kinds", KindList(), ("chat",), "what the user's turns are about, in turn", _WRITE),
    "prompts": PROMPT_FIELDS["prompts"],
    "temperatures": Field("temperatures", NumberList(0, 5), (0.0, 0.7, 1.0), "of the answers, in turn", _WRITE),
    "answer_tokens": Field("answer_tokens", Whole(1, 65_536), 256, "longest answer, in tokens", _WRITE),
    "batch": Field("batch", Whole(1, 4096), 32, "chats that are written at once", _WRITE),
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


@dataclass(frozen=True)
class TablesArgs:
    """What `tables` takes beside the settings. `sources` is ("self",) or files."""

    sources: tuple[str, ...] = ()
    out: Path | None = None
    max_n: int = 5
    max_mb: float = 10.0
    choices: int = 3
    tokens: int = 200_000


def tables_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> TablesArgs:
    """The arguments read from their texts; UsageError in one line."""
    plain = {name: given[name] for name in TABLES_FIELDS if name in given and name != "from"}
    values = {name: TABLES_FIELDS[name].read(text, label=f"--{name.replace('_', '-')}") for name, text in plain.items()}
    sources = tuple(given.get("from") or ())
    if not sources:
        raise UsageError("tables needs --from: self, or files to count")
    if SELF in sources and len(sources) > 1:
        raise UsageError(f"--from takes self or files, not both, got {' '.join(sources)}")
    if not values.get("out"):
        raise UsageError("tables needs --out: the file to write")
    return TablesArgs(**{**values, "sources": sources, "out": Path(values["out"]).expanduser()})
