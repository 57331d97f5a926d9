"""Summarises a benchmark's answers in one row per method and gamma.

:class:`SummaryRow` is the one table of columns. Each of its fields but the three that name the row says how the figure
is computed, which values a file may hold, how the figure is written, and the column's head in each table; the file of
--out, the tables on the screen and the report (app/bench/report.py) follow from it.

A rate is Σ tokens / Σ seconds over all prompts of a repeat. A speed-up is the time that `ar` takes for as many tokens
as the method's, over the method's time, over the same prompts: with equal texts Σ time_ar / Σ time_method. Over repeats
a row has mean and spread (standard deviation) of rates, and the median of speed-ups. A repeat has no speed-up if its
timing was disturbed: if the method seems faster than its tokens a pass allow, though its passes are no shorter.

Knows no texts of answers, no models and no screen.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field

from app.lanes.answers import NEAR_TIE, Answer, PartingKind, Variant, agrees, parting
from app.lanes.costs import swi_of
from app.prompts.questions import Question
from app.settings.table import Settings
from sampling.drafters.registry import is_simulated
from sampling.stats.summary import Stats, cost_ratio, disturbed, expected, merge, ratio, speedup_over, verify_ratio
from utils.objects import Json
from utils.remote.server import ServerMessage

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Gamma = Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] | None
SummaryFields = Json  # the figures of one row, by key


# -- prompts and variants ------------------------------------------------------------------------


@dataclass
class PromptItem:
    """One prompt, which is turn `turn` of question number `number`, and its answers: `answers[repeat][variant]`."""

    number: int
    question: Question
    turn: int
    ids: list[int]
    answers: list[dict[Variant, Answer]] = field(default_factory=list)
    messages: Sequence[ServerMessage] = ()  # the chat, for a server

    @property
    def prompt(self) -> str:
        """The user's message of this turn."""
        return self.question.turns[self.turn]


def variants_of(engine: "PairEngine", settings: Settings, args: Namespace) -> list[Variant]:
    """Return methods × gammas; a method that drafts nothing appears once.

    A method that ignores gamma appears once for all numbers (its gamma is None) and once for auto.
    """
    variants: list[Variant] = []
    for method in args.methods or settings.compare:
        lane = engine.lane(method, settings)
        gammas: Iterable[int | str | None] = dict.fromkeys(args.gammas) if lane.drafts else [None]
        if lane.drafts and not lane.takes_gamma:
            gammas = dict.fromkeys(gamma if gamma == "auto" else None for gamma in gammas)
        variants += [Variant(method, gamma) for gamma in gammas]
    return variants


def reference_of(variants: Sequence[Variant]) -> Variant:
    """Return the variant that the others are compared with: `ar`, or without it the first one."""
    return next((variant for variant in variants if variant.method == "ar"), variants[0])


