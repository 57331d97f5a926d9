"""Repetition penalty and no-repeat n-grams: against a naive oracle and against transformers' own processors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support.reference import NaiveLaw
from tests.support.refusals import refused
from utils.logits_processors import (
    GreedyProcessor,
    LogitsProcessor,
    MinPProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
    followers,
    make_processor,
)

PENALTIES = st.sampled_from([0.5, 1.0, 1.2, 2.0])
PREFIXES = st.lists(st.integers(0, 4), min_size=0, max_size=14)


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def naive_followers(prefix: list[int], n: int) -> set[int]:
    grams = [prefix[start : start + n] for start in range(len(prefix) - n + 1)]
    return {gram[-1] for gram in grams if gram[:-1] == prefix[len(prefix) - n + 1 :]}


@settings(max_examples=300)
@given(PREFIXES, st.integers(1, 5))
def test_the_banned_ids_are_those_behind_the_same_tokens(prefix: list[int], n: int) -> None:
    assert followers(prefix, n) == naive_followers(prefix, n)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.lists(PREFIXES, min_size=2, max_size=2), PENALTIES, st.integers(0, 4))
def test_both_rules_equal_the_naive_ones(seed: int, prefixes: list[list[int]], penalty: float, n: int) -> None:
    logits = logits_of(seed, 2, 7)
    rules: dict[str, Any] = {"repetition_penalty": penalty, "no_repeat_ngram": n}
    found = make_processor(0.8, 5, 0.9, 0.05, **rules)(logits, prefixes)
    assert torch.allclose(found, NaiveLaw(0.8, 5, 0.9, 0.05, **rules)(logits, prefixes), atol=1e-12, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(0, 9), min_size=1, max_size=25),
    PENALTIES,
    st.integers(0, 3),
    st.sampled_from([0, 5]),
    st.sampled_from([1.0, 0.8]),
)
def test_definition_and_order_are_those_of_transformers(
    seed: int, prefix: list[int], penalty: float, n: int, top_k: int, top_p: float
) -> None:
    from transformers import (
        LogitsProcessorList,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = logits_of(seed, 1, 60)
    theirs: list[Any] = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    theirs += [NoRepeatNGramLogitsProcessor(n)] if n else []
    theirs += [TemperatureLogitsWarper(0.7)]
    theirs += [TopKLogitsWarper(top_k)] if top_k else []
    theirs += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = LogitsProcessorList(theirs)(torch.tensor([prefix]), logits.clone()).softmax(dim=-1)
    assert torch.allclose(
        make_processor(0.7, top_k, top_p, repetition_penalty=penalty, no_repeat_ngram=n)(logits, [prefix]),
        expected,
        atol=1e-9,
    )


def test_every_named_processor_takes_the_rules_beside_its_own_numbers() -> None:
    rules: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram": 2}
    logits, prefix = logits_of(1, 1, 6), [[0, 1, 2, 0]]
    made: list[tuple[LogitsProcessor, NaiveLaw]] = [
        (GreedyProcessor(**rules), NaiveLaw(0.0, **rules)),
        (MultinomialProcessor(0.7, **rules), NaiveLaw(0.7, **rules)),
        (TopKProcessor(0.7, 3, **rules), NaiveLaw(0.7, 3, **rules)),
        (NucleusProcessor(0.7, 0.8, **rules), NaiveLaw(0.7, 0, 0.8, **rules)),
        (TopKNucleusProcessor(0.7, 4, 0.8, **rules), NaiveLaw(0.7, 4, 0.8, **rules)),
        (MinPProcessor(0.7, 0.1, **rules), NaiveLaw(0.7, 0, 1.0, 0.1, **rules)),
    ]
    for processor, naive in made:
        assert processor.needs_prefixes
        assert torch.allclose(processor(logits, prefix), naive(logits, prefix), atol=1e-12)
    assert not MultinomialProcessor(0.7, repetition_penalty=1.0, no_repeat_ngram=0).needs_prefixes


def test_greedy_takes_the_best_after_the_rules() -> None:
    row = torch.tensor([[3.0, 2.0, -1.0, -1.1]])
    assert GreedyProcessor(repetition_penalty=2.0)(row, [[0]]).argmax() == 1
    assert GreedyProcessor(no_repeat_ngram=1)(row, [[0, 1]]).argmax() == 2
    assert GreedyProcessor(repetition_penalty=1.4)(torch.tensor([[-1.0, -1.3]]), [[0]]).argmax() == 1


def test_where_everything_would_be_banned_nothing_is() -> None:
    rows = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    found = make_processor(1.0, no_repeat_ngram=1)(rows, [[0, 1, 2], [2, 1]])
    assert torch.allclose(found[0], rows[0].softmax(-1))
    assert found[1].tolist() == [1.0, 0.0, 0.0]
    short = torch.tensor([[-math.inf, 1.0, -math.inf]])  # a drafter that covers one id
    assert make_processor(1.0, no_repeat_ngram=1)(short, [[1]]).tolist() == [[0.0, 1.0, 0.0]]


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    """-1 stands for an absent draft; a padded id may be in a prompt."""
    row = logits_of(3, 1, 4)
    processor = make_processor(1.0, repetition_penalty=3.0, no_repeat_ngram=1)
    assert torch.equal(processor(row, [[1, -1, 4, 99]]), processor(row, [[1]]))


@pytest.mark.parametrize("prefixes", [None, [], [[1]], [[1]] * 3])
def test_a_missing_prefix_is_an_error(prefixes: Any) -> None:
    given = 0 if prefixes is None else len(prefixes)
    with pytest.raises(ValueError, match=f"needs the tokens before each distribution: 2 rows, {given} prefixes"):
        make_processor(1.0, repetition_penalty=2.0)(torch.zeros(2, 4), prefixes)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: GreedyProcessor(repetition_penalty=0), "repetition_penalty must be above 0 (1 = off), got 0"),
        (lambda: GreedyProcessor(repetition_penalty=-1.5), "repetition_penalty must be above 0 (1 = off), got -1.5"),
        (
            lambda: NucleusProcessor(1.0, 0.9, repetition_penalty=math.nan),
            "repetition_penalty must be above 0 (1 = off), got nan",
        ),
        (
            lambda: make_processor(1.0, repetition_penalty="1.2"),  # type: ignore[arg-type]
            "repetition_penalty must be above 0 (1 = off), got '1.2'",
        ),
        (lambda: TopKProcessor(1.0, 5, no_repeat_ngram=-1), "no_repeat_ngram must be 0 (off) or more, got -1"),
        (
            lambda: TopKProcessor(1.0, 5, no_repeat_ngram=2.5),  # type: ignore[arg-type]
            "no_repeat_ngram must be 0 (off) or more, got 2.5",
        ),
        (lambda: TopKProcessor(1.0, 2.5), "top_k must be 0 (off) or more, got 2.5"),  # type: ignore[arg-type]
        (lambda: MultinomialProcessor("hot"), "temperature must be a finite number, 0 or more, got 'hot'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_named(make: Callable[[], LogitsProcessor], told: str) -> None:
    assert refused(make) == told
