"""Where there are no kernels torch computes, and what asks for none does not wait for their compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
import torch
from utils.kernels.bindings import load
from utils.kernels.instruction_sets import instruction_set, why_not
print(load(), instruction_set(), why_not(), sep="|")
"""
PLAIN = """
import sys, transformers
from sampling.models.network import network_of
from utils.kernels.bindings import at_hand
size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, num_hidden_layers=1, **size))
print(type(network_of(model)).__name__, at_hand())
"""


def said(program: str, **environment: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SPEC_KERNELS"} | environment
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return run.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names for it")
def test_a_compiler_that_fails_is_as_good_as_none_and_its_words_are_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    (tmp_path / "ziglang" / "__main__.py").write_text("raise SystemExit('error: out of luck\\nand more')")
    assert said(ASK, PYTHONPATH=str(tmp_path)) == "False|None|the kernels do not compile: error: out of luck"


def test_kernels_can_be_switched_off() -> None:
    assert said(ASK, SPEC_KERNELS="torch") == "False|None|SPEC_KERNELS=torch"


def test_a_model_without_packed_weights_loads_no_kernels() -> None:
    assert said(PLAIN) == "LlamaNetwork False"
