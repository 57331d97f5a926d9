"""A published block head's logits, written as its authors have the pass: the whole context at once, no cache.

JetSpec: `DFlashDraftModel` of hao-ai-lab/JetSpec (jetspec/models/draft_head.py) with `causal_head`.
DFlare: `QwenDFlareDraftModel` of Tencent/AngelSlim (train/models/draft/qwen_dflare.py).
Domino: `DominoDraftModel` of sgl-project/SpecForge (specforge/modeling/draft/domino.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (torch.arange(half) / half)
    mixed = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((mixed.real, mixed.imag), dim=-1)


@torch.no_grad()
def block(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Any, features: Tensor, path: list[int], drafts: int
) -> Tensor:
    """Logits [drafts, V] of the block after features [S, K·G]; `path`: the last token and the drafts after it."""
    own, nested = tensors, config["dflash_config"]
    size, heads, shared = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    theta, count, length = config["rope_parameters"]["rope_theta"], config["block_size"], len(features)
    places = torch.arange(length + count)
    x = target.get_input_embeddings()(torch.tensor([path[0], *[nested["mask_token_id"]] * (count - 1)]))
    shares, states = own.get("layer_fusion_weights"), features.view(length, len(nested["target_layer_ids"]), -1)
    seen = torch.ones(count, length + count, dtype=torch.bool)
    if nested.get("causal_head"):
        seen = seen.tril(length)
    for at in range(config["num_hidden_layers"]):
        part = {name.removeprefix(f"layers.{at}."): value for name, value in own.items()}
        read = _normed(x, part["input_layernorm.weight"])
        if shares is None:
            mixed, suffix = features @ own["fc.weight"].T, ""
        else:
            mixed, suffix = torch.einsum("stg,t->sg", states, shares[at].exp() / shares[at].exp().sum()), "_target"
        context = _normed(mixed, own["hidden_norm.weight"])
        entering = {}
        for name in "kv":
            own_rows = read @ part[f"self_attn.{name}_proj.weight"].T
            both = torch.cat((context @ part[f"self_attn.{name}_proj{suffix}.weight"].T, own_rows))
            entering[name] = both.view(length + count, shared, size)

        query = (read @ part["self_attn.q_proj.weight"].T).view(count, heads, size)
        query = _turned(_normed(query, part["self_attn.q_norm.weight"]), places[length:], theta)
        keys = _turned(_normed(entering["k"], part["self_attn.k_norm.weight"]), places, theta)
        keys, values = (each.repeat_interleave(heads // shared, dim=1) for each in (keys, entering["v"]))
        weights = torch.einsum("qhd,khd->hqk", query, keys) / size**0.5
        weights = weights.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        x = x + mixed @ part["self_attn.o_proj.weight"].T
        read = _normed(x, part["post_attention_layernorm.weight"])
        gate, up = (read @ part[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ part["mlp.down_proj.weight"].T
    x = _normed(x, own["norm.weight"])[-drafts:]
    logits: Tensor = target.get_output_embeddings()(x)
    if nested.get("projector_type") == "domino":
        return _corrected(nested, own, logits, x, target.get_input_embeddings()(torch.tensor(path)))
    return logits


def _corrected(nested: dict[str, Any], own: dict[str, Tensor], logits: Tensor, x: Tensor, read: Tensor) -> Tensor:
    """Logits with Domino's term; `read` are the embeddings of the last token and the drafts."""
    memory = torch.zeros(nested["gru_hidden_dim"])
    for at in range(len(logits)):
        given = (own["prefix_gru.weight_ih_l0"] @ read[at]).chunk(3)
        kept = (own["prefix_gru.weight_hh_l0"] @ memory).chunk(3)
        reset, update = ((one + other).sigmoid() for one, other in zip(given[:2], kept[:2], strict=True))
        memory = (1 - update) * (given[2] + reset * kept[2]).tanh() + update * memory
        if at >= nested.get("pure_draft_prefix_len", 0):
            narrow = F.silu(own["embed_proj.0.weight"] @ torch.cat((x[at], memory)))
            logits[at] = logits[at] + own["embed_proj.2.weight"] @ narrow
    return logits
