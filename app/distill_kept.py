"""What `distill` finds in its folder: a run of the same settings goes on, another one is named. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.bench_file import write_json
from app.distill_fields import TRAINING_NAMES
from utils.errors import UsageError, UserError

RUN, CHECKPOINT, WORK, WRITTEN = "run.json", "checkpoint.pt", "work", "written.jsonl"
_IN_WORDS = {"files": "other files to read", "tokenizer": "a target of another tokenizer"}


def check_folder(out: Path) -> None:
    """UsageError if `out` is a file, or holds what no run of distill has put there."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    if out.is_dir() and not (out / RUN).is_file() and any(out.iterdir()):
        raise UsageError(f"--out {out} holds other files and no run of distill: name a new or empty folder")


def keep(out: Path, now: Mapping[str, str]) -> None:
    """Note the settings of this run in its folder.

    Those that the kept parts were made with must be the same: of the data always, of the training once there is a
    checkpoint. UsageError names the first that is not.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / RUN
    if file.is_file():
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{file} is damaged: remove {out}, or choose another --out") from None
        trained = (out / CHECKPOINT).is_file()
        for name, value in now.items():
            if before.get(name) != value and (trained or name not in TRAINING_NAMES):
                flag = f"--{name.replace('_', '-')} {before.get(name)}, now {value}"
                what = _IN_WORDS.get(name, flag)
                raise UsageError(f"{out} holds a run with {what}: give the same flags, or another --out")
    write_json(file, dict(now))


def hash_of(files: Sequence[str | Path]) -> str:
    """Sixteen hexadecimal digits of the files' SHA-256; "" for none. UserError if one cannot be read."""
    if not files:
        return ""
    found = hashlib.sha256()
    for name in files:
        try:
            with Path(name).expanduser().open("rb") as file:
                while block := file.read(1 << 20):
                    found.update(block)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    return found.hexdigest()[:16]
