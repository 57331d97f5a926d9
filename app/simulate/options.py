"""The flags of `simulate` and `record` beside the settings. No torch, no models."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.prompts.questions import PROMPT_FIELDS
from app.settings.table import Field, arguments
from app.settings.types import METHODS, Choice, Names, Number, NumberList, Switch, Text, Whole, WholeList
from utils.errors import UsageError

_GROUP, _RECORD = "simulate", "record"
_SECONDS = Number(0, 1e6)
_FILE = Text("FILE", "a file", optional=True)

RECORD_FIELDS: Mapping[str, Field] = {
    **PROMPT_FIELDS,
    "out": Field("out", _FILE, None, "the recording, .jsonl", _RECORD),
    "costs": Field("costs", Switch(), False, "also record the time of passes over 1 to 17 tokens here", _RECORD),
    "best": Field("best", Whole(1, 64), 3, "the target's likeliest ids to record at each token", _RECORD),
}

_TABLE = (
    Field(
        "methods", Names(METHODS), ("spec",), "drafters to try, as the lanes of bench; spec: that of --drafter", _GROUP
    ),
    Field("gammas", WholeList(1, 64), (1, 2, 4, 8), "gammas to try", _GROUP),
    Field("t_draft", _SECONDS, None, "seconds of a drafted token (default: measured here)", _GROUP),
    Field(
        "t_verify",
        NumberList(0, 1e6, without_low=True),
        (),
        "seconds of a pass over 1, 2, … tokens (default: as recorded)",
        _GROUP,
    ),
    Field("prompts", _FILE, None, "the prompts of a recording that torch printed, row by row", _GROUP),
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
    Field("out", Text("F.json", "a file", optional=True), None, "write every figure to this JSON file", _GROUP),
)
SIMULATE_FIELDS: Mapping[str, Field] = {field.name: field for field in _TABLE}


def simulate_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """Return the values or defaults, and `file`; UsageError in one line."""
    if not given.get("file"):
        raise UsageError("simulate needs a file: the recording to play (infer.py record makes one)")
    return arguments(SIMULATE_FIELDS, given, file=Path(os.path.expanduser(given["file"])))


def record_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """Return the values or defaults; UsageError in one line."""
    args = arguments(RECORD_FIELDS, given)
    if args.out is None:
        raise UsageError("record needs --out: the file to write")
    return args
