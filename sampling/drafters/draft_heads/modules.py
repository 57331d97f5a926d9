"""Small drafter networks that learn from one target: plain, GLIDE, feature, EAGLE and block heads, with their layers.

* plain: a Llama of few layers.
* glide: between self-attention and MLP each layer reads the target's own keys and values
  (arXiv 2402.02082; no norm before it, and only the q and o projections are the head's).
* feature: each token enters together with the target's last hidden state one position before; where
  there is none yet, the drafter's own state stands in (EAGLE, arXiv 2401.15077).
* eagle: EAGLE heads as their authors publish them: EAGLE-3 (arXiv 2503.01840), which reads several of the target's
  states, and EAGLE-1 and 2 (parameters only: they draft and are not trained).
* peagle, dflash, jetspec, dflare, domino, dspark, dflash2: heads that draft a block in one pass (dflash.py).

The head may cover a reduced vocabulary only. Parameter names follow the published GLIDE checkpoints.
Knows whole sequences: no cache, no sessions (sampling/drafters/draft_heads/network.py), no loss (training/).
Shapes: B sequences, T tokens, H the draft head's width, G the target's width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.drafters.draft_heads.config import BlockConfig, DraftHeadConfig
from utils.errors import UserError

# GLIDE: the target's keys and values [B, H_kv, S, D], the rotation of the queries, which keys [T, S] they see.
CrossInputs = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]
NONE, THEIRS, OWN = range(3)  # the state one position before a token: none, the target's, the head's own


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, or over each of its `parts` of `size` numbers by itself."""

    def __init__(self, size: int, eps: float, parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parts * size))
        self.variance_epsilon, self.parts = eps, parts

    def forward(self, x: Tensor) -> Tensor:
        parts, size = x.float().unflatten(-1, (self.parts, -1)), len(self.weight) // self.parts
        return (F.rms_norm(parts, (size,), None, self.variance_epsilon).flatten(-2) * self.weight).to(x.dtype)


class Rotary(nn.Module):
    """cos and sin [B, T, D] of positions [B, T], from a base; `inv_freq` [D/2] may be replaced, and both scaled."""

    def __init__(self, size: int, theta: float, inv_freq: Tensor | None = None, scaling: float = 1.0) -> None:
        super().__init__()
        with torch.device("cpu"):  # also while the default device is meta
            inverse = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        self.register_buffer("inv_freq", inverse if inv_freq is None else inv_freq.detach().float(), persistent=False)
        self.attention_scaling = scaling

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[..., None].float() * cast(Tensor, self.inv_freq)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling

    def equals(self, other: "Rotary") -> bool:
        """Return whether both give the same rotation."""
        both = cast(Tensor, self.inv_freq), cast(Tensor, other.inv_freq)
        return torch.equal(*both) and self.attention_scaling == other.attention_scaling


def turned(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of heads [B, heads, T, D] by cos, sin [B, T, D]."""
    cos, sin = (part[:, None].to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_of(config: DraftHeadConfig) -> Rotary:
    """Return the head's own rotary module: of the base alone, or stretched as transformers does it."""
    if not config.rope:
        return Rotary(config.head_dim, config.rope_theta)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape: Any = LlamaConfig(
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        num_attention_heads=1,  # only head_dim counts; the width need not be a multiple of it
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **config.rope},
    )
    with torch.device("cpu"):  # also while the default device is meta
        inverse, scaling = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](shape, torch.device("cpu"))
    return Rotary(config.head_dim, config.rope_theta, inverse, float(scaling))


