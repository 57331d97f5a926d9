"""What a round costs beside its passes: `python -m tests.support.round_costs`. Milliseconds, medians; on a busy machine
only their ratios count. Measures, and judges nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from sampling.drafters.cascade import chain_of
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.drafters.tables.prompt_lookup import TablesDrafter
from sampling.types import Budget
from tests.support.runs import drafting, sampler
from tests.support.toys import TableLM
from utils.logits_processors import NucleusProcessor

V = 49_152


def milliseconds(call: Callable[[int], Any], times: int = 30) -> float:
    took = []
    for turn in range(times):
        started = perf_counter()
        call(turn)
        took.append(1000 * (perf_counter() - started))
    return median(took)


def proposal(make: Callable[[], Any], length: int) -> float:
    """A proposal behind `length` tokens of which one is new each time."""
    ids, drafter = random.Random(1), make()
    row = [ids.randrange(300) for _ in range(length)]
    session = TableLM(8).open([[0]])
    drafter.start([row], session, session)

    def round_(turn: int) -> None:
        row.append(ids.randrange(300))
        drafter.propose([list(row)], Budget([6]), drafting(sampler(), [row]))

    round_(0)
    return milliseconds(round_)


def main() -> None:
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], Any]] = {
        "matches alone": lambda: TablesDrafter(None, least=0),
        "matches behind n-grams": lambda: chain_of([NgramDrafter(V), TablesDrafter(None, least=0)], [3, 3]),
    }
    lines = []
    for name, make in ways.items():
        lines.append(f"{name}: {proposal(make, 4096):.2f} ms at 4k tokens, {proposal(make, 16384):.2f} ms at 16k")
    processor, noise = NucleusProcessor(1.0, 0.9), torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    for scale in (6.0, 0.1):
        took = milliseconds(lambda _, logits=scale * noise: processor(logits))
        lines.append(f"nucleus of .9, logits of spread {scale}: {took:.2f} ms")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
