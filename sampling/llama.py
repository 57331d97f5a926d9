"""The forward pass of Llama-like models, written out by hand as a `Network`.

Same arithmetic as transformers' own forward (Llama, Mistral without sliding window, Qwen2 without
sliding layers), with less around it: grouped-query attention without expanding K and V, a cache of
preallocated slots, only the logits asked for. It reads the model's own modules and copies no
weights; where `utils.packed_linear.pack` has packed them, activation, product and residual sum are
done inside the matrix kernels. Knows no tokens' meaning and keeps no state between passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.cache import SlotCache
from sampling.types import KVCache
from utils.packed_linear import PackedLinear

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
DYNAMIC_ROPE = ("dynamic", "longrope")  # their frequencies change with the length: not a function of the position


def supports(model: object) -> bool:
    """Whether `LlamaNetwork` computes exactly what `model` does.

    True for the families above on one device, with SiLU, full attention in every layer and
    rotary frequencies that do not depend on the length.
    """
    config: Any = getattr(model, "config", None)
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith("transformers."):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or []
    windowed = type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    return (
        config.hidden_act in ("silu", "swish")
        and rope.get("rope_type", "default") not in DYNAMIC_ROPE
        and all(kind == "full_attention" for kind in kinds)
        and not windowed
        and not spread
    )


class LlamaNetwork:
    """A Llama-like transformers model as a function of new tokens and a `SlotCache`.

    The model's modules are used where they lie (nothing is copied, nothing replaced), so the model
    itself keeps working, and later changes of its weights are seen. Raises ValueError for a model that
    `supports` refuses.
    """

    def __init__(self, model: nn.Module) -> None:
        if not supports(model):
            raise ValueError(f"{type(model).__name__} is not of the Llama kind that this network computes")
        trunk: Any = model.model
        config: Any = model.config
        self._embed = cast(nn.Embedding, trunk.embed_tokens)
        self._rotary: Any = trunk.rotary_emb
        self._norm = _Norm.of(trunk.norm)
        self._head = cast(nn.Module, model.lm_head)
        self.layers = int(config.num_hidden_layers)
        self._layers = [_Layer.of(layer, config) for layer in trunk.layers[: self.layers]]
        self.vocab_size = int(config.vocab_size)
        self.context = int(config.max_position_embeddings)
        self.device = self._embed.weight.device
        self.dtype = self._embed.weight.dtype

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache; it takes the number of rows from what is first fed."""
        return SlotCache(self.layers)

    @torch.no_grad()  # not inference mode: what the cache holds stays usable anywhere
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        keep: int,
        hidden: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Feed ids [B, T] at positions [B, T]; append T slots to `cache`.

        mask [B, 1, T, S+T] additive, or None = every token sees all S slots and its predecessors.
        Returns logits [B, keep, V] of the last `keep` columns and, if `hidden`, the last hidden states
        [B, T, H]: the states *after* the final norm, i.e. exactly what the head is applied to
        (transformers' `hidden_states[-1]`).
        """
        assert isinstance(cache, SlotCache)
        x = self._embed(ids)
        cos, sin = self._rotary(x, positions)
        rotation = cos[:, :, None], sin[:, :, None]
        bias = causal_bias(ids.shape[1], cache.length, x) if mask is None else mask
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation, bias, cache, index)
        if hidden:
            x = self._norm(x)
            return self._head(x[:, x.shape[1] - keep :]), x
        return self._head(self._norm(x[:, x.shape[1] - keep :])), None


def causal_bias(new: int, cached: int, like: Tensor) -> Tensor | None:
    """The additive mask [1, 1, T, S+T] that hides each new token's successors; None where there is nothing to hide."""
    if new == 1:
        return None
    bias = torch.zeros((new, cached + new), dtype=like.dtype, device=like.device)
    bias[:, cached:].masked_fill_(torch.ones((new, new), dtype=torch.bool, device=like.device).triu(1), float("-inf"))
    return bias[None, None]


@dataclass(frozen=True, slots=True)
class _Norm:
    """RMS norm: x / rms(x) · weight."""

    weight: Tensor
    eps: float

    @staticmethod
    def of(module: Any) -> _Norm:
        return _Norm(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer: x + attention(norm(x)), then + mlp(norm(x))."""

    before: _Norm
    after: _Norm
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    size: int  # D, of one head
    scale: float

    @staticmethod
    def of(module: Any, config: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        return _Layer(
            before=_Norm.of(module.input_layernorm),
            after=_Norm.of(module.post_attention_layernorm),
            q=attention.q_proj,
            k=attention.k_proj,
            v=attention.v_proj,
            o=attention.o_proj,
            gate=mlp.gate_proj,
            up=mlp.up_proj,
            down=mlp.down_proj,
            size=attention.head_dim,
            scale=attention.scaling,
        )

    def __call__(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], bias: Tensor | None, cache: SlotCache, index: int
    ) -> Tensor:
        h = self.before(x)
        split = (*x.shape[:2], -1, self.size)  # [B, T, heads, D]
        query = rotate(self.q(h).view(split), rotation)
        key = rotate(self.k(h).view(split), rotation)
        keys, values = cache.append(index, key.transpose(1, 2), self.v(h).view(split).transpose(1, 2))
        mixed = attend(query, keys, values, bias, self.scale)
        x = plus(self.o, mixed, x)
        h = self.after(x)
        return plus(self.down, gated(self.gate, self.up, h), x)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of heads [B, T, heads, D] by (cos, sin) [B, T, 1, D]."""
    cos, sin = rotation
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((-x[..., half:], x[..., :half]), dim=-1), sin)


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Grouped-query attention: query [B, T, H, D], keys and values [B, H_kv, S+T, D] → [B, T, H·D].

    The G = H / H_kv query heads of a group are laid out as G·T rows against the one K and V they share.
    """
    rows, new, heads, size = query.shape
    shared = keys.shape[1]
    group = heads // shared
    grouped = query.view(rows, new, shared, group, size).permute(0, 2, 3, 1, 4).reshape(rows, shared, group * new, size)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).mul_(scale)  # [B, H_kv, G·T, S+T]
    if bias is not None:
        scores.view(rows, shared, group, new, -1).add_(bias[:, :, None])
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights, values).view(rows, shared, group, new, size)
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows, new, heads * size)


def plus(linear: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """linear(x) + residual."""
    return linear.plus(x, residual) if isinstance(linear, PackedLinear) else cast(Tensor, linear(x) + residual)


def gated(gate: nn.Module, up: nn.Module, x: Tensor) -> Tensor:
    """silu(gate(x)) · up(x)."""
    if isinstance(gate, PackedLinear) and isinstance(up, PackedLinear):
        return up.times(x, gate.silu(x))
    return cast(Tensor, F.silu(gate(x)) * up(x))
