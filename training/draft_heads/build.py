"""A new draft head for a target: its shape and its initial weights."""

from typing import Any

import torch
from torch import nn

from sampling.drafters.draft_heads.checkpoint import target_rotary
from sampling.drafters.draft_heads.config import BlockConfig, DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.published import usual_reads
from training.draft_heads.features import Examples
from utils.catalogue.heads import BLOCK_KINDS, PUBLISHED_KINDS
from utils.errors import UsageError, UserError


def shape_for(target: nn.Module, kind: str, several: bool = False, **changes: Any) -> DraftHeadConfig:
    """Return a draft head's shape: the target's width and heads and one layer, but for `changes` (None: no change).
    `several`: a feature head that reads the three states of EAGLE-3 beside the last one.

    Raises UserError for a target whose shape cannot be read or that has too few layers, UsageError for numbers that do
    not go together.
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
        usual = usual_reads(large.num_hidden_layers)
    except AttributeError as error:
        raise UserError(f"no draft head can be made for a {type(target).__name__}: {error}") from None
    if several or kind in PUBLISHED_KINDS:
        values["reads"] = (-1, *usual) if several else tuple(usual)
    given = {name: value for name, value in changes.items() if value is not None}
    if (several or kind == "eagle") and (len(usual) < 3 or usual[0] < 2):
        raise UserError(
            f"{'a head of several states' if several else 'EAGLE-3'} reads three states of its target, one of "
            f"{large.num_hidden_layers} layers has too few: it needs 7"
        )
    if kind == "eagle":
        # The norms that *speculators* 0.9 trains with.
        values |= dict.fromkeys(("wide", "norm_before_fc", "norm_before_residual", "norm_output"), True)
    if kind in BLOCK_KINDS:
        # The mask token is the last id, which hardly any text contains.
        values |= {"qk_norm": True, "mask": large.vocab_size - 1}
    if kind == "dspark":
        values |= {"markov": "vanilla", "rank": 64}  # published heads of larger targets have rank 256
        values |= dict.fromkeys(("from_anchor", "confidence", "confidence_with_markov"), True)
    values |= given
    if "num_attention_heads" in given:
        values["head_dim"] = values["hidden_size"] // given["num_attention_heads"]
    values["shared_embedding"] = values["hidden_size"] == width
    if values.get("shared_head") and not values["shared_embedding"]:
        raise UsageError(f"a head of width {values['hidden_size']} cannot share rows of the target's width {width}")
    block = {"windows": (0,) * values["num_hidden_layers"]}
    return BlockConfig(**values, **block) if kind in BLOCK_KINDS else DraftHeadConfig(**values)


def new_draft_head(config: DraftHeadConfig, target: Any, short_list: list[int], seed: int) -> DraftHead:
    """Return a draft head with fresh weights.

    Embedding and head rows are the target's where the widths agree; layers start from noise.
    """
    torch.manual_seed(seed)
    head = DraftHead(config, torch.tensor(short_list, dtype=torch.long))
    head.adopt(head.ids, target_rotary(target))
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
    trunk: Any = head.model
    rows, width = plain(target.get_output_embeddings()).weight.detach().float(), config.hidden_size
    if width == rows.shape[1]:
        embedding = plain(target.get_input_embeddings()).weight.detach()
        trunk.embed_tokens.weight = nn.Parameter(embedding.float(), requires_grad=False)
        head.lm_head.weight = nn.Parameter((rows[head.ids] if config.short_list else rows).clone())
    for joined in (trunk.join_feature, trunk.join_state) if config.kind == "feature" else ():
        if width == config.large_hidden_size:
            nn.init.eye_(joined.weight)  # of several states the first, the last layer's
    if hasattr(trunk, "markov_head"):
        nn.init.zeros_(trunk.markov_head.markov_w2.weight)
    if hasattr(trunk, "fc") and width == config.large_hidden_size:
        trunk.fc.weight.data[:, -width:] = torch.eye(width)  # pass on the last of the states read
    for layer in trunk.layers if config.kind == "glide" else ():
        nn.init.zeros_(layer.cross_attn.o_proj.weight)
    return _trainable(head)


def plain(layer: Any) -> Any:
    """Return the layer, or its unpacked copy: packed weights cannot be copied from."""
    return layer.unpacked() if hasattr(layer, "unpacked") else layer


def start_linear(draft_head: DraftHead, examples: Examples, ridge: float = 100.0) -> None:
    """Let a fresh feature head of the target's width begin as the linear map of token and state that is nearest to the
    target's next state on `examples` (ridge regression; its layers add nothing at first)."""
    trunk: Any = draft_head.model
    width = trunk.join_embed.in_features
    others = trunk.join_feature.in_features - width  # numbers of states between layers, which the map does not read
    square, product, size, count = torch.zeros(2 * width, 2 * width), torch.zeros(2 * width, width), 0.0, 0
    with torch.no_grad():
        for index in range(len(examples.lengths)):
            example = examples.take([index])[0]
            first = max(1, example.start - 1)
            token, hidden = trunk.embed_tokens(example.ids[first:]), example.hidden.float()
            before = nn.functional.pad(hidden[first - 1 : -1], (0, others))
            entered = torch.cat((trunk.feature_norm(before)[:, :width], trunk.embed_norm(token)), dim=-1)
            square, product = square.addmm_(entered.T, entered), product.addmm_(entered.T, hidden[first:])
            size, count = size + float(hidden[first:].square().mean(dim=-1).sqrt().sum()), count + len(entered)
        square.diagonal().add_(ridge)
        theirs, embed = torch.linalg.solve(square, product).split(width)
        trunk.join_embed.weight.copy_(embed.T)
        trunk.join_feature.weight.copy_(nn.functional.pad(theirs.T, (0, others)))
        trunk.join_state.weight.copy_(theirs.T)
        trunk.norm.weight.fill_(size / max(count, 1))
        for layer in trunk.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def _trainable(head: DraftHead) -> DraftHead:
    """Make all parameters trainable but those shared with the target."""
    head.model.embed_tokens.weight.requires_grad_(not head.config.shared_embedding)
    head.lm_head.weight.requires_grad_(not head.config.shared_head)
    return head


def continued(old: DraftHead, config: DraftHeadConfig, device: torch.device) -> DraftHead:
    """Return a draft head with the weights of `old`, to be trained further; all but the embedding are copies.

    `config` may differ in window, block size, recency and, of a feature head of the last state, in the states that it
    reads. New slopes of recency and the map of new states are 0 and change no output at first.
    """
    with torch.device("meta"):  # no memory for parameters that are replaced
        head = DraftHead(config, old.ids)
    new = head.state_dict()
    weights = {name: torch.zeros(value.shape) for name, value in new.items() if "recency" in name} | {
        # of new states the map is 0, the norm 1
        name: value.detach()
        if "embed_tokens" in name
        else nn.functional.pad(value, (0, new[name].shape[-1] - value.shape[-1]), value=float(value.dim() == 1))
        for name, value in old.state_dict().items()
    }
    head.load_state_dict(weights, assign=True)
    head.requires_grad_(True)
    head.adopt(old.ids, old.cross_rotary)
    return _trainable(head).to(device)
