"""The flags of `distill`, from one table. No torch."""

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from app.prompts.questions import PROMPT_FIELDS
from app.settings.table import Field, arguments, by_name
from app.settings.types import Choice, Number, NumberList, Text, Whole
from training.text.dialogues import TASKS
from utils.catalogue.heads import PUBLISHED_KINDS
from utils.errors import raise_first

SELF = "self"
TEXT, TABLES, HEAD = STAGES = ("text", "tables", "head")
_FOLDER = Text("DIR", "a folder", optional=True)
_ANY = "|".join(TASKS)
_TASK_LIST = Text(
    *("LIST|all", f"all or a comma list of {', '.join(TASKS)}", ("all", *TASKS)),
    pattern=rf"all|\s*({_ANY})\s*(,\s*({_ANY})\s*)*",
)

_BLOCKS = ("dflash", "dflare", "dspark")  # kinds that draft a block, and are trained
_DATA = (
    Field("data", Text("self|FILES", "self or files"), SELF, "files to learn from and to count, or self"),
    PROMPT_FIELDS["prompts"],
    Field("kinds", _TASK_LIST, "chat", "kinds of task of the user's turns in own text, in turn"),
    Field("answer_tokens", Whole(1, 65_536), 384, "longest answer written, in tokens"),
    Field("tokens", Whole(1), 200_000, "answer tokens to write or to take"),
    Field("temperatures", NumberList(0, 5), (0.0, 0.7, 1.0), "of the answers written, in turn"),
    Field("longest", Whole(16, 65_536), 512, "longest sequence, in tokens"),
)
_TABLES = (
    Field("max_n", Whole(1, 16), 5, "tokens of the tables' longest context"),
    Field("max_mb", Number(0, 4000, without_low=True), 10.0, "the tables' largest file, in million bytes"),
    Field("choices", Whole(1, 8), 3, "most next tokens of a context in the tables"),
)
_STUDENTS = "plain", "glide", "feature", "eagle3", *_BLOCKS
_SHAPE = (
    Field("student", Choice(_STUDENTS), "plain", f"the kind of drafter: {', '.join(_STUDENTS)}"),
    Field("layers", Whole(1, 100), 1, "its layers"),
    Field("hidden", Whole(8, 65_536), None, "its width (default: the target's)"),
    Field("heads", Whole(1, 1024), None, "its attention heads (default: the target's)"),
    Field("intermediate", Whole(8, 1_000_000), None, "its MLP's width (default: the target's)"),
    Field("reads", Choice(("last", "several")), "last", "the target's states that it reads (feature)"),
    Field("start", _FOLDER, None, "a trained drafter of this shape to train further"),
    Field("bits", Choice(("16", "4")), "16", "bits of the stored weights"),
    Field("short_list", Whole(0), 4096, "ids of its head, the most frequent ones; 0: all"),
    Field("head", Choice(("trained", "shared")), "trained", "its head: own rows, or the target's"),
)
_TRAINING = (
    Field("steps", Whole(1, 16), 3, "drafted steps to train over (feature, eagle3)"),
    Field("lag", Whole(1, 64), 5, "largest lag of its view of the target, in tokens (glide)"),
    Field("block", Whole(2, 64), 8, f"rows of a block: the last token and masks ({', '.join(_BLOCKS)})"),
    Field("anchors", Whole(1, 4096), 24, f"blocks of each sequence in a batch ({', '.join(_BLOCKS)})"),
    Field("recency", Choice(("off", "on")), "off", "a learned preference for the latest keys (glide)"),
    Field("linear_start", Choice(("off", "on")), "off", "begin as the best linear map (feature)"),
    Field("held", Whole(1), 48, "sequences held out, at most a fifth"),
    Field("epochs", Number(0, 1000, without_low=True), 4.0, "times the data is learned from"),
    Field("lr", Number(0, 1, without_low=True), 0.003, "highest learning rate"),
    Field("batch_tokens", Whole(16), 1536, "tokens of a training batch"),
    Field("minutes", Number(0, 100_000, without_low=True), None, "end the training after this time"),
    Field("patience", Whole(1, 1000), 4, "evaluations without gain after which it stops"),
)
_WHERE = (
    Field("out", _FOLDER, None, "folder for text, tables and head; work in it is resumed"),
    Field("stage", Choice(STAGES), None, "make the text, the tables or the head alone (default: all three)"),
    Field("features", _FOLDER, None, "folder of the target's outputs, for several runs"),
    Field("batch", Whole(1, 4096), 32, "chats that are written at once"),
)
DISTILL_FIELDS = by_name(*_WHERE, *_DATA, *_TABLES, *_SHAPE, *_TRAINING)
DATA_NAMES, TABLES_NAMES, TRAINING_NAMES = (
    tuple(field.name for field in fields) for fields in (_DATA, _TABLES, (*_SHAPE, *_TRAINING))
)
_ONLY_FOR = {
    "steps": ("feature", "eagle3"),
    **dict.fromkeys(("linear_start", "reads"), ("feature",)),
    "bits": ("plain", "glide", "feature"),
    "lag": ("glide",),
    "recency": ("glide",),
    **dict.fromkeys(("block", "anchors"), _BLOCKS),
}