class SelfAttention(nn.Module):
    def __init__(self, config: DraftHeadConfig, width: int | None = None) -> None:
        super().__init__()
        size, heads, shared = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        width, bias = width or config.hidden_size, config.attention_bias
        self.head_dim, self.num_key_value_groups, self.scaling = size, heads // shared, size**-0.5
        self.q_proj = nn.Linear(width, heads * size, bias=bias)
        self.k_proj = nn.Linear(width, shared * size, bias=bias)
        self.v_proj = nn.Linear(width, shared * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=config.output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(size, config.rms_norm_eps) for _ in range(2))

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attend from x [B, T, H] to the keys and values of `earlier` steps, to which x's own are appended.

        mask: bool over the keys of all steps; or [T, S] over the S keys of step 0 alone: a query then sees one key of
        each later step, the one on its chain of drafts.
        """
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query = turned(self.q_norm(query) if self.qk_norm else query, rotation)
        earlier.append(self.remembered(x, rotation))
        (keys, values), *later = earlier
        if later and mask.shape[-1] == keys.shape[2]:
            mixed = self._along_lines(query, keys, values, mask, later)
        else:
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*earlier, strict=True))
            mixed = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=True
            )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def _along_lines(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, later: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attend to step 0 and to one key of each `later` step: query i of the last step to key i − (last − step).

        A mask over the keys of all steps would be as wide as these together, and nearly empty.
        """
        length, places = query.shape[2], torch.arange(query.shape[2], device=query.device)[:, None]
        query = query.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, heads / H_kv, T, D]
        scores, moved = [(query @ keys[:, :, None].mT).masked_fill(~mask, float("-inf"))], []
        for back, pair in enumerate(reversed(later)):
            key, value = (F.pad(part, (0, 0, back, 0))[:, :, None, :length] for part in pair)
            scores.append((query * key).sum(dim=-1, keepdim=True).masked_fill(places < back, float("-inf")))
            moved.append(value)
        weights = (torch.cat(scores, dim=-1) * self.scaling).softmax(dim=-1).to(values.dtype)
        mixed: Tensor = weights[..., :length] @ values[:, :, None]
        for column, value in enumerate(moved, length):
            mixed = mixed + weights[..., column, None] * value
        return mixed.flatten(1, 2)

    def remembered(self, x: Tensor, rotation: tuple[Tensor, Tensor], of: str = "proj") -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [B, heads, T, D] of x [B, T, H]; `of`: the maps, or DFlare's `proj_target`."""
        key, value = (
            getattr(self, f"{part}_{of}")(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in "kv"
        )
        return turned(self.k_norm(key) if self.qk_norm else key, rotation), value


class CrossAttention(nn.Module):
    """Attention over the target's cached keys and values; its queries are rotated as the target's are."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.head_dim, self.heads = config.large_head_dim, config.large_num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        # One slope a head: 4, 1, ¼, 0 in turn to start from, so that some heads see the latest key alone.
        slopes = torch.tensor([4.0, 1.0, 0.25, 0.0]).repeat(self.heads // 4 + 1)[: self.heads]
        self.recency = nn.Parameter(slopes) if config.recency else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, H] at positions 0 … T − 1; keys and values [B, H_kv, S, D]; mask bool [T, S]."""
        query = turned(self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2), rotation)
        if self.recency is not None:
            positions = torch.arange(mask.shape[-1], device=mask.device)
            late = recency_bias(self.recency, positions[None, : mask.shape[-2]], len(positions))
            mask = late.masked_fill(~mask, float("-inf")).to(query.dtype)
        mixed = F.scaled_dot_product_attention(
            query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


def recency_bias(slopes: Tensor, positions: Tensor, slots: int) -> Tensor:
    """Return the bias [B, heads, T, slots] that favours late keys, −slope · (position − slot), for queries at positions
    [B, T]."""
    return -slopes[:, None, None] * (positions[:, None, :, None] - torch.arange(slots, device=positions.device))


class Gated(nn.Module):
    """The SwiGLU block."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def block_mask(length: int, block: int, offset: int, device: torch.device) -> Tensor:
    """Return [T, T] bool: position i sees target key j iff j's block comes before i's; the first block is causal.

    Imitates the lag of 1 … block tokens at which drafting sees the target's cache; `offset` shifts the blocks.
    """
    positions = torch.arange(length, device=device)
    number = (positions + offset) // block
    return (number[None] < number[:, None]) | ((number == 0)[:, None] & (positions[None] <= positions[:, None]))


def lag_mask(length: int, lag: int, device: torch.device) -> Tensor:
    """Return [T, T] bool: query i sees key 0 and target keys j < i − lag, as drafts at depth lag + 1 do."""
    positions = torch.arange(length, device=device)
    return (positions[None] < positions[:, None] - lag) | (positions[None] == 0).expand(length, -1)


class Layer(nn.Module):
    """A decoder layer. `first`: it is the first one of an EAGLE head, which reads tokens and states."""

    def __init__(self, config: DraftHeadConfig, first: bool = False) -> None:
        super().__init__()
        normed, self.joins = config.wide or not first, first and config.wide
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()
        self.self_attn = SelfAttention(config, 2 * config.hidden_size if self.joins else None)
        if self.joins:
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.kind == "dflare":  # it maps the target's states by separate weights
            sizes = config.hidden_size, config.num_key_value_heads * config.head_dim
            for name in ("k_proj_target", "v_proj_target"):
                self.self_attn.add_module(name, nn.Linear(*sizes, bias=config.attention_bias))
        if config.kind == "glide":
            self.cross_attn = CrossAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Gated(config)
        if isinstance(config, BlockConfig) and config.taps:
            self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)

    def entered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention's input and the residual [B, T, H]: x, or the state where x is token and state side by side
        [B, T, 2H]."""
        if not self.joins:
            return self.input_layernorm(x), x
        token, state = x.chunk(2, dim=-1)
        normed = self.hidden_norm(state)
        return torch.cat((self.input_layernorm(token), normed), dim=-1), normed if self.norm_before_residual else state

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,
        earlier: list[tuple[Tensor, Tensor]],
        cross: CrossInputs | None = None,
    ) -> Tensor:
        """Run x [B, T, H] (where the layer `joins` [B, T, 2H]) → [B, T, H]; mask and `earlier` as in SelfAttention."""
        read, x = self.entered(x)
        x = x + self.self_attn(read, rotation, mask, earlier)
        if cross is not None:
            kv, turning, seen = cross
            x = x + self.cross_attn(x, turning, *kv, seen)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Convolution(nn.Module):
    """Mixes each row of a block with the `taps` − 1 rows before it; used before and after a sublayer.

    A coefficient is a parameter of its channel and, for `group` neighbouring channels, a map of the sublayer's input.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.taps, self.group, width = config.taps, config.group, config.hidden_size
        self.base_kernel = nn.Parameter(torch.zeros(2, config.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * config.taps * (width // config.group), bias=False)

    def coefficients(self, x: Tensor) -> Tensor:
        """Return [2, B, R, taps, H] of x [B, R, H]: the coefficients before the sublayer, and those after it."""
        own = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        return cast(Tensor, own + self.base_kernel).movedim(2, 0)

    def forward(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Mix the rows x [B, R, H] of whole blocks, each with the rows before it in its block."""
        shifted = [F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(self.taps)]
        return (torch.stack(shifted, dim=2) * coefficients).sum(dim=2)


