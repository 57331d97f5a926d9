"""Rotary positions: how fast each pair of a head's dimensions turns, by the rule that a configuration names.

Knows no models: the rules are functions of a configuration's `rope_parameters`, as transformers has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BY_LENGTH = ("dynamic", "longrope")  # rules that look at the length of the text
BLOCK = 128  # positions of a table that are computed together


def is_fixed(rope: Mapping[str, Any] | None) -> bool:
    """Return whether the frequencies are the same for texts of every length."""
    rope = rope or {}
    alike = "short_factor" in rope and rope["short_factor"] == rope["long_factor"]
    return alike or rope.get("rope_type") not in BY_LENGTH


def frequencies(rope: Mapping[str, Any], size: int) -> tuple[Tensor, float] | None:
    """Return radians a position [D/2] for heads of `size`, and the factor of cos and sin; None for a rule that looks at
    the length of the text, or an unknown one.

    Bit for bit those of transformers (modeling_rope_utils.py).
    """
    kind, period = rope.get("rope_type", "default"), rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    if kind == "default":
        return 1.0 / period, 1.0
    if kind == "linear":
        return 1.0 / period / rope["factor"], 1.0
    if kind == "longrope" and is_fixed(rope) and rope.get("attention_factor") is not None:
        return 1.0 / (torch.tensor(rope["short_factor"]) * period), rope["attention_factor"]
    return None


def rotation_of(module: Any, kind: str = "") -> tuple[Tensor, float]:
    """Return frequencies and factor of a transformers rotary module, for one kind of layers."""
    prefix = f"{kind}_" if kind else ""
    return getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")


def table(frequency: Tensor, scaling: float, first: int, last: int) -> Tensor:
    """cos and sin [n, D], halves side by side, of the positions from `first` to `last` or a few more.

    The blocks of positions are whole because torch rounds differently at the end of a tensor, and the bits must depend
    on the position alone.
    """
    blocks = []
    for start in range(first, last, BLOCK):
        angle = torch.arange(start, start + BLOCK)[:, None].float() * frequency
        blocks.append(torch.cat([angle.cos() * scaling, angle.sin() * scaling], dim=1))
    return torch.cat(blocks)
