"""Any causal transformers model as a :class:`sampling.types.Network`: new tokens and a cache in,
logits of the last columns out. Knows no sessions, no sampling and no text.

Rotary angles may depend on the length of the text: LongRoPE has two tables of rotary frequencies, for texts within the
original context and for longer ones. Keys rotated by one do not fit the other, so the text is read again at the limit,
and no draft crosses it. Dynamic scaling has a table for every length beyond the limit, and a key keeps the rotation
with which it was read: there a pass adds one token, as in plain decoding, and nothing is drafted. A prompt is read
with the table of its whole length.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from sampling.models.cache import SlotCache, as_transformers_cache, joined
from sampling.models.probe import Exact, probe, takes
from sampling.types import Hidden, KVCache, Network, states_of
from utils.device_map import main_device
from utils.errors import UserError
from utils.families import is_fixed
from utils.loading.loaded import context_of
from utils.objects import HfConfig, HfModel, Json

_MASKABLE = {"sdpa", "eager"}


class LengthTables:
    """The rotary tables of a transformers model whose rotary angles depend on the length of the text.

    :meth:`set` gives the module its table for one pass and restores it afterwards.
    """

    def __init__(self, model: HfModel, config: HfConfig) -> None:
        rope = config.rope_parameters
        self.dynamic = rope["rope_type"] == "dynamic"
        self.limit = int(config.max_position_embeddings if self.dynamic else rope["original_max_position_embeddings"])
        self._parts = [part for part in model.modules() if self._is_known(part, rope["rope_type"])]
        # A model without a known rotary module is used up to the limit: its modules choose tables by themselves.
        self.context = context_of(config) if self._parts else self.limit

    def table(self, length: int) -> int:
        """Return the number of the table for texts of `length` tokens; 0 is the first."""
        if length <= self.limit:
            return 0
        return length if self.dynamic else 1

    def draftable(self, length: int) -> int | None:
        """The most tokens of a draft after `length` tokens; None: any number."""
        return max(0, self.limit - length) if self.dynamic or length <= self.limit else None

    @contextmanager
    def set(self, lengths: Sequence[int]) -> Iterator[None]:
        """Rotate row b by the table for lengths[b]."""
        before = [(part.rope_type, part.inv_freq, part.attention_scaling) for part in self._parts]
        try:
            for part in self._parts:
                tables = {length: self._of(part, length) for length in set(lengths)}
                rows = torch.stack([tables[length][0] for length in lengths])[:, None]  # [B, 1, D/2]
                part.rope_type, part.inv_freq = "default", rows if len(tables) > 1 else rows[0, 0]
                part.attention_scaling = tables[lengths[0]][1]
            yield
        finally:
            for part, (kind, frequency, scaling) in zip(self._parts, before, strict=True):
                part.rope_type, part.inv_freq, part.attention_scaling = kind, frequency, scaling

    def _is_known(self, part: Any, kind: str) -> bool:
        """Whether a module has a rule of this kind, uses a table that is set on it, and begins with the first one."""
        return (
            getattr(part, "rope_type", None) == kind
            and hasattr(part, "original_inv_freq")
            and not hasattr(part, "rope_init_fn")
            and torch.equal(self._of(part, self.limit)[0], part.original_inv_freq)
        )

    @staticmethod
    def _of(part: Any, length: int) -> tuple[Tensor, float]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequency, scaling = ROPE_INIT_FUNCTIONS[part.rope_type](part.config, part.inv_freq.device, length)
        return frequency.to(part.inv_freq.dtype), scaling


def length_tables(model: HfModel, config: HfConfig) -> LengthTables | None:
    """Return the tables of a model that has several; None for others. UserError if its kinds of layer have different
    ones."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(inner, Mapping) and not is_fixed(inner) for inner in rope.values()):
        raise UserError(
            f"{type(model).__name__} turns positions by the length of the text, by another rule in each kind of layer: "
            "such models are not supported"
        )
    return None if is_fixed(rope) else LengthTables(model, config)


