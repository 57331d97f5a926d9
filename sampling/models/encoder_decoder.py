"""LM and Session over encoder-decoder models (T5 and the like), of any transformers model of that kind.

The encoder reads the prompt once. The rows hold the decoder's tokens, from its start token on, and their cache follows
by common prefix as a causal model's does. The loop calls `read` before the rows' first round, so that the time of the
encoder is counted; scoring calls it too. :class:`EncDecNetwork` is the model in two parts: the encoder, and the decoder
as a :class:`sampling.types.Network`. Knows no sampling and no text.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sampling.models.cache import CrossCache, EncodedSource, as_transformers_cache
from sampling.models.causal import CausalLM, CausalSession
from sampling.models.network import ModelNetwork
from sampling.models.probe import Exact, probe
from sampling.rows import padded, put
from sampling.types import LM, Hidden, KVCache, Rows, Session
from utils.errors import UserError, raise_first
from utils.loading.loaded import context_of
from utils.objects import HfModel

# Models whose decoder can be given positions: one relative bias, shared by all layers.
PLACEABLE = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")


def is_encoder_decoder(model: HfModel) -> bool:
    """Whether a transformers model reads its prompt with an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class EncDecNetwork(ModelNetwork):
    """A `…ForConditionalGeneration`. `context` bounds the prompt and the answer separately.

    Ragged rows and trees need positions that differ from the cache's slots; T5 and mT5 can be given them.
    """

    def __init__(self, model: HfModel, exact: Exact | None = None) -> None:
        config, decoder = model.config, model.config.get_text_config(decoder=True)
        super().__init__(model, config)
        self.context = context_of(decoder)
        self.layers: int = config.to_dict().get("num_decoder_layers") or decoder.num_hidden_layers
        self.exact = exact or (Exact() if type(model).__name__ in PLACEABLE else probe(model, EncDecNetwork))

    def new_cache(self, rows: int) -> CrossCache:
        """An empty cache; `encoded` is for the encoder's states."""
        return CrossCache(self.layers)

    def read(self, cache: CrossCache, prompt: Rows) -> int:
        """Encode the prompts into `cache` unless that is done; the number of tokens read in the longest one."""
        if cache.encoded is not None:
            return 0
        cache.encoded = self.encode(prompt)
        return max(map(len, prompt))

    @torch.no_grad()
    def encode(self, prompt: Rows) -> EncodedSource:
        """Run the encoder over ragged prompts, padded after their ends."""
        width, shortest = max(map(len, prompt)), min(map(len, prompt))
        ids = put(padded(prompt, 0), self.device).clamp(
            max=self.vocab_size - 1
        )  # an id that only the target has is read as the last one
        lengths = put(list(map(len, prompt)), self.device)
        mask = None if shortest == width else torch.arange(width, device=self.device) < lengths[:, None]
        states = self.model.get_encoder()(input_ids=ids, attention_mask=None if mask is None else mask.long())
        return EncodedSource(states.last_hidden_state, mask)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run as :class:`sampling.types.Network` says → logits [B, keep, V]; no hidden states.

        `cache.encoded` must be set. UserError for several rows of a model that decodes one at a time.
        """
        assert isinstance(cache, CrossCache)
        assert cache.encoded is not None
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        seen = cache.encoded.mask
        if len(ids) > 1 and not self.exact.batches:
            raise UserError(f"{type(self.model).__name__} decodes a single row at a time")
        encoded: Any = BaseModelOutput(cache.encoded.states)
        encoded.router_logits = None  # models with experts read it
        out = self.model(
            encoder_outputs=encoded,
            attention_mask=None if seen is None else seen.long(),
            decoder_input_ids=ids,
            decoder_attention_mask=None if mask is None else self._placed(mask, positions, cache.length),
            past_key_values=EncoderDecoderCache(as_transformers_cache(cache), cache.encoded.cross),
            use_cache=True,
        )
        return out.logits[:, -keep:], None

    def _placed(self, mask: Tensor, positions: Tensor, cached: int) -> Tensor:
        """Return the mask [B, 1, T, S+T] as [B, H, T, S+T], corrected for the model's position bias.

        The model adds the bias of slots, not of positions, to the mask, so the mask holds the difference.
        """
        if (name := self.check_maskable()) not in PLACEABLE:
            raise UserError(
                f"{name} takes no positions for its decoder; ragged rows cannot be placed: decode one by one"
            )
        attention = self.model.get_decoder().block[0].layer[0].SelfAttention
        rows, new = positions.shape
        keys = torch.cat([torch.arange(cached, device=positions.device).expand(rows, -1), positions], dim=1)
        bucket = attention._relative_position_bucket(
            keys[:, None] - positions[..., None],
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        right = attention.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        by_slot = attention.compute_bias(new, cached + new, device=positions.device, past_seen_tokens=cached)
        return mask + cast(Tensor, right - by_slot).to(mask).masked_fill(mask < 0, 0.0)


def lm_of(model: HfModel, name: str = "target", vocab_size: int | None = None) -> CausalLM:
    """The LM for a transformers model of either kind (or for a :class:`sampling.types.Network`)."""
    return (EncDecLM if is_encoder_decoder(model) else CausalLM)(model, name, vocab_size)


def check_same_kind(models: list[LM]) -> None:
    """UserError if only some of these LMs read the prompt with an encoder: their rows differ."""
    kinds = {model.encodes: model.name for model in reversed(models)}
    if len(kinds) == 2:
        raise UserError(
            f"{kinds[True]} is an encoder-decoder model and {kinds[False]} is none: they cannot draft for each other"
        )


def go_on(session: Session, begun: Sequence[int]) -> Session:
    """Return a `session` of one prompt whose row begins with `begun`, ids of the answer that are already known."""
    if begun:
        assert isinstance(session, EncDecSession)
        session.initial = [[*row, *begun] for row in session.initial]
    return session


class EncDecLM(CausalLM):
    """An encoder-decoder model by name.

    Args:
        model: a transformers encoder-decoder model. `vocab_size` as in :class:`CausalLM`.

    Raises:
        UserError: a model that has no encoder, or names no token for its decoder to start from.
    """

    encodes = True

    def __init__(self, model: HfModel, name: str = "target", vocab_size: int | None = None) -> None:
        if not is_encoder_decoder(model):
            raise UserError(f"{name} must be an encoder-decoder model, got {type(model).__name__}")
        super().__init__(EncDecNetwork(model), name, vocab_size)
        self.start_id = decoder_start_id(model)
        forced = getattr(getattr(model, "generation_config", None), "forced_bos_token_id", None)  # a language, say
        self.begin = [self.start_id] if forced is None else [self.start_id, int(forced)]

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> "EncDecSession":
        """A session for `prompt`, which may be as long as `context`; encodes nothing yet.

        It takes over the cache and the encoder's states of `previous` if that was opened for the same prompt.
        UserError for a prompt beyond `context`, and if hidden states are wanted.
        """
        self.check(prompt, target)
        longest = max(map(len, prompt))
        cases = {
            f"{self.name} is an encoder-decoder model: it has no hidden states for a drafter to read": hidden,
            f"the prompt is {longest} tokens, the encoder of {self.name} takes {self.context}": longest > self.context,
        }
        raise_first(cases, UserError)
        initial = [list(self.begin) for _ in prompt]
        if isinstance(previous, EncDecSession) and previous.source == prompt and previous.network is self.network:
            return self.beside(previous.again(initial), target)
        return self.beside(EncDecSession(self.network, prompt, initial, self.vocab_size), target)


class EncDecSession(CausalSession):
    """B rows of one encoder-decoder model; a :class:`sampling.types.Session`.

    `source` [B] are the prompts, which the encoder reads; the rows begin with `initial`: the decoder's start and the
    tokens that the model's configuration forces there, which are not part of the answer.
    """

    described = "an encoder-decoder model"
    network: EncDecNetwork
    source: Rows
    _cache: CrossCache = CrossCache(0)  # before the first reset

    def __init__(self, network: Any, source: Rows, initial: Rows, vocab_size: int) -> None:
        self.source = source
        super().__init__(network, initial, vocab_size, hidden=False)

    def read(self) -> int:
        """Run the encoder if it has not run; the number of tokens read in the longest prompt, else 0."""
        return self.network.read(self._cache, self.source)

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        self.read()
        return super()._run(ids, positions, mask, keep)

    def _reset(self, rows: int) -> None:
        """An empty cache; the encoder's states stay."""
        known = self._cache.encoded
        super()._reset(rows)
        self._cache.encoded = known and EncodedSource(known.states, known.mask)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.source = [self.source[row] for row in rows.tolist()]

    kv, hidden = Session.kv, Session.hidden


def decoder_start_id(model: HfModel) -> int:
    """Return the token that the decoder starts from; UserError if the model names none."""
    for config in (getattr(model, "generation_config", None), model.config):
        if (start := getattr(config, "decoder_start_token_id", None)) is not None:
            return int(start)
    raise UserError(f"{type(model).__name__} names no decoder_start_token_id: its decoder cannot start")
