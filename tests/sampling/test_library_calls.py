"""The one-call functions: the arguments people pass, the one line for what cannot be used, and `cascade_generate` with
transformers models and other drafters: new ids out.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from sampling import (
    MaxGramDrafter,
    RecordedLM,
    autoregressive_generate,
    cascade_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from sampling.api import stop_ids_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.causal import CausalLM
from tests.support.refusals import refused
from tests.support.students import make_target
from tests.support.tiny import noisy_copy, tiny_model, tiny_tokenizer
from utils.logits_processors import GreedyProcessor, MultinomialProcessor, NucleusProcessor

PROMPT = [5, 6, 7, 5, 6]
TARGET = tiny_model(3)
DRAFTER = noisy_copy(TARGET, 0.05)
PLAIN = autoregressive_generate(PROMPT, TARGET, max_gen_len=20)

START = [5, 17, 40, 5, 17]
K2, K3 = [[4, 4], [0, 4]], [[4, 3, 3], [0, 1, 3], [0, 0, 3]]


def spec(*args: Any, **more: Any) -> list[int]:
    prompt, *rest = args or (PROMPT,)
    return speculative_generate(prompt, *(rest or (DRAFTER, TARGET)), **{"max_gen_len": 20, **more})[0]


def ngram(**more: Any) -> list[int]:
    return ngram_assisted_speculative_generate(PROMPT, None, TARGET, **{"max_gen_len": 20, **more})[0]


def cascade(**more: Any) -> list[int]:
    ways, matrix = [DRAFTER, MaxGramDrafter()], [[2, 2], [0, 2]]
    return cascade_generate(PROMPT, ways, TARGET, matrix, **{"max_gen_len": 20, **more})[0]


def plain(**more: Any) -> list[int]:
    return autoregressive_generate(PROMPT, TARGET, **{"max_gen_len": 20, **more})


CALLS: dict[str, Callable[..., list[int]]] = {"plain": plain, "spec": spec, "ngram": ngram, "cascade": cascade}


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_people_pass_change_no_text(name: str, untouched_global_noise: None) -> None:
    call = CALLS[name]
    more = {"use_cache": False, "debug": False, "first_target": True, "skip_sample_adjustment": False}
    assert call(**more, pad_token_id=0, eos_tokens_id=[2]) == PLAIN
    assert call(use_cache=True, end_tokens_id=2, logits_processor=GreedyProcessor(temperature=1)) == PLAIN


@pytest.mark.parametrize("name", CALLS)
def test_what_would_change_the_distribution_is_refused_with_the_reason(name: str) -> None:
    told = refused(lambda: CALLS[name](skip_sample_adjustment=True))
    assert told == (
        "skip_sample_adjustment=True is refused: without the adjustment after a refusal the text no longer has the "
        "target's distribution"
    )
    told = refused(lambda: CALLS[name](first_target=False))
    assert told.startswith("first_target=False is refused: the target always does the opening round")
    assert refused(lambda: CALLS[name](debug=1)) == "debug must be True or False, got 1"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("gama", "gamma"),
        ("logit_processor", "logits_processor"),
        ("max_new_tokens", "max_gen_len"),
        ("eos_token_id", "end_tokens_id"),
        ("temperature", "logits_processor"),
        ("generator", "seed"),
        ("usecache", "use_cache"),
    ],
)
def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name(wrong: str, near: str) -> None:
    told = refused(lambda: spec(**{wrong: 1}), kind=TypeError)
    assert told == f"speculative_generate() got an unexpected keyword argument '{wrong}' (did you mean {near}?)"


@pytest.mark.parametrize(
    "prompt", [tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT]), [PROMPT], torch.tensor(PROMPT).numpy()]
)
def test_prompts_may_be_lists_tuples_and_tensors(prompt: Any) -> None:
    assert spec(prompt) == PLAIN


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("hello", "input_ids must be token ids, got text: encode it first (tokenizer(text).input_ids)"),
        ([], "the prompt is empty: give at least one token"),
        ([[]], "the prompt is empty: give at least one token"),
        (torch.tensor([[1, 2], [3, 4]]), "input_ids must be one prompt, got 2 rows (Engine.generate takes several)"),
        ([1, 2.5], "input_ids must be whole numbers, got 2.5"),
        ([1, "a"], "input_ids must be whole numbers, got 'a'"),
        ([1, True], "input_ids must be whole numbers, got True"),
        (7, "input_ids must be a list of ids or a tensor of them, got int"),
        ({"input_ids": [1]}, "input_ids must be a list of ids or a tensor of them, got dict"),
        ([1, 300], "id 300 is outside the vocabulary of target (0 … 299)"),
        ([1, -1], "id -1 is outside the vocabulary of target (0 … 299)"),
        ([1] * 512, "the prompt is 512 tokens; the context holds 512, and at least one must be left for the answer"),
    ],
)
def test_a_wrong_prompt_is_named(prompt: Any, told: str) -> None:
    assert refused(lambda: autoregressive_generate(prompt, TARGET)) == told
    assert refused(lambda: speculative_generate(prompt, DRAFTER, TARGET)) == told


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("spec", {"gamma": -1}, "gamma must be a whole number, at least 0, got -1"),
        ("spec", {"gamma": 2.5}, "gamma must be a whole number, at least 0, got 2.5"),
        ("spec", {"max_gen_len": 0}, "max_gen_len must be a whole number, at least 1, got 0"),
        ("spec", {"max_gen_len": "9"}, "max_gen_len must be a whole number, at least 1, got '9'"),
        ("spec", {"seed": None}, "seed must be a whole number or a torch.Generator, got None"),
        ("spec", {"seed": 1.5}, "seed must be a whole number or a torch.Generator, got 1.5"),
        ("spec", {"end_tokens_id": "</s>"}, "end_tokens_id must be an id or several, got '</s>'"),
        ("spec", {"end_tokens_id": 2.0}, "end_tokens_id must be an id or several, got 2.0"),
        ("spec", {"end_tokens_id": [2, "x"]}, "end_tokens_id must be an id or several, got 'x'"),
        (
            "spec",
            {"logits_processor": NucleusProcessor},
            "logits_processor must be an object, got the class NucleusProcessor: call it",
        ),
        (
            "spec",
            {"logits_processor": []},
            "logits_processor must be one of utils.logits_processors, got list"
            " (GreedyProcessor(), NucleusProcessor(temperature, top_p) …)",
        ),
        ("spec", {"coupling": "loose"}, "coupling must be rejection or gumbel, got 'loose'"),
        ("ngram", {"n": "3"}, "n must be a whole number, at least 2, got '3'"),
        ("ngram", {"n": 1}, "n must be a whole number, at least 2, got 1"),
        ("ngram", {"filler_top_k": 1.5}, "filler_top_k must be a whole number, at least 1, got 1.5"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_named(name: str, options: dict[str, Any], told: str) -> None:
    assert refused(lambda: CALLS[name](**options)) == told


@pytest.mark.parametrize("stop", [torch.tensor(7), torch.tensor([7, 2]), np.int64(7), (7,)])
def test_stop_ids_may_be_tensors(stop: Any) -> None:
    assert stop_ids_of(stop, None, TARGET) in ({7}, {7, 2})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: autoregressive_generate(PROMPT, "gpt2"),
            "target must be a model, got 'gpt2': load it (AutoModelForCausalLM.from_pretrained)",
        ),
        (lambda: speculative_generate(PROMPT, None, TARGET), "drafter must be a transformers model, got None"),
        (
            lambda: ngram_assisted_speculative_generate(PROMPT, 3, TARGET),  # type: ignore[arg-type]
            "ngram must be an NgramDrafter or None (a fresh one), got int",
        ),
        (
            lambda: speculative_generate(PROMPT, make_target(300).to("meta"), TARGET),
            "drafter is on meta, the target on cpu: move one of them",
        ),
    ],
)
def test_wrong_models_are_named(call: Callable[[], Any], told: str) -> None:
    assert refused(call) == told


def test_far_vocabularies_are_refused_and_near_ones_taken() -> None:
    other = make_target(2000)
    told = refused(lambda: speculative_generate(PROMPT, other, TARGET))
    assert told == (
        "different vocabularies: drafter has 2,000 ids, the target 300 (one tokenizer for both? then give it)"
    )
    assert spec(PROMPT, make_target(310), TARGET) == PLAIN
    assert len(tiny_tokenizer()) == 300
    assert spec(PROMPT, other, TARGET, tiny_tokenizer()) == PLAIN
    assert spec(PROMPT, make_target(290), TARGET, tiny_tokenizer()) == PLAIN
    told = refused(lambda: spec(PROMPT, TARGET, other, range(2000)))  # of a tokenizer its size is asked
    assert told == "different vocabularies: drafter has 300 ids, the target 2,000, and the tokenizer 2,000"


@pytest.mark.parametrize(
    "drafter", [MaxGramDrafter(), NgramDrafter(300), ModelDrafter(CausalLM(DRAFTER, "drafter")), CausalLM(DRAFTER)]
)
def test_drafter_objects_draft_as_well(drafter: Any) -> None:
    assert spec(PROMPT, drafter, TARGET) == PLAIN


def test_a_recording_stands_in_for_the_target() -> None:
    recorded = RecordedLM({tuple(PROMPT): PLAIN}, end_id=2, vocab_size=300)
    assert autoregressive_generate(PROMPT, recorded, max_gen_len=20) == PLAIN
    ids, rate = speculative_generate(PROMPT, DRAFTER, recorded, max_gen_len=20)
    assert ids == PLAIN
    assert rate > 0


def test_seeds_and_generators_decide_and_the_global_one_does_not(untouched_global_noise: None) -> None:
    hot = {"logits_processor": MultinomialProcessor(1.5)}
    assert spec(**hot, seed=1) == spec(**hot, seed=1) != spec(**hot, seed=2)
    first, again = (spec(**hot, seed=torch.Generator().manual_seed(7)) for _ in range(2))
    assert first == again
    rolling = torch.Generator().manual_seed(7)
    assert spec(**hot, seed=rolling) == first
    assert spec(**hot, seed=rolling) != first


def test_processors_with_rules_go_through_every_call() -> None:
    rules = GreedyProcessor(repetition_penalty=1.4, no_repeat_ngram=2)
    alone = plain(logits_processor=rules)
    assert alone != PLAIN
    assert {name: call(logits_processor=rules) for name, call in CALLS.items()} == dict.fromkeys(CALLS, alone)


# -- cascades of transformers models ---------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> list[LlamaForCausalLM]:
    """Target, base and small; nothing ends an answer."""
    target = tiny_model(3)
    target.lm_head.weight.data[2] = 0.0
    return [target, noisy_copy(target, 0.01, seed=1), noisy_copy(target, 0.03, seed=2)]


@pytest.fixture(scope="module")
def alone(models: list[LlamaForCausalLM]) -> list[int]:
    return autoregressive_generate(START, models[0], max_gen_len=40)


@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_greedy_ids_are_plain_decodings(models: list[LlamaForCausalLM], alone: list[int], lenience: float) -> None:
    target, base, small = models
    for drafters, matrix in (
        ([base, small, MaxGramDrafter()], K3),
        ([base, MaxGramDrafter()], K2),
        ([base, small], K2),
        ([ModelDrafter(CausalLM(base, "base")), small], K2),
        ([small], [[4]]),
        ([MaxGramDrafter()], [[4]]),
    ):
        ids, rate = cascade_generate(START, drafters, target, matrix, lenience, 40)
        assert ids == alone
        assert 0 <= rate <= 1
    assert len(alone) == 40


def test_the_rate_is_that_of_the_targets_reviews(models: list[LlamaForCausalLM]) -> None:
    """A base that is the target has every token accepted, whatever it refused itself."""
    target, _, small = models
    assert cascade_generate(START, [target, small], target, [[5, 0], [0, 3]], 1.0, 24)[1] == 1
    assert cascade_generate(START, [small], target, [[5]], 1.0, 24)[1] < 1
    assert cascade_generate(START, [small], target, [[0]], 1.0, 24)[1] == 0
    assert len(cascade_generate(START, [MaxGramDrafter()], target, [[5]])[0]) == 200  # the published length


def test_limits_and_stop_ids(models: list[LlamaForCausalLM], alone: list[int]) -> None:
    target, base, _ = models
    stop = alone[11]
    first = alone.index(stop) + 1
    run = {"drafters": [base, MaxGramDrafter()], "target": target, "k_matrix": K2}
    assert cascade_generate(START, **run, max_gen_len=1)[0] == alone[:1]
    assert cascade_generate(START, **run, max_gen_len=7)[0] == alone[:7]
    assert cascade_generate(START, **run, end_tokens_id=stop)[0] == alone[:first]
    assert cascade_generate(START, **run, eos_tokens_id=[299, stop], pad_token_id=0)[0] == alone[:first]
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    assert cascade_generate(START, **run, tokenizer=tokenizer)[0] == alone[:first]


# -- a recorded target ----------------------------------------------------------------------------


def test_a_recording_ends_with_its_own_end(models: list[LlamaForCausalLM]) -> None:
    """Nobody need name it."""
    lm = RecordedLM({tuple(START): [9, 8, 7]}, end_id=2)
    assert cascade_generate(START, [models[1], MaxGramDrafter()], lm, K2)[0] == [9, 8, 7, 2]
    assert cascade_generate(START, [models[1]], lm, [[4]], end_tokens_id=8)[0] == [9, 8]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"k_matrix": [[4, 4]]}, "k_matrix must be square: 1 rows, but one of them has 2 numbers"),
        ({"k_matrix": [[4]]}, "k_matrix must have a row for each of the 2 drafters, got 1"),
        ({"k_matrix": [[4, -4], [0, 4]]}, "k_matrix must hold whole numbers from 0 to 1000, got -4 in row 1"),
        ({"k_matrix": [[4, 4], [1, 4]]}, "k_matrix must be upper triangular: row 2, column 1 must be 0, got 1"),
        ({"drafters": None}, "drafters must be a list, large to small, got NoneType"),
        ({"drafters": TARGET}, "drafters must be a list, large to small, got LlamaForCausalLM"),
        ({"lenience": 0.5}, "lenience must be a number, at least 1, got 0.5"),
        ({"drafters": []}, "a cascade needs at least one drafter"),
        ({"max_gen_len": 0}, "max_gen_len must be a whole number, at least 1, got 0"),
        ({"input_ids": [300]}, "id 300 is outside the vocabulary of target (0 … 299)"),
        ({"coupling": "none"}, "coupling must be rejection or gumbel, got 'none'"),
        (
            {"drafters": [MaxGramDrafter(), MaxGramDrafter()]},
            "maxgram is no model and cannot review drafts: only the last drafter of a cascade may be one",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(models: list[LlamaForCausalLM], change: Any, line: str) -> None:
    sound = {"input_ids": START, "drafters": [models[1], MaxGramDrafter()], "target": models[0], "k_matrix": K2}
    assert refused(lambda: cascade_generate(**(sound | change))) == line