class ModelNetwork:
    """A transformers model's vocabulary, device and dtype, and whether it takes our masks."""

    reduced_ids = ragged = None
    exact: Exact  # the kinds of pass that are known to be right

    def __init__(self, model: HfModel, config: HfConfig) -> None:
        self.model, self.config = model, config
        head = model.get_output_embeddings()
        size = getattr(head, "out_features", None)  # a packed head would unpack its weight to show its shape
        self.vocab_size: int = head.weight.shape[0] if size is None else size

    @property
    def device(self) -> torch.device:
        """The device of its tokens and logits: the first of a model that is spread over several."""
        return main_device(self.model) or cast(torch.device, self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.model.dtype)

    @property
    def takes_trees(self) -> bool:
        """Whether a draft may be a tree of any size, at any length."""
        return self.config._attn_implementation in _MASKABLE and self.exact.masks and self.exact.slots is None

    def check_maskable(self) -> str:
        """The model's name; UserError if its attention takes no mask for ragged rows."""
        name, attention = type(self.model).__name__, self.config._attn_implementation
        if attention not in _MASKABLE:
            raise UserError(
                f"{name} runs with {attention} attention, which takes no 4-D mask; "
                "ragged rows and trees need sdpa or eager"
            )
        return name


class TransformersNetwork(ModelNetwork):
    """A `…ForCausalLM`. A model with recurrent layers decodes one row, and drafts for it are chains.

    Args:
        exact: the kinds of pass that are known to be right; None: try them on a small twin of the model.

    Raises:
        UserError: the model is an encoder-decoder, has a state that transformers' caches do not hold, or is wrong with
            a cache.
    """

    def __init__(self, model: HfModel, exact: Exact | None = None) -> None:
        name, config = type(model).__name__, model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise UserError(f"{name} is an encoder-decoder model: sampling.models.encoder_decoder decodes with it")
        from sampling.models.recurrent import RecurrentCache, keep_states, recurrent_layers

        self.recurrent = bool(recurrent_layers(config))
        if getattr(model, "_is_stateful", False) and not self.recurrent:
            raise UserError(f"{name} keeps a state outside transformers' caches, which cannot go back to a token")
        super().__init__(model, config)
        self.by_length = length_tables(model, config)
        self.context: int = context_of(config) if self.by_length is None else self.by_length.context
        self.layers: int = config.num_hidden_layers
        self._keeps, self._positions = takes(model, "logits_to_keep"), takes(model, "position_ids")
        self.exact = exact or probe(model, TransformersNetwork)
        self._cache_name = "past_key_values" if takes(model, "past_key_values") else "cache_params"
        if self.recurrent:
            cache, token = RecurrentCache(config), torch.zeros(1, 1, dtype=torch.long, device=self.device)
            keep_states(model, cache, lambda: self._run(token, cache, {}))

    def new_cache(self, rows: int) -> SlotCache:
        from sampling.models.recurrent import RecurrentCache

        return RecurrentCache(self.config) if self.recurrent else SlotCache(self.layers)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run as :class:`sampling.types.Network` says → logits [B, keep, V] and states [B, T, K·H], None if not wanted.

        UserError for several rows of a model that decodes one at a time.
        """
        assert isinstance(cache, SlotCache)
        extra: Json = {"logits_to_keep": keep} if self._keeps else {}
        extra |= {"position_ids": positions} if self._positions else {}
        if len(ids) > 1 and not self.exact.batches:
            raise UserError(f"{type(self.model).__name__} decodes a single row at a time")
        if mask is not None:
            self._check_mask(mask)
            extra["attention_mask"] = mask
        wanted = states_of(hidden)
        lengths = cache.lengths or [int(positions.max()) + 1] * len(ids)
        tables = nullcontext() if self.by_length is None else self.by_length.set(lengths)
        with tables, cache.reading(ids.shape[1], keep - 1, self.exact.singly):
            out = self._run(ids, cache, extra | {"output_hidden_states": bool(wanted)})
        return out.logits[:, -keep:], joined([out.hidden_states[state] for state in wanted]) if wanted else None

    def _run(self, ids: Tensor, cache: SlotCache, more: Json) -> Any:
        return self.model(input_ids=ids, use_cache=True, **{self._cache_name: as_transformers_cache(cache)}, **more)

    def _check_mask(self, mask: Tensor) -> None:
        name, slots = self.check_maskable(), self.exact.slots
        if not self.exact.masks:
            raise UserError(f"{name} is wrong with our masks and position_ids: ragged rows and trees are not supported")
        if slots is not None and mask.shape[-1] > slots:
            raise UserError(f"{name}: ragged rows beyond its window of {slots} tokens are not supported")


def network_of(model: HfModel) -> Network:
    """The fastest Network for `model`: itself if it is one, else a hand-written pass where one fits."""
    if hasattr(model, "new_cache"):
        return cast(Network, model)
    from sampling.models import fused, llama

    if fused.supports(model):
        return fused.FusedNetwork(model)
    if not llama.supports(model):
        return TransformersNetwork(model)
    capture = getattr(model, "capture", None)
    return llama.LlamaNetwork(model) if capture is None else llama.FixedNetwork(llama.LlamaNetwork(model), capture)
