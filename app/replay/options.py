"""What `replay` and `demo` take on the command line beside the looks. No torch, no models."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.replay.steps import STEPS
from app.settings.table import Field, arguments
from app.settings.types import Number, Switch, Whole
from utils.errors import UsageError

REPLAY_FIELDS = {
    "speed": Field("speed", Number(0, 1_000_000), 1.0, "times its own speed; 0: at once", "replay"),
    "answer": Field("answer", Whole(1), None, "only this answer, counted from 1", "replay"),
    "inspect": Field("inspect", Switch(), False, "walk over the last answer token by token", "replay"),
}

STEP = Whole(1, len(STEPS))


def replay_args(given: Mapping[str, Any], _: Sequence[str] = ()) -> Namespace:
    """Return the values or defaults, and `file`; UsageError in one line."""
    if not given.get("file"):
        raise UsageError("replay needs a file that --log has written")
    return arguments(REPLAY_FIELDS, given, file=Path(os.path.expanduser(given["file"])))


def demo_args(given: Mapping[str, Any], _: Sequence[str] = ()) -> Namespace:
    """Return `step` (None: all) and whether it is the recorded tour; UsageError in one line."""
    step = None if given.get("step") is None else Field("step", STEP, None, "", "").read(given["step"], "demo N")
    return Namespace(step=step, recorded=bool(given.get("recorded")))
