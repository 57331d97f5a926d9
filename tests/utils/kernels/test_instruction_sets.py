"""Where nothing can be compiled torch computes, and what asks for no kernels does not wait for the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = "raise ImportError('Numba needs NumPy 2.5 or less.\\nGot NumPy 3.1.')"
ASK = "from utils.kernels.instruction_sets import instruction_set, why_not; print(why_not(), instruction_set())"
PLAIN = """
import sys, transformers
from sampling.models.network import network_of
size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, num_hidden_layers=1, **size))
print(type(network_of(model)).__name__, "numba" in sys.modules)
"""


def said(program: str, **environment: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SPEC_KERNELS"} | environment
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return run.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled elsewhere")
def test_a_compiler_that_cannot_be_imported_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(BROKEN)
    found = said(ASK, PYTHONPATH=str(tmp_path))
    assert found == "numba cannot be imported: Numba needs NumPy 2.5 or less. Got NumPy 3.1. None"


def test_a_model_without_packed_weights_does_not_load_the_compiler() -> None:
    assert said(PLAIN) == "LlamaNetwork False"
