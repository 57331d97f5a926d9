"""The calls of the published programs run here as their authors print them, but for the import lines.

romsto's Speculative-Decoding (README, infer.py), ColossalAI's inference engine (colossalai/inference/README.md,
examples/inference/llama/README.md), a K matrix as CS-Drafting's example.py makes it. Models are tiny ones in the places
of those that the authors load.
"""

import inspect
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import sampling
import sampling.inference_engine as colossalai
from sampling import InferenceConfig, InferenceEngine, MaxGramDrafter, NGramStorage, OneLevelNGramStorage
from sampling.drafters.tables.table_file import StaticTables
from sampling.inference_engine import GlideLlamaForCausalLM
from tests.sampling.drafters.draft_heads.test_checkpoint import WEIGHTS, published
from tests.support.refusals import refused
from tests.support.tiny import noisy_copy, tiny_model, tiny_tokenizer
from utils import logits_processors
from utils.errors import UserError

MODEL = tiny_model(3)
DRAFTER = noisy_copy(MODEL, 0.05)
PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colossalai, "said_unused", set())


def transformers_of(*models: Any) -> SimpleNamespace:
    """A `transformers` that loads these models, one after the other, and the tiny tokenizer."""
    given = iter(models)
    loads = SimpleNamespace(from_pretrained=lambda name: next(given))
    tokenizer = SimpleNamespace(from_pretrained=lambda name: tiny_tokenizer(chat=False))
    return SimpleNamespace(AutoModelForCausalLM=loads, LlamaForCausalLM=loads, AutoTokenizer=tokenizer)


def ran(snippet: str, **more: Any) -> dict[str, Any]:
    # what the import lines of a snippet would bring
    scope = {name: getattr(sampling, name) for name in sampling.__all__} | vars(logits_processors) | more
    exec(compile(inspect.cleandoc(snippet), "snippet", "exec"), scope)
    return scope


# -- romsto's Speculative-Decoding ----------------------------------------------------------------

README_LOADS = """
target_model_name = "meta-llama/Llama-3.2-3B-Instruct"
target = AutoModelForCausalLM.from_pretrained(target_model_name)

drafter_model_name = "meta-llama/Llama-3.2-1B-Instruct"
drafter = AutoModelForCausalLM.from_pretrained(drafter_model_name)

tokenizer = AutoTokenizer.from_pretrained(target_model_name)

chat_templated = f"<bos><start_of_turn>user\\n{prefix}<end_of_turn>\\n<start_of_turn>model\\n"
input_ids = tokenizer(chat_templated, return_tensors="pt").input_ids
input_ids = input_ids[0].tolist()
"""

README_GENERATES = """
gen_len = 100
gamma = 4
logits_processor = NucleusProcessor(temperature=.6, top_p=.9)

output_ids_ar = autoregressive_generate(
                input_ids,
                target,
                logits_processor=logits_processor,
                max_gen_len=gen_len,
                end_tokens_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
output_ar = tokenizer.decode(output_ids_ar, skip_special_tokens=True)

output_ids_sd, alpha = speculative_generate(
                input_ids,
                drafter,
                target,
                logits_processor=logits_processor,
                gamma=gamma,
                max_gen_len=gen_len,
                end_tokens_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
output_sd = tokenizer.decode(output_ids_sd, skip_special_tokens=True)

print("Auto-regressive decoding:", output_ar)
print("Speculative decoding:", output_sd)
print("Acceptance rate:", alpha)

output_ids_bs = beam_search_generate(
                input_ids,
                target,
                max_gen_len=gen_len,
                end_tokens_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                top_k=3,
                num_beams=5,
                min_length=5,
                alpha=1.2,
            )
"""

INFER = """
self.ngram = NGramStorage(n=3, vocab_size=self.target.config.vocab_size)
self.end_tokens = [self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|eot_id|>")]
if self.reset_in_between:
    self.ngram.reset()

spec_ids, accept_rate = speculative_generate(
    tokenized,
    self.drafter,
    self.target,
    tokenizer=self.tokenizer,
    logits_processor=self.processor,
    gamma=self.gamma,
    max_gen_len=self.gen_len,
    eos_tokens_id=self.end_tokens,
    debug=self.debug,
    use_cache=self.cache,
)

ngram_ids, accept_rate = ngram_assisted_speculative_generate(
    tokenized,
    self.ngram,
    self.target,
    tokenizer=self.tokenizer,
    gamma=self.gamma,
    filler_top_k=self.top_k_filler,
    logits_processor=self.processor,
    max_gen_len=self.gen_len,
    eos_tokens_id=self.end_tokens,
    debug=self.debug,
    use_cache=self.cache,
    first_target=True,
    stop_if_unknown=True,
)

output_ids = autoregressive_generate(
    tokenized,
    self.target,
    use_cache=self.cache,
    max_gen_len=self.gen_len,
    eos_tokens_id=self.end_tokens,
    logits_processor=self.processor,
    debug=self.debug,
)
"""


