"""Several prompts answered together: one answer a row, each with what it cost, and `bench --batch-size`.

The rows of a batch share every pass. A row's seconds are its even share of each round it was active in, so that Σ
tokens / Σ seconds over the rows is the batch's own rate. Knows lanes, not how they decode, and no figures over several
answers (app/bench/summary.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from app.lanes.answers import Answer
from app.lanes.comparison import may_differ
from app.lanes.costs import Terms
from sampling.stats.metrics import Meter
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.bench.options import BenchArgs
    from app.lanes.lane import Lane


def check_batches(args: BenchArgs, methods: Sequence[str], record: str | None = None) -> None:
    """UsageError, before any work, for what is answered one prompt at a time only."""
    alone = {
        "lane beam searches for": "beam" in methods,
        "--against times": args.against is not None,
        "--record tells of": record,
        "--check-identity compares": args.check_identity,
    }
    for words, given in alone.items():
        if given and args.batch_size > 1:
            raise UsageError(f"{words} one prompt at a time, got --batch-size {args.batch_size}")


def run_rows(
    lane: Lane,
    prompts: Sequence[list[int]],
    decode: Callable[[list[int]], str],
    *,
    interrupt: Callable[[], bool],
    terms: Terms | None = None,
) -> list[Answer]:
    """Decode the prompts as one batch to their ends: an answer for each. The lane reads them itself."""
    meters = [Meter(row, len(prompt), len(prompts)) for row, prompt in enumerate(prompts)]
    for event in lane.run_rows([list(prompt) for prompt in prompts], interrupt=interrupt):
        row = getattr(event, "row", None)
        for meter in meters if row is None else [meters[row]]:
            meter.add(event)
    differs = may_differ(lane, lane.settings)
    return [
        Answer(lane.name, tuple(one.ids), decode(one.ids), one.stats, differs, terms or Terms(), len(prompts))
        for one in meters
    ]
