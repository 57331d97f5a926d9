"""A new draft head for a target: its shape, and what it starts from."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from sampling.drafters.draft_heads.checkpoint import target_rotary
from sampling.drafters.draft_heads.config import BlockConfig, DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.published import usual_reads
from training.draft_heads.features import Examples
from utils.errors import UsageError, UserError


def shape_for(target: nn.Module, kind: str, **changes: Any) -> DraftHeadConfig:
    """A draft head's shape: the target's own width and heads, one layer, what is not given in `changes`.

    Raises UserError for a target whose shape cannot be read, UsageError for numbers that do not go together.
    """
    large: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
    try:
        width, heads = large.hidden_size, large.num_attention_heads
        size = getattr(large, "head_dim", None) or width // heads
        values: dict[str, Any] = {
            "kind": kind,
            "vocab_size": large.vocab_size,
            "hidden_size": width,
            "intermediate_size": large.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(large, "num_key_value_heads", None) or heads,
            "head_dim": size,
            "large_hidden_size": width,
            "large_num_attention_heads": heads,
            "large_head_dim": size,
            "max_position_embeddings": large.max_position_embeddings,
            "rms_norm_eps": getattr(large, "rms_norm_eps", 1e-5),
            "rope_theta": (getattr(large, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        }
    except AttributeError as error:
        raise UserError(f"{type(target).__name__} is of no kind a student can be made for: {error}") from None
    given = {name: value for name, value in changes.items() if value is not None}
    if kind == "eagle":
        values |= _eagle3(large.num_hidden_layers)
    if kind == "dflash":
        # The mask's row enters as the embedding of the last id, of which hardly any text has a token.
        reads = tuple(usual_reads(large.num_hidden_layers))
        values |= {"reads": reads, "qk_norm": True, "mask": large.vocab_size - 1}
    values |= given
    if "num_attention_heads" in given:
        values["head_dim"] = values["hidden_size"] // given["num_attention_heads"]
    values["shared_embedding"] = values["hidden_size"] == width
    if values.get("shared_head") and not values["shared_embedding"]:
        raise UsageError(f"a student of width {values['hidden_size']} cannot share what has the target's width {width}")
    if kind == "dflash":
        return BlockConfig(**values, windows=(0,) * values["num_hidden_layers"])
    return DraftHeadConfig(**values)


def _eagle3(layers: int) -> dict[str, Any]:
    """What its authors read of the target, and the norms that *speculators* 0.9 trains with."""
    reads = usual_reads(layers)
    if len(reads) < 3 or reads[0] < 2:
        raise UserError(f"EAGLE-3 reads three states of its target, one of {layers} layers has too few: it needs 7")
    norms = dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output"), True)
    return {"reads": tuple(reads), "wide": True, **norms}


def new_draft_head(config: DraftHeadConfig, target: Any, short_list: list[int], seed: int) -> DraftHead:
    """A draft head with fresh weights; what has the target's width starts as the target's own.

    Embedding and head rows are the target's where the widths agree; layers start from noise.
    """
    torch.manual_seed(seed)
    made = DraftHead(config, torch.tensor(short_list, dtype=torch.long))
    made.adopt(made.ids, target_rotary(target))
    for module in made.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
    trunk: Any = made.model
    rows = plain(target.get_output_embeddings()).weight.detach().float()
    if config.hidden_size == rows.shape[1]:
        embedding = plain(target.get_input_embeddings()).weight.detach()
        trunk.embed_tokens.weight = nn.Parameter(embedding.float(), requires_grad=False)
        made.lm_head.weight = nn.Parameter((rows[made.ids] if config.short_list else rows).clone())
    if config.project:
        nn.init.eye_(trunk.project.weight)
    if config.kind == "feature":
        for joined in (trunk.join_feature, trunk.join_state):
            if joined.weight.shape[0] == joined.weight.shape[1]:
                nn.init.eye_(joined.weight)
    if config.kind in ("eagle", "dflash"):
        width, large = config.hidden_size, config.large_hidden_size
        if width == large:
            trunk.fc.weight.data[:, -large:] = torch.eye(width)  # the highest of the states that it reads
    if config.kind == "glide":
        for layer in trunk.layers:
            nn.init.zeros_(layer.cross_attn.o_proj.weight)
    return _trainable(made)


def plain(layer: Any) -> Any:
    """The layer, or its unpacked copy: packed weights cannot be copied from."""
    return layer.unpacked() if hasattr(layer, "unpacked") else layer


def start_linear(draft_head: DraftHead, examples: Examples, ridge: float = 100.0) -> None:
    """Let a fresh feature head of the target's width begin as the linear map of token and state that is nearest to the
    target's next state on `examples` (ridge regression; its layers add nothing at first)."""
    trunk: Any = draft_head.model
    width = trunk.join_embed.in_features
    square, product, size, count = torch.zeros(2 * width, 2 * width), torch.zeros(2 * width, width), 0.0, 0
    with torch.no_grad():
        for index in range(len(examples.lengths)):
            example = examples.take([index])[0]
            first = max(1, example.start - 1)
            token, hidden = trunk.embed_tokens(example.ids[first:]), example.hidden.float()
            entered = torch.cat((trunk.feature_norm(hidden[first - 1 : -1]), trunk.embed_norm(token)), dim=-1)
            square, product = square.addmm_(entered.T, entered), product.addmm_(entered.T, hidden[first:])
            size, count = size + float(hidden[first:].square().mean(dim=-1).sqrt().sum()), count + len(entered)
        square.diagonal().add_(ridge)
        theirs, embed = torch.linalg.solve(square, product).split(width)
        trunk.join_embed.weight.copy_(embed.T)
        for join in (trunk.join_feature, trunk.join_state):
            join.weight.copy_(theirs.T)
        trunk.norm.weight.fill_(size / max(count, 1))
        for layer in trunk.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def _trainable(made: DraftHead) -> DraftHead:
    """Everything learns but what is the target's own."""
    made.model.embed_tokens.weight.requires_grad_(not made.config.shared_embedding)
    made.lm_head.weight.requires_grad_(not made.config.shared_head)
    return made


def taken_up(old: DraftHead, config: DraftHeadConfig, device: torch.device, seed: int = 0) -> DraftHead:
    """A draft head with the weights of `old`, to be trained further; it shares none but the embedding.

    `config` may differ in window, block size, recency and depth. What `old` has not begins as if it were not there:
    recency with slopes of 0, further layers, which stand in front of its own, with nothing to add.
    """
    torch.manual_seed(seed)
    with torch.device("meta"):  # no memory for parameters that are replaced
        made = DraftHead(config, old.ids)
    further, weights = config.num_hidden_layers - old.config.num_hidden_layers, dict[str, Tensor]()
    for name, value in old.state_dict().items():
        moved = re.sub(r"(?<=^model\.layers\.)\d+", lambda number: str(int(number[0]) + further), name)
        weights[moved] = value.detach() if "embed_tokens" in name else value.detach().clone()
    fresh = {name: _silent(name, value.shape) for name, value in made.state_dict().items() if name not in weights}
    made.load_state_dict(fresh | weights, assign=True)
    made.requires_grad_(True)
    made.adopt(old.ids, old.cross_rotary)
    return _trainable(made).to(device)


def _silent(name: str, shape: torch.Size) -> Tensor:
    """A parameter that the old head lacks: noise, or 0 where it would change the output."""
    if name.endswith(("o_proj.weight", "down_proj.weight")) or "recency" in name:
        return torch.zeros(shape)
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5 / 2