def test_the_snippets_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    scope = ran(
        README_LOADS + README_GENERATES,
        prefix="Translate to English: Bonjour !",
        **vars(transformers_of(MODEL, DRAFTER)),
    )
    assert 0 < scope["alpha"] <= 1
    assert 5 <= len(scope["output_ids_bs"]) <= 100
    assert capsys.readouterr().out.startswith("Auto-regressive decoding: ")


def test_the_calls_of_its_console_run_and_say_one_text() -> None:
    cli = SimpleNamespace(
        target=MODEL,
        drafter=DRAFTER,
        tokenizer=tiny_tokenizer(),
        processor=logits_processors.GreedyProcessor(temperature=1.0),
        gamma=4,
        gen_len=35,
        top_k_filler=3,
        **dict.fromkeys(("debug", "cache"), False),
        reset_in_between=True,
    )
    cli.tokenizer.unk_token = None
    assert cli.tokenizer.convert_tokens_to_ids("<|eot_id|>") is None  # the list of ends has a hole then
    scope = ran(INFER, self=cli, tokenized=PROMPT)
    assert scope["spec_ids"] == scope["ngram_ids"] == scope["output_ids"]
    assert len(scope["output_ids"]) == 35


def test_positions_and_keyword_names_are_those_of_its_repository() -> None:
    """Each call once by position to its end, once by its keyword names, once as here."""
    greedy, end, pad = logits_processors.GreedyProcessor(), 2, 0
    here = sampling.autoregressive_generate(PROMPT, MODEL, max_gen_len=12, end_tokens_id=end)
    plain = sampling.autoregressive_generate
    assert plain(PROMPT, MODEL, 12, greedy, end, pad, False, False) == here  # type: ignore[call-arg, arg-type, misc]
    assert plain(inputs=PROMPT, model=MODEL, max_gen_len=12, eos_tokens_id=[end]) == here  # type: ignore[call-arg]
    spec: Any = sampling.speculative_generate
    wanted = sampling.speculative_generate(PROMPT, DRAFTER, MODEL, gamma=3, max_gen_len=12, end_tokens_id=end)
    assert wanted[0] == here
    assert spec(PROMPT, DRAFTER, MODEL, tiny_tokenizer(), 3, greedy, 12, end, pad, True, False, True, False) == wanted
    assert spec(inputs=PROMPT, drafter=DRAFTER, target=MODEL, gamma=3, max_gen_len=12, eos_tokens_id=end) == wanted
    ngram: Any = sampling.ngram_assisted_speculative_generate
    grams = ngram(PROMPT, None, MODEL, None, 3, 2, greedy, 12, end, pad, False, True, True, False)
    assert grams == ngram(PROMPT, None, MODEL, gamma=3, filler_top_k=2, max_gen_len=12, end_tokens_id=end)
    named = ngram(inputs=PROMPT, ngramstorage=NGramStorage(3, 300), target=MODEL, max_gen_len=12, eos_tokens_id=end)
    assert named[0] == grams[0] == here
    beam: Any = sampling.beam_search_generate
    found = beam(inputs=PROMPT, model=MODEL, max_gen_len=8, num_beams=3, top_k=3, min_length=2, alpha=1.0)
    assert beam(PROMPT, MODEL, 8, 3, 3, 2, 1.0, None, 0, False, None) == found


def test_a_position_too_many_and_a_name_twice_are_told() -> None:
    plain: Any = sampling.autoregressive_generate
    many = refused(lambda: plain(PROMPT, MODEL, 4, None, 2, 0, False, False, 1), kind=TypeError)
    assert many == "autoregressive_generate() takes at most 8 positional arguments, got 9"
    twice = refused(plain, PROMPT, MODEL, inputs=PROMPT, kind=TypeError)
    assert twice == "autoregressive_generate() got multiple values for argument 'input_ids'"


