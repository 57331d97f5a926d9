"""A benchmark's answers → one summary row per method and gamma, and what lies in repeating loops.

A rate is Σ tokens / Σ seconds over all prompts of a repeat, a speed-up the ratio of two rates over
the same prompts: with equal texts that is Σ time_ar / Σ time_method. Over repeats: mean and spread
(standard deviation) of rates, median of speed-ups.

Small greedy models repeat themselves, and loops flatter n-gram drafts. A token is in a loop iff it lies in a stretch of
at least `repeats`·p tokens in which every token but the first p equals the one p places before it, for some period p of
1 … `period`. So a stretch is as long as the period holds: an unfinished last repeat counts, and so does "000" (period
1). Knows no text, no models and no screen (app/bench/table.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from app.bench.plan import references
from app.lanes.answers import Answer, agrees, parting
from app.lanes.costs import swi_of
from sampling.stats.ratios import cost_ratio, expected, speedup, verify_ratio
from sampling.stats.summary import Stats, merge, ratio

if TYPE_CHECKING:
    from app.bench.plan import Item
    from app.lanes.comparison import Variant


PERIOD = 20  # longest period, in tokens
REPEATS = 3  # a stretch holds its period so often at least
LOOPS = 0.25  # a prompt loops if a larger share of its answer lies in loops

RIVALS = "hf-"  # how the names of --against begin


def looping_tokens(ids: Sequence[int], period: int = PERIOD, repeats: int = REPEATS) -> int:
    """How many of `ids` lie in a loop; at most `period` comparisons a token."""
    inside = [False] * len(ids)
    for step in range(1, min(period, len(ids) // repeats) + 1):
        since = 0  # where the stretch that has this period begins
        for end in range(step, len(ids) + 1):
            if end < len(ids) and ids[end] == ids[end - step]:
                continue
            if end - since >= repeats * step:
                inside[since:end] = [True] * (end - since)
            since = end - step + 1
    return sum(inside)


def looping_share(ids: Sequence[int]) -> float:
    """The share of `ids` that lies in a loop, 0 for none."""
    return looping_tokens(ids) / len(ids) if ids else 0.0


def summarise(items: Sequence[Item], variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """One row per variant, JSON-able; figures that are undefined are None.

    Each temperature by itself: what its `ar` answered is compared with, and says which prompts loop (without an `ar`
    its first variant says that).
    """
    return [row for judge in references(variants).values() for row in _tempered(items, variants, judge)]


def _tempered(items: Sequence[Item], variants: Sequence[Variant], judge: Variant) -> list[dict[str, Any]]:
    """The rows of one temperature."""
    here = [variant for variant in variants if variant.temperature == judge.temperature]
    plain = judge if judge.method == "ar" else None
    calm = [item for item in items if not _loops(item, judge)]
    rows = [_row(items, variant, plain) for variant in here]
    for row, variant in zip(rows, here, strict=True):
        row["speedup_without_loops"] = _median(_speedups(calm, variant, plain))
        row["over_rivals"] = _over_rivals(items, variant, rows, here)
    return rows


def loops(items: Sequence[Item], reference: Variant) -> dict[str, Any]:
    """How much of the reference's first answers lies in loops (app/bench/summary.py), and which prompts loop.

    A prompt does if more than a quarter of its answer's tokens lie in loops.
    """
    answers = [answer.ids for item in items if (answer := _first(item, reference)) is not None]
    tokens = sum(map(len, answers))
    looping = [item for item in items if _loops(item, reference)]
    return {
        "method": reference.method,
        "temperature": reference.temperature,
        "period": PERIOD,
        "repeats": REPEATS,
        "above": LOOPS,
        "share": _short(sum(map(looping_tokens, answers)) / tokens) if tokens else None,
        "prompts": len(answers),
        "looping": len(looping),
        "looping_prompts": [{"question_id": item.question.question_id, "turn": item.turn} for item in looping],
    }


def _first(item: Item, reference: Variant) -> Answer | None:
    return next((row[reference] for row in item.answers if reference in row), None)


def _loops(item: Item, reference: Variant) -> bool:
    answer = _first(item, reference)
    return answer is not None and looping_share(answer.ids) > LOOPS


def _over_rivals(
    items: Sequence[Item], variant: Variant, rows: Sequence[dict[str, Any]], variants: Sequence[Variant]
) -> dict[str, Any] | None:
    """The speed-up over the fastest rival of --against; None for rivals and where there are none."""
    rates = [row["predicted_per_second"]["mean"] for row in rows]
    rivals = [pair for pair in zip(rates, variants, strict=True) if _rival(pair[1]) and pair[0] is not None]
    if _rival(variant) or not rivals:
        return None
    fastest = max(rivals, key=lambda pair: pair[0])[1]
    return {"rival": fastest.method, "speedup": _median(_speedups(items, variant, fastest))}


def _rival(variant: Variant) -> bool:
    return variant.method.startswith(RIVALS)


def _row(items: Sequence[Item], variant: Variant, plain: Variant | None) -> dict[str, Any]:
    answers = [row[variant] for item in items for row in item.answers if variant in row]
    both = list(_pairs(items, variant, plain))
    total = merge(answer.stats for answer in answers)
    names = sorted({item.question.category for item in items if item.question.category is not None})
    categories = {name: _category(items, name, variant, plain) for name in names}
    return {
        "method": variant.method,
        "gamma": variant.gamma,
        "temperature": variant.temperature,
        "mean_gamma": _mean_gamma(answers, variant),
        "prompts": sum(any(variant in row for row in item.answers) for item in items),
        "answers": len(answers),
        "batch_size": max((answer.rows for answer in answers), default=1),
        "predicted_n": total.predicted_n,
        "predicted_per_second": _spread(_rates(items, variant)),
        "ttft_ms": _mean([answer.stats.ttft_ms for answer in answers]),
        "speedup": _median(_speedups(items, variant, plain)),
        "speedup_per_repeat": [_short(value) for value in _speedups(items, variant, plain)],
        "tokens_per_pass": _short(total.tokens_per_pass),
        "acceptance_rate": _short(total.acceptance_rate),
        "alpha": _short(total.alpha),
        "alpha_per_position": [_short(value) for value in total.alpha_per_position],
        **_model(variant, total, merge(one.stats for one, _ in both)),
        **_differences(both if variant != plain else []),
        "categories": categories,
        "worst_category": _worst(categories),
        **_costs(answers, total),
    }


def _costs(answers: Sequence[Answer], total: Stats) -> dict[str, Any]:
    """Calls of each model a target pass and milliseconds a call; (accepted, examined) of each reviewer; SWI."""
    passes = total.target_passes
    return {
        "calls_per_pass": {model: _short(ratio(calls, passes)) for model, calls in total.calls.items()},
        "ms_per_call": {model: _short(ratio(total.call_ms.get(model, 0.0), n)) for model, n in total.calls.items()},
        "reviews": total.to_json().get("reviews", {}),
        "swi": swi_of(total, answers[0].terms) if answers else None,
    }


def _category(items: Sequence[Item], name: str, variant: Variant, plain: Variant | None) -> dict[str, Any]:
    within = [item for item in items if item.question.category == name]
    return {
        "prompts": sum(any(variant in row for row in item.answers) for item in within),
        "predicted_per_second": _spread(_rates(within, variant))["mean"],
        "speedup": _median(_speedups(within, variant, plain)),
    }


def _worst(categories: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The category of the smallest speed-up."""
    known = [(told["speedup"], name) for name, told in categories.items() if told["speedup"] is not None]
    return {"name": min(known)[1], "speedup": min(known)[0]} if known else None


