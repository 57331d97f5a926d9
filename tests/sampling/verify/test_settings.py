"""Every setting that shapes a distribution, alone and together, under drafts of every kind: sampled by taking every
branch, greedy by comparison with plain decoding. And the drafters see a bias as the target does."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sampling.drafters.cascade import cascade_of
from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter, source_of
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Drafter, Rule
from sampling.vocabulary import single_thread_if_small
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support import cascades
from tests.support.blocks import V, loaded, target_of
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.runs import answers, decode, enumeration_error, sample_counts, steps
from tests.support.students import make_drafter, make_student, make_target, text
from tests.support.tiny import noisy_copy
from tests.support.toys import TableLM, TreeDrafter
from utils.logits_processors import LogitsProcessor

SETTINGS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": (((0,), 1.5), ((2,), -1.0))},
    "ban": {"logit_bias": (((1,), -math.inf),)},
    "sequences": {"logit_bias": (((2, 0), -math.inf), ((2, 1), 1.5), ((3,), 0.5))},
    "penalty": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.2},
    "frequency in a window": {"frequency_penalty": -0.7, "penalty_window": 2},
    "bigrams once": {"no_repeat_ngram": 2},
    "typical-p": {"typical_p": 0.8},
}
FILTERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.15},
}
LAWS = {f"{name}, {cut}": NaiveLaw(**SETTINGS[name], **FILTERS[cut]) for name in SETTINGS for cut in FILTERS}
LAWS["all"] = NaiveLaw(
    *(0.9, 4, 0.95, 0.02, 1.2, 2, 0.5, -0.4, 3, 0.95),
    SETTINGS["bias"]["logit_bias"] + SETTINGS["sequences"]["logit_bias"],
)
WIDE = 6
MAKERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: ModelDrafter(TableLM(WIDE, seed=7)),
    "block": lambda: ModelDrafter(TableLM(WIDE, seed=7), rule=Rule.BLOCK),
    "tree": lambda: TreeDrafter(TableLM(WIDE, seed=9), (2,)),
    "cascade": lambda: cascades.drafter("model < model", 2.0, WIDE),
}
SHORT = {f"{name}, {cut}" for name, cut in zip(SETTINGS, [*FILTERS, *FILTERS], strict=True)} | {"all"}


@pytest.mark.parametrize(
    "law", [law if law in SHORT else pytest.param(law, marks=pytest.mark.exhaustive) for law in LAWS]
)
@pytest.mark.parametrize("name", MAKERS)
def test_sampled_text_has_the_targets_law(name: str, law: str) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "length": 3, "gamma": 64 if name == "cascade" else 2}
    assert enumeration_error(sure_start(WIDE, 1), MAKERS[name], law=LAWS[law], together=256, **options) < EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", MAKERS)
def test_it_has_in_longer_texts(name: str, law: str) -> None:
    narrow = replace(LAWS[law], top_k=min(LAWS[law].top_k or 3, 3))
    options: dict[str, Any] = {"prompt": PROMPT, "length": 5, "gamma": 64 if name == "cascade" else 2}
    assert enumeration_error(sure_start(WIDE, 1), MAKERS[name], law=narrow, together=1024, **options) < EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("law", sorted(SHORT))
@pytest.mark.parametrize("name", ["chain", "block", "cascade"])
def test_counts_of_sampled_text_have_it_too(name: str, law: str) -> None:
    right, target = LAWS[law], TableLM(WIDE, 21, 1.2, dtype=torch.float32)
    shape = {field: getattr(right, field) for field in right.__dataclass_fields__}
    processor = LogitsProcessor(**shape | {"logit_bias": dict(right.logit_bias)})
    make, gamma = MAKERS[name], 64 if name == "cascade" else 3
    counts = sample_counts(
        target,
        make,
        lambda seed: KeyedSampler(processor, 900 + seed),
        prompt=PROMPT,
        samples=5_000,
        length=4,
        gamma=gamma,
    )
    assert chi_square_p(counts, exact_law(target, PROMPT, right, 3)) > 1e-6


# -- greedy -----------------------------------------------------------------------------------------


def drafters(folder: Path, target: Any) -> dict[str, Drafter]:
    guess = CausalLM(noisy_copy(target, 0.1), "drafter")
    head = loaded(folder, "DFlash, windows, a reduced vocabulary", target)
    return {
        "ngram": NgramDrafter(V),
        "tables": LookupDrafter(tree=True, recall=True, least=0.0),
        "model": ModelDrafter(guess),
        "tree": Proposer([ModelSource(guess)], tree=True, least=0.0),
        "block head": ModelDrafter(head),
        "block tree": Proposer([source_of(head)], tree=True, least=0.0),
        "cascade": cascade_of([ModelDrafter(guess), MaxGramDrafter()], [[2, 2], [0, 2]]),
    }


IDS = st.integers(0, V - 1)
BIASES = st.dictionaries(st.tuples(IDS) | st.tuples(IDS, IDS), st.sampled_from([-math.inf, -3.0, 1.5, 6.0]), max_size=6)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": BIASES,
        "repetition_penalty": st.sampled_from([0.7, 1.4]),
        "presence_penalty": st.sampled_from([-1.0, 0.6]),
        "frequency_penalty": st.sampled_from([-0.5, 0.9]),
        "penalty_window": st.integers(1, 8),
        "no_repeat_ngram": st.integers(1, 3),
        "typical_p": st.sampled_from([0.3, 0.9]),
        "top_k": st.integers(1, 9),
        "top_p": st.sampled_from([0.2, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
    },
)
ALL = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.5, "penalty_window": 5}
ALL |= {"no_repeat_ngram": 3, "typical_p": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.05}


def check_greedy(folder: Path, rules: dict[str, Any], seed: int) -> None:
    target = target_of("Llama")
    lm, prompt = CausalLM(target), text(seed, 9, V)
    sampler = KeyedSampler(LogitsProcessor(0.0, **rules))
    with single_thread_if_small(1):
        alone = answers(lm, [prompt], NoDrafter(), sampler, length=12)
        for name, drafter in drafters(folder, target).items():
            assert answers(lm, [prompt], drafter, sampler, length=12) == alone, name


def test_greedy_text_is_plain_decodings_under_all_settings(tmp_path: Path) -> None:
    check_greedy(tmp_path, ALL | {"logit_bias": {3: 6.0, 7: -math.inf, (3, 3): -math.inf}}, 1)


@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None)
@given(RULES, st.integers(0, 99))
def test_greedy_text_is_plain_decodings_under_any_settings(
    tmp_path_factory: pytest.TempPathFactory, rules: dict[str, Any], seed: int
) -> None:
    check_greedy(tmp_path_factory.mktemp("head"), rules, seed)


# -- drafters see a bias ------------------------------------------------------------------------------


def itself(name: str) -> Drafter:
    guess = TableLM(9, seed=3)
    if name == "tree":
        return Proposer([ModelSource(guess)], tree=True, least=0.0)
    return (
        ModelDrafter(guess)
        if name == "chain"
        else cascade_of([ModelDrafter(guess), ModelDrafter(TableLM(9, seed=3))], [[3, 0], [0, 2]])
    )


@pytest.mark.parametrize(
    ("name", "temperature", "coupling"),
    [
        *[("chain", 0.0, "rejection"), ("chain", 1.0, "rejection"), ("chain", 1.0, "gumbel")],
        *[("tree", 0.0, "rejection"), ("cascade", 0.0, "rejection"), ("cascade", 1.0, "rejection")],
    ],
)
def test_a_target_that_drafts_for_itself_accepts_every_draft(name: str, temperature: float, coupling: Any) -> None:
    sampler = KeyedSampler(LogitsProcessor(temperature, logit_bias={1: 4.0, 3: -math.inf}), 5, coupling=coupling)
    rounds = steps(decode(TableLM(9, seed=3), [[0, 1]], itself(name), sampler, length=24, gamma=4))
    accepted = [len(step.path) for step in rounds[1:-1]]
    assert min(accepted) >= 2
    assert name == "tree" or accepted == [len(step.drafted) for step in rounds[1:-1]]
    inner = [step for each in rounds for step in each.inner]
    assert all(len(step.path) == len(step.drafted) for step in inner)
    assert bool(inner) == (name == "cascade")


def test_a_reduced_vocabulary_is_biased_by_its_ids() -> None:
    """Ids 2 and 5 are outside the head's list; the draft that the bias asks for is made all the same."""
    target = make_target(12, seed=3)
    drafter = make_drafter(make_student("plain", target, short=[0, 1, 3, 4, 6, 7, 8, 9, 10, 11]))
    for temperature in (0.0, 1.0):
        sampler = KeyedSampler(LogitsProcessor(temperature, logit_bias={7: 90.0, 2: -90.0}), 2)
        rounds = steps(decode(CausalLM(target), [[0, 1]], drafter, sampler, length=9, gamma=3))
        assert {token for step in rounds for token in step.drafted} == {7}


def test_look_ups_offer_no_banned_token() -> None:
    bias = {3: -math.inf, (1, 2): 90.0, (2, 1): 90.0}
    lm, sampler = TableLM(6, seed=3), KeyedSampler(LogitsProcessor(0.0, logit_bias=bias))
    rounds = steps(decode(lm, [[1, 2, 3, 1, 2, 3, 1]], LookupDrafter(least=0.0), sampler, length=16, gamma=3))
    assert {token for step in rounds for token in step.drafted} == {1, 2}


def test_a_bias_is_that_of_transformers() -> None:
    from transformers.generation import SequenceBiasLogitsProcessor

    bias = {(2,): 1.5, (3,): -math.inf, (0, 4): 2.0, (1, 0, 4): -2.5, (5, 4): 9.0}
    scores, prefix = torch.randn(1, 8, generator=torch.Generator().manual_seed(1)), [5, 1, 0]
    theirs = SequenceBiasLogitsProcessor(bias)(torch.tensor([prefix]), scores.clone()).softmax(dim=-1)
    assert torch.allclose(LogitsProcessor(logit_bias=bias)(scores, [prefix]), theirs)
