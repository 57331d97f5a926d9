"""Block verification: a drawn chain is judged as a whole (Sun et al., "Block Verification Accelerates Speculative
Decoding", arXiv 2403.10444, algorithm 2). Exact, and in the mean it accepts at least as many tokens as token by token.

r₀ = 1, rᵢ = min(1, rᵢ₋₁·p(xᵢ)/q(xᵢ)); for i < γ sᵢ = Σ(rᵢp − q)⁺ behind x₁…xᵢ and hᵢ = sᵢ/(sᵢ + 1 − rᵢ), h_γ = r_γ.
Accepted are the first n drafts, n the largest i with a coin of chance hᵢ that fell; behind them stands a draw from
norm((rₙp − q)⁺), behind all of them one from p. Knows laws and drafts only. Point masses gain nothing by it: there the
chance that i are accepted is ∏p(xⱼ) either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.types import Draft, Sampler
from sampling.verify import TINY, check_ratio, normal


def judged(law: Tensor, draft: Draft, keys: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Path [B, N] and own token [B] on the host, for N ≥ 1 drafts with laws; `law` [B, N+1, V] is the target's."""
    assert draft.probs is not None
    tokens, q = draft.tokens.to(law.device), draft.probs.to(law)
    rows, count = tokens.shape
    present = (tokens >= 0).cumprod(dim=1).bool()
    lengths = present.sum(dim=1)
    r = _carried(law, q, tokens, present)  # [B, N+1]
    left = (r[:, :-1, None] * law[:, :-1] - q).clamp_(min=0)  # what stands behind i drafts if the next is refused
    h = _chances(r, left.sum(dim=-1), lengths)
    fell = torch.zeros_like(present)
    open_ = present & (h > 0)
    if bool(open_.any()):
        fell[open_] = sampler.coin(h[open_])
    n = (fell * torch.arange(1, count + 1, device=law.device)).amax(dim=1)
    own_law = law[torch.arange(rows, device=law.device), n]
    short = n < lengths
    if bool(short.any()):
        own_law[short] = normal(left[short, n[short]], own_law[short])
    n = n.cpu()
    path = torch.where(torch.arange(count)[None] < n[:, None], torch.arange(count)[None], -1)
    return path, sampler.draw(own_law, keys + torch.stack([torch.zeros_like(n), n], dim=1)).cpu()


def _carried(law: Tensor, q: Tensor, tokens: Tensor, present: Tensor) -> Tensor:
    """rᵢ [B, N+1]; behind a chain's end it stays."""
    at = tokens.clamp(min=0)[..., None]
    ratio = (law[:, :-1].gather(2, at) / q.gather(2, at))[..., 0]
    check_ratio(ratio[present])
    found = [torch.ones_like(law[:, 0, 0])]
    for depth in range(tokens.shape[1]):
        found.append(torch.where(present[:, depth], (found[-1] * ratio[:, depth]).clamp(max=1), found[-1]))
    return torch.stack(found, dim=1)


def _chances(r: Tensor, s: Tensor, lengths: Tensor) -> Tensor:
    """hᵢ for i = 1 … N [B, N]: of the whole chain r itself, of a part of it s/(s + 1 − r)."""
    count = s.shape[1]
    inner, mass = r[:, 1:count], s[:, 1:]
    below = mass + 1 - inner
    part = torch.where(below > TINY, mass / below.clamp(min=TINY), 0.0)
    part = torch.cat([part, r[:, count:]], dim=1)
    last = torch.arange(1, count + 1, device=r.device)[None] == lengths[:, None]
    return torch.where(last, r[:, 1:], part)