# -- the answers of a row ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """The answers of one variant, which are compared with those of `reference` if that is `ar`."""

    items: Sequence[PromptItem]
    variant: Variant
    reference: Variant

    @property
    def plain(self) -> Variant | None:
        return self.reference if self.reference.method == "ar" else None

    @cached_property
    def answers(self) -> list[Answer]:
        return [row[self.variant] for item in self.items for row in item.answers if self.variant in row]

    @cached_property
    def total(self) -> Stats:
        return merge(answer.stats for answer in self.answers)

    @cached_property
    def both(self) -> list[tuple[Answer, Answer]]:
        """(ar's answer, the variant's answer) of every prompt and repeat that has both."""
        return [
            (row[self.plain], row[self.variant])
            for item in self.items
            for row in item.answers
            if self.plain in row and self.variant in row
        ]

    @cached_property
    def beside(self) -> Stats:
        """The figures of `ar` over the answers in `both`."""
        return merge(plain.stats for plain, _ in self.both)

    @property
    def compared(self) -> list[tuple[Answer, Answer]]:
        """The pairs of `both`; none if the variant is `ar` itself."""
        return [] if self.variant == self.plain else self.both

    @cached_property
    def agreeing(self) -> list[bool]:
        """For each answer that must equal ar's, whether it does."""
        return [same for pair in self.compared if (same := agrees(*pair)) is not None]

    @property
    def drafting(self) -> bool:
        """Whether the variant drafts, so that c and v are defined."""
        return isinstance(self.variant.gamma, int) or self.total.draft_n > 0

    @property
    def prompts(self) -> int:
        """The number of prompts that it answered."""
        return sum(any(self.variant in row for row in item.answers) for item in self.items)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repeat."""
        merged = [merge(row[self.variant].stats for row in rows if self.variant in row) for rows in self._repeats()]
        return _known(stats.predicted_per_second for stats in merged)

    def speedups(self, base: Variant | None) -> list[float]:
        """Return the speed-up over `base` of each repeat whose timing was not disturbed, over the prompts that both
        answered."""
        return _known(speedup_over(pairs) for pairs in self._pairs(base) if not _disturbed(pairs))

    @property
    def disturbed(self) -> int:
        """The number of repeats whose timing, compared with ar's, was disturbed."""
        return sum(map(_disturbed, self._pairs(self.plain)))

    def _pairs(self, base: Variant | None) -> list[list[tuple[Stats, Stats]]]:
        """Return the figures of `base` and of the variant, by repeat, of the prompts that both answered."""
        if base is None or base == self.variant:
            return []
        return [
            [(row[base].stats, row[self.variant].stats) for row in rows if base in row and self.variant in row]
            for rows in self._repeats()
        ]

    def _repeats(self) -> Iterable[tuple[dict[Variant, Answer], ...]]:
        return zip_longest(*(item.answers for item in self.items), fillvalue={})

    @property
    def speedup(self) -> float | None:
        ratios = self.speedups(self.plain)
        return median(ratios) if ratios else None

    def parted(self, kind: PartingKind) -> int:
        """Count the answers that differ from ar's in this way (:class:`app.lanes.answers.Parting`)."""
        return [parted.kind for pair in self.compared if (parted := parting(*pair)) is not None].count(kind)


def _disturbed(pairs: Sequence[tuple[Stats, Stats]]) -> bool:
    return bool(pairs) and disturbed(*map(merge, zip(*pairs, strict=True)))


def _rounded(value: Any) -> Any:
    """Round every number in `value` to four digits after the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _of_server(timed: Timed) -> dict[str, int]:
    """Return the counts that a server reported over the answers, such as those of its drafts."""
    report = timed.total.report
    return {name: count for name, count in report._asdict().items() if isinstance(count, int)} if report else {}


def _mean_gamma(timed: Timed) -> float | None:
    """Return the gamma; under auto the mean number of tokens drafted a round (of trees: nodes)."""
    gamma, total = timed.variant.gamma, timed.total
    if gamma == "auto":
        return ratio(total.draft_n, total.target_passes)
    return None if gamma is None else float(gamma)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _rate(timed: Timed) -> Json:
    rates = timed.rates
    return {"mean": _mean(rates), "spread": stdev(rates) if len(rates) > 1 else None, "repeats": rates}


def _categories(timed: Timed) -> Json:
    names = sorted({item.question.category for item in timed.items if item.question.category is not None})
    parts = {
        name: replace(timed, items=[item for item in timed.items if item.question.category == name]) for name in names
    }
    return {
        name: {"prompts": part.prompts, "predicted_per_second": _mean(part.rates), "speedup": _rounded(part.speedup)}
        for name, part in parts.items()
    }


# -- how a figure is written ------------------------------------------------------------------------

ALARM = "ALARM"
DISTURBED = "timing disturbed, faster than tokens a pass allow: no speed-up"
MARKS = (
    ("near_ties", "tie", f"tie: two best logits closer than rounding ({NEAR_TIE:g} in float32)"),
    ("beyond_ties", ALARM, f"{ALARM}: elsewhere"),
    ("other_draws", "draw", "draw: another draw of the same distribution"),
    ("other_texts", "text", "text: of another model, a search, or a lossy rule"),
)
TIMES = "{:.2f}x"


def times(value: float | None) -> str:
    """Write a factor: 1.93x."""
    return "-" if value is None else TIMES.format(value)


def variant_name(row: SummaryFields) -> str:
    """Return method and gamma: spec 4, or spec auto(2.7) with its mean gamma."""
    gamma, mean = row["gamma"], row["mean_gamma"]
    if gamma == "auto" and mean is not None:
        gamma = f"auto({mean:.1f})"
    simulated = ["(simulated)"] if is_simulated(row["method"]) else []
    return " ".join([str(row["method"]), *([] if gamma is None else [str(gamma)]), *simulated])


def _rate_cell(row: SummaryFields) -> str:
    rate = row["predicted_per_second"]
    mean = "-" if rate["mean"] is None else f"{rate['mean']:.1f}"
    return mean if rate["spread"] is None else f"{mean} ±{rate['spread']:.1f}"


def _range_cell(row: SummaryFields) -> str:
    each = row["speedup_per_repeat"]
    return f"{min(each):.2f}-{times(max(each))}" if len(each) > 1 else "-"


def _differs_cell(row: SummaryFields) -> str:
    """Return how many answers differ from ar's, and how: "1/6 tie"."""
    if row["differs"] is None and not row["may_differ"]:
        return "-"
    rightly = f"{row['other_draws'] + row['other_texts']}/{row['may_differ']}"
    of_all = rightly if row["differs"] is None else f"{row['differs']}/{row['compared']}"
    return " ".join([of_all, *(mark for key, mark, _ in MARKS if row[key])])


