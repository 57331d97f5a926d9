"""Several prompts answered together: one answer a row, each with what it cost, and `bench --batch-size`.

The rows of a batch share every pass. A row's seconds are its even share of each round it was active in, so that Σ
tokens / Σ seconds over the rows is the batch's own rate. Chats go on side by side: the first turns of a group of
questions are one batch, then the second turns of those that have one. Knows lanes, not how they decode, and no figures
over several answers (app/bench_figures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from app.answers import Answer
from app.costs import Terms, terms_of
from sampling.metrics import Meter
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.bench import Bench, Item, Variant
    from app.bench_fields import BenchArgs
    from app.lanes import Lane

Level = Sequence[tuple["Item", list[int]]]


def check_batches(args: BenchArgs, methods: Sequence[str]) -> None:
    """UsageError, before any work, for what is answered one prompt at a time only."""
    if args.batch_size == 1:
        return
    still = f"got --batch-size {args.batch_size}"
    if "beam" in methods:
        raise UsageError(f"lane beam searches for one prompt at a time, {still}")
    if args.against is not None:
        raise UsageError(f"--against times one prompt at a time, {still}")
    if args.check_identity:
        raise UsageError(f"--check-identity compares one prompt at a time, {still}")


def run_rows(
    lane: Lane,
    prompts: Sequence[list[int]],
    decode: Callable[[list[int]], str],
    *,
    interrupt: Callable[[], bool],
    terms: Terms | None = None,
) -> list[Answer]:
    """Decode the prompts as one batch to their ends: an answer for each. The lane reads them itself."""
    from app.lanes import may_differ

    meters = [Meter(row, len(prompt), len(prompts)) for row, prompt in enumerate(prompts)]
    asked = [0] * len(prompts)
    for event in lane.run_rows([list(prompt) for prompt in prompts], interrupt=interrupt):
        row = getattr(event, "row", None)
        for meter in meters if row is None else [meters[row]]:
            meter.add(event)
        if row is not None:
            asked[row] += getattr(event, "gamma", 0)
    differs = may_differ(lane, lane.settings)
    return [
        Answer(lane.name, tuple(one.ids), decode(one.ids), one.stats, differs, gammas, terms or Terms(), len(prompts))
        for one, gammas in zip(meters, asked, strict=True)
    ]


def run_batches(bench: Bench, bar: Any) -> bool:
    """Answer the questions of `bench` so many at a time, every variant in turn; False after an interrupt."""
    size, each = bench.args.batch_size, bench.args.repeat * len(bench.variants)
    for start in range(0, len(bench.questions), size):
        group = bench.questions[start : start + size]
        chats = [bench.turns(question) for question in group]
        left = sum(len(question.turns) for question in group)
        while level := [found for chat in chats if (found := next(chat, None)) is not None]:
            bench.items += [item for item, _ in level]
            if not _measure(bench, level, bar):
                return False
            left -= len(level)
        bar.total = (bar.total or 0) - left * each
    return True


def _measure(bench: Bench, level: Level, bar: Any) -> bool:
    """All repeats of one batch; False after an interrupt, whose unfinished answers are dropped."""
    from app.bench import order

    for _ in range(bench.args.repeat):
        for item, _ in level:
            item.answers.append({})
        for variant in order(bench.variants, sum(len(item.answers) for item in bench.items) // len(level) - 1):
            bar.set_description(variant.label, refresh=False)
            answers = _answered(bench, variant, [prompt for _, prompt in level])
            if any(answer.interrupted for answer in answers):
                return False
            for (item, _), answer in zip(level, answers, strict=True):
                item.answers[-1][variant] = answer
            bar.update(len(level))
    return True


def _answered(bench: Bench, variant: Variant, prompts: list[list[int]]) -> list[Answer]:
    lane = bench.lane(variant)
    return run_rows(lane, prompts, bench.decode, interrupt=bench.interrupt, terms=terms_of(lane, bench.engine))
