"""The progress bar of work that answers prompts: on standard error, seldom where that is no terminal. Knows no text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.settings import Settings


def answer_bar(total: int, settings: Settings, known: int = 0) -> Any:
    """A tqdm bar over `total` answers, `known` of which are there already; --quiet shows none."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=known,
        unit="answer",
        disable=settings.quiet,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        leave=False,
    )
