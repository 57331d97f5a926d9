"""The Python examples of the README, and the calls that people know by name, run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.network import StudentNetwork

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
KNOWN = """\
from sampling import autoregressive_generate, speculative_generate
from utils.logits_processors import NucleusProcessor

ids = autoregressive_generate(input_ids, target, logits_processor=NucleusProcessor(temperature=.6, top_p=.9),
                              max_gen_len=100, end_tokens_id=tokenizer.eos_token_id,
                              pad_token_id=tokenizer.pad_token_id)
ids, acceptance_rate = speculative_generate(input_ids, drafter, target, tokenizer, logits_processor=None, gamma=4,
                                            max_gen_len=100, end_tokens_id=tokenizer.eos_token_id,
                                            pad_token_id=tokenizer.pad_token_id)
"""


@pytest.fixture(scope="module")
def names(default_pair: Any) -> dict[str, Any]:
    target, tokenizer = default_pair.target.model, default_pair.tokenizer
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    input_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    drafter = StudentNetwork(load_student(ROOT / "weights" / "smollm2-135m-plain", target))
    return {"target": target, "tokenizer": tokenizer, "drafter": drafter, "input_ids": input_ids}


@pytest.mark.parametrize("code", [KNOWN, *(block for block in BLOCKS if "encoder_decoder" not in block)])
def test_it_runs_with_the_default_model(code: str, names: dict[str, Any]) -> None:
    scope = dict(names)
    exec(compile(code, "example", "exec"), scope)
    assert "Paris" in names["tokenizer"].decode(scope["ids"], skip_special_tokens=True)
    assert 0 <= scope["acceptance_rate"] <= 1


def test_it_runs_with_two_t5() -> None:
    (code,) = (block for block in BLOCKS if "encoder_decoder" in block)
    shape = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "decoder_start_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target, drafter = (T5ForConditionalGeneration(T5Config(**shape, num_layers=n)).eval() for n in (2, 1))
    scope = {"target": target, "drafter": drafter, "input_ids": [5, 6, 1], "tokenizer": None}
    exec(compile(code, "README", "exec"), scope)
    assert 0 < len(scope["ids"]) <= 100  # type: ignore[arg-type]
