"""The fast pass of a draft head: new tokens and a cache in, logits of its reduced vocabulary out.

It has the arithmetic of `DraftHead.states` and of the output layer, step by step: float32 weights are packed on the
CPU, the cache is preallocated, and the output layer has only the rows of the reduced vocabulary. For a plain draft head
it is a :class:`sampling.types.Network`; sessions of GLIDE and EAGLE heads pass in what these read of their target.
Knows no sessions, no distributions and no gradients; of the `DraftHead` it keeps the embedding and small parts.

Shapes: B rows, T new tokens, S slots, H the draft head's width, G the target's, n ids in the reduced vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.drafters.draft_heads.modules import CrossAttention, DraftHead, Rotary, recency_bias
from sampling.models.cache import SlotCache
from sampling.models.causal import CausalLM
from sampling.models.llama import LlamaLayer, Map, angles_of, as_it_is, causal_bias, latest, norm_of, rotate
from sampling.types import Hidden, KVCache
from utils.kernels.bindings import GROUP, at_hand
from utils.kernels.quantized_linear import PackedWeight, QuantizedLinear, fits, packable

TABLE = 1024  # positions by which a table of angles grows


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """The part of the target's cache that a pass of a GLIDE head may see.

    `kv`: K and V [B, H_kv, S, D] for each layer, rotated, views of the target's cache; `bias` [B, 1, T, S] additive,
    None = everything; `blind` [B, T, 1] bool: queries without a single key, None = no such query.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None
    blind: Tensor | None = None


class Angles:
    """cos and signed sin [B, T, 1, D] of positions, as `rotate` takes them, looked up in a table that grows."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary, self._table = rotary, torch.empty(0)

    def __call__(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        if positions.device.type != "cpu":  # where the host would have to wait for the highest position
            cos, sin = angles_of(self._rotary, positions).to(like)[:, :, None].chunk(2, dim=-1)
            return cos, sin
        highest, table = int(positions.max()), self._table
        if highest >= len(table) or table.dtype != like.dtype or table.device != like.device:
            table = self._table = angles_of(self._rotary, torch.arange((highest // TABLE + 1) * TABLE)).to(like)
        cos, sin = F.embedding(positions, table)[:, :, None].chunk(2, dim=-1)
        return cos, sin


class Cross:
    """The cross-attention of a module over the target's keys and values, with the residual; its linear maps are as
    `take` makes them."""

    def __init__(self, module: CrossAttention, take: Callable[[Any], nn.Module], window: int) -> None:
        self.q, self.o = take(module.q_proj), take(module.o_proj)
        self.size, self.scale, self.window = module.head_dim, module.scaling, window
        self.slopes = module.recency  # [heads]

    def read(self, x: Tensor, turning: tuple[Tensor, Tensor], seen: SeenKeys, index: int, positions: Tensor) -> Tensor:
        """Return x + attention over the target's keys of layer `index`, [B, T, H] both; positions [B, T]."""
        rows, new, _ = x.shape
        query = rotate(self.q(x).view(rows, new, -1, self.size), turning).transpose(1, 2)
        (keys, values), bias = seen.kv[index], seen.bias
        if self.slopes is not None:
            late = recency_bias(self.slopes, positions, keys.shape[2])
            bias = late if bias is None else (bias + late).clamp_min(torch.finfo(late.dtype).min)
        if self.window and rows == 1 and keys.shape[2] >= self.window + new:  # the last slots of one row are the latest
            keys, values, bias = latest(self.window + new - 1, keys, values, bias)
        keys, values = keys.to(x), values.to(x)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=self.scale, enable_gqa=True)
        read = x + self.o(mixed.transpose(1, 2).reshape(rows, new, -1))
        return read if seen.blind is None else torch.where(seen.blind, x, read)


