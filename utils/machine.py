"""What a figure needs beside it to be quoted: the machine it was measured on and the program's version. Measures
nothing.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


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
        "dtype": loaded.target.dtype_text,
        "quantization": loaded.target.quantization,
    }


def version() -> str:
    """Name and version, from pyproject.toml: their only source."""
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    return f"{project['name']} {project['version']}"
