"""What a student's layers are made of: norms, rotary positions, attention to itself and to the target, the MLP.

Modules with parameters; names follow the published GLIDE checkpoints. Knows whole sequences: no cache, no sessions,
no gradients of its own making. Shapes: B sequences, T tokens, H the student's width.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.student_config import StudentConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.variance_epsilon).to(x.dtype)


class Rotary(nn.Module):
    """cos and sin [B, T, D] of positions [B, T], from a base; `inv_freq` [D/2] may be replaced."""

    def __init__(self, size: int, theta: float, inv_freq: Tensor | None = None) -> None:
        super().__init__()
        made = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        self.register_buffer("inv_freq", made if inv_freq is None else inv_freq.detach().float(), persistent=False)
        self.attention_scaling = 1.0

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[..., None].float() * cast(Tensor, self.inv_freq)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling


def turned(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of heads [B, heads, T, D] by cos, sin [B, T, D]."""
    cos, sin = (part[:, None].to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.head_dim, self.heads = config.head_dim, config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        size, shared = config.head_dim, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, self.heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [B, T, H]; mask bool over the keys of `earlier` steps and then x's own; appends x's to `earlier`."""
        query, key, value = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        earlier.append((turned(key, rotation), value))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*earlier, strict=True))
        mixed = F.scaled_dot_product_attention(
            turned(query, rotation), keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        return cast(Tensor, x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))


class CrossAttention(nn.Module):
    """Attention over the target's cached keys and values: its q is rotated as the target's."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.head_dim, self.heads = config.large_head_dim, config.large_num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.recency = nn.Parameter(first_slopes(self.heads)) if config.recency else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, H] at positions 0 … T − 1; keys and values [B, H_kv, S, D]; mask bool [T, S]."""
        query = turned(self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2), rotation)
        if self.recency is not None:
            place = torch.arange(mask.shape[-1], device=mask.device)
            late = lateness(self.recency, place[None, : mask.shape[-2]], len(place))
            mask = late.masked_fill(~mask, float("-inf")).to(query.dtype)
        mixed = F.scaled_dot_product_attention(
            query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


def first_slopes(heads: int) -> Tensor:
    """[heads] slopes that recency starts from: 4, 1, ¼, 0 in turn, so that some heads see the latest key alone."""
    return torch.tensor([4.0, 1.0, 0.25, 0.0]).repeat(heads // 4 + 1)[:heads]


def lateness(slopes: Tensor, positions: Tensor, slots: int) -> Tensor:
    """What recency adds to the scores [B, heads, T, slots]: −slope · (position − slot), of queries [B, T]."""
    behind = positions[:, None, :, None] - torch.arange(slots, device=positions.device)
    return -slopes[:, None, None] * behind


class Gated(nn.Module):
    """The SwiGLU block."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def step_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[T, (step+1)·T] bool: query i of a drafted step sees keys of step 0 up to i − step, of later steps its own line.

    A key of step k at position j is what was computed k tokens after the last target state; only the query
    i = j + (step − k) meets it while drafting.
    """
    first = torch.ones(length, length, dtype=torch.bool, device=device).tril(-step)
    place = torch.arange(length, device=device)
    lines = [place[:, None] - place[None] == step - k for k in range(1, step + 1)]
    return torch.cat([first, *lines], dim=1)


def block_mask(length: int, block: int, offset: int, device: torch.device) -> Tensor:
    """[T, T] bool: position i sees target key j iff j's block comes before i's; the first block is causal.

    Imitates the lag of 1 … block tokens at which drafting sees the target's cache; `offset` shifts the blocks.
    """
    place = torch.arange(length, device=device)
    number = (place + offset) // block
    seen = number[None] < number[:, None]
    return seen | ((number == 0)[:, None] & (place[None] <= place[:, None]))


def lag_mask(length: int, lag: int, device: torch.device) -> Tensor:
    """[T, T] bool: query i sees target keys j < i − lag, and key 0 if none: what drafts at depth lag + 1 see."""
    place = torch.arange(length, device=device)
    return (place[None] < place[:, None] - lag) | (place[None] == 0).expand(length, -1)
