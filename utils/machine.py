"""The machine on which figures are measured, the program's version, and how memory is allocated."""

import ctypes
import os
import platform
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from utils.objects import Json
from utils.processes import this_process

_TRIM, _MAPPED = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def machine(loaded: Any) -> Json:
    """Return the facts about the machine and the loaded pair that belong to a figure."""
    target = loaded.target
    return {
        **facts(target.device),
        "dtype": target.dtype_text,
        "quantization": target.quantization,
        "activations": target.activations,
    }


def facts(device: Any) -> Json:
    """Return the facts about the machine that belong to a figure measured on a torch.device now."""
    import torch
    import transformers

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": this_process().world_size,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    """Return the processor's name, from the system."""
    with suppress(OSError):
        if name := re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1].strip()
    return platform.processor() or platform.machine()


def keep_memory() -> None:
    """Keep freed memory in the process. Passes over many rows allocate and free tens of megabytes each time, and
    clearing fresh memory takes up to half of their time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc
        mallopt(_TRIM, (1 << 31) - 1)
        mallopt(_MAPPED, 1 << 30)


def version() -> str:
    """Return name and version, from pyproject.toml: their only source."""
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    return f"{project['name']} {project['version']}"
