"""What a folder says of the trained drafter in it, by its configuration alone; imports no torch.

The rule is that of sampling/student_file.py, which this package may not ask (a test compares them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from utils.specs import STUDENTS

FORMAT = "speculative-console student"
_GLIDE = "large_num_attention_heads"  # a Llama configuration with this key is a published GLIDE drafter's


def student_kind(folder: str | Path) -> str | None:
    """ "plain", "glide" or "feature" if a trained drafter lies in `folder`; None for anything else."""
    try:
        config: Any = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not (config.get("student") == FORMAT or _GLIDE in config):
        return None
    kind = config.get("kind", "glide" if _GLIDE in config else "plain")
    return kind if kind in STUDENTS else None
