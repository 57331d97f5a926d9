"""The package *speculators* as the reference of EAGLE-3 heads, where it can be imported.

Version 0.9.0 asks for transformers of at most 5.19 and cannot be required beside ours; installed with `--no-deps`
(and what it imports) it runs. Its training forward returns tokens alone, so its logits are caught at its output layer:
step s at place i has read the target's states up to i and the tokens up to i + 1 + s.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IMPORTABLE = None not in (find_spec("speculators"), find_spec("openai"))  # which it imports


def read(folder: Path) -> Any:
    """The head in `folder`, by their own `from_pretrained`: the target that it names must lie there."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config: Any = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.float().eval()


def made(config: dict[str, Any], tensors: dict[str, Tensor], target: Any) -> Any:
    """Their model of a published configuration and its tensors (`layers.0.…`)."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    inner = {"mlp_bias": False, "tie_word_embeddings": False, **config.get("transformer_layer_config", config)}
    named = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    given: Any = {name: config[name] for name in named if name in config}
    told = Eagle3SpeculatorConfig(
        transformer_layer_config=inner, draft_vocab_size=len(tensors["lm_head.weight"]), **given
    )
    told.transformer_layer_config._attn_implementation = "eager"
    model: Any = Eagle3DraftModel(told).float().eval()
    own = {"embed_tokens.weight": target.get_input_embeddings().weight.detach(), **tensors}
    missing, surplus = model.load_state_dict(own, strict=False)
    assert not surplus
    assert all(name.startswith("verifier_") for name in missing)
    return model


@torch.no_grad()
def steps(model: Any, features: Tensor, ids: list[int], count: int) -> list[Tensor]:
    """Logits [T − 1, n] of each of `count` drafted steps; features [T, K·G] of the target, beside each other."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda layer, given, out: found.append(out[0].float()))
    length = len(ids) - 1
    try:
        model(
            hidden_states=features[None, :length].float(),
            input_ids=torch.tensor([ids[1:]]),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            ttt_steps=count,
        )
    finally:
        hook.remove()
    return found