@pytest.mark.parametrize("kind", [NGramStorage, OneLevelNGramStorage])
def test_a_storage_goes_on_until_it_is_reset_and_follows_the_call(kind: Any) -> None:
    storage = kind(n=3, vocab_size=300)
    call: Any = sampling.ngram_assisted_speculative_generate
    first, low = call(PROMPT, storage, MODEL, max_gen_len=20)
    again, high = call(PROMPT, storage, MODEL, filler_top_k=1, max_gen_len=20)
    assert first == again
    assert high > low  # it knows the answer by now
    assert (storage.ngrams.top_k_filler, storage.ngrams.stop_if_unknown) == (1, True)
    storage.reset()
    assert call(PROMPT, storage, MODEL, max_gen_len=20)[1] == low
    refused(
        call, PROMPT, storage, MODEL, filler_top_k=0, match=r"^filler_top_k must be a whole number, at least 1, got 0$"
    )


# -- ColossalAI -----------------------------------------------------------------------------------

COLOSSAL = """
colossalai.launch_from_torch()

model_path = "lmsys/vicuna-7b-v1.3"
model = transformers.LlamaForCausalLM.from_pretrained(model_path).cuda()
tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)

inference_config = InferenceConfig(
                dtype=torch.float16,
                max_batch_size=4,
                max_input_len=1024,
                max_output_len=512,
                use_cuda_kernel=True,
            )

engine = InferenceEngine(model, tokenizer, inference_config, verbose=True)

prompts = ['Who is the best player in the history of NBA?']
response = engine.generate(prompts=prompts)
pprint(response)
"""

GENERATION = """
generation_config = GenerationConfig(
    max_length=128,
    do_sample=True,
    temperature=0.7,
    top_k=50,
    top_p=1.0,
)
response = engine.generate(prompts=prompts, generation_config=generation_config)
"""

GLIDE = """
drafter_model = GlideLlamaForCausalLM.from_pretrained(drafter_model_path_or_name)
engine.enable_spec_dec(drafter_model, use_glide_drafter=True)
"""


def test_the_published_snippets_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = tiny_model(3, context=1024)
    model.lm_head.weight.data[2] = 0.0  # nothing ends an answer
    monkeypatch.setattr(type(model), "cuda", lambda self: self)
    said: list[Any] = []
    brought = {"colossalai": colossalai, "transformers": transformers_of(model), "torch": torch, "pprint": said.append}
    with caplog.at_level(logging.INFO, logger="sampling"):
        scope = ran(COLOSSAL + GENERATION, GenerationConfig=GenerationConfig, **brought)
    (text,) = said[0]
    assert text.startswith("Who is the best player in the history of NBA?")
    tokens = tiny_tokenizer()("Who is the best player in the history of NBA?").input_ids
    plain = sampling.autoregressive_generate(tokens, model, max_gen_len=512)
    assert text == tiny_tokenizer().decode([*tokens, *plain], skip_special_tokens=True)
    assert scope["engine"].last.tokens == 128 - len(tokens)
    assert caplog.messages[0] == "dtype, use_cuda_kernel: taken, change nothing here"
    assert [message for message in caplog.messages[1:] if "nothing here" in message] == []
    published(tmp_path, model, WEIGHTS)
    greedy = scope["engine"].generate(prompts=scope["prompts"], generation_config={"max_new_tokens": 9})
    ran(GLIDE, engine=scope["engine"], drafter_model_path_or_name=tmp_path, GlideLlamaForCausalLM=GlideLlamaForCausalLM)
    assert scope["engine"].generate(prompts=scope["prompts"]) == greedy
    assert scope["engine"].last.drafted > 0