class Markov(nn.Module):
    """DSpark's sequential head: a term of the token before for the logits of a position, of rank `rank`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, width = config.rank, config.hidden_size
        self.kind = config.markov
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.short_list or config.vocab_size, bias=False)
        if config.markov == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if config.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def step(self, previous: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return `markov_w2`'s input [M, r] and the next recurrent state of ids before [M], x [M, H], state [M, r]."""
        token = self.markov_w1(previous)
        if self.kind == "vanilla":
            return token, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((x, token), dim=-1))) * token, state
        gate, candidate, out = self.joint_proj(torch.cat((state, token, x), dim=-1)).chunk(3, dim=-1)
        return torch.tanh(out), torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))


class Selector(nn.Module):
    """DFlash2's scores of a position's candidates by the token before."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)

    def forward(self, previous: Tensor, x: Tensor, candidates: Tensor) -> Tensor:
        """Return the term of the candidates' logits [M, C] for ids before [M], states x [M, H], candidates [M, C]."""
        context = self.predecessor_codebook[previous] * self.hidden_projection(x)
        return cast(Tensor, (context[:, None] * self.successor_codebook[candidates]).sum(dim=-1))


class Trunk(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        large, count = config.large_hidden_size, len(config.reads) or 1
        if config.kind == "feature":
            self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.feature_norm = RMSNorm(large, config.rms_norm_eps, count)
            self.state_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.join_embed = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.join_feature = nn.Linear(count * large, config.hidden_size, bias=False)
            self.join_state = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if isinstance(config, BlockConfig):
            self._add_block_parts(config)
        if config.is_eagle:
            read = count * large if config.wide else config.hidden_size + count * large
            self.fc = nn.Linear(read, config.hidden_size, bias=config.fc_bias)
            if config.norm_before_fc:
                self.input_norm = RMSNorm(count * large, config.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(RMSNorm(large, config.rms_norm_eps) for _ in config.reads)
        self.layers = nn.ModuleList(
            Layer(config, first=config.is_eagle and not index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.final_norm else nn.Identity()

    def _add_block_parts(self, config: BlockConfig) -> None:
        count = len(config.reads) * config.large_hidden_size
        if config.kind == "peagle":
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, count))
            return
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.kind == "dflare":
            self.layer_fusion_weights = nn.Parameter(torch.zeros(config.num_hidden_layers, len(config.reads)))
        else:
            self.fc = nn.Linear(count, config.hidden_size, bias=False)
        if config.markov:
            self.markov_head = Markov(config)
        if config.confidence:  # DSpark's estimate, before a draft is drawn, of the chance that it is accepted
            read = config.hidden_size + config.rank * config.confidence_with_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1)})
        if config.memory:
            self.prefix_gru = nn.GRU(config.hidden_size, config.memory, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(config.hidden_size + config.memory, config.bottleneck, bias=False),
                nn.SiLU(),
                nn.Linear(config.bottleneck, config.short_list or config.vocab_size, bias=False),
            )
        if config.choices:
            self.candidate_selector = Selector(config)

    def normed(self, features: Tensor) -> Tensor:
        """Norm the target's states [B, T, K·G] as an EAGLE-3 head reads them: together, each, or not at all."""
        if hasattr(self, "input_norm"):
            features = self.input_norm(features)
        if hasattr(self, "fc_norm"):
            parts = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return features