# -- the table of columns ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchColumn:
    """How a figure is computed, how it is written (by a format, or by a function of the row), and its column's heads.

    A table does not show a column without a head in it; the report shows the columns of the table of methods, and more.
    On a narrow console the columns with a number in `leaves` are left out, the lowest number first.
    """

    figure: Callable[[Timed], Any]
    form: str | Callable[[SummaryFields], str] = ""
    methods: str = ""
    speedups: str = ""
    report: str = ""
    leaves: int = 0

    def head(self, view: str) -> str:
        """Return its head in a table (methods, speedups, report); "" if the table does not have the column."""
        return getattr(self, view) or (self.methods if view == "report" else "")

    def cell(self, row: SummaryFields, key: str) -> str:
        """Write the figure of a row."""
        if not isinstance(self.form, str):
            return self.form(row)
        return "-" if row[key] is None else self.form.format(row[key])


class Rate(BaseModel, frozen=True):
    """Tokens a second."""

    mean: Amount | None = None
    spread: Amount | None = None


class Category(BaseModel, frozen=True):
    """A variant's figures over the prompts of one category."""

    speedup: Amount | None = None


class Reviewed(BaseModel, frozen=True):
    """The drafts that a reviewer of a cascade examined and accepted."""

    accepted: Count
    examined: Count


AmountValue = Amount | None
AmountsByName = dict[str, Amount | None]


