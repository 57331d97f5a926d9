"""The fast pass of a trained student: new tokens and a cache in, logits of its short list out.

The same arithmetic as `Student.states` and the head behind it, step by step: packed weights on the CPU
in float32, q/k/v and gate/up each as one product, a preallocated cache, only the rows of the head that
exist. For a plain student it is a :class:`sampling.types.Network`; what GLIDE and feature students
read of their target is handed in by their sessions. Knows no sessions, no distributions and no
gradients, and holds nothing of the `Student` it was made from but its embedding and small parts.

Shapes: B rows, T new tokens, S slots, H the student's width, G the target's, n ids in the short list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.drafters.draft_heads.modules import CrossAttention, Rotary, Student, lateness
from sampling.drafters.draft_model import ModelDrafter, chain_of_head
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.cache import SlotCache
from sampling.models.causal import CausalLM
from sampling.models.llama import Layer, Map, as_it_is, causal_bias, latest, norm_of, plus, rotate
from sampling.types import KVCache
from sampling.vocabulary import spread
from utils.kernels.packed_linear import HalfLinear, PackedLinear, available, half_available, packable, ready

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


class StudentNetwork:
    """A student as a function of new tokens and a `SlotCache`.

    With `pack`, and float32 weights on the CPU, the linear layers are packed copies (in 16 bit if
    `student.rounded`): the caller may release the student, and later changes of its weights are not seen.
    Otherwise the student's own modules are used where they lie, on whatever device. The embedding is never
    copied: it may be the target's.

    Attributes:
        short_list: [n] long, the ids of the head's rows, ascending; None = all ids.
    """

    def __init__(self, student: Student, pack: bool = True) -> None:
        config, trunk = student.config, student.model
        take = as_it_is
        if pack and available() and packable(student.lm_head):
            take = _halved if student.rounded and half_available() else _packed
        frozen = take is not as_it_is
        self.kind = config.kind
        self.vocab_size, self.context = config.vocab_size, config.max_position_embeddings
        self.layers = config.num_hidden_layers
        self.window = config.window
        self._embed = trunk.embed_tokens
        self._layers = [Layer.of(layer, take, config.window) for layer in trunk.layers]
        self._angles = Angles(student.rotary)
        self._norm = norm_of(trunk.norm, frozen)
        self._project = take(trunk.project) if config.project else None
        self._head = take(student.lm_head)
        ready(self._head, *(part for layer in self._layers for part in layer.products))
        self._ids = cast(Tensor, student.short_list) if config.short_list else None
        self._cross: list[Cross] = []
        self._cross_angles = self._angles
        if student.cross_rotary is not None:
            self._cross = [
                Cross.of(cast(CrossAttention, layer.cross_attn), take, config.window) for layer in trunk.layers
            ]
            if not alike(student.rotary, student.cross_rotary):
                self._cross_angles = Angles(student.cross_rotary)
        self._joint = Joint.of(trunk, take, frozen) if config.kind == "feature" else None

    @property
    def device(self) -> torch.device:
        return self._embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.weight.dtype

    @property
    def takes_trees(self) -> bool:
        """Of one with a window the nodes beside would count in it."""
        return not self.window

    @property
    def short_list(self) -> Tensor | None:
        return None if self._ids is None else self._ids.to(self.device)

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache; it takes the number of rows from what is first fed."""
        return SlotCache(self.layers)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`; logits [B, keep, V], -inf outside the short list.

        A GLIDE student runs without its target's cache here, i.e. as a plain one; a feature student cannot.
        """
        short, states = self.forward_short(ids, positions, mask, cache, keep, hidden)
        return self.widen(short), states

    @torch.no_grad()
    def forward_short(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` with logits [B, keep, n] of the short list's ids alone."""
        if self._joint is not None:
            raise ValueError("a feature student needs its target's states: open it with FeatureLM")
        return self.answer(self.run(self.embed(ids), positions, mask, cache), keep, hidden)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] long → [B, T, H]."""
        return cast(Tensor, self._embed(ids))

    def join_target(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Input of a feature student where the target's state one position before is known: [B, T, H], [B, T, G]."""
        assert self._joint is not None
        return self._joint.with_feature(embedded, features.to(embedded))

    def join_own(self, embedded: Tensor, own: Tensor) -> Tensor:
        """The same where its own state (what `run` returned there) stands in: [B, T, H] both."""
        assert self._joint is not None
        return self._joint.with_own(embedded, own)

    def join_none(self, embedded: Tensor) -> Tensor:
        """The same at position 0, which has no state before it."""
        assert self._joint is not None
        return self._joint.alone(embedded)

    def run(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, seen: Seen | None = None
    ) -> Tensor:
        """Through all layers: x [B, T, H] at positions [B, T] → own states [B, T, H], before the final norm.

        mask as in :class:`sampling.types.Network`; `seen` is what a GLIDE student sees of its target, None = nothing.
        """
        assert isinstance(cache, SlotCache)
        rotation = self._angles(positions, x)
        bias = causal_bias(x.shape[1], cache.length, x) if mask is None else self._near(mask, positions, cache.length)
        turning = rotation
        if seen is not None and (seen.offset or self._cross_angles is not self._angles):
            turning = self._cross_angles(positions + seen.offset, x)
        for index, layer in enumerate(self._layers):
            x = layer.attend(x, rotation, bias, cache, index)
            if seen is not None:
                x = self._cross[index].read(x, turning, seen, index, positions)
            x = layer.think(x)
        return x

    def _near(self, mask: Tensor, positions: Tensor, cached: int) -> Tensor:
        """The mask of ragged rows, with the cached slots hidden that a row by itself would not look back to."""
        if not self.window or len(mask) == 1:
            return mask
        first = positions[:, -1] + 2 - self.window - fed_columns(mask, positions)
        far = torch.arange(mask.shape[-1], device=mask.device) < first.clamp(max=cached)[:, None]
        return mask.masked_fill(far[:, None, None], torch.finfo(mask.dtype).min)

    def answer(self, own: Tensor, keep: int, hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """Own states [B, T, H] → logits [B, keep, n] of the last `keep`; if `hidden`, what the head is applied to."""
        x = self._norm(own if hidden else own[:, own.shape[1] - keep :])
        x = x if self._project is None else cast(Tensor, self._project(x))
        return cast(Tensor, self._head(x[:, x.shape[1] - keep :])), x if hidden else None

    def widen(self, short: Tensor) -> Tensor:
        """Logits [..., n] of the short list → [..., V], -inf elsewhere."""
        return spread(short, self.short_list, self.vocab_size, float("-inf"))


def fed_columns(mask: Tensor | None, positions: Tensor) -> Tensor:
    """[B]: how many of the columns at positions [B, T] are tokens and no padding: what the last one sees of them."""
    rows, new = positions.shape
    if mask is None:
        return positions.new_full((rows,), new)
    return (mask[:, 0, -1, -new:] == 0).sum(dim=-1)


class _Packed(PackedLinear):
    """Packed, with the sum behind the product: for one token the joint operator costs more than it saves."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self.forward(x).add_(other)


def _packed(linear: nn.Module) -> nn.Module:
    assert isinstance(linear, nn.Linear)
    return _Packed(linear.weight.detach(), linear.bias)


def _halved(linear: nn.Module) -> nn.Module:
    assert isinstance(linear, nn.Linear)
    return HalfLinear(linear.weight)


def build(pair: Parts, asked: DraftRequest) -> ModelDrafter:
    """The pair's plain draft head: a small model of its own."""

    def made(student: Student) -> ModelDrafter:
        return ModelDrafter(CausalLM(StudentNetwork(student), "plain", pair.target.vocab_size))

    return chain_of_head(pair.head("plain", made), asked)