def distill_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """Return the values given or the defaults; UsageError in one line for values that exclude each other.

    `data`: ("self",) or files; `writes`: the target writes the text itself; `limited`: --tokens was given; `tasks`: the
    --kinds; `kind`: the kind of head for --student, a word of HEAD_KINDS (eagle for eagle3); `published`: its
    checkpoint has its authors' format; `command`: the command line, of which `words` are the arguments.
    """
    plain = {name: value for name, value in given.items() if name != "data"}
    args = arguments(DISTILL_FIELDS, plain, command=shlex.join(["python", "infer.py", *words]))
    args.data, args.limited = tuple(given.get("data", (SELF,))), "tokens" in given
    args.writes = args.data == (SELF,)
    args.tasks = tuple(TASKS) if args.kinds == "all" else tuple(kind.strip() for kind in args.kinds.split(","))
    args.kind = "eagle" if args.student == "eagle3" else args.student
    args.published = args.kind in PUBLISHED_KINDS
    student, prompts = args.student, args.prompts is not None
    foreign = {name: kinds for name, kinds in _ONLY_FOR.items() if name in given and student not in kinds}
    raise_first(
        {
            f"--data takes self or files, not both, got {' '.join(args.data)}": SELF in args.data and not args.writes,
            "--data FILES and --prompts contradict each other: give one": not args.writes and prompts,
            "--kinds and --prompts contradict each other: give one": "kinds" in given and prompts,
            "--kinds and --data FILES contradict each other: give one": "kinds" in given and not args.writes,
            "--stage text writes text, --data FILES reads it: give one": args.stage == TEXT and not args.writes,
            **{
                f"{DISTILL_FIELDS[name].flag} belongs to --student {' or '.join(kinds)}, the student is {student}": True
                for name, kinds in foreign.items()
            },
            f"--head {args.head} has no place in a published checkpoint: --student {student} trains its own": (
                args.published and args.head != "trained"
            ),
            "--features: the target's outputs for --student eagle3 are streamed, not kept": (
                args.features is not None and args.kind == "eagle"
            ),
        }
    )
    return args


def matters(args: Namespace, name: str) -> bool:
    """Return whether a setting has an effect on this draft head."""
    if name in ("tokens", "temperatures", "kinds", "answer_tokens"):
        return bool(args.writes or (name == "tokens" and args.limited))  # else the text is there already
    return getattr(args, name, "") is not None and args.student in _ONLY_FOR.get(name, (args.student,))


def shown(args: Namespace, name: str) -> str:
    """Return a setting's value as a user would type it."""
    value = getattr(args, name)
    if name == "data":
        return " ".join(value)
    return "(none)" if value is None else DISTILL_FIELDS[name].show(value)