class StudentNetwork:
    """A draft head as a function of new tokens and a `SlotCache`.

    Of float32 weights on the CPU, the linear layers are packed copies: the caller may release the draft
    head, and later changes of its weights have no effect. If `student.rounded` they have 8 bits, or 4 where the whole
    pass is one compiled call: drafts are as good (docs/notes/passes.md). Otherwise the draft head's own modules are
    used, on any device. The embedding is never copied: it may be the target's.
    """

    ragged = None

    def __init__(self, student: DraftHead) -> None:
        config, trunk = student.config, cast(Any, student.model)
        like, head = next(trunk.layers.parameters()), student.lm_head
        packs = at_hand() and like.dtype == torch.float32 and (packable(head) or isinstance(head, QuantizedLinear))
        pack = _rounded if student.rounded else _packed
        take = pack if packs else as_it_is
        self.kind, self.window, self.layers = config.kind, config.window, config.num_hidden_layers
        self.vocab_size, self.context = config.vocab_size, config.max_position_embeddings
        self._embed = trunk.embed_tokens
        if config.kind == "peagle":
            self.mask_hidden = trunk.mask_hidden[0, 0]  # [K·G] replaces the target's states after the last token
        self.device, self.dtype = like.device, like.dtype
        self.takes_trees = not self.window  # in a window sibling nodes of a tree would count as earlier positions
        # The reduced vocabulary [n] long, ascending, in the order of the head's rows; None: all ids.
        self.reduced_ids = student.ids.to(self.device) if config.short_list else None
        self.compiled: Any = None  # the whole pass as one compiled call; the parts below are not built then
        if take is _rounded and _compilable(student):
            from sampling.drafters.draft_heads.compiled_step import CompiledStep

            self.compiled = CompiledStep(student, cast(Any, partial(_rounded, kind="q4")))
            return
        self._take, self._frozen = take, packs
        self._from, self._wide = int(config.is_eagle), config.wide  # an EAGLE head's text begins with token 1
        self._layers = [
            LlamaLayer.of(layer, take, config.window, layer.entered if layer.joins else None, self._from)
            for layer in trunk.layers
        ]
        norms: list[Map] = [norm_of(trunk.norm, packs), nn.Identity()]
        self._norm, self._leave = reversed(norms) if config.norm_output else norms
        self._head = take(head)
        self._angles = self._cross_angles = Angles(student.rotary)
        self._cross = [Cross(layer.cross_attn, take, config.window) for layer in trunk.layers if config.kind == "glide"]
        if student.cross_rotary is not None and not student.rotary.equals(student.cross_rotary):
            self._cross_angles = Angles(student.cross_rotary)
        if config.kind == "feature":
            self._embed_norm, self._feature_norm, self._own_norm = (
                norm_of(norm, packs) for norm in (trunk.embed_norm, trunk.feature_norm, trunk.state_norm)
            )
            self._join_embed, self._join_feature, self._join_own = map(
                take, (trunk.join_embed, trunk.join_feature, trunk.join_state)
            )
        if config.is_eagle:
            self._fc, self._features = take(trunk.fc), trunk.normed

    def new_cache(self, rows: int) -> KVCache:
        """Return an empty cache; the first tokens fed set its number of rows."""
        return SlotCache(self.layers) if self.compiled is None else cast(KVCache, self.compiled.new_cache())

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`; logits [B, keep, n] of the reduced vocabulary alone.

        A GLIDE head then runs without its target's cache, as a plain one; ValueError for an EAGLE head, which cannot.
        """
        if self.kind == "feature" or self._from:
            raise ValueError("an EAGLE head needs its target's states: open it with FeatureLM")
        return self.answer(self.run(self.embed(ids), positions, mask, cache), keep, bool(hidden))

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [B, T] long → [B, T, H]."""
        return cast(Tensor, self._embed(ids))

    def join_none(self, embedded: Tensor) -> Tensor:
        """Return an EAGLE head's input at position 0, which has no state before it: [B, T, H]; EAGLE-3's [B, T, 2H]."""
        if self._from:  # no later position attends to it
            return self._paired(embedded, torch.zeros_like(embedded))
        return cast(Tensor, self._join_embed(self._embed_norm(embedded)))

    def join_target(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return an EAGLE head's input where the target's state one position before is known: from tokens [B, T, H] and
        states [B, T, G]."""
        if self._from:
            features = features.to(embedded)  # EAGLE-1 takes them as they are
            return self._paired(embedded, self._fc(self._features(features)) if self._wide else features)
        return cast(Tensor, self._join_feature(self._feature_norm(features.to(embedded)))) + self.join_none(embedded)

    def join_own(self, embedded: Tensor, own: Tensor) -> Tensor:
        """Return an EAGLE head's input where its own state, the output of `run`, replaces the target's: from tokens and
        states [B, T, H]."""
        if self._from:
            return self._paired(embedded, own)
        return cast(Tensor, self._join_own(self._own_norm(own))) + self.join_none(embedded)

    def _paired(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the input of an EAGLE head's first layer: [B, T, 2H] of EAGLE-3, else [B, T, H]."""
        both = torch.cat((embedded, state), dim=-1)
        return both if self._wide else cast(Tensor, self._fc(both))

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        seen: SeenKeys | None = None,
        turned: Tensor | None = None,
    ) -> Tensor:
        """Run x [B, T, H] (of EAGLE-3 [B, T, 2H]) at positions [B, T] through all layers → own states [B, T, H], normed
        only if the configuration has `norm_output`.

        mask as in :class:`sampling.types.Network`; `seen` is the part of its target that a GLIDE head sees, None =
        nothing; `turned` [B, T] are the positions of the rotation, where these differ.
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
        """Return the mask of ragged rows; it also hides the cached slots outside each row's window."""
        if not self.window or len(mask) == 1:
            return mask
        first = positions[:, -1] + 2 - self.window - fed_columns(mask, positions)
        far = torch.arange(mask.shape[-1], device=mask.device) < first.clamp(max=cached)[:, None]
        return mask.masked_fill(far[:, None, None], torch.finfo(mask.dtype).min)

    def answer(self, own: Tensor, keep: int, hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """Map own states [B, T, H] to logits [B, keep, n] of the last `keep`; if `hidden`, with the head's input."""
        x = self._norm(own if hidden else own[:, own.shape[1] - keep :])
        return cast(Tensor, self._head(x[:, x.shape[1] - keep :])), x if hidden else None


def _compilable(student: DraftHead) -> bool:
    """Return whether the pass of this rounded head can be one compiled call: a feature head of the usual shape."""
    config = student.config
    sizes = (config.hidden_size, config.large_hidden_size, config.intermediate_size, config.head_dim)
    return (
        config.kind == "feature"
        and config.final_norm
        and not (config.norm_output or config.qk_norm or config.attention_bias)
        and student.lm_head.weight.dtype == torch.float32
        and not any(size % GROUP for size in sizes)
        and fits(student.lm_head.weight)
    )


def _without_first(bias: Tensor | None, positions: Tensor) -> Tensor | None:
    """Hide new tokens at position 0 from all others in the mask [.., T, S+T]: there is no state before them."""
    new = positions.shape[1]
    first = positions == 0
    if bias is None or (positions.device.type == "cpu" and not bool(first.any())):
        return bias
    hide = first[:, None, None] & ~torch.eye(new, dtype=torch.bool, device=first.device)
    late = bias[..., -new:].expand(len(first), -1, -1, -1).masked_fill(hide, torch.finfo(bias.dtype).min)
    return torch.cat((bias[..., :-new].expand(len(first), -1, -1, -1), late), dim=-1)


def fed_columns(mask: Tensor | None, positions: Tensor) -> Tensor:
    """Return [B]: the number of columns at positions [B, T] that are tokens, not padding."""
    new = positions.shape[1]
    return torch.full_like(positions[:, 0], new) if mask is None else (mask[:, 0, -1, -new:] == 0).sum(dim=-1)


def _packed(linear: Any) -> nn.Module:
    own_bits = isinstance(linear, QuantizedLinear)  # a file's
    return linear if own_bits else QuantizedLinear(PackedWeight.floats(linear.weight), linear.bias)


def _rounded(linear: Any, kind: str = "q8") -> nn.Module:
    if isinstance(linear, QuantizedLinear) or linear.bias is not None or not fits(linear.weight):
        return _packed(linear)
    return QuantizedLinear(PackedWeight.rounded(linear.weight, kind))


def plain_lm(student: DraftHead, name: str, vocab_size: int | None = None) -> CausalLM:
    """Return a plain draft head, a small model by itself, as an LM."""
    return CausalLM(StudentNetwork(student), name, vocab_size)
