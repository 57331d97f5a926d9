"""Any encoder-decoder transformers model in two parts: the encoder, run once over the prompts, and the decoder as a
:class:`sampling.types.Network`: new tokens and a cache in, logits of the last columns out.

Knows no sessions, no sampling and no text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sampling.cache import CrossCache, Encoded, as_encoder_decoder_cache
from sampling.network import ModelNetwork
from sampling.types import KVCache, Rows
from utils.errors import UserError

NO_LIMIT = 1 << 30  # relative positions have no end
PLACEABLE = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")  # one relative bias, shared by all layers


def is_encoder_decoder(model: Any) -> bool:
    """Whether a transformers model reads its prompt with an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class EncDecNetwork(ModelNetwork):
    """Wraps a `…ForConditionalGeneration`. `context` bounds the prompt and the answer, each by itself.

    Ragged rows and trees need positions that differ from the cache's slots; T5 and mT5 can be given them.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        super().__init__(model, config)
        self.context: int = getattr(config, "max_position_embeddings", None) or NO_LIMIT
        counts = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
        self.layers: int = next(filter(None, counts), None) or config.num_hidden_layers

    def new_cache(self, rows: int) -> CrossCache:
        """An empty cache; what the encoder makes of the prompts goes into its `encoded`."""
        return CrossCache(self.layers)

    def read(self, cache: CrossCache, prompt: Rows) -> int:
        """Put what the encoder makes of the prompts into `cache`, if nothing is there; how many tokens it read."""
        if cache.encoded is not None:
            return 0
        cache.encoded = self.encode(prompt)
        return max(map(len, prompt))

    @torch.no_grad()
    def encode(self, prompt: Rows) -> Encoded:
        """The encoder's pass over ragged prompts, padded behind their ends."""
        width = max(map(len, prompt))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in prompt], device=self.device)
        lengths = torch.tensor([len(row) for row in prompt], device=self.device)
        mask = None if int(lengths.min()) == width else torch.arange(width, device=self.device) < lengths[:, None]
        states = self.model.get_encoder()(input_ids=ids, attention_mask=None if mask is None else mask.long())
        return Encoded(states.last_hidden_state, mask)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`; there are no hidden states to be had. `cache.encoded` must be there."""
        assert isinstance(cache, CrossCache)
        assert cache.encoded is not None
        seen = cache.encoded.mask
        out = self.model(
            encoder_outputs=(cache.encoded.states,),
            attention_mask=None if seen is None else seen.long(),
            decoder_input_ids=ids,
            decoder_attention_mask=None if mask is None else self._placed(mask, positions, cache.length),
            past_key_values=as_encoder_decoder_cache(cache),
            use_cache=True,
        )
        return out.logits[:, -keep:], None

    def _placed(self, mask: Tensor, positions: Tensor, cached: int) -> Tensor:
        """The mask [B, 1, T, S+T] → [B, H, T, S+T], with what the model's own bias gets wrong made good.

        The model takes slots for positions. Its bias is added to the mask, so the mask holds the difference.
        """
        self._check_placeable()
        attention = self.model.get_decoder().block[0].layer[0].SelfAttention
        rows, new = positions.shape
        slots = torch.arange(cached, device=positions.device).expand(rows, -1)
        keys = torch.cat([slots, positions], dim=1)
        bucket = attention._relative_position_bucket(
            keys[:, None] - positions[..., None],
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        right = attention.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        by_slot = attention.compute_bias(new, cached + new, device=positions.device, past_seen_tokens=cached)
        biased: Tensor = mask + (right - by_slot).to(mask).masked_fill(mask < 0, 0.0)
        return biased

    @property
    def takes_trees(self) -> bool:
        """Whether a draft may be a tree."""
        return self.maskable and type(self.model).__name__ in PLACEABLE

    def _check_placeable(self) -> None:
        name = self.check_maskable()
        if name not in PLACEABLE:
            raise UserError(
                f"{name} takes no positions for its decoder; ragged rows cannot be placed: decode one by one"
            )
