"""What `bench` says of its figures, and the tables."""

import io
from dataclasses import replace
from typing import Any

import pytest

from app.bench.report import show_tables
from app.bench.summary import PromptItem, summarise
from app.lanes.answers import Answer, Variant
from app.prompts.questions import Question
from app.screen.output import screen
from app.settings.table import Settings
from sampling.stats.summary import Stats

PLAIN, FOUR, AUTO = Variant("ar"), Variant("spec", 4), Variant("ngram", "auto")
NGRAM, DRAFT = Variant("ngram"), Variant("draft")
CALM = tuple(range(50, 70))
LOOPING = (1, 2) * 3 + CALM[:14]  # 6 of 20
EDGE = (1,) * 5 + CALM[:15]  # 5 of 20: not more than a quarter


def answer(
    variant: Variant, seconds: float, ids: tuple[int, ...] = CALM, ttft: float = 10.0, openings: int = 1
) -> Answer:
    stats = Stats(
        stop_reason="length",
        prompt_n=4,
        prompt_ms=0.8 * ttft,
        ttft_ms=ttft,
        predicted_n=len(ids) + openings - 1,
        openings=openings,
        predicted_ms=1000 * seconds,
        target_passes=len(ids) - 1,
    )
    return Answer(variant.method, ids, "", stats)


def item(category: str | None, number: int, *rounds: dict[Variant, Answer]) -> PromptItem:
    return PromptItem(0, Question(("x",), category, number), 0, [], list(rounds))


def both(plain: float, other: float, ids: tuple[int, ...] = CALM) -> dict[Variant, Answer]:
    return {PLAIN: answer(PLAIN, plain, ids), FOUR: answer(FOUR, other, ids)}


ITEMS = [
    item("qa", 1, both(10, 5), both(10, 4)),
    item("rag", 2, both(10, 1, LOOPING), both(10, 1, LOOPING)),
    item("rag", 3, both(10, 9, EDGE), both(10, 9, EDGE)),
]


def telling(variant: Variant, at: int | None, gap: float | None = None, **more: Any) -> Answer:
    """CALM, but for another token at `at`, where the target's two best logits lie `gap` apart."""
    told = answer(variant, 1, CALM if at is None else (*CALM[:at], 7, *CALM[at + 1 :]))
    return replace(told, stats=replace(told.stats, top2_gaps=() if at is None else (*[None] * at, gap)), **more)


def test_how_texts_differ_is_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    draft, beam, drawn = Variant("draft"), Variant("beam"), Variant("spec", 8)
    cases = [(None, None), (3, 9e-4), (3, 1e-3), (3, None), (19, 0.0)]
    rows = [
        {
            PLAIN: answer(PLAIN, 1),
            FOUR: telling(FOUR, *case),
            drawn: telling(drawn, *case, may_differ=True),
            draft: telling(draft, *case, may_differ=True),
            beam: replace(answer(beam, 1), may_differ=True),
        }
        for case in cases
    ]
    variants = [PLAIN, FOUR, drawn, draft, beam]
    summary = summarise([item(None, 1, *rows)], variants)
    kinds = ("compared", "differs", "near_ties", "beyond_ties", "other_draws", "other_texts", "may_differ")
    assert [tuple(row[kind] for kind in kinds) for row in summary] == [
        (0, None, 0, 0, 0, 0, 0),
        (5, 4, 2, 2, 0, 0, 0),
        (0, None, 0, 0, 4, 0, 5),
        (0, None, 0, 0, 0, 4, 5),
        (0, None, 0, 0, 0, 0, 5),
    ]
    lines = shown([item(None, 1, *rows)], variants, ascii=True)
    assert [line.split("|")[-1].strip() for line in lines[3:8]] == ["-", "4/5 tie ALARM", "4/5 draw", "4/5 text", "0/5"]
    told = " ".join(lines[8:11])
    assert "tie: two best logits closer than rounding (0.001 in float32); ALARM: elsewhere;" in told
    assert "ALARM: spec 4 differs from ar beyond a near tie in 2 of 5 answers" in told


