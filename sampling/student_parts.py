"""The parts of a student's fast pass: its angles, what it reads of the target's cache, how its input is joined.

Made from the modules of sampling/student_layers.py, with or without packed weights. Knows no cache of the student's
own and no head. Shapes: B rows, T new tokens, S slots, H the student's width, G the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.llama import Map, latest, norm_of, plus, rotate
from sampling.student_layers import CrossAttention, Rotary, lateness

TABLE = 1024  # positions by which a table of angles grows


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass of a GLIDE student may see of the target's cache.

    `kv`: for each layer K and V [B, H_kv, S, D], rotated, as they lie in the target's cache; `bias`
    [B, 1, T, S] additive, None = everything; `blind` [B, T, 1] bool: queries without a single key, None = no such
    query; `offset` is added to the positions of the queries.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None
    blind: Tensor | None = None
    offset: int = 0


def alike(one: Rotary, other: Rotary) -> bool:
    """Whether two modules turn alike, so that one table serves both."""
    ours, theirs = cast(Tensor, one.inv_freq), cast(Tensor, other.inv_freq)
    return torch.equal(ours, theirs) and one.attention_scaling == other.attention_scaling


class Angles:
    """cos and signed sin [B, T, 1, D] of positions, as `rotate` takes them, looked up in a table that grows."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._table = torch.empty(0)

    def __call__(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        highest, table = int(positions.max()), self._table
        if highest >= len(table) or table.dtype != like.dtype or table.device != like.device:
            table = self._table = self._made((highest // TABLE + 1) * TABLE).to(like)
        cos, sin = F.embedding(positions, table)[:, :, None].chunk(2, dim=-1)
        return cos, sin

    def _made(self, count: int) -> Tensor:
        inverse, scaling = cast(Tensor, self._rotary.inv_freq), self._rotary.attention_scaling
        angle = torch.arange(count, device=inverse.device)[:, None].float() * inverse
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos, -sin, sin), dim=-1) * scaling


@dataclass(frozen=True, slots=True)
class Cross:
    """x + attention over the target's keys and values."""

    q: nn.Module
    o: nn.Module
    size: int
    scale: float
    window: int
    slopes: Tensor | None  # [heads] of its recency

    @staticmethod
    def of(module: CrossAttention, take: Callable[[nn.Module], nn.Module], window: int) -> Cross:
        return Cross(take(module.q_proj), take(module.o_proj), module.head_dim, module.scaling, window, module.recency)

    def read(self, x: Tensor, turning: tuple[Tensor, Tensor], seen: Seen, index: int, positions: Tensor) -> Tensor:
        rows, new, _ = x.shape
        query = rotate(self.q(x).view(rows, new, -1, self.size), turning).transpose(1, 2)
        (keys, values), bias = seen.kv[index], seen.bias
        if self.slopes is not None:
            late = lateness(self.slopes, positions, keys.shape[2])
            bias = late if bias is None else (bias + late).clamp_min(torch.finfo(late.dtype).min)
        if self.window and rows == 1 and keys.shape[2] >= self.window + new:  # of one row the last slots are the latest
            keys, values, bias = latest(self.window + new - 1, keys, values, bias)
        keys, values = keys.to(x), values.to(x)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=self.scale, enable_gqa=True)
        read = plus(self.o, mixed.transpose(1, 2).reshape(rows, new, -1), x)
        return read if seen.blind is None else torch.where(seen.blind, x, read)


@dataclass(frozen=True, slots=True)
class Joint:
    """How a feature student's input is made of a token and the state one position before."""

    token_norm: Map
    feature_norm: Map
    own_norm: Map
    token: nn.Module
    feature: nn.Module
    own: nn.Module

    @staticmethod
    def of(trunk: nn.Module, take: Callable[[nn.Module], nn.Module], frozen: bool) -> Joint:
        parts: Any = trunk
        return Joint(
            token_norm=norm_of(parts.embed_norm, frozen),
            feature_norm=norm_of(parts.feature_norm, frozen),
            own_norm=norm_of(parts.state_norm, frozen),
            token=take(parts.join_embed),
            feature=take(parts.join_feature),
            own=take(parts.join_state),
        )

    def alone(self, embedded: Tensor) -> Tensor:
        return cast(Tensor, self.token(self.token_norm(embedded)))

    def with_feature(self, embedded: Tensor, features: Tensor) -> Tensor:
        return plus(self.feature, self.feature_norm(features), self.alone(embedded))

    def with_own(self, embedded: Tensor, own: Tensor) -> Tensor:
        return plus(self.own, self.own_norm(own), self.alone(embedded))