class DraftHead(nn.Module):
    """A draft head's parameters and its pass over whole sequences.

    `reduced_ids` [N] long holds the ids of the head's rows, ascending; empty = all ids. `rounded`: while drafting its
    weights may be rounded (as :class:`sampling.drafters.draft_heads.network.StudentNetwork` has it); the target
    verifies its drafts. UserError unless there are as many ids as `config.short_list` says.
    """

    def __init__(self, config: DraftHeadConfig, reduced_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.rounded = config, False
        listed = 0 if reduced_ids is None else len(reduced_ids)
        if listed != config.short_list:
            raise UserError(f"the reduced vocabulary has {listed} ids, the configuration says {config.short_list}")
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.short_list or config.vocab_size, bias=False)
        self.adopt(reduced_ids)

    def adopt(self, reduced_ids: Tensor | None, target_rotary: nn.Module | None = None) -> None:
        """Set the non-parameters: the reduced vocabulary's ids [N] and, for glide, the target's rotary module."""
        config = self.config
        ids = torch.empty(0, dtype=torch.long) if reduced_ids is None else reduced_ids.long()
        self.register_buffer("reduced_ids", ids, persistent=False)
        self.rotary = rotary_of(config)
        self.cross_rotary: Rotary | None = None
        if config.kind == "glide":
            self.cross_rotary = Rotary(
                config.large_head_dim,
                config.rope_theta,
                getattr(target_rotary, "inv_freq", None),
                float(getattr(target_rotary, "attention_scaling", 1.0)),
            )

    @property
    def ids(self) -> Tensor:
        """Return the reduced vocabulary [N] long, in the order of the head's rows; empty = all ids."""
        return cast(Tensor, self.reduced_ids)

    def target_layers(self, count: int) -> list[int]:
        """Return which of the target's `count` layers each layer of a GLIDE head reads; [] for other heads."""
        return list(range(count - self.config.num_hidden_layers, count)) if self.config.kind == "glide" else []

    def states(
        self,
        ids: Tensor,
        hidden: Tensor | None = None,
        kv: list[tuple[Tensor, Tensor]] | None = None,
        offset: int = 0,
        steps: int = 1,
        lag: int | None = None,
    ) -> list[Tensor]:
        """Return the output layer's input [B, T, H] for each of `steps` drafted steps (1 but for EAGLE heads).

        Args:
            ids: [B, T] long, padded on the right.
            hidden: feature and EAGLE-3: the target's hidden states that it reads, concatenated [B, T, K·G].
            kv: glide: the target's keys and values of each layer read, [B, H_kv, T, D].
            offset: glide: start of the mask's first block, 0 … block_size − 1.
            lag: glide: instead of blocks, every position misses the last `lag` tokens, as the draft at that depth does.

        Raises UserError for EAGLE-1 and 2, which are not trained.
        """
        if self.config.kind == "eagle" and not self.config.wide:
            raise UserError("an EAGLE-1 or 2 head can draft, but not be trained")
        embedded = self.model.embed_tokens(ids)
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)[None]
        rotation = self.rotary(positions)
        crosses: list[CrossInputs | None] = [None] * len(self.model.layers)
        if self.cross_rotary is not None and kv is not None:
            block, turning = self.config.block_size, self.cross_rotary(positions)
            seen = block_mask(length, block, offset, ids.device) if lag is None else lag_mask(length, lag, ids.device)
            crosses = [(pair, turning, seen) for pair in kv]
        earlier: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.model.layers]
        outputs, own = [], None
        for step in range(steps):
            x = embedded if hidden is None else self._joined(embedded, hidden, own)
            # [T, T]: query i sees keys of step 0 up to i − step. A key of a later step k at position j is computed k
            # tokens after the last target state; while drafting only the query i = j + (step − k) sees it.
            mask = positions.T - positions >= step
            if self.config.kind == "eagle":
                mask[1:, 0] = False  # an EAGLE head's text begins with token 1: there is no state before token 0
            for layer, before, cross in zip(self.model.layers, earlier, crosses, strict=True):
                x = layer(x, rotation, mask, before, cross)
            outputs.append(self.model.norm(x))
            own = outputs[-1] if self.config.norm_output else x
        return outputs

    def blocks(self, ids: Tensor, read: Tensor, anchors: Tensor) -> Tensor:
        """Return a trainable block head's normed states [B, A, R, H] of the blocks after A tokens of each sequence.

        Args:
            ids: [B, T] long, padded on the right.
            read: the target's states that it reads, concatenated [B, T, K·G].
            anchors: [A] positions of the blocks' first rows; a block sees the states before its own.
        """
        config, trunk = cast(BlockConfig, self.config), self.model
        rows, length, count = config.mask_tokens + 1, ids.shape[1], len(anchors)
        entered = ids.new_full((len(ids), count, rows), config.mask)
        entered[:, :, 0] = ids[:, anchors]
        x = trunk.embed_tokens(entered).flatten(1, 2)
        if config.kind == "dflare":
            states, shares = read.to(x.dtype).unflatten(-1, (len(config.reads), -1)), trunk.layer_fusion_weights
            contexts, of = torch.einsum("btkg,lk->lbtg", states, shares.softmax(dim=1)), "proj_target"
        else:
            contexts, of = trunk.fc(read.to(x.dtype)).expand(len(trunk.layers), -1, -1, -1), "proj"
        slots = torch.arange(length, device=ids.device)
        block = torch.arange(count, device=ids.device).repeat_interleave(rows)
        mask = torch.cat((slots[None] < anchors[block][:, None], block[None] == block[:, None]), dim=1)
        positions = (anchors[:, None] + torch.arange(rows, device=ids.device)).flatten()
        rotation, before = self.rotary(positions[None]), self.rotary(slots[None])
        for index, layer in enumerate(trunk.layers):
            own = cast(Layer, layer)
            context = own.self_attn.remembered(trunk.hidden_norm(contexts[index]), before, of)
            x = own(x, rotation, mask, [context])
        return cast(Tensor, trunk.norm(x).unflatten(1, (count, rows)))

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Map states [M, H] to logits [M, n]; a Markov head without memory adds a term of the token before each [M]."""
        logits = self.lm_head(states)
        if hasattr(self.model, "markov_head"):
            latent, _ = self.model.markov_head.step(before, states, states[:, :0])
            logits = logits + self.model.markov_head.markov_w2(latent)
        return cast(Tensor, logits)

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the logit [M] of the chance that the draft after `before` [M], of states [M, H], is accepted."""
        if cast(BlockConfig, self.config).confidence_with_markov and hasattr(self.model, "markov_head"):
            states = torch.cat((states, self.model.markov_head.markov_w1(before)), dim=-1)
        return cast(Tensor, self.model.confidence_head["proj"](states)[:, 0])

    def _joined(self, embedded: Tensor, hidden: Tensor, own: Tensor | None) -> Tensor:
        """Join tokens with the state one position before: the target's, or after the first step the head's own."""
        trunk = self.model
        if self.config.kind == "eagle":
            state = trunk.fc(trunk.normed(hidden.to(embedded.dtype))) if own is None else own
            return torch.cat((embedded, F.pad(state, (0, 0, 1, 0))[:, :-1]), dim=-1)
        state = (
            trunk.join_feature(trunk.feature_norm(hidden.to(embedded.dtype)))
            if own is None
            else trunk.join_state(trunk.state_norm(own))
        )
        return cast(Tensor, trunk.join_embed(trunk.embed_norm(embedded)) + F.pad(state, (0, 0, 1, 0))[:, :-1])