class SummaryRow(BaseModel, frozen=True):
    """One row of `summary`, of a method at a gamma.

    A column's default stands for it in a file that is older than the column. Files whose rows have a temperature are
    refused.
    """

    method: str
    gamma: Gamma = None
    temperature: None = None
    mean_gamma: Annotated[AmountValue, BenchColumn(_mean_gamma)] = None
    prompts: Annotated[Count, BenchColumn(lambda timed: timed.prompts)] = 0
    answers: Annotated[Count, BenchColumn(lambda timed: len(timed.answers))] = 0
    predicted_n: Annotated[Count, BenchColumn(lambda timed: timed.total.predicted_n)] = 0
    predicted_per_second: Annotated[Rate, BenchColumn(_rate, _rate_cell, methods="tok/s")] = Rate()
    speedup: Annotated[
        AmountValue,
        BenchColumn(
            lambda timed: timed.speedup,
            lambda row: "disturbed" if row["speedup"] is None and row["disturbed"] else times(row["speedup"]),
            methods="speed-up",
            speedups="median",
        ),
    ] = None
    disturbed: Annotated[Count, BenchColumn(lambda timed: timed.disturbed)] = 0
    speedup_per_repeat: Annotated[
        list[Amount],
        BenchColumn(lambda timed: timed.speedups(timed.plain), _range_cell, speedups="range", report="range", leaves=2),
    ] = []
    expected_speedup: Annotated[
        AmountValue,
        BenchColumn(
            lambda timed: expected(timed.total, timed.beside, timed.variant.gamma),
            TIMES,
            speedups="expected",
            report="expected",
            leaves=1,
        ),
    ] = None
    tokens_per_pass: Annotated[
        AmountValue, BenchColumn(lambda timed: timed.total.tokens_per_pass, "{:.2f}", methods="tok/pass", leaves=6)
    ] = None
    acceptance_rate: Annotated[
        AmountValue, BenchColumn(lambda timed: timed.total.acceptance_rate, "{:.0%}", methods="accepted", leaves=5)
    ] = None
    alpha: Annotated[
        AmountValue,
        BenchColumn(lambda timed: timed.total.alpha, "{:.2f}", methods="alpha", leaves=4),
    ] = None
    alpha_per_position: Annotated[
        list[Amount | None], Field(max_length=10_000), BenchColumn(lambda timed: timed.total.alpha_per_position)
    ] = []
    draft_histogram: Annotated[list[Count], BenchColumn(lambda timed: list(timed.total.draft_histogram))] = []
    acceptance_histogram: Annotated[list[Count], BenchColumn(lambda timed: list(timed.total.acceptance_histogram))] = []
    c: Annotated[
        AmountValue,
        BenchColumn(
            lambda timed: cost_ratio(timed.total, timed.beside) if timed.drafting else None,
            "{:.3f}",
            methods="c",
            leaves=2,
        ),
    ] = None
    v: Annotated[
        AmountValue,
        BenchColumn(
            lambda timed: verify_ratio(timed.total, timed.beside) if timed.drafting else None,
            "{:.2f}",
            methods="v",
            leaves=1,
        ),
    ] = None
    ttft_ms: Annotated[
        AmountValue,
        BenchColumn(
            lambda timed: _mean(_known(answer.stats.ttft_ms for answer in timed.answers)),
            "{:.0f} ms",
            methods="TTFT",
            leaves=3,
        ),
    ] = None
    prompt_per_second: Annotated[
        AmountValue,
        BenchColumn(
            lambda timed: ratio(1000.0 * timed.total.prompt_n, timed.total.prompt_ms),
            "{:.0f}",
            methods="prompt/s",
            leaves=3,
        ),
    ] = None
    compared: Annotated[Count, BenchColumn(lambda timed: len(timed.agreeing))] = 0
    differs: Annotated[
        Count | None,
        BenchColumn(
            lambda timed: timed.agreeing.count(False) if timed.agreeing else None, _differs_cell, methods="differs"
        ),
    ] = None
    near_ties: Annotated[Count, BenchColumn(lambda timed: timed.parted("near tie"))] = 0
    beyond_ties: Annotated[Count, BenchColumn(lambda timed: timed.parted("beyond"))] = 0
    other_draws: Annotated[Count, BenchColumn(lambda timed: timed.parted("other draw"))] = 0
    other_texts: Annotated[Count, BenchColumn(lambda timed: timed.parted("other text"))] = 0
    may_differ: Annotated[Count, BenchColumn(lambda timed: len(timed.compared) - len(timed.agreeing))] = 0
    categories: Annotated[dict[str, Category], BenchColumn(_categories)] = {}
    calls_per_pass: Annotated[
        AmountsByName,
        BenchColumn(lambda timed: {name: ratio(n, timed.total.target_passes) for name, n in timed.total.calls.items()}),
    ] = {}
    ms_per_call: Annotated[
        AmountsByName,
        BenchColumn(
            lambda timed: {name: ratio(timed.total.call_ms.get(name, 0.0), n) for name, n in timed.total.calls.items()}
        ),
    ] = {}
    reviews: Annotated[dict[str, Reviewed], BenchColumn(lambda timed: timed.total.to_json().get("reviews", {}))] = {}
    reported: Annotated[AmountsByName, BenchColumn(_of_server)] = {}
    swi: Annotated[
        AmountsByName | None,
        BenchColumn(lambda timed: swi_of(timed.total, timed.answers[0].terms) if timed.answers else None),
    ] = None


COLUMNS: Mapping[str, BenchColumn] = {
    key: column
    for key, field in SummaryRow.model_fields.items()
    for column in field.metadata
    if isinstance(column, BenchColumn)
}


def shown(view: str) -> dict[str, BenchColumn]:
    """Return the columns of a table, by key."""
    return {key: column for key, column in COLUMNS.items() if column.head(view)}


def summarise(items: Sequence[PromptItem], variants: Sequence[Variant]) -> list[Json]:
    """Return one row per variant, as JSON values; undefined figures are None."""
    timed = [Timed(items, variant, reference_of(variants)) for variant in variants]
    return [
        vars(each.variant) | {key: _rounded(column.figure(each)) for key, column in COLUMNS.items()} for each in timed
    ]
