"""A conversation as a file, and an answer on the clipboard. Files are written whole or not at all.
Knows no models and no screen; it writes what it is given.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.conversation import Turn
from utils.errors import UserError

VERSION = 1
_TOOLS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "-ib"), ("pbcopy",), ("clip.exe",))
_NEEDS = {"wl-copy": "WAYLAND_DISPLAY", "xclip": "DISPLAY", "xsel": "DISPLAY"}


def as_json(turns: Sequence[Turn], about: Mapping[str, Any]) -> str:
    """The conversation with ids, texts, settings, figures and events; `about` is the pair and the system prompt."""
    return json.dumps(
        {"version": VERSION, **about, "turns": [_turn(turn) for turn in turns]}, ensure_ascii=False, indent=1
    )


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "user": turn.user,
        "text": turn.text,
        "reason": turn.reason,
        "seed": turn.seed,
        "regenerated": turn.regenerated,
        "prompt_ids": list(turn.prompt),
        "answer_ids": list(turn.answer),
        **turn.record,
    }


def as_text(turns: Sequence[Turn], system: str) -> str:
    """The conversation as plain text."""
    head = [f"[system]\n{system}\n"] if system else []
    return "\n".join([*head, *(f"[user]\n{turn.user}\n\n[assistant]\n{turn.text}\n" for turn in turns)])


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, replacing what was there only when everything is on disk.

    What is no plain file (a device, a pipe) is written directly. Raises UserError in one line.
    """
    data = text.encode("utf-8", "replace")
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb", buffering=0) as file:
                file.write(data)
            return
        _replace(path.resolve(), data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error} (nothing was saved)") from None


def _replace(path: Path, data: bytes) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def osc52(text: str) -> str:
    """The control sequence by which a terminal puts `text` on the clipboard, also over ssh."""
    return f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode('ascii')}\x07"


def local_clipboard(text: str) -> bool:
    """Put `text` on this machine's clipboard with the first tool that works; False if there is none."""
    for command in _TOOLS:
        needed = _NEEDS.get(command[0])
        if shutil.which(command[0]) is None or (needed and not os.environ.get(needed)):
            continue
        try:
            subprocess.run(
                command,
                input=text.encode("utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=3,
                check=True,
            )
            return True
        except (OSError, subprocess.SubprocessError):
            continue
    return False
