"""The package *speculators* as the reference of EAGLE-3 and block heads, where it can be imported.

Version 0.9.0 asks for transformers of at most 5.19 and cannot be required beside ours; installed with `--no-deps`
(and what it imports) it runs. Its training forward returns tokens alone, so its logits are caught at its output layer:
step s at place i has read the target's states up to i and the tokens up to i + 1 + s.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IMPORTABLE = all(map(find_spec, ("speculators", "openai", "datasets", "hs_connectors")))  # it imports the others


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
    missing, surplus = model.load_state_dict(
        {"embed_tokens.weight": target.get_input_embeddings().weight.detach(), **tensors}, strict=False
    )
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


def block_made(config: dict[str, Any], tensors: dict[str, Tensor], target: Any) -> Any:
    """Their model of a block head in their own naming."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    kind = config["speculators_model_type"]
    made = {**config["speculators_config"], "verifier": {"name_or_path": None, "architectures": []}}
    told: Any = SpeculatorModelConfig.registry[kind](**{**config, "speculators_config": made})
    told.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.registry[kind](told).float().eval()
    own = {"embed_tokens.weight": target.get_input_embeddings().weight.detach()}
    if "lm_head.weight" not in tensors:
        own["lm_head.weight"] = target.get_output_embeddings().weight.detach()
    missing, surplus = model.load_state_dict({**own, **tensors}, strict=False)
    assert not surplus
    assert all(name.startswith("verifier_") or name == "rotary_emb.inv_freq" for name in missing), missing
    return model


@torch.no_grad()
def block(model: Any, features: Tensor, ids: list[int], anchor: int, drafts: int) -> Tensor:
    """Logits [R, n] of the block whose first row is token `anchor` of `ids`, behind which its drafts stand; features
    [T, K·G] of the target."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda layer, given, out: found.extend((out, given[0])))
    wide = [*ids[: anchor + 1], *[0] * (2 * model.block_size)]
    states = torch.zeros(1, len(wide), features.shape[-1])
    states[0, :anchor] = features[:anchor]
    chosen = torch.zeros(1, len(wide))
    chosen[0, anchor] = 1
    try:
        model._backbone_forward(
            states,
            torch.tensor([wide]),
            chosen,
            torch.zeros(1, len(wide), model.fc.out_features),
            torch.zeros(1, len(wide), dtype=torch.long),
            max_anchors=1,
        )
    finally:
        hook.remove()
    logits, hidden = found
    path = ids[anchor : anchor + drafts]
    previous = torch.tensor([path if drafts == model.block_size else [path[0], *path]])
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    if hasattr(model, "candidate_selector"):
        candidates, scores = model.candidate_selector.select(logits, hidden, previous)
        logits = torch.full_like(logits, float("-inf")).scatter(2, candidates, scores)
    return logits[0].float()


@torch.no_grad()
def mtp_states(model: Any, layer: dict[str, Tensor], states: Tensor, ids: list[int]) -> Tensor:
    """States [1, T, H] of a multi-token prediction layer, by transformers' names of its tensors, where `model` has read
    all of `ids` but the last: states [1, T, H]."""
    from speculators.models.mtp.model_definitions import mtp_model_classes

    names = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm"}
    names |= {"post_norm": "final_layernorm"}
    theirs: Any = mtp_model_classes[model.config.model_type].first_layer_class(model.config, layer_idx=0)
    own = {}
    for key, value in layer.items():
        part, _, rest = key.partition(".")
        own[rest if part == "mtp_block" else f"{names[part]}.{rest}"] = value
    theirs.load_state_dict(own)
    count = len(ids) - 1
    positions = torch.arange(count)[None]
    found: Tensor = theirs.eval()(
        hidden_states=states,
        token_embeddings=model.get_input_embeddings()(torch.tensor([ids[1:]])),
        attention_mask=torch.full((1, 1, count, count), torch.finfo(torch.float32).min).triu(1),
        position_ids=positions,
        position_embeddings=model.get_decoder().rotary_emb(states, positions),
    )
    return found


@torch.no_grad()
def parallel(model: Any, features: Tensor, ids: list[int], anchor: int, drafts: int) -> Tensor:
    """The same of a P-EAGLE head: logits [drafts, n] behind token `anchor`."""
    import speculators.models.peagle.core as core

    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda layer, given, out: found.append(out[0]))
    last = anchor - 1  # row i is token i + 1 with the target's state i
    wide = last + drafts + 1
    places = torch.cat((torch.arange(anchor), torch.full((drafts - 1,), last)))
    depths = torch.cat((torch.zeros(anchor, dtype=torch.long), torch.arange(1, drafts)))
    usual, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **given: (places, depths)
    states = torch.zeros(1, wide, features.shape[-1])
    states[0, :anchor] = features[:anchor]
    try:
        model(
            states,
            torch.tensor([[*ids[1 : anchor + 1], *[0] * (wide - anchor)]]),
            torch.zeros(1, wide, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, wide, model.fc.out_features),
            num_depths=drafts,
            loss_config={"none": (lambda logits, targets: 0 * logits.sum(dim=-1), 1.0)},
        )
    finally:
        hook.remove()
        core.generate_cod_sample_indices = usual
    return found[0][last:].float()
