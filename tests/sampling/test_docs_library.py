"""docs/library.md: every example runs, in order, with the default model, and prints what the page says."""

import re
from pathlib import Path
from typing import Any

import pytest

import sampling
from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.network import StudentNetwork
from utils.loading.fit import fingerprint

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)


def test_every_example_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, untouched_global_noise: None
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for number, (code, printed) in enumerate(BLOCKS, 1):
        exec(compile(code, f"docs/library.md, example {number}", "exec"), names)
        assert capsys.readouterr().out.rstrip("\n") == printed.rstrip("\n"), f"example {number}:\n{code}"


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


def test_the_calls_that_people_know_run_as_they_write_them(default_pair: Any) -> None:
    target, tokenizer = default_pair.target.model, default_pair.tokenizer
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    scope: dict[str, Any] = {
        "target": target,
        "tokenizer": tokenizer,
        "drafter": StudentNetwork(
            load_student(ROOT / "weights" / "smollm2-135m-plain", target, fingerprint(tokenizer))
        ),
        "input_ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
    }
    exec(compile(KNOWN, "example", "exec"), scope)
    assert "Paris" in tokenizer.decode(scope["ids"], skip_special_tokens=True)
    assert 0 <= scope["acceptance_rate"] <= 1


def test_every_example_shows_what_it_prints() -> None:
    assert len(BLOCKS) >= 12
    assert all(printed for code, printed in BLOCKS)
    assert PAGE.count("```python") == len(BLOCKS)


def test_the_page_names_every_public_call() -> None:
    exempt = {"FeatureDrafter", "GlideLM"}  # parts of Engine's GLIDE drafter and of the console
    assert [name for name in sampling.__all__ if name not in PAGE and name not in exempt] == []
