"""Temperatures that float32 cannot divide by, and logits that are no numbers: a law or one line, never NaN.

Below 2^-126 everything is greedy, point masses included; above 2^126 what the filters leave is uniform.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sampling import autoregressive_generate, beam_search_generate, cascade_generate, speculative_generate
from sampling.drafters.draft_model import ModelDrafter, ModelSource
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.sampler import KeyedSampler
from sampling.types import Drafter
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, sampler
from tests.support.students import make_target
from tests.support.toys import TableLM, ToyLM
from utils.logits_processors import (
    GreedyProcessor,
    LogitsProcessor,
    MinPProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)

COLD = (0.0, 1e-46, 1e-45, 1e-40, 1.17e-38)
HOT = (1e38, 1e39, 1e300)
WARM = (1.2e-38, 1e-38 * 2, 1e-10, 1e-3, 1.0, 1e10, 8e37)
LAWS: list[tuple[type[LogitsProcessor], dict[str, Any]]] = [
    (MultinomialProcessor, {}),
    (TopKProcessor, {"top_k": 2}),
    (NucleusProcessor, {"top_p": 0.6}),
    (NucleusProcessor, {"top_p": 1e-46}),
    (TopKNucleusProcessor, {"top_k": 3, "top_p": 0.9}),
    (MinPProcessor, {"min_p": 0.1}),
]
NUMBERS = st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-60, 60, width=32) | st.just(-math.inf)
ROWS = st.lists(NUMBERS, min_size=1, max_size=8).filter(lambda row: max(row) > -math.inf)
TEMPERATURES = st.sampled_from([*COLD, *WARM, *HOT]) | st.floats(0, allow_infinity=False, allow_nan=False)
PROMPT = [0, 1, 0]


@given(ROWS, TEMPERATURES, st.sampled_from(LAWS), st.sampled_from([1.0, 1.3, 1e-46, 1e39]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_law_is_a_law(row: list[float], temperature: float, law: Any, penalty: float, double: bool) -> None:
    """Finite, without negative numbers, of mass 1; what is impossible stays so; the likeliest id is the likeliest."""
    make, numbers = law
    processor = make(temperature=temperature, repetition_penalty=penalty, **numbers)
    logits = torch.tensor([row], dtype=torch.float64 if double else torch.float32)
    prefixes = [[0, 1]] if processor.needs_prefixes else None
    probs = processor(logits, prefixes)
    assert bool((probs >= 0).all())
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    assert not bool(probs[logits == -torch.inf].any())
    ruled = processor.ruled(logits, prefixes) if prefixes else logits
    assert probs[0, int(ruled.argmax())] == probs.max() or processor.top_p < 1  # of equals a nucleus may take any


@pytest.mark.parametrize(("temperature", "law"), crossed(COLD, LAWS))
def test_what_cannot_be_divided_by_is_greedy(temperature: float, law: Any) -> None:
    make, numbers = law
    processor = make(temperature=temperature, **numbers)
    logits = torch.tensor([[1.0, 3.0, -math.inf, 3.0, 2.9]])
    assert processor.greedy
    assert processor(logits).tolist() == [[0, 1, 0, 0, 0]]
    assert processor(logits.double()).tolist() == [[0, 1, 0, 0, 0]]
    assert processor.sample(processor(logits)).tolist() == [[1]]
    sampler = KeyedSampler(processor)
    assert sampler.point_mass
    assert sampler.drafting([(0, 0)]).point_mass
    assert sampler.noise(0, 5, [1, 2]) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("temperature", HOT)
def test_what_is_too_hot_is_uniform_over_what_is_left(temperature: float) -> None:
    logits = torch.tensor([1.0, 30.0, -math.inf, 4.0, -50.0])
    third, half = pytest.approx(1 / 3), pytest.approx(1 / 2)
    quarter = pytest.approx(1 / 4)
    assert MultinomialProcessor(temperature)(logits).tolist() == [quarter, quarter, 0, quarter, quarter]
    assert TopKProcessor(temperature, 2)(logits).tolist() == [0, half, 0, half, 0]
    assert TopKProcessor(temperature, 3)(logits).tolist() == [third, third, 0, third, 0]
    assert MinPProcessor(temperature, 0.9)(logits).tolist() == [quarter, quarter, 0, quarter, quarter]
    assert int(NucleusProcessor(temperature, 0.5)(logits).count_nonzero()) == 2
    assert not MultinomialProcessor(temperature).greedy


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -1e-46])
def test_a_drafter_may_not_take_a_temperature_that_is_no_number(wrong: float) -> None:
    for make in (GreedyProcessor, *dict(LAWS)):
        refused(make, temperature=wrong, match=r"^temperature must be a finite number, 0 or more, got [^\n]*$")


WAYS: dict[str, Any] = {
    "model": lambda: ModelDrafter(TableLM(4, 2)),
    "ngram": lambda: NgramDrafter(4),
    "tables": lambda: LookupDrafter(tree=True, shared_noise=True, recall=True),
    "joint": lambda: LookupDrafter(model=ModelSource(TableLM(4, 2)), tree=True, shared_noise=True),
}


@pytest.mark.parametrize(("coupling", "way"), crossed(["rejection", "gumbel"], WAYS))
def test_cold_text_is_greedy_text_and_hot_text_is_said(coupling: Any, way: str) -> None:
    """Float32 logits with impossible ids, as a model gives them."""
    table = TableLM(4, 1, dtype=torch.float32)
    table.table[:, :, 3] = -math.inf
    make: Any = WAYS[way]

    def said(temperature: float, drafter: Drafter | None) -> list[int]:
        return answers(table, [PROMPT], drafter, sampler(temperature, seed=9, coupling=coupling), length=24)[0]

    greedy = said(0.0, None)
    assert all(said(temperature, None) == said(temperature, make()) == greedy for temperature in COLD)
    for temperature in HOT:
        plain, drafted = said(temperature, None), said(temperature, make())
        assert set(plain) == set(drafted) == {0, 1, 2}
        if coupling == "gumbel":
            assert drafted == plain


@pytest.mark.parametrize("temperature", [*COLD, *HOT])
def test_the_calls_take_every_temperature(temperature: float) -> None:
    large, small = make_target(8, seed=1), make_target(8, seed=2)
    options = {"logits_processor": MultinomialProcessor(temperature), "max_gen_len": 12, "end_tokens_id": []}
    plain = autoregressive_generate(PROMPT, large, **options)
    for ids, _ in (
        speculative_generate(PROMPT, small, large, coupling="gumbel", **options),
        cascade_generate(PROMPT, [small, MaxGramDrafter()], large, [[2, 2], [0, 2]], coupling="gumbel", **options),
    ):
        assert ids == plain
    if temperature in COLD:
        assert plain == autoregressive_generate(PROMPT, large, max_gen_len=12, end_tokens_id=[])


# -- logits that are no numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_a_beam_search_says_the_same(row: list[float]) -> None:
    refused(beam_search_generate, PROMPT, ToyLM(3, lambda prefix: row), max_gen_len=4, match="NaN")
