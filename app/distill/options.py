"""What `distill`, `write` and `tables` take: their flags from one table each. No torch."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.prompts.datasets import PROMPT_FIELDS
from app.settings.table import Field, arguments
from app.settings.types import Choice, Number, NumberList, Text, Whole, WholeList
from training.text.dialogues import KINDS
from utils.errors import UsageError

SELF, NONE = "self", "none"
_GROUP, _WRITE = "distill", "write"
_FILE, _FOLDER = Text("FILE", "a file", optional=True), Text("DIR", "a folder", optional=True)
_ANY = "|".join(KINDS)
_KINDS = Text(
    *("LIST|all", f"all or a comma list of {', '.join(KINDS)}", ("all", *KINDS)),
    pattern=rf"all|\s*({_ANY})\s*(,\s*({_ANY})\s*)*",
)
_LAW = Text(
    *("full|K|hard", "full, hard or a whole number from 1 to 1000000", ("full", "hard")),
    pattern=r"full|hard|[1-9][0-9]{0,5}|1000000",
)

TABLES_FIELDS = {
    "from": Field("from", Text("self|FILES", "self or files"), None, "text to count: .jsonl, .txt, or self", "tables"),
    "out": Field("out", _FILE, None, "the tables' file", "tables"),
    "max_n": Field("max_n", Whole(1, 16), 5, "tokens of the longest context", "tables"),
    "max_mb": Field("max_mb", Number(0, 4000, without_low=True), 10.0, "largest file, in million bytes", "tables"),
    "choices": Field("choices", Whole(1, 8), 3, "most next tokens of a context: trees draft siblings", "tables"),
    "tokens": Field("tokens", Whole(1), 200_000, "answer tokens that self writes", "tables"),
}


WRITE_FIELDS: Mapping[str, Field] = {
    "tokens": Field("tokens", Whole(1), 200_000, "answer tokens to write", _WRITE),
    "kinds": Field("kinds", _KINDS, "chat", "what the user's turns are about, in turn", _WRITE),
    "prompts": PROMPT_FIELDS["prompts"],
    "temperatures": Field("temperatures", NumberList(0, 5), (0.0, 0.7, 1.0), "of the answers, in turn", _WRITE),
    "answer_tokens": Field("answer_tokens", Whole(1, 65_536), 256, "longest answer, in tokens", _WRITE),
    "batch": Field("batch", Whole(1, 4096), 32, "chats that are written at once", _WRITE),
}
_DATA = (
    Field("data", Text("self|FILES", "self or files"), SELF, "token files to learn from, or self", _GROUP),
    Field("prompts", _FILE, None, "prompts that the target answers, as in bench", _GROUP),
    Field("tokens", Whole(1), 200_000, "answer tokens to write or to take", _GROUP),
    Field("temperatures", NumberList(0, 5), (0.0, 0.7, 1.0), "of the answers written, in turn", _GROUP),
    Field("longest", Whole(16, 65_536), 512, "longest sequence, in tokens", _GROUP),
)
_SHAPE = (
    Field("student", Choice(("plain", "glide", "feature", "eagle3")), "plain", "the kind of drafter", _GROUP),
    Field("layers", Whole(1, 100), 1, "its layers", _GROUP),
    Field("hidden", Whole(8, 65_536), None, "its width (default: the target's)", _GROUP),
    Field("heads", Whole(1, 1024), None, "its attention heads (default: the target's)", _GROUP),
    Field("intermediate", Whole(8, 1_000_000), None, "its MLP's width (default: the target's)", _GROUP),
    Field("start", _FOLDER, None, "a trained drafter of this shape, or of fewer layers, to go on from", _GROUP),
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
    Field("steps", Whole(1, 16), 3, "drafted steps to train over (feature, eagle3)", _GROUP),
    Field("lag", Whole(1, 64), 5, "tokens its view of the target lags behind, at most (glide)", _GROUP),
    Field("recency", Choice(("off", "on")), "off", "a learned leaning towards the latest keys (glide)", _GROUP),
    Field("law", _LAW, "full", "learn the whole distribution, its K likeliest ids, or the likeliest", _GROUP),
    Field("hard_weight", Number(0, 1), 0.0, "share of the distribution moved to its likeliest id", _GROUP),
    Field("epochs", Number(0, 1000, without_low=True), 4.0, "times the data is learned from", _GROUP),
    Field("lr", Number(0, 1, without_low=True), 0.003, "highest learning rate", _GROUP),
    Field("batch_tokens", Whole(16), 1536, "tokens of a training batch", _GROUP),
    Field("minutes", Number(0, 100_000, without_low=True), None, "end the training after so long", _GROUP),
    Field("patience", Whole(1, 1000), 4, "stop after so many evaluations without gain", _GROUP),
)
_WHERE = (
    Field("out", _FOLDER, None, "folder for the drafter; kept work in it is gone on with", _GROUP),
    Field("features", _FOLDER, None, "folder of what the target computes, for several runs", _GROUP),
    Field("batch", Whole(1, 4096), 32, "chats that are written at once", _GROUP),
    Field("export", _FOLDER, None, "also save a plain one as a transformers model", _GROUP),
)
DISTILL_FIELDS: Mapping[str, Field] = {field.name: field for field in (*_WHERE, *_DATA, *_SHAPE, *_TRAINING)}
TRAINING_NAMES = tuple(field.name for field in (*_SHAPE, *_TRAINING))
"""What a checkpoint depends on beside the data."""
DATA_NAMES = tuple(field.name for field in _DATA)
_ONLY_FOR = {"steps": ("feature", "eagle3"), "lag": ("glide",), "recency": ("glide",)}


# -- distill ----------------------------------------------------------------------------------------


def distill_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """What was given or is the default; UsageError in one line for what does not go together.

    `data` is ("self",) or files, `writes` says whether the target writes it itself; `limited`: --tokens was given;
    `command` is what was typed.
    """
    plain = {name: value for name, value in given.items() if name != "data"}
    args = arguments(DISTILL_FIELDS, plain, command=shlex.join(["python", "infer.py", *words]))
    if args.out is None:
        raise UsageError("distill needs --out: the folder to write")
    args.data, args.limited = tuple(given.get("data", (SELF,))), "tokens" in given
    args.writes = args.data == (SELF,)
    if SELF in args.data and not args.writes:
        raise UsageError(f"--data takes self or files, not both, got {' '.join(args.data)}")
    if not args.writes and args.prompts is not None:
        raise UsageError("--data FILES and --prompts contradict each other: give one")
    args.init_layers = _init_layers(args)
    for name, kinds in _ONLY_FOR.items():
        if name in given and args.student not in kinds:
            raise UsageError(f"--{name} belongs to --student {' or '.join(kinds)}, the student is {args.student}")
    args.kind = "eagle" if args.student == "eagle3" else args.student
    if args.kind == "eagle":
        _published(args)
    if args.start is not None and args.init_layers:
        raise UsageError("--start and --init-layers contradict each other: give one")
    if args.export is not None and (args.student != "plain" or args.short_list):
        raise UsageError("--export needs --student plain and --short-list 0: no ordinary model has another head")
    if args.heads is not None and args.hidden is not None and args.hidden % args.heads:
        raise UsageError(f"--hidden {args.hidden} cannot be shared out over --heads {args.heads}")
    return args


def _published(args: Namespace) -> None:
    """Refuse what the published format has no place for, and what streaming leaves nothing of."""
    if args.head != "trained":
        raise UsageError(f"--head {args.head} has no place in an EAGLE-3 checkpoint: --student eagle3 trains its own")
    if args.init_layers:
        raise UsageError("--init-layers: the layers of --student eagle3 are wider than a target's")
    if args.features is not None:
        raise UsageError("--features: what the target computes for --student eagle3 is streamed, not kept")


def _init_layers(args: Namespace) -> tuple[int, ...]:
    """The target's layers that the draft head's start from, one for each; none of them for `none`."""
    chosen = args.init_layers
    if chosen == (NONE,):
        return ()
    if NONE in chosen:
        raise UsageError(f"--init-layers takes layers or none, not both, got {','.join(map(str, chosen))}")
    if len(chosen) != args.layers:
        raise UsageError(f"--init-layers names {len(chosen)} layers, --layers is {args.layers}: one for each")
    return tuple(chosen)


def matters(args: Namespace, name: str) -> bool:
    """Whether a setting says anything about this draft head."""
    if name in ("tokens", "temperatures") and not (args.writes or (name == "tokens" and args.limited)):
        return False  # of text that is there already
    return getattr(args, name, "") is not None and args.student in _ONLY_FOR.get(name, (args.student,))


def shown(args: Namespace, name: str) -> str:
    """A setting's value as a user would type it."""
    value = getattr(args, name)
    if name == "data":
        return " ".join(value)
    if name == "init_layers":
        return ",".join(map(str, value)) or NONE
    return "(none)" if value is None else DISTILL_FIELDS[name].show(value)


