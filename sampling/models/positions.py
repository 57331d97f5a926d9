"""Positions that turn by the length of the text: which table of rotary frequencies a row's passes take.

LongRoPE has two tables, for texts within the original context and for longer ones. What a table has turned is of no use
to the other, so at the crossing the text is read again, and no draft reaches across it. Dynamic scaling has a table for
every length beyond the limit, and keeps each token as it was turned when it was read: there a pass adds one token, as
plain decoding does, and nothing is drafted. A prompt is read with the table of its whole length. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError
from utils.loading.loaded import context_of
from utils.rotary import is_fixed


class LengthTables:
    """The tables of a transformers model whose rotary part looks at the length of the text.

    Its module is told which table to take for the time of a pass, and left as it was.
    """

    def __init__(self, model: Any, config: Any) -> None:
        rope = config.rope_parameters
        self.dynamic = rope["rope_type"] == "dynamic"
        self.limit = int(config.max_position_embeddings if self.dynamic else rope["original_max_position_embeddings"])
        kinds = [part for part in model.modules() if getattr(part, "rope_type", None) == rope["rope_type"]]
        self._parts = [part for part in kinds if self._is_known(part)]
        self.context = context_of(config) if self._parts else self.limit  # another part chooses its tables by itself

    def table(self, length: int) -> int:
        """The number of the table for texts of `length` tokens; 0 is the first."""
        if length <= self.limit:
            return 0
        return length if self.dynamic else 1

    def draftable(self, length: int) -> int | None:
        """How many tokens a draft behind `length` tokens may have; None: any number."""
        return max(0, self.limit - length) if self.dynamic or length <= self.limit else None

    @contextmanager
    def set(self, lengths: Sequence[int]) -> Iterator[None]:
        """Turn row b by the table for lengths[b]."""
        before = [(part.rope_type, part.inv_freq, part.attention_scaling) for part in self._parts]
        try:
            for part in self._parts:
                found = {length: self._of(part, length) for length in set(lengths)}
                rows = torch.stack([found[length][0] for length in lengths])[:, None]  # [B, 1, D/2]
                part.rope_type, part.inv_freq = "default", rows if len(found) > 1 else rows[0, 0]
                part.attention_scaling = found[lengths[0]][1]
            yield
        finally:
            for part, (kind, frequency, scaling) in zip(self._parts, before, strict=True):
                part.rope_type, part.inv_freq, part.attention_scaling = kind, frequency, scaling

    def _is_known(self, part: Any) -> bool:
        """Whether a module takes the table that it is given, and begins with the first of the rule's."""
        if not hasattr(part, "original_inv_freq") or hasattr(part, "rope_init_fn"):
            return False
        return torch.equal(self._of(part, self.limit)[0], part.original_inv_freq)

    @staticmethod
    def _of(part: Any, length: int) -> tuple[Tensor, float]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequency, scaling = ROPE_INIT_FUNCTIONS[part.rope_type](part.config, part.inv_freq.device, length)
        return frequency.to(part.inv_freq.dtype), scaling


def length_tables(model: Any, config: Any) -> LengthTables | None:
    """The tables of a model that has several; None for others. UserError where its layers have tables of their own."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(inner, Mapping) and not is_fixed(inner) for inner in rope.values()):
        raise UserError(
            f"{type(model).__name__} turns positions by the length of the text, by another rule in each kind of layer: "
            "such models are not supported"
        )
    return None if is_fixed(rope) else LengthTables(model, config)
