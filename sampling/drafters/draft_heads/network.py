"""The fast pass of a draft head: new tokens and a cache in, logits of its reduced vocabulary out.

The same arithmetic as `DraftHead.states` and the output layer behind it, step by step: packed weights on the CPU
in float32, a preallocated cache, only the rows of the output layer that
exist. For a plain draft head it is a :class:`sampling.types.Network`; what GLIDE and EAGLE heads
read of their target is handed in by their sessions. Knows no sessions, no distributions and no
gradients, and holds nothing of the `DraftHead` it was made from but its embedding and small parts.

Shapes: B rows, T new tokens, S slots, H the draft head's width, G the target's, n ids in the reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead, Rotary, lateness
from sampling.drafters.draft_model import ModelDrafter, of_head
from sampling.drafters.proposal import Proposer
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.cache import SlotCache
from sampling.models.causal import CausalLM
from sampling.models.llama import LlamaLayer, as_it_is, causal_bias, latest, norm_of, rotate
from sampling.types import Hidden, KVCache
from utils.kernels.bindings import GROUP, at_hand
from utils.kernels.packed_linear import packable
from utils.kernels.quantized_linear import PackedWeight, QuantizedLinear, fits

TABLE = 1024  # positions by which a table of angles grows


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass of a GLIDE head may see of the target's cache.

    `kv`: for each layer K and V [B, H_kv, S, D], rotated, as they lie in the target's cache; `bias`
    [B, 1, T, S] additive, None = everything; `blind` [B, T, 1] bool: queries without a single key, None = no such
    query.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None
    blind: Tensor | None = None


def alike(one: Rotary, other: Rotary) -> bool:
    """Whether two modules turn alike, so that one table serves both."""
    ours, theirs = cast(Tensor, one.inv_freq), cast(Tensor, other.inv_freq)
    return torch.equal(ours, theirs) and one.attention_scaling == other.attention_scaling


class Angles:
    """cos and signed sin [B, T, 1, D] of positions, as `rotate` takes them, looked up in a table that grows."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary, self._table = rotary, torch.empty(0)

    def __call__(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        highest, table = int(positions.max()), self._table
        if highest >= len(table) or table.dtype != like.dtype or table.device != like.device:
            inverse = cast(Tensor, self._rotary.inv_freq)
            angle = torch.arange((highest // TABLE + 1) * TABLE, device=inverse.device)[:, None].float() * inverse
            both = torch.cat((angle.cos(), angle.cos(), -angle.sin(), angle.sin()), dim=-1)
            table = self._table = (both * self._rotary.attention_scaling).to(like)
        cos, sin = F.embedding(positions, table)[:, :, None].chunk(2, dim=-1)
        return cos, sin


@dataclass(frozen=True, slots=True)
class Cross:
    """x + attention over the target's keys and values."""

    q: nn.Module
    o: nn.Module
    size: int
    scale: float
    window: int
    slopes: Tensor | None  # [heads] of its recency

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
        read = x + self.o(mixed.transpose(1, 2).reshape(rows, new, -1))
        return read if seen.blind is None else torch.where(seen.blind, x, read)


class StudentNetwork:
    """A draft head as a function of new tokens and a `SlotCache`.

    With `pack`, and float32 weights on the CPU, the linear layers are packed copies: the caller may release the draft
    head, and later changes of its weights are not seen. If `student.rounded` they have 8 bits, 4 where the whole
    pass is one compiled call: its drafts are as good (docs/notes/passes.md). Otherwise the draft head's own
    modules are used where they lie, on whatever device. The embedding is never copied: it may be the target's.
    """

    ragged = False

    def __init__(self, student: DraftHead, pack: bool = True) -> None:
        config, trunk = student.config, cast(Any, student.model)
        take = as_it_is
        if pack and at_hand() and packable(student.lm_head) and student.lm_head.weight.dtype == torch.float32:
            take = _rounded if student.rounded else _packed
        frozen = take is not as_it_is
        self.kind, self.window, self.layers = config.kind, config.window, config.num_hidden_layers
        self.vocab_size, self.context = config.vocab_size, config.max_position_embeddings
        self._embed = trunk.embed_tokens
        self.device, self.dtype = student.lm_head.weight.device, student.lm_head.weight.dtype
        self._ids = student.ids if config.short_list else None
        self.compiled: Any = None  # the whole pass, where it is one compiled call: nothing else is made then
        if take is _rounded and _compilable(student):
            from sampling.drafters.draft_heads.compiled_step import CompiledStep

            self.compiled = CompiledStep(student, cast(Any, partial(_rounded, kind="q4")), _halves(student.rotary))
            return
        self._take, self._frozen = take, frozen
        self._from, self._wide = int(config.is_eagle), config.wide  # an EAGLE head's text begins with token 1
        self._layers = [
            LlamaLayer.of(layer, take, config.window, _entrance(layer, config, frozen), self._from)
            for layer in trunk.layers
        ]
        self._norm = self._leave = norm_of(trunk.norm, frozen)
        if config.norm_output:
            self._norm = nn.Identity()
        else:
            self._leave = nn.Identity()
        self._project = take(trunk.project) if config.project else None
        self._head = take(student.lm_head)
        self._angles = self._cross_angles = Angles(student.rotary)
        self._cross: list[Cross] = []
        if student.cross_rotary is not None:
            for one in (layer.cross_attn for layer in trunk.layers):
                products = take(one.q_proj), take(one.o_proj)
                self._cross.append(Cross(*products, one.head_dim, one.scaling, config.window, one.recency))
            if not alike(student.rotary, student.cross_rotary):
                self._cross_angles = Angles(student.cross_rotary)
        if config.kind == "feature":
            norms = (norm_of(norm, frozen) for norm in (trunk.embed_norm, trunk.feature_norm, trunk.state_norm))
            self._embed_norm, self._feature_norm, self._own_norm = norms
            joins = (take(join) for join in (trunk.join_embed, trunk.join_feature, trunk.join_state))
            self._join_embed, self._join_feature, self._join_own = joins
        if config.is_eagle:
            self._fc = take(trunk.fc)
            self._all = norm_of(trunk.input_norm, frozen) if config.norm_before_fc else nn.Identity()
            self._each = [norm_of(norm, frozen) for norm in trunk.fc_norm] if config.fc_norm else []

    @property
    def takes_trees(self) -> bool:
        """Of one with a window the nodes beside would count in it."""
        return not self.window

    @property
    def reduced_ids(self) -> Tensor | None:
        """The reduced vocabulary [n] long, ascending, as the rows of the output layer; None = all ids."""
        return None if self._ids is None else self._ids.to(self.device)

    def new_cache(self, rows: int) -> KVCache:
        """An empty cache; it takes the number of rows from what is first fed."""
        return SlotCache(self.layers) if self.compiled is None else cast(KVCache, self.compiled.new_cache())

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`; logits [B, keep, n] of the reduced vocabulary alone.

        A GLIDE head runs without its target's cache here, i.e. as a plain one; an EAGLE head cannot.
        """
        if self.kind == "feature" or self._from:
            raise ValueError("an EAGLE head needs its target's states: open it with FeatureLM")
        return self.answer(self.run(self.embed(ids), positions, mask, cache), keep, bool(hidden))

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] long → [B, T, H]."""
        return cast(Tensor, self._embed(ids))

    def join_none(self, embedded: Tensor) -> Tensor:
        """Input of an EAGLE head at position 0, which has no state before it: [B, T, H]."""
        if self._from:  # nothing else looks at it
            return self._paired(embedded, torch.zeros_like(embedded))
        return cast(Tensor, self._join_embed(self._embed_norm(embedded)))

    def join_target(self, embedded: Tensor, features: Tensor) -> Tensor:
        """The same where the target's state one position before is known: [B, T, H], [B, T, G]."""
        if self._from:
            return self._paired(embedded, self._fused(features.to(embedded)))
        return cast(Tensor, self._join_feature(self._feature_norm(features.to(embedded)))) + self.join_none(embedded)

    def join_own(self, embedded: Tensor, own: Tensor) -> Tensor:
        """The same where its own state (what `run` returned there) stands in: [B, T, H] both."""
        if self._from:
            return self._paired(embedded, own)
        return cast(Tensor, self._join_own(self._own_norm(own))) + self.join_none(embedded)

    def _paired(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What enters an EAGLE head's first layer: [B, T, 2H] of EAGLE-3, else [B, T, H]."""
        both = torch.cat((embedded, state), dim=-1)
        return both if self._wide else cast(Tensor, self._fc(both))

    def _fused(self, features: Tensor) -> Tensor:
        """The target's states [B, T, K·G] as one of EAGLE-3's own [B, T, H]."""
        if not self._wide:
            return features
        features = self._all(features)
        if self._each:
            parts = zip(self._each, features.chunk(len(self._each), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return cast(Tensor, self._fc(features))

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        seen: Seen | None = None,
        turned: Tensor | None = None,
    ) -> Tensor:
        """Through all layers: x [B, T, H] at positions [B, T] → own states [B, T, H], which no norm has seen unless the
        configuration says `norm_output`.

        mask as in :class:`sampling.types.Network`; `seen` is what a GLIDE head sees of its target, None = nothing;
        `turned` [B, T] are the positions by which queries and keys are rotated, where they are others.
        """
        assert isinstance(cache, SlotCache)
        turned = positions if turned is None else turned
        rotation = turning = self._angles(turned, x)
        bias = causal_bias(x.shape[1], cache.length, x) if mask is None else self._near(mask, positions, cache.length)
        if self._from and (mask is not None or not cache.length):
            bias = _without_first(bias, positions)
        if seen is not None and self._cross_angles is not self._angles:
            turning = self._cross_angles(turned, x)
        for index, layer in enumerate(self._layers):
            x = layer.attend(x, rotation, bias, cache, index)
            if seen is not None:
                x = self._cross[index].read(x, turning, seen, index, positions)
            x = layer.mlp(x)
        return self._leave(x)

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


def _compilable(student: DraftHead) -> bool:
    """Whether the whole pass of this rounded head can be one compiled call: a feature head of the usual shape."""
    config = student.config
    sizes = (config.hidden_size, config.large_hidden_size, config.intermediate_size, config.head_dim)
    plain = not (config.project or config.norm_output or config.qk_norm or config.attention_bias) and config.final_norm
    return (
        config.kind == "feature"
        and plain
        and student.lm_head.weight.dtype == torch.float32
        and not any(size % GROUP for size in sizes)
        and fits(student.lm_head.weight)
    )


def _halves(rotary: Rotary) -> Callable[[Tensor], Tensor]:
    """positions [n] → cos and sin [n, D], halves side by side."""

    def angles(positions: Tensor) -> Tensor:
        angle = positions[:, None].float() * cast(Tensor, rotary.inv_freq)
        return torch.cat((angle.cos(), angle.sin()), dim=-1) * rotary.attention_scaling

    return angles


def _entrance(layer: Any, config: DraftHeadConfig, frozen: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """How token and state [B, T, 2H] enter EAGLE-3's first layer: normed side by side, the state goes by."""
    if not layer.joins:
        return None
    of_token, of_state = norm_of(layer.input_layernorm, frozen), norm_of(layer.hidden_norm, frozen)

    def enter(x: Tensor) -> tuple[Tensor, Tensor]:
        token, state = x.chunk(2, dim=-1)
        normed = of_state(state)
        by = normed if config.norm_before_residual else state.contiguous()
        return torch.cat((of_token(token), normed), dim=-1), by

    return enter


def _without_first(bias: Tensor | None, positions: Tensor) -> Tensor | None:
    """The mask [.., T, S+T] with the new tokens at position 0 hidden from all others: no state stands before them."""
    new = positions.shape[1]
    if bias is None or not bool((first := positions == 0).any()):
        return bias
    hide = first[:, None, None] & ~torch.eye(new, dtype=torch.bool, device=first.device)
    late = bias[..., -new:].expand(len(first), -1, -1, -1).masked_fill(hide, torch.finfo(bias.dtype).min)
    return torch.cat((bias[..., :-new].expand(len(first), -1, -1, -1), late), dim=-1)


def fed_columns(mask: Tensor | None, positions: Tensor) -> Tensor:
    """[B]: how many of the columns at positions [B, T] are tokens and no padding: what the last one sees of them."""
    new = positions.shape[1]
    return torch.full_like(positions[:, 0], new) if mask is None else (mask[:, 0, -1, -new:] == 0).sum(dim=-1)


def _packed(linear: Any) -> nn.Module:
    return QuantizedLinear(PackedWeight.floats(linear.weight), linear.bias)


def _rounded(linear: Any, kind: str = "q8") -> nn.Module:
    if linear.bias is not None or not fits(linear.weight):
        return _packed(linear)
    return QuantizedLinear(PackedWeight.rounded(linear.weight, kind))


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's plain draft head: a small model of its own."""

    def made(student: DraftHead) -> ModelDrafter:
        return ModelDrafter(CausalLM(StudentNetwork(student), "plain", pair.target.vocab_size))

    return of_head(pair.head("plain", made).lm, asked)
