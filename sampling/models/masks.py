"""Positions and masks of fed tokens, for ragged rows and trees. Knows shapes only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sampling.types import Network, Rows, above

_OPEN, _SHUT = np.float32(0), np.finfo(np.float32).min


def ancestors(parents: Tensor | None, count: int) -> Tensor:
    """[N, N] bool: column j is node i itself or one of its ancestors."""
    if parents is None:
        return torch.ones(count, count, dtype=torch.bool).tril()
    seen = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def places(
    lengths: list[int], feed: Rows, parents: Tensor | None, start: int, width: int, count: int
) -> tuple[Tensor, Tensor]:
    """Positions [B, T] of the fed columns, and which slots each may see [B, T, S+T] bool.

    Columns: the missing committed tokens, padded on the left to `width`, then the nodes. A padding
    column sees itself alone; nobody sees it.
    """
    if len(feed) == 1 and lengths[0] == start:
        return _of_one_row(parents, start, width, count)
    before = torch.tensor(lengths)[:, None]
    pads = torch.tensor([width - len(new) for new in feed])[:, None]
    column = torch.arange(width)[None]
    seen = ancestors(parents, count)
    depth = seen.sum(dim=1) - 1 if count else torch.empty(0, dtype=torch.long)
    ends = torch.tensor([length + len(new) for length, new in zip(lengths, feed, strict=True)])[:, None]
    positions = torch.cat([(before + column - pads).clamp(min=0), ends + depth[None]], dim=1)
    mask = torch.zeros(len(feed), width + count, start + width + count, dtype=torch.bool)
    mask[:, :, :start] = (torch.arange(start)[None] < before)[:, None]
    real = column >= pads  # [B, width]
    mask[:, :width, start : start + width] = torch.ones(width, width, dtype=torch.bool).tril()[None] & real[:, None]
    mask[:, width:, start : start + width] = real[:, None]
    mask[:, width:, start + width :] = seen[None]
    mask[:, :width, :] &= real[..., None]
    mask |= torch.eye(width + count, start + width + count, dtype=torch.bool).roll(start, dims=1)[None]
    return positions, mask


def _of_one_row(parents: Tensor | None, start: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """`places` of one row, whose slots are its tokens; lists are faster than tensors of a few elements."""
    first = start + width
    mask = np.ones((width + count, first + count), dtype=bool)
    if width:
        mask[:width, start:] = np.tri(width, width + count, dtype=bool)
    positions, seen = list(range(start, first)), list[list[bool]]()
    for node, parent in enumerate(above(parents, count)):
        seen.append([False] * count if parent < 0 else seen[parent].copy())
        seen[node][node] = True
        positions.append(first if parent < 0 else positions[width + parent] + 1)
    mask[width:, first:] = seen
    return torch.tensor([positions]), torch.from_numpy(mask)[None]


def additive(mask: Tensor, network: Network) -> Tensor:
    """[B, T, S] bool → [B, 1, T, S] of 0 and the most negative number, in the model's dtype."""
    if network.device.type == "cpu" and network.dtype == torch.float32:
        return torch.from_numpy(np.where(mask.numpy(), _OPEN, _SHUT))[:, None]
    zeros = torch.zeros(mask.shape, dtype=network.dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(network.dtype).min)[:, None].to(network.device, non_blocking=True)
