"""A training run's state on disk, so that it goes on where it was stopped. Knows no models."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

import torch

from utils.errors import UserError

NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state, whole or not at all. Raises OSError (a full disk) with the last one intact."""
    held = io.BytesIO()
    torch.save(state, held)
    data = held.getvalue()
    temporary = folder / f"{NAME}.partial"
    try:
        with temporary.open("wb") as out:
            out.write(zlib.crc32(data).to_bytes(4, "little") + data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, folder / NAME)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(folder / NAME)) from error  # a failed write names no file


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The state last saved; None if there is none. UserError if it is damaged."""
    file = folder / NAME
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {file}: {error.strerror}") from None
    if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4]:
        raise UserError(f"the checkpoint {file} is damaged: remove it to begin again")
    state: dict[str, Any] = torch.load(io.BytesIO(content[4:]), map_location="cpu", weights_only=True)
    return state
