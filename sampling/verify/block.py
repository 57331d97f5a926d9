"""The numbers of block verification (Sun et al., arXiv 2403.10444, algorithm 2); sampling/verify/rules.py states it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.types import Draft
from sampling.verify.distributions import TINY, one_hot


def coin_keys(keys: Tensor, count: int) -> Tensor:
    """[B, N, 4] of the coin of each draft, from the keys [B, 2] of the first: row, position, the round's start, 0."""
    each = F.pad(torch.cat([keys, keys[:, 1:]], dim=1), (0, 1))[:, None].repeat(1, count, 1)
    each[..., 1] += torch.arange(count)
    return each


class Block(NamedTuple):
    """Of a chain [B, N]: which drafts are `present`, the `lengths` [B], rᵢ `r` [B, N+1], (rᵢp − q)⁺ `left` [B, N, V]
    and the chances `h` of the coins."""

    present: Tensor
    lengths: Tensor
    r: Tensor
    left: Tensor
    h: Tensor


def block_of(probs: Tensor, draft: Draft, tokens: Tensor) -> Block:
    """Return the numbers of a draft of `tokens` [B, N] under distributions [B, N+1, V]. ValueError for a tree."""
    if draft.parents is not None:
        raise ValueError("block verification judges chains; the draft is a tree")
    q = one_hot(tokens, probs) if draft.probs is None else draft.probs.to(probs)
    present = (tokens >= 0).cumprod(dim=1).bool()
    lengths = present.sum(dim=1)
    r = carried(probs, q, tokens, present)
    left = (r[:, :-1, None] * probs[:, :-1] - q).clamp_(min=0)
    return Block(present, lengths, r, left, acceptance(r, left.sum(dim=-1), lengths))


def carried(probs: Tensor, q: Tensor, tokens: Tensor, present: Tensor) -> Tensor:
    """rᵢ [B, N+1]; behind a chain's end it stays. NaN behind a draft that its own distribution gives no mass."""
    at = tokens.clamp(min=0)[..., None]
    ratio = (probs[:, :-1].gather(2, at) / q.gather(2, at))[..., 0]
    found = [torch.ones_like(probs[:, 0, 0])]
    for depth in range(tokens.shape[1]):
        found.append(torch.where(present[:, depth], (found[-1] * ratio[:, depth]).clamp(max=1), found[-1]))
    return torch.stack(found, dim=1)


def acceptance(r: Tensor, s: Tensor, lengths: Tensor) -> Tensor:
    """hᵢ for i = 1 … N [B, N]: of the whole chain r itself, of a part of it s/(s + 1 − r)."""
    count = s.shape[1]
    inner, mass = r[:, 1:count], s[:, 1:]
    below = mass + 1 - inner
    part = torch.where(below > TINY, mass / below.clamp(min=TINY), 0.0)
    last = torch.arange(1, count + 1, device=r.device)[None] == lengths[:, None]
    return torch.where(last, r[:, 1:], torch.cat([part, r[:, count:]], dim=1))
