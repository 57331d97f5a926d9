"""The file of `bench --out`: written whole or not at all, with the facts of the machine beside the figures.

Knows no methods and no prompts.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from utils.errors import UsageError


def writable(path: Path) -> None:
    """UsageError, before hours of work, if a file cannot be written there."""
    folder = path.expanduser().absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--out {path}: the folder {folder} is not there or cannot be written to")
    if path.expanduser().is_dir():
        raise UsageError(f"--out {path} is a folder: name a file")


def machine(loaded: Any) -> dict[str, Any]:
    """The facts a figure needs beside it to be quoted."""
    import torch
    import transformers

    device = loaded.target.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "gpu": gpu,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "quantization": loaded.target.quantization,
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write all of it or nothing: a file of this name is replaced only by a complete one."""
    path = path.expanduser()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
