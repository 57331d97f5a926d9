"""What callers of the library rely on: the names, the arguments and the imports that docs/library.md shows stay as they
are, whatever moves inside. A line is added here with a new name, and never changed.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import sampling
from utils import logits_processors

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")

CALLS = {
    "BeamPlan": "num_beams=4, top_k=0, min_length=0, alpha=1.2, offset=5.0, early_stopping=False",
    "Engine": "model, tokenizer, max_n_spec_tokens=5, *, template='auto'",
    "FeatureDrafter": "student, name='feature', vocab_size=None",
    "GlideLM": "student, target_layers, name='glide', offset=0, vocab_size=None",
    "InferenceConfig": (
        "max_batch_size=8, max_output_len=256, max_input_len=256, *, prompt_template=None, do_sample=False, top_k=50, "
        "top_p=1.0, temperature=1.0, no_repeat_ngram_size=0, repetition_penalty=1.0, ignore_eos=False, "
        "max_n_spec_tokens=5, **unused"
    ),
    "InferenceEngine": ("model_or_path, tokenizer=None, inference_config=None, verbose=False, model_policy=None"),
    "MaxGramDrafter": "tables=None, vocab_size=1073741824",
    "NGramStorage": "n, vocab_size",
    "OneLevelNGramStorage": "n, vocab_size",
    "RecordedLM": "answers, end_id, vocab_size=None, name='target', context=1073741824, start_id=None, best=None",
    "StudentNetwork": "student, pack=True",
    "autoregressive_generate": (
        "input_ids, target, *, logits_processor=None, max_gen_len=100, end_tokens_id=None, eos_tokens_id=None, "
        "pad_token_id=None, tokenizer=None, seed=0, **more"
    ),
    "autoregressive_generate_encoder_decoder": "input_ids, target, **arguments",
    "beam_generate": "lm, prompt, limits, plan=None, *, processor=None, session=None, interrupt=never",
    "beam_search_generate": (
        "input_ids, model, *, num_beams=4, top_k=0, min_length=0, alpha=1.2, max_gen_len=100, end_tokens_id=None,"
        " eos_tokens_id=None, pad_token_id=None, tokenizer=None, logits_processor=None, early_stopping=False, "
        "penalty_offset=5.0, seed=0, **more"
    ),
    "cascade_generate": (
        "input_ids, drafters, target, k_matrix, lenience=1.0, max_gen_len=200, *, tokenizer=None, "
        "logits_processor=None, end_tokens_id=None, eos_tokens_id=None, pad_token_id=None, seed=0, "
        "coupling='rejection', draft_sampling='law', **more"
    ),
    "generate": "lm, prompt, drafter, sampler, limits, *, pace=None, session=None, interrupt=never",
    "ngram_assisted_speculative_generate": (
        "input_ids, ngram, target, tokenizer=None, *, logits_processor=None, gamma=4, n=3, filler_top_k=3, "
        "stop_if_unknown=True, max_gen_len=100, end_tokens_id=None, eos_tokens_id=None, pad_token_id=None, "
        "seed=0, **more"
    ),
    "speculative_generate": (
        "input_ids, drafter, target, tokenizer=None, *, logits_processor=None, gamma=4, max_gen_len=100, "
        "end_tokens_id=None, eos_tokens_id=None, pad_token_id=None, seed=0, coupling='rejection', "
        "draft_sampling='law', **more"
    ),
    "speculative_generate_encoder_decoder": "input_ids, drafter, target, tokenizer=None, **arguments",
    "speculative_stream": (
        "input_ids, drafter, target, tokenizer=None, *, logits_processor=None, gamma=4, max_gen_len=100, "
        "end_tokens_id=None, eos_tokens_id=None, pad_token_id=None, seed=0, coupling='rejection', "
        "draft_sampling='law', interrupt=never, **more"
    ),
    "Engine.stream": "prompts, generation_config=None, *, seed=0, interrupt=never",
    "Engine.generate": "prompts, generation_config=None, *, return_token_ids=False, seed=0",
    "Engine.enable_spec_dec": "drafter=None, n_spec_tokens=None, use_glide_drafter=False",
    "Engine.disable_spec_dec": "",
    "Engine.clear_spec_dec": "",
    "InferenceEngine.generate": (
        "request_ids=None, prompts=None, prompts_token_ids=None, return_token_ids=False, generation_config=None, *, "
        "seed=0"
    ),
    "InferenceEngine.add_request": "request_ids=None, prompts=None, prompts_token_ids=None",
    "InferenceEngine.enable_spec_dec": "drafter_model=None, n_spec_tokens=None, use_glide_drafter=False",
}

PROCESSORS = {
    "GreedyProcessor": "temperature=1.0, **rules",
    "LogitsProcessor": "temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, no_repeat_ngram=0",
    "MinPProcessor": "temperature=1.0, min_p=0.05, **rules",
    "MultinomialProcessor": "temperature=1.0, **rules",
    "NucleusProcessor": "temperature=1.0, top_p=0.9, **rules",
    "TopKNucleusProcessor": "temperature=1.0, top_k=50, top_p=0.9, **rules",
    "TopKProcessor": "temperature=1.0, top_k=50, **rules",
}

IMPORTS = {
    "sampling": list(CALLS),
    "sampling.models.causal": ["CausalLM"],
    "sampling.events": ["Finished", "Step"],
    "sampling.sampler": ["KeyedSampler"],
    "sampling.drafters.draft_heads.checkpoint": ["load_student"],
    "sampling.types": ["FixedPace", "Limits"],
    "utils.errors": ["UserError"],
    "utils.logits_processors": list(PROCESSORS),
    "utils.catalogue.templates": ["render"],
}


def arguments_of(call: Any) -> str:
    """Names, kinds and defaults, without annotations (a private type may be renamed)."""
    shown: list[str] = []
    for argument in inspect.signature(call).parameters.values():
        default = argument.default
        value = "" if default is inspect.Parameter.empty else f"={getattr(default, '__name__', None) or repr(default)}"
        if argument.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(("**" if argument.kind is inspect.Parameter.VAR_KEYWORD else "") + argument.name + value)
    return ", ".join(name for name in shown if name != "self")


def found(path: str, home: Any) -> Any:
    for part in path.split("."):
        home = getattr(home, part)
    return home


@pytest.mark.parametrize("name", CALLS)
def test_calls_take_the_arguments_that_people_wrote_down(name: str) -> None:
    assert arguments_of(found(name, sampling)) == CALLS[name]


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_take_the_arguments_that_people_wrote_down(name: str) -> None:
    assert arguments_of(found(name, logits_processors)) == PROCESSORS[name]


def test_no_public_name_is_lost() -> None:
    assert [name for name in CALLS if "." not in name and name not in sampling.__all__] == []


def test_every_import_that_was_shown_still_works() -> None:
    for home, names in IMPORTS.items():
        module = import_module(home)
        assert [name for name in names if "." not in name and not hasattr(module, name)] == [], home


def test_the_page_shows_no_import_that_this_test_does_not_hold() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    shown = [line for line in ast.walk(ast.parse(code)) if isinstance(line, ast.ImportFrom)]
    ours = [(line.module or "", one.name) for line in shown for one in line.names if line.module != "transformers"]
    assert ours
    assert [(home, name) for home, name in ours if name not in IMPORTS.get(home, [])] == []