# -- write and tables -------------------------------------------------------------------------------


def write_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """What was given or is the default, and `file`; UsageError in one line.

    `tokens` is None for as many as there are prompts for; `prompts` is a file, or the name of a data set.
    """
    args = arguments(WRITE_FIELDS, given)
    if not given.get("file"):
        raise UsageError("write needs a file to write: python infer.py write FILE.jsonl")
    args.file = Path(os.path.expanduser(given["file"]))
    if args.file.suffix != ".jsonl":
        raise UsageError(f"{args.file}: the file must end in .jsonl, as its readers expect")
    if "kinds" in given and args.prompts is not None:
        raise UsageError("--kinds and --prompts contradict each other: give one")
    if args.prompts is not None and "tokens" not in given:
        args.tokens = None
    args.kinds = tuple(KINDS) if args.kinds == "all" else tuple(kind.strip() for kind in args.kinds.split(","))
    return args


def tables_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """What was given or is the default; UsageError in one line. `sources` is ("self",) or files."""
    sources = tuple(given.get("from") or ())
    args = arguments(TABLES_FIELDS, {name: given[name] for name in given if name != "from"}, sources=sources)
    if not sources:
        raise UsageError("tables needs --from: self, or files to count")
    if SELF in sources and len(sources) > 1:
        raise UsageError(f"--from takes self or files, not both, got {' '.join(sources)}")
    if args.out is None:
        raise UsageError("tables needs --out: the file to write")
    return args
