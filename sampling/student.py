"""Small drafter networks that learn from one target: plain, GLIDE and feature, as trainable modules.

* plain: a Llama of few layers.
* glide: between self-attention and MLP each layer reads the target's own keys and values
  (arXiv 2402.02082; no norm before it, only q and o projections of its own).
* feature: each token enters together with the target's last hidden state one position before; where
  there is none yet, the drafter's own state stands in (EAGLE, arXiv 2401.15077).

The head may cover a short list of ids only. Parameter names follow the published GLIDE checkpoints.
Knows sequences in one piece: no cache, no sessions (sampling/student_network.py), no loss (training/).
Shapes: B sequences, T tokens, H the student's width, G the target's width.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.student_config import StudentConfig
from sampling.student_layers import (
    CrossAttention,
    Gated,
    RMSNorm,
    Rotary,
    SelfAttention,
    block_mask,
    lag_mask,
    step_mask,
)
from utils.errors import UserError


class Layer(nn.Module):
    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        if config.kind == "glide":
            self.cross_attn = CrossAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Gated(config)


class Trunk(nn.Module):
    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.kind == "feature":
            self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.feature_norm = RMSNorm(config.large_hidden_size, config.rms_norm_eps)
            self.state_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.join_embed = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.join_feature = nn.Linear(config.large_hidden_size, config.hidden_size, bias=False)
            self.join_state = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.project:
            self.project = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class Student(nn.Module):
    """A student's parameters and its pass over whole sequences.

    `short_list` [N] long holds the ids of the head's rows, ascending; empty = all ids. `rounded`: while drafting its
    products may be taken in bfloat16 (its weights come from 16 bit); drafts need no more, the target judges them.
    """

    def __init__(self, config: StudentConfig, short_list: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.rounded = config, False
        ids = torch.empty(0, dtype=torch.long) if short_list is None else short_list.long()
        if len(ids) != config.short_list:
            raise UserError(f"the short list has {len(ids)} ids, the configuration says {config.short_list}")
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.short_list or config.vocab_size, bias=False)
        self.adopt(ids)

    def adopt(self, short_list: Tensor | None, target_rotary: nn.Module | None = None) -> None:
        """Set what is no parameter: the short list's ids [N] and, for glide, the target's rotary module."""
        config = self.config
        ids = torch.empty(0, dtype=torch.long) if short_list is None else short_list.long()
        self.register_buffer("short_list", ids, persistent=False)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.cross_rotary: Rotary | None = None
        if config.kind == "glide":
            inverse = getattr(target_rotary, "inv_freq", None)
            self.cross_rotary = Rotary(config.large_head_dim, config.rope_theta, inverse)
            self.cross_rotary.attention_scaling = float(getattr(target_rotary, "attention_scaling", 1.0))

    @property
    def ids(self) -> Tensor:
        """The short list [N] long, the head's rows in order; empty = all ids."""
        return cast(Tensor, self.short_list)

    def target_layers(self, count: int) -> list[int]:
        """Which of the target's `count` layers each layer of a glide student reads; [] for the others."""
        if self.config.kind != "glide":
            return []
        own = self.config.num_hidden_layers
        return [count - 1 if self.config.cross_last else count - own + index for index in range(own)]

    def states(
        self,
        ids: Tensor,
        hidden: Tensor | None = None,
        kv: list[tuple[Tensor, Tensor]] | None = None,
        offset: int = 0,
        steps: int = 1,
        lag: int | None = None,
    ) -> list[Tensor]:
        """What the head is applied to, [B, T, H], for each of `steps` drafted steps (1 but for feature students).

        Args:
            ids: [B, T] long, padded on the right.
            hidden: feature: the target's last hidden states [B, T, G].
            kv: glide: the target's keys and values of each layer read, [B, H_kv, T, D].
            offset: glide: where the first block of the mask begins, 0 … block_size − 1.
            lag: glide: instead of blocks every position misses its last `lag` tokens, as the draft at that depth does.
        """
        embedded = self.model.embed_tokens(ids)
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)[None]
        rotation = self.rotary(positions)
        cross = None
        if self.cross_rotary is not None and kv is not None:
            block = self.config.block_size
            seen = block_mask(length, block, offset, ids.device) if lag is None else lag_mask(length, lag, ids.device)
            cross = (kv, self.cross_rotary(positions), seen)
        earlier: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.model.layers]
        found, own = [], None
        for step in range(steps):
            x = embedded if hidden is None else self._joined(embedded, hidden, own)
            mask = step_mask(length, step, ids.device)
            for index, layer in enumerate(self.model.layers):
                x = self._layer(cast(Layer, layer), index, x, rotation, mask, earlier[index], cross)
            own = x
            x = self.model.norm(x)
            found.append(self.model.project(x) if self.config.project else x)
        return found

    def _joined(self, embedded: Tensor, hidden: Tensor, own: Tensor | None) -> Tensor:
        """Token and state one position before: the target's, or after the first step the student's own."""
        trunk = self.model
        if own is None:
            state = trunk.join_feature(trunk.feature_norm(hidden.to(embedded.dtype)))
        else:
            state = trunk.join_state(trunk.state_norm(own))
        return cast(Tensor, trunk.join_embed(trunk.embed_norm(embedded)) + F.pad(state, (0, 0, 1, 0))[:, :-1])

    def _layer(
        self,
        layer: Layer,
        index: int,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,
        earlier: list[tuple[Tensor, Tensor]],
        cross: tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], Tensor] | None,
    ) -> Tensor:
        x = x + layer.self_attn(layer.input_layernorm(x), rotation, mask, earlier)
        if cross is not None:
            kv, turning, seen = cross
            x = x + layer.cross_attn(x, turning, *kv[index], seen)
        return cast(Tensor, x + layer.mlp(layer.post_attention_layernorm(x)))