def _repeats(items: Iterable[Item]) -> list[list[dict[Variant, Answer]]]:
    """What was measured, by repeat: of each prompt the answers of that repeat."""
    rows = [item.answers for item in items]
    return [[row[repeat] for row in rows if repeat < len(row)] for repeat in range(max(map(len, rows), default=0))]


def _pairs(items: Iterable[Item], variant: Variant, plain: Variant | None) -> list[tuple[Answer, Answer]]:
    """(ar's answer, the variant's answer) of every round that has both."""
    if plain is None:
        return []
    rows = [row for item in items for row in item.answers]
    return [(row[plain], row[variant]) for row in rows if plain in row and variant in row]


def _rates(items: Iterable[Item], variant: Variant) -> list[float]:
    merged = [merge(row[variant].stats for row in rows if variant in row) for rows in _repeats(items)]
    return [stats.predicted_per_second for stats in merged if stats.predicted_per_second is not None]


def _speedups(items: Iterable[Item], variant: Variant, plain: Variant | None) -> list[float]:
    """One per repeat, over the prompts that both answered in it."""
    if plain is None or variant == plain:
        return []
    found = []
    for rows in _repeats(items):
        both = [row for row in rows if plain in row and variant in row]
        found.append(speedup(merge(row[plain].stats for row in both), merge(row[variant].stats for row in both)))
    return [value for value in found if value is not None]


def _spread(rates: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": _short(fmean(rates)) if rates else None,
        "spread": _short(stdev(rates)) if len(rates) > 1 else None,
        "repeats": [_short(rate) for rate in rates],
    }


def _model(variant: Variant, total: Stats, plain: Stats) -> dict[str, Any]:
    """c and v as measured in these very runs, and the speed-up they let expect."""
    c, v = cost_ratio(total, plain), verify_ratio(total, plain)
    planned = isinstance(variant.gamma, int) or (variant.gamma is None and total.draft_n > 0)
    return {
        "c": _short(c) if variant.gamma or planned else None,
        "v": _short(v) if planned else None,  # of passes that are planned to be of one width
        "expected_speedup": _short(expected(total, plain, variant.gamma)),
    }


def _mean_gamma(answers: Sequence[Answer], variant: Variant) -> float | None:
    """Under auto the tokens drafted a round, of a tree all its nodes; the gamma itself where it is fixed."""
    if variant.gamma != "auto":
        return None if variant.gamma is None else float(variant.gamma)
    rounds = sum(answer.stats.target_passes for answer in answers)
    return _short(sum(answer.stats.draft_n for answer in answers) / rounds) if rounds else None


def _differences(both: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """How many answers differ from ar's (None where they may rightly), and how: see app/lanes/answers.py, Parting."""
    told = [agrees(one, other) for one, other in both]
    known = [same for same in told if same is not None]
    kinds = [found.kind for one, other in both if (found := parting(one, other)) is not None]
    return {
        "compared": len(known),
        "differs": known.count(False) if known else None,
        "near_ties": kinds.count("near tie"),
        "beyond_ties": kinds.count("beyond"),
        "other_draws": kinds.count("other draw"),
        "other_texts": kinds.count("other text"),
        "may_differ": len(told) - len(known),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _short(fmean(known)) if known else None


def _median(values: Sequence[float]) -> float | None:
    return _short(median(values)) if values else None


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
