"""Positions that turn by the length of the text: which table of rotary frequencies a row's passes take.

LongRoPE has two tables, for texts within the original context and for longer ones. Keys turned by one do not fit the
other, so the text is read again at the limit, and no draft crosses it. Dynamic scaling has a table for every length
beyond the limit and keeps each token as it was turned when it was read: there a pass adds one token, as in plain
decoding, and nothing is drafted. A prompt is read with the table of its whole length. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError
from utils.families import is_fixed
from utils.loading.loaded import context_of


class LengthTables:
    """The tables of a transformers model whose rotary module looks at the length of the text.

    :meth:`set` gives the module its table for one pass and restores it afterwards.
    """

    def __init__(self, model: Any, config: Any) -> None:
        rope = config.rope_parameters
        self.dynamic = rope["rope_type"] == "dynamic"
        self.limit = int(config.max_position_embeddings if self.dynamic else rope["original_max_position_embeddings"])
        kinds = [part for part in model.modules() if getattr(part, "rope_type", None) == rope["rope_type"]]
        self._parts = [part for part in kinds if self._is_known(part)]
        self.context = context_of(config) if self._parts else self.limit  # unknown modules choose their tables

    def table(self, length: int) -> int:
        """The number of the table for texts of `length` tokens; 0 is the first."""
        if length <= self.limit:
            return 0
        return length if self.dynamic else 1

    def draftable(self, length: int) -> int | None:
        """The most tokens of a draft after `length` tokens; None: any number."""
        return max(0, self.limit - length) if self.dynamic or length <= self.limit else None

    @contextmanager
    def set(self, lengths: Sequence[int]) -> Iterator[None]:
        """Turn row b by the table for lengths[b]."""
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

    def _is_known(self, part: Any) -> bool:
        """Whether a module uses a table that is set on it, and begins with the rule's first table."""
        if not hasattr(part, "original_inv_freq") or hasattr(part, "rope_init_fn"):
            return False
        return torch.equal(self._of(part, self.limit)[0], part.original_inv_freq)

    @staticmethod
    def _of(part: Any, length: int) -> tuple[Tensor, float]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequency, scaling = ROPE_INIT_FUNCTIONS[part.rope_type](part.config, part.inv_freq.device, length)
        return frequency.to(part.inv_freq.dtype), scaling


def length_tables(model: Any, config: Any) -> LengthTables | None:
    """The tables of a model that has several; None for others. UserError if its kinds of layer have different ones."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(inner, Mapping) and not is_fixed(inner) for inner in rope.values()):
        raise UserError(
            f"{type(model).__name__} turns positions by the length of the text, by another rule in each kind of layer: "
            "such models are not supported"
        )
    return None if is_fixed(rope) else LengthTables(model, config)
