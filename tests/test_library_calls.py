"""The one-call functions: the arguments people pass, and the one line for what cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sampling import (
    MaxGramDrafter,
    RecordedLM,
    autoregressive_generate,
    cascade_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from sampling.causal import CausalLM
from sampling.drafters import ModelDrafter, NgramDrafter
from tests.students import make_target
from tests.tiny import noisy_copy, tiny_model, tiny_tokenizer
from utils.errors import UserError
from utils.logits_processors import GreedyProcessor, MultinomialProcessor, NucleusProcessor, TopKProcessor

PROMPT = [5, 6, 7, 5, 6]
TARGET = tiny_model(3)
DRAFTER = noisy_copy(TARGET, 0.05)
PLAIN = autoregressive_generate(PROMPT, TARGET, max_gen_len=20)


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


def refused(call: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


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
        "target's law"
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
    told = refused(lambda: spec(**{wrong: 1}), TypeError)
    assert told == f"speculative_generate() got an unexpected keyword argument '{wrong}' (did you mean '{near}'?)"


def test_a_keyword_like_no_other_gets_no_suggestion() -> None:
    told = refused(lambda: plain(zzz=1), TypeError)
    assert told == "autoregressive_generate() got an unexpected keyword argument 'zzz'"


def test_prompts_may_be_lists_tuples_and_tensors() -> None:
    for prompt in (tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT]), [PROMPT], torch.tensor(PROMPT).numpy()):
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
        ([1] * 512, "the prompt is 512 tokens, the context holds 512 with room for one more"),
    ],
)
def test_a_wrong_prompt_is_named(prompt: Any, told: str) -> None:
    assert refused(lambda: autoregressive_generate(prompt, TARGET)) == told
    assert refused(lambda: speculative_generate(prompt, DRAFTER, TARGET)) == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gamma": -1}, "gamma must be a whole number, at least 0, got -1"),
        ({"gamma": 2.5}, "gamma must be a whole number, at least 0, got 2.5"),
        ({"max_gen_len": 0}, "max_gen_len must be a whole number, at least 1, got 0"),
        ({"max_gen_len": "9"}, "max_gen_len must be a whole number, at least 1, got '9'"),
        ({"seed": None}, "seed must be a whole number or a torch.Generator, got None"),
        ({"seed": 1.5}, "seed must be a whole number or a torch.Generator, got 1.5"),
        ({"end_tokens_id": "</s>"}, "end_tokens_id must be an id or several, got '</s>'"),
        ({"end_tokens_id": [2, "x"]}, "end_tokens_id must be an id or several, got 'x'"),
        (
            {"logits_processor": NucleusProcessor},
            "logits_processor must be an object, got the class NucleusProcessor: call it",
        ),
        (
            {"logits_processor": []},
            "logits_processor must be one of utils.logits_processors, got list"
            " (GreedyProcessor(), NucleusProcessor(temperature, top_p) …)",
        ),
        ({"coupling": "loose"}, "coupling must be rejection or gumbel, got 'loose'"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_named(options: dict[str, Any], told: str) -> None:
    assert refused(lambda: spec(**options)) == told


def test_wrong_models_are_named() -> None:
    told = refused(lambda: autoregressive_generate(PROMPT, "gpt2"))
    assert told == "target must be a model, got 'gpt2': load it (AutoModelForCausalLM.from_pretrained)"
    told = refused(lambda: speculative_generate(PROMPT, None, TARGET))
    assert told == "drafter must be a transformers model, got None"
    told = refused(lambda: ngram_assisted_speculative_generate(PROMPT, 3, TARGET))  # type: ignore[arg-type]
    assert told == "ngram must be an NgramDrafter or None (a fresh one), got int"


def test_models_on_different_devices_are_named() -> None:
    away = make_target(300).to("meta")
    told = refused(lambda: speculative_generate(PROMPT, away, TARGET))
    assert told == "drafter is on meta, the target on cpu: move one of them"


def test_different_vocabularies_are_refused_and_padded_ones_shared() -> None:
    other = make_target(2000)
    told = refused(lambda: speculative_generate(PROMPT, other, TARGET))
    assert told == (
        "different vocabularies: drafter has 2,000 ids, the target 300 (one tokenizer for both? then give it)"
    )
    assert spec(PROMPT, make_target(310), TARGET) == PLAIN
    assert len(tiny_tokenizer()) == 300
    assert spec(PROMPT, other, TARGET, tiny_tokenizer()) == PLAIN
    told = refused(lambda: spec(PROMPT, make_target(290), TARGET, tiny_tokenizer()))
    assert told == "different vocabularies: drafter has 290 ids, the target 300, and the tokenizer 300"


def test_the_cascades_models_are_compared_too() -> None:
    far = make_target(2000)
    told = refused(lambda: cascade_generate(PROMPT, [far, MaxGramDrafter()], TARGET, [[2, 2], [0, 2]]))
    assert told.startswith("different vocabularies: drafter 1 has 2,000 ids")


def test_drafter_objects_draft_as_well() -> None:
    for drafter in (MaxGramDrafter(), NgramDrafter(300), ModelDrafter(CausalLM(DRAFTER, "drafter")), CausalLM(DRAFTER)):
        assert spec(PROMPT, drafter, TARGET) == PLAIN


def test_a_recording_stands_in_for_the_target() -> None:
    recorded = RecordedLM({tuple(PROMPT): PLAIN}, end_id=2, vocab_size=300)
    assert autoregressive_generate(PROMPT, recorded, max_gen_len=20) == PLAIN
    ids, rate = speculative_generate(PROMPT, DRAFTER, recorded, max_gen_len=20)
    assert ids == PLAIN
    assert rate > 0


def test_debug_logs_every_round_and_prints_nothing(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="sampling"):
        assert spec() == PLAIN
        assert not caplog.messages
        assert spec(debug=True) == PLAIN
    assert caplog.messages[0] == f"round 0: drafted [], accepted [], then {PLAIN[0]}"
    assert all(message.startswith(f"round {number}: drafted [") for number, message in enumerate(caplog.messages))
    assert capsys.readouterr() == ("", "")


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


def test_the_same_processor_by_position_and_by_name() -> None:
    for by_position, by_name in (
        (TopKProcessor(0.7, 5), TopKProcessor(temperature=0.7, top_k=5)),
        (NucleusProcessor(0.7, 0.9), NucleusProcessor(temperature=0.7, top_p=0.9)),
    ):
        assert plain(logits_processor=by_position, seed=3) == plain(logits_processor=by_name, seed=3)
