"""Proof by counting: the real sampler, noise and loop emit the target's distribution.

Answers drawn as rows of large batches; the first three tokens jointly against the exact law.
Every row number and every seed has noise of its own, so the samples are independent.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.types import Drafter
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.runs import sample_counts, sampler, tiers
from tests.support.toys import LawDrafter, TableLM

FAIL_BELOW = 1e-6
V = 8
PROMPT = [3, 1, 3, 1, 3]
LENGTH = 4  # the fourth gives the first round room for two drafts


def target() -> TableLM:
    return TableLM(V, seed=21, sharpness=1.2, dtype=torch.float32)


def drafter_lm() -> TableLM:
    """A drafter that is often right: the target's table with noise on it."""
    lm = target()
    lm.table = lm.table + 0.8 * torch.randn(lm.table.shape, generator=torch.Generator().manual_seed(22))
    return lm


def model() -> Drafter:
    return ModelDrafter(drafter_lm())


Case = tuple[Callable[[], Drafter], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {  # drafter, sampler options, law
    "none": (NoDrafter, {}, {}),
    "rejection": (model, {}, {}),
    "rejection, shaped": (model, {}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}),
    "rejection, min-p": (model, {}, {"temperature": 1.4, "min_p": 0.1}),
    "greedy drafts": (model, {"draft_sampling": "greedy"}, {}),
    "gumbel": (model, {"coupling": "gumbel"}, {}),
    "gumbel, shaped": (model, {"coupling": "gumbel"}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}),
    "ngram": (lambda: NgramDrafter(V), {}, {}),
    "ngram, random fill": (lambda: NgramDrafter(V, stop_if_unknown=False), {}, {"temperature": 0.8, "top_p": 0.9}),
    "early stop": (lambda: LawDrafter(drafter_lm(), least_top=0.35), {}, {}),
}


def counts_of(case: Case, samples: int, **options: Any) -> Counter[tuple[int, ...]]:
    make_drafter, sampling, law = case
    settings = {"prompt": PROMPT, "samples": samples, "length": LENGTH, "gamma": 3, **options}
    return sample_counts(
        target(),
        make_drafter,
        lambda seed: sampler(seed=1000 + seed, **{"temperature": 1.0, **law, **sampling}),
        **settings,
    )


def p_value(case: Case, samples: int, **options: Any) -> float:
    counts = counts_of(case, samples, **options)
    assert counts.total() == samples
    return chi_square_p(counts, exact_law(target(), PROMPT, NaiveLaw(**case[2]), 3))


@pytest.mark.parametrize("samples", tiers(3_000, 40_000))
@pytest.mark.parametrize("name", CASES)
def test_the_first_three_tokens_have_the_targets_law(name: str, samples: int) -> None:
    assert p_value(CASES[name], samples) > FAIL_BELOW


@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_decided_one_by_one_say_the_same(name: str) -> None:
    assert counts_of(CASES[name], 250, batch=250) == counts_of(CASES[name], 250, batch=250, at_once=False)


def test_single_rows_with_many_seeds() -> None:
    """One row an answer, a new seed for each: seeds give independent noise just as rows do."""
    assert p_value(CASES["rejection"], samples=400, batch=1, at_once=False) > FAIL_BELOW


@pytest.mark.parametrize(
    ("samples", "temperature"), [(3_000, 1.3), pytest.param(40_000, 1.08, marks=pytest.mark.exhaustive)]
)
def test_the_statistic_sees_a_law_that_is_a_little_off(samples: int, temperature: float) -> None:
    """Counts of temperature 1 against the law of a higher one must fail: so many samples have power."""
    counts = sample_counts(
        target(),
        NoDrafter,
        lambda seed: sampler(1.0, seed=seed),
        prompt=PROMPT,
        samples=samples,
        length=3,
        gamma=1,
    )
    assert chi_square_p(counts, exact_law(target(), PROMPT, NaiveLaw(temperature=temperature), 3)) < FAIL_BELOW
