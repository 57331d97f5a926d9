"""Every logits processor against a naive float64 full sort, and against transformers' warpers."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.support.reference import NaiveLaw
from tests.support.refusals import refused
from utils.logits_processors import (
    ARGUMENTS,
    GreedyProcessor,
    LogitsProcessor,
    MinPProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
    make_processor,
)

CLOSE = 1e-12
# Distinct logits on a coarse grid: no ties, and no mass that sits on a boundary by rounding.
ROWS = st.lists(st.integers(-400, 400), min_size=2, max_size=30, unique=True).map(lambda row: [x / 37 for x in row])
TEMPERATURES = st.sampled_from([0.3, 0.8, 1.0, 1.7])
TOP_PS = st.sampled_from([0.05, 0.41, 0.77, 0.9, 0.99, 1.0])


def wide(row: list[float]) -> Tensor:
    return torch.tensor(row, dtype=torch.float64)


def agree(processor: LogitsProcessor, naive: NaiveLaw, row: list[float]) -> None:
    assert torch.allclose(processor(wide(row)), naive(wide(row)), atol=CLOSE, rtol=0)


@given(ROWS)
def test_greedy_is_one_hot_at_the_best(row: list[float]) -> None:
    agree(GreedyProcessor(), NaiveLaw(temperature=0), row)


@given(ROWS, TEMPERATURES, st.integers(0, 12), TOP_PS, st.sampled_from([0.0, 0.03, 0.2]))
def test_all_together(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    settings_ = (temperature, top_k, top_p, min_p)
    agree(make_processor(*settings_), NaiveLaw(*settings_), row)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), TEMPERATURES, st.sampled_from([0, 5, 50]), TOP_PS, st.sampled_from([0.0, 0.05]))
def test_the_order_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn((3, 200), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = LogitsProcessorList(warpers)(torch.zeros((3, 1), dtype=torch.long), logits.clone()).softmax(dim=-1)
    assert torch.allclose(make_processor(temperature, top_k, top_p, min_p)(logits), expected, atol=1e-9)


def every_processor() -> list[LogitsProcessor]:
    return [
        GreedyProcessor(),
        MultinomialProcessor(0.7),
        TopKProcessor(0.7, 3),
        NucleusProcessor(0.7, 0.8),
        TopKNucleusProcessor(0.7, 4, 0.8),
        MinPProcessor(0.7, 0.1),
        make_processor(1.3, 5, 0.9, 0.05),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_callers_logits_stay_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.randn((2, 3, 50), generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    for processor in every_processor():
        probs = processor(logits)
        assert torch.equal(logits, before)
        assert (probs.shape, probs.dtype) == (logits.shape, torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(probs.sum(dim=-1), torch.ones(2, 3, dtype=probs.dtype), atol=1e-5)
        assert bool((probs >= 0).all())


def full_sort(probs: Tensor, top_p: float) -> Tensor:
    """The oracle: all ids sorted, the first of equal ones first; kept while the mass before them is below top_p."""
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(dim=-1) - values
    left = torch.where(torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids, before < top_p), probs, 0.0)
    return left / left.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999, 0.9999, 0.9999999])
def test_the_nucleus_equals_the_full_sort(spread: float, top_p: float, dtype: torch.dtype) -> None:
    """Flat rows, peaked ones and rows of many equal ids, in one batch and alone."""
    noise = torch.randn((4, 4096), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise[1] = noise[1].round()
    logits = (noise * torch.tensor([spread, spread, 8.0, 0.01])[:, None]).to(dtype)
    found = NucleusProcessor(1.0, top_p)(logits)
    assert torch.equal(found, full_sort(MultinomialProcessor(1.0)(logits), top_p))
    for row in range(4):
        assert torch.equal(NucleusProcessor(1.0, top_p)(logits[row]), found[row])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 1.5, -2.0, -math.inf]), min_size=6, max_size=6), min_size=1, max_size=3
    ),
    st.floats(0.01, 0.99),
)
def test_of_equal_ids_the_first_are_kept(rows: list[list[float]], top_p: float) -> None:
    logits = torch.tensor([[0.0, *row] for row in rows])
    assert torch.equal(NucleusProcessor(1.0, top_p)(logits), full_sort(MultinomialProcessor(1.0)(logits), top_p))


def test_ties_with_the_kth_are_kept_and_ties_for_the_best_give_the_first() -> None:
    tied = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0])
    assert TopKProcessor(1.0, 2)(tied).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3])
    assert GreedyProcessor()(tied).tolist() == [0, 1, 0, 0, 0]
    assert int(NucleusProcessor(1.0, 0.5)(tied).count_nonzero()) == 2  # of three equals two reach 0.5
    assert MinPProcessor(1.0, 0.9)(tied).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3])


@pytest.mark.parametrize(
    ("row", "named"), [([math.nan, 0.0], "NaN"), ([math.inf, 0.0], "NaN"), ([-math.inf] * 2, "finite")]
)
def test_a_row_that_gives_no_distribution_is_an_error(row: list[float], named: str) -> None:
    for processor in every_processor():
        refused(processor, torch.tensor([[0.0, 1.0], row]), kind=ValueError, match=named)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: MultinomialProcessor(-0.1), "temperature"),
        (lambda: MultinomialProcessor(float("nan")), "temperature"),
        (lambda: TopKProcessor(1.0, -1), "top_k"),
        (lambda: NucleusProcessor(1.0, 0.0), "top_p"),
        (lambda: NucleusProcessor(1.0, 1.01), "top_p"),
        (lambda: MinPProcessor(1.0, 1.0), "min_p"),
        (lambda: MinPProcessor(1.0, -0.01), "min_p"),
    ],
)
def test_values_out_of_range_are_named(make: Callable[[], LogitsProcessor], named: str) -> None:
    refused(make, match=named)


def test_sample_follows_the_callers_generator(untouched_global_noise: None) -> None:
    probs = MultinomialProcessor(1.0)(torch.randn((64, 9), generator=torch.Generator().manual_seed(3)))
    processor = MultinomialProcessor(1.0)
    first = processor.sample(probs, torch.Generator().manual_seed(4))
    again = processor.sample(probs, torch.Generator().manual_seed(4))
    other = processor.sample(probs, torch.Generator().manual_seed(5))
    assert first.shape == (64, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(GreedyProcessor().sample(probs)[:, 0], probs.argmax(dim=-1))


# -- the tables -----------------------------------------------------------------------------------


def test_every_number_has_a_row_and_a_processor_that_is_off_changes_nothing() -> None:
    assert {field.name for field in fields(LogitsProcessor)} == {*ARGUMENTS, "logit_bias"}
    logits = torch.randn(3, 9)
    assert torch.allclose(
        LogitsProcessor(**{name: argument.off for name, argument in ARGUMENTS.items()})(logits), logits.softmax(dim=-1)
    )


@given(ROWS, st.lists(st.integers(0, 5), max_size=12), st.integers(0, 6), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties(
    row: list[float], prefix: list[int], window: int, presence: float, frequency: float
) -> None:
    how: dict[str, Any] = {"presence_penalty": presence, "frequency_penalty": frequency, "penalty_window": window}
    got = LogitsProcessor(**how)(wide(row)[None], [prefix])
    assert torch.allclose(got, NaiveLaw(**how)(wide(row)[None], [prefix]), atol=CLOSE, rtol=0)


@given(ROWS, st.sampled_from([0.1, 0.5, 0.9]))
def test_typical_p_is_that_of_transformers(row: list[float], mass: float) -> None:
    from transformers import TypicalLogitsWarper

    theirs: Any = TypicalLogitsWarper(mass)(torch.tensor([[0]]), wide(row)[None]).softmax(dim=-1)
    assert torch.allclose(LogitsProcessor(typical_p=mass)(wide(row)[None]), theirs, atol=CLOSE, rtol=0)
    agree(LogitsProcessor(typical_p=mass), NaiveLaw(typical_p=mass), row)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8},
        {"top_p": 0.97, "min_p": 0.02, "typical_p": 0.7},
        {"top_k": 7, "min_p": 0.2, "typical_p": 0.9},
        {"top_k": 5000, "top_p": 0.01},
    ],
)
def test_of_many_ids_only_those_that_can_be_left_are_looked_at(seed: int, rules: dict[str, Any]) -> None:
    """The first row has ties, also with the k-th; the second is nearly flat."""
    rows = torch.randn(2, 4200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = torch.stack([(rows[0] * 9).round() / 3, rows[1] / 50])
    shape = {"temperature": 0.9 + seed / 4, **rules}
    assert torch.allclose(LogitsProcessor(**shape)(rows), NaiveLaw(**shape)(rows), atol=CLOSE, rtol=0)
    assert torch.equal(LogitsProcessor(**shape)(rows)[:1], LogitsProcessor(**shape)(rows[:1]))