def test_a_repeat_with_a_disturbed_timing_has_no_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens in five passes: 2 a pass. A repeat in which plain decoding took longer than that allows is left out,
    and where no repeat remains the table says so."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def timed(variant: Variant, seconds: float, passes: int) -> Answer:
        told = answer(variant, seconds)
        return replace(
            told, stats=replace(told.stats, target_passes=passes, least_pass_ms=9.0, calls={"target": passes})
        )

    def rounds(*seconds: float) -> list[dict[Variant, Answer]]:
        return [{PLAIN: timed(PLAIN, plain, 19), FOUR: timed(FOUR, 10.0, 10)} for plain in seconds]

    both = [item("qa", 1, *rounds(15.0, 40.0, 13.0))]
    _, spec = summarise(both, [PLAIN, FOUR])
    assert (spec["speedup_per_repeat"], spec["speedup"], spec["disturbed"]) == ([1.5, 1.3], 1.4, 1)
    words = "timing disturbed, faster than tokens a pass allow: no speed-up of"
    assert f"spec 4: {words} 1 of 3 repeats" in " ".join(shown(both, [PLAIN, FOUR]))
    none = [item("qa", 1, *rounds(40.0, 50.0))]
    _, spec = summarise(none, [PLAIN, FOUR])
    assert (spec["speedup"], spec["speedup_per_repeat"], spec["categories"]["qa"]["speedup"]) == (None, [], None)
    lines = shown(none, [PLAIN, FOUR])
    assert any("disturbed" in line.split() for line in lines if line.startswith("spec 4 "))
    assert f"spec 4: {words} 2 of 2 repeats" in " ".join(lines)


# -- the screen ---------------------------------------------------------------------------------


def shown(items: list[PromptItem], variants: list[Variant], **settings: Any) -> list[str]:
    stream, given = io.StringIO(), Settings(color="never", **settings)
    show_tables(summarise(items, variants), given, screen(given, stream))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_tables_as_they_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    first = item("qa", 1, *({**row, NGRAM: answer(NGRAM, 8)} for row in ITEMS[0].answers))
    assert shown([first, *ITEMS[1:]], [PLAIN, FOUR, NGRAM], ascii=True) == EXPECTED.strip("\n").split("\n")


EXPECTED = """
3 prompts, 6 answers a method; rates leave prefill out
method|     tok/s| speed-up| tok/pass| accepted| alpha| c| v|  TTFT| prompt/s| differs
------+----------+---------+---------+---------+------+--+--+------+---------+--------
ar    | 1.9 +-0.0|        -|     1.00|        -|     -| -| -| 10 ms|      500|       -
spec 4| 3.9 +-0.2|    2.07x|     1.00|        -|     -| -| -| 10 ms|      500|     0/6
ngram | 2.4 +-0.0|    1.25x|     1.00|        -|     -| -| -| 10 ms|      500|     0/2

speed-up over ar, median of 2 repeats
method| median|      range| expected
------+-------+-----------+---------
spec 4|  2.07x| 2.00-2.14x|        -
ngram |  1.25x| 1.25-1.25x|        -

speed-up by category
        |  spec|
category|     4| ngram
--------+------+------
qa      | 2.25x| 1.25x
rag     | 2.00x|     -
"""


NAMES = ("writing", "coding", "extraction", "translation", "summarization", "qa", "math_reasoning", "rag")


def test_the_widest_tables_fit_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    variants = [PLAIN, FOUR, AUTO, Variant("tables", "auto"), Variant("static"), NGRAM, DRAFT]

    def row(ids: tuple[int, ...]) -> dict[Variant, Answer]:
        return {variant: answer(variant, 0.01 * (2 + index), ids, 1234.5) for index, variant in enumerate(variants)}

    items = [item(name, index, *[row(LOOPING if index else CALM)] * 3) for index, name in enumerate(NAMES)]
    lines = shown(items, variants)
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith(NAMES)] == sorted(NAMES)
