"""Whether memory and disk have the room for what is about to be made: refused with figures before the machine swaps."""

from __future__ import annotations

import shutil
from pathlib import Path

from utils.errors import UserError
from utils.loading.cache import cache_folder


def check_memory(what: str, needed: float, instead: str) -> None:
    """UserError if `needed` bytes are not free; `what` needs them, `instead` is the way out."""
    import psutil

    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(f"{what} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free: {instead}")


def check_disk(what: str, needed: float, folder: Path) -> None:
    """UserError if the disk of `folder`, in the cache, has not `needed` bytes."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free in {cache_folder()}: free some, "
            "or set SPEC_CACHE_DIR"
        )