def test_ids_requests_and_the_end_of_drafting_as_their_tests_have_them() -> None:
    engine = InferenceEngine(MODEL, tiny_tokenizer(), InferenceConfig(max_output_len=9, max_batch_size=2))
    engine.enable_spec_dec(DRAFTER, n_spec_tokens=5)
    inputs = torch.randint(low=5, high=200, size=(1, 10), generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(pad_token_id=2, max_length=24, eos_token_id=2)
    out, ids = engine.generate(prompts_token_ids=inputs, generation_config=config, return_token_ids=True)
    assert len(out) == 1
    assert ids == [sampling.autoregressive_generate(inputs, MODEL, max_gen_len=14)]
    engine.clear_spec_dec()
    assert not engine.use_spec_dec
    engine.add_request(request_ids=[7, 3, 5], prompts=["late", "early", "between"])
    engine.add_request(request_ids=4, prompts="second")
    assert re.fullmatch(
        "early.*second.*between.*late.*", "".join(engine.generate(generation_config={"max_new_tokens": 3})), re.DOTALL
    )
    assert engine.generate() == []


@pytest.mark.parametrize(
    "wrong",
    [{"generation_config": {"num_beams": 4}}, {"generation_config": {"max_length": 2}}, {"prompts": "a" * 300}],
)
def test_a_call_that_fails_leaves_what_waits_and_the_config_as_they_were(wrong: dict[str, Any]) -> None:
    engine = InferenceEngine(MODEL, tiny_tokenizer(), InferenceConfig(max_output_len=4))
    engine.add_request(prompts=["first", "second"])
    refused(engine.generate, **wrong)
    asked = [tiny_tokenizer()(prompt).input_ids for prompt in ("first", "second")]
    wanted = [sampling.autoregressive_generate(ids, MODEL, max_gen_len=4) for ids in asked]
    assert engine.generate(return_token_ids=True)[1] == wanted


@pytest.mark.parametrize(
    ("template", "read"),
    [
        (None, "hello"),
        ('{"q": "{input_text}"}', '{"q": "hello"}'),
        ("baichuan", " <reserved_106> hello <reserved_107> "),
        ("llama", "[INST] hello [/INST]"),
    ],
)
def test_prompt_templates(template: str | None, read: str) -> None:
    engine = InferenceEngine(MODEL, tiny_tokenizer(), InferenceConfig(prompt_template=template, max_output_len=4))
    wanted = sampling.autoregressive_generate(tiny_tokenizer()(read).input_ids, MODEL, max_gen_len=4)
    assert engine.generate(prompts=["hello"], return_token_ids=True)[1] == [wanted]


def test_ignore_eos_goes_on() -> None:
    ended = noisy_copy(MODEL, 0.0)
    ids = sampling.autoregressive_generate(PROMPT, ended, max_gen_len=12, end_tokens_id=[])
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[3])
    for ignored, count in ((False, ids.index(ids[3]) + 1), (True, 12)):
        engine = InferenceEngine(ended, tokenizer, InferenceConfig(ignore_eos=ignored, max_output_len=12))
        assert engine.generate(prompts_token_ids=[PROMPT], return_token_ids=True)[1] == [ids[:count]]


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda: InferenceConfig(beam_width=2), UserError, "InferenceConfig: beam_width=2 cannot be honoured here: le"),
        (lambda: InferenceConfig(max_batchsize=2), TypeError, "InferenceConfig() got an unexpected keyword argument"),
        (lambda: InferenceConfig(prompt_template="x"), UserError, "prompt_template must be llama, vicuna, baichuan or"),
        (lambda: InferenceEngine(MODEL), UserError, "InferenceEngine needs the model's tokenizer: "),
        (lambda: made().generate(prompts=["a" * 5]), UserError, "prompt 1 is 5 tokens, max_input_len is 4"),
        (lambda: made().add_request(), UserError, "add_request needs prompts or prompts_token_ids"),
    ],
)
def test_what_cannot_be_is_one_line(call: Any, kind: type[Exception], told: str) -> None:
    assert refused(call, kind=kind).startswith(told)


def made() -> InferenceEngine:
    return InferenceEngine(MODEL, tiny_tokenizer(), InferenceConfig(max_input_len=4))


# -- Cascade Speculative Drafting -----------------------------------------------------------------


def test_zero_is_nothing_in_a_published_bigram_list(tmp_path: Path) -> None:
    """As the paper's file for LLaMA begins: 0, 450, 29871, 0 …; entry i is the id that follows i."""
    file = tmp_path / "wiki_bigram_naive_bayers_greedy_llama_next_token.json"
    file.write_text(json.dumps([0, 7, 9, 0, 0, 0, 0, 2, 0, 8]))
    tables = StaticTables.open(file, vocab_size=300)
    known = [[follower for _, follower, _ in tables.entries([token])] for token in range(10)]
    assert known == [[], [7], [9], [], [], [], [], [2], [], [8]]
    ids, _ = sampling.speculative_generate(PROMPT, MaxGramDrafter(tables), MODEL, max_gen_len=20)
    assert ids == sampling.autoregressive_generate(PROMPT, MODEL, max_gen_len=20)
