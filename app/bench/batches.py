"""Several prompts answered together: one answer a row, each with what it cost, and `bench --batch-size`.

The rows of a batch share every pass. A row's seconds are its even share of each round it was active in, so that Σ
tokens / Σ seconds over the rows is the batch's own rate. Chats go on side by side: the first turns of a group of
questions are one batch, then the second turns of those that have one. Knows lanes, not how they decode, and no figures
over several answers (app/bench/summary.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from app.bench.journal import Place
from app.bench.plan import Item
from app.lanes.answers import Answer
from app.lanes.comparison import Variant, order
from app.lanes.costs import Terms, terms_of
from sampling.stats.metrics import Meter
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.bench.options import BenchArgs
    from app.bench.plan import Measurement
    from app.lanes.lane import Lane
    from app.prompts.questions import Question


class Row(NamedTuple):
    """A prompt of a batch: the number of its question, where its answers go, its ids."""

    number: int
    item: Item
    prompt: list[int]


Level = Sequence[Row]


def check_batches(args: BenchArgs, methods: Sequence[str], record: str | None = None) -> None:
    """UsageError, before any work, for what is answered one prompt at a time only."""
    if args.batch_size == 1:
        return
    still = f"got --batch-size {args.batch_size}"
    if "beam" in methods:
        raise UsageError(f"lane beam searches for one prompt at a time, {still}")
    if args.against is not None:
        raise UsageError(f"--against times one prompt at a time, {still}")
    if record:
        raise UsageError(f"--record tells of one prompt at a time, {still}")
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
    from app.lanes.comparison import may_differ

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


def run_batches(bench: Measurement, bar: Any) -> bool:
    """Answer the questions of `bench` so many at a time, every variant in turn; False after an interrupt."""
    size, each = bench.args.batch_size, bench.args.repeat * len(bench.variants)
    for start in range(0, len(bench.questions), size):
        group = bench.questions[start : start + size]
        chats = [_chat(bench, number, question) for number, question in enumerate(group, start)]
        left = sum(len(question.turns) for question in group)
        while level := [found for chat in chats if (found := next(chat, None)) is not None]:
            bench.items += [row.item for row in level]
            if not _measure(bench, level, bar):
                return False
            left -= len(level)
        bar.total = (bar.total or 0) - left * each
    return True


def _chat(bench: Measurement, number: int, question: Question) -> Iterator[Row]:
    """The turns of a question."""
    yield from (Row(number, item, prompt) for item, prompt in bench.turns(question))


def _measure(bench: Measurement, level: Level, bar: Any) -> bool:
    """All repeats of one batch; False after an interrupt, whose unfinished answers are dropped."""
    for repeat in range(bench.args.repeat):
        for row in level:
            row.item.answers.append({})
        for variant in order(bench.variants, sum(len(item.answers) for item in bench.items) // len(level) - 1):
            bar.set_description(variant.label, refresh=False)
            answers = _answered(bench, variant, level, repeat, bar)
            if any(answer.interrupted for answer in answers):
                return False
            for row, answer in zip(level, answers, strict=True):
                row.item.answers[-1][variant] = answer
        if bench.journal is not None:
            bench.journal.sync()
    return True


def _answered(bench: Measurement, variant: Variant, level: Level, repeat: int, bar: Any) -> list[Answer]:
    """The journal's answers; where it lacks one the batch is answered anew, and those that it has stay."""
    journal = bench.journal
    places = [Place(row.number, row.item.turn, repeat, variant) for row in level]
    known = [
        None if journal is None else journal.answer(place, len(row.prompt))
        for place, row in zip(places, level, strict=True)
    ]
    if None not in known:
        return [answer for answer in known if answer is not None]
    lane = bench.lane(variant)
    prompts, terms = [row.prompt for row in level], terms_of(lane, bench.engine)
    answers = run_rows(lane, prompts, bench.decode, interrupt=bench.interrupt, terms=terms)
    if any(answer.interrupted for answer in answers):
        return answers
    for place, before, answer in zip(places, known, answers, strict=True):
        if before is None:
            bar.update()
            if journal is not None:
                journal.add(place, answer)
    return [before or answer for before, answer in zip(known, answers, strict=True)]
