"""The table of docs/models.md: every architecture as a small random model, decoded in each way or refused.

python -m tests.support.models_table --write docs/models.md
"""

import sys
from pathlib import Path
from typing import Any

from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import lm_of
from sampling.models.network import TransformersNetwork
from sampling.models.recurrent import recurrent_layers
from tests.support.architectures import architecture, differing
from utils.errors import UserError

NAMES = {
    "bamba": "Bamba",
    "deepseek_v3": "DeepSeek V3",
    "deepseek_v32": "DeepSeek V3.2",
    "falcon_h1": "Falcon-H1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "glm4_moe": "GLM-4-MoE",
    "glm_moe_dsa": "GLM-MoE-DSA",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "Granite 4",
    "jamba": "Jamba",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "mamba": "Mamba",
    "mamba2": "Mamba 2",
    "minimax": "MiniMax",
    "nemotron_h": "Nemotron-H",
    "olmo_hybrid": "OLMo Hybrid",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "recurrent_gemma": "RecurrentGemma",
    "zamba2": "Zamba2",
}
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"


def row_of(name: str) -> str:
    """A line of the table: what this architecture takes here, as its small model shows."""
    try:
        model = architecture(name)
    except Exception as error:
        return f"| {NAMES[name]} | not tried: {type(error).__name__} | | | |"
    try:
        lm = lm_of(model)
        wrong = differing(model, model)
    except UserError as error:
        line = str(error).removeprefix(f"{type(model).__name__} ").removeprefix("is not supported: ")
        return f"| {NAMES[name]} | refused: {line} | | | |"
    network: Any = lm.network if isinstance(lm, CausalLM) else None
    batches = True if not isinstance(network, TransformersNetwork) else network.exact.batches
    kept = "keys, values and states" if recurrent_layers(model.config) else "keys and values"
    ways = [" " if wrong else "yes", "yes" if lm.takes_trees else "", "yes" if batches else ""]
    return f"| {NAMES[name]} | {'wrong: ' + ', '.join(wrong) if wrong else kept} | {' | '.join(ways)} |"


def table() -> str:
    """The whole table."""
    head = "| model | cache | chains | trees | batches |\n|---|---|---|---|---|\n"
    return head + "".join(row_of(name) + "\n" for name in NAMES)


def written(document: str, lines: str) -> str:
    """The document with this table in its place."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + lines + END + rest.split(END)[1]


if __name__ == "__main__":
    path = Path(sys.argv[sys.argv.index("--write") + 1])
    path.write_text(written(path.read_text(encoding="utf-8"), table()), encoding="utf-8")
