"""The arguments of `bench` as a test gives them."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from app.command_line.arguments import bench_args


def bench_with(prompts: Path | str | None = None, **given: Any) -> Namespace:
    """The defaults, with these values."""
    return Namespace(**{**vars(bench_args({})), "prompts": prompts, **given})
