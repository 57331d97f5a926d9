"""Engine: batches of texts over the one loop, drafters switched on and off, generation configs honoured or refused."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from sampling import Engine, GlideLM, MaxGramDrafter
from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.engine import read_config
from tests.support.refusals import refused
from tests.support.students import make_student
from tests.support.tiny import noisy_copy, tiny_model, tiny_tokenizer

MODEL = tiny_model(3)
DRAFTER = noisy_copy(MODEL, 0.05)
PROMPTS = ["the end", "one two one two one two", "x"]
HEAD, NOT = "generation_config:", "cannot be honoured here"
SHORT = {"max_new_tokens": 24}


def engine(**more: Any) -> Engine:
    return Engine(MODEL, tiny_tokenizer(chat=False), **more)


def theirs(text: str, **options: Any) -> list[int]:
    """What transformers says, greedily."""
    ids = torch.tensor([tiny_tokenizer(chat=False)(text)["input_ids"]])
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0, **options}
    return MODEL.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def glide_student() -> Any:
    return make_student("glide", MODEL, seed=2)


WAYS = {
    "model": lambda: (DRAFTER, {}),
    "maxgram": lambda: (MaxGramDrafter(), {}),
    "plain student": lambda: (StudentNetwork(make_student("plain", MODEL, seed=2)), {}),
    "feature student": lambda: (FeatureDrafter(make_student("feature", MODEL, seed=2)), {}),
    "glide student": lambda: (glide_student(), {"use_glide_drafter": True}),
    "glide model": lambda: (GlideLM(glide_student(), 2), {"use_glide_drafter": True}),
}


@pytest.mark.parametrize("rules", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}])
@pytest.mark.parametrize("way", ["none", *WAYS])
def test_a_batch_says_what_transformers_says_prompt_by_prompt(way: str, rules: dict[str, Any]) -> None:
    made = engine()
    if way != "none":
        drafter, options = WAYS[way]()
        made.enable_spec_dec(drafter, 3, **options)
    texts, ids = made.generate(PROMPTS, {**SHORT, **rules}, return_token_ids=True)
    assert ids == [theirs(text, **rules) for text in PROMPTS]
    assert texts == [tiny_tokenizer().decode(found, skip_special_tokens=True) for found in ids]
    assert made.last.tokens == sum(map(len, ids)) == made.last.accepted + made.last.passes
    assert (made.last.drafted > 0) == (way != "none")


def test_drafting_is_switched_off_kept_and_cleared() -> None:
    made = engine()
    assert refused(made.enable_spec_dec) == "no drafter is set: enable_spec_dec(drafter) sets one"
    made.enable_spec_dec(DRAFTER, n_spec_tokens=2)
    made.generate(PROMPTS, SHORT)
    assert made.last.acceptance_rate > 0.3
    made.disable_spec_dec()
    assert not made.use_spec_dec
    made.generate(PROMPTS, SHORT)
    assert (made.last.drafted, made.last.acceptance_rate) == (0, 0.0)
    made.enable_spec_dec()
    made.generate(PROMPTS, SHORT)
    assert made.last.drafted > 0
    made.clear_spec_dec()
    made.generate(PROMPTS, SHORT)
    assert made.last.drafted == 0
    assert refused(made.enable_spec_dec) == "no drafter is set: enable_spec_dec(drafter) sets one"


def test_no_round_drafts_more_than_it_may() -> None:
    assert refused(lambda: engine(max_n_spec_tokens=0)) == "max_n_spec_tokens must be a whole number, at least 1, got 0"
    made = engine(max_n_spec_tokens=2)
    told = refused(lambda: made.enable_spec_dec(DRAFTER, 3))
    assert told == "n_spec_tokens must be at most max_n_spec_tokens, 2, got 3"
    made.enable_spec_dec(DRAFTER)
    made.generate(PROMPTS[:1], SHORT)
    assert made.last.drafted <= 2 * made.last.passes


def test_sampling_follows_its_seed_and_leaves_the_global_noise(untouched_global_noise: None) -> None:
    hot = GenerationConfig(do_sample=True, temperature=1.3, top_k=0, top_p=0.95, **SHORT)
    made = engine()
    made.enable_spec_dec(DRAFTER)
    assert made.generate(PROMPTS, hot, seed=1) == made.generate(PROMPTS, hot, seed=1)
    assert made.generate(PROMPTS, hot, seed=1) != made.generate(PROMPTS, hot, seed=2)


def test_a_tokenizer_without_a_pad_token_just_works() -> None:
    bare = tiny_tokenizer(chat=False)
    bare.pad_token = None
    assert Engine(MODEL, bare).generate(PROMPTS, SHORT) == engine().generate(PROMPTS, SHORT)


def test_prompts_may_be_texts_ids_and_messages() -> None:
    own, tokenizer = Engine(MODEL, tiny_tokenizer()), tiny_tokenizer()
    chat = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert own.generate(["hello", chat, list(ids)], SHORT) == own.generate("hello", SHORT) * 3
    told = refused(lambda: engine().generate([chat], SHORT))
    assert told == "chat messages need a chat template: name one (Engine(…, template='chatml'))"


def test_a_named_template_stands_in_for_the_tokenizers_own() -> None:
    told = tiny_tokenizer(chat=False)(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )["input_ids"]
    assert engine(template="chatml").generate("hello", SHORT) == engine().generate([list(told)], SHORT)
    own = Engine(MODEL, tiny_tokenizer(), template="plain")
    assert own.generate("hello", SHORT) == engine().generate("hello", SHORT)
    told_off = refused(lambda: engine(template="vicunna"))
    assert told_off.startswith("no chat template 'vicunna' (did you mean vicuna?): have auto, plain, vicuna, ")


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "prompts holds no prompt: give at least one"),
        (None, "prompts must be a text, or a list of texts, messages or ids, got None"),
        (5, "prompts must be a text, or a list of texts, messages or ids, got 5"),
        (["a", []], "prompt 2 is empty: give at least one token"),
        (["a", ""], "prompt 2 is empty: give at least one token"),
        ([[1, "x"]], "prompt 1 must be whole numbers, got 'x'"),
        ([[1, 999]], "id 999 is outside the vocabulary of target (0 … 299)"),
    ],
)
def test_wrong_prompts_are_named(prompts: Any, told: str) -> None:
    assert refused(lambda: engine().generate(prompts, SHORT)) == told


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_beams": 4}, f"{HEAD} num_beams=4 {NOT}: leave it out"),
        ({"top_h": 0.9}, f"{HEAD} top_h=0.9 {NOT}: leave it out"),
        ({"sequence_bias": 3}, "sequence_bias: lists of ids are needed, as transformers takes them"),
        ({"bad_words_ids": [["x"]]}, "logit_bias must be by ids of 0 or more, got 'x'"),
        ({"stop_strings": ["x"]}, f"{HEAD} stop_strings=['x'] {NOT}: leave it out"),
        ({"max_newtokens": 4}, f"{HEAD} max_newtokens=4 {NOT}: did you mean max_new_tokens?"),
        ({"temperature": -1, "do_sample": True}, "temperature must be a finite number, 0 or more, got -1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 (1 = off), got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, at least 1, got 0"),
        ({"do_sample": "yes"}, "do_sample must be True or False, got 'yes'"),
        (
            GenerationConfig(num_return_sequences=2, do_sample=True),
            f"{HEAD} num_return_sequences=2 {NOT}: leave it out",
        ),
        (3, "generation_config must be a GenerationConfig or a dict, got 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(config: Any, told: str) -> None:
    assert refused(lambda: engine().generate(PROMPTS, config)) == told


def test_a_config_of_transformers_is_read_as_they_read_it() -> None:
    full = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1, "pad_token_id": 0, "output_scores": False}
    config = read_config({**full, "do_sample": True, "eos_token_id": [2, 3], "max_length": 50})
    law = config.processor
    assert (law.temperature, law.top_k, law.top_p, law.min_p) == (1.0, 50, 1.0, 0.0)
    assert (config.stop, config.new_tokens(20)) == ([2, 3], 30)
    assert read_config({"max_length": 5, "max_new_tokens": 7}).new_tokens(100) == 7
    assert read_config({"temperature": 0.7}).processor.greedy  # do_sample is off
    assert read_config(GenerationConfig()).new_tokens(3) == 128
    told = refused(lambda: read_config({"max_length": 20}).new_tokens(20))
    assert told == "max_length must be above the 20 tokens of the longest prompt, got 20"


def test_biases_are_transformers() -> None:
    said = engine().generate(PROMPTS, SHORT, return_token_ids=True)[1][0]
    biases: dict[str, Any] = {
        "sequence_bias": [[[said[0]], -3.0], [[said[1], said[2]], -4.0], [[5], 2.5]],
        "bad_words_ids": [[said[1]], [said[2], said[3]], [2]],
        "suppress_tokens": [said[4], 9],
    }
    config = GenerationConfig(**biases, max_new_tokens=8, eos_token_id=2)
    assert engine().generate(PROMPTS, config, return_token_ids=True)[1] == [
        theirs(text, max_new_tokens=8, **biases) for text in PROMPTS
    ]
    assert read_config({"typical_p": 0.5, "do_sample": True}).processor.typical_p == 0.5


def test_the_models_own_config_holds_where_none_is_given() -> None:
    model = noisy_copy(MODEL, 0.0)
    model.generation_config = GenerationConfig(max_new_tokens=5, eos_token_id=2)
    _, ids = Engine(model, tiny_tokenizer(chat=False)).generate(PROMPTS, return_token_ids=True)
    assert ids == [theirs(text, max_new_tokens=5) for text in PROMPTS]
