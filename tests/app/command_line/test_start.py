"""What a second start loads until the first token of the default pair is out: no more than the compiled pass needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.kernels.build import instruction_set, why_not

pytestmark = pytest.mark.skipif(instruction_set() is None, reason=f"nothing is compiled here: {why_not()}")

HEAVY = (
    "transformers",
    "openai",
    "accelerate",
    "huggingface_hub",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
)
RUN = """
import sys
from app.command_line.main import main
code = main(["run", "Name a colour.", "--max-new-tokens", "1", "--compare", sys.argv[1]])
loaded = [name for name in sys.argv[2].split(",") if name in sys.modules]
print("loaded:", *loaded)
sys.exit(code)
"""


def test_the_default_pair_says_its_first_token_without_the_model_libraries() -> None:
    given = [sys.executable, "-c", RUN, "ar,spec", ",".join(("torch", *HEAVY))]
    done = subprocess.run(
        given, cwd=Path(__file__).parents[3], capture_output=True, text=True, env=os.environ, timeout=600
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded: torch"), done.stderr
