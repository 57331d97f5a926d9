"""The only accept/reject code. Knows laws and drafts; no models, no caches, no text.

Theorem (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): if x ~ q is accepted
with probability min(1, p(x)/q(x)) and a refusal is answered by a draw from norm((p − q)⁺), the
token has law p. A point mass is lossless however it was chosen: draw t ~ p and accept iff t is x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.types import Draft, Rows, Sampler, Verdict

TINY = 1e-12  # a residual with less mass than this is rounding: draw from p


def verify(logits: Tensor, draft: Draft, rows: Rows, keys: Tensor, sampler: Sampler) -> Verdict:
    """Examine a draft token by token.

    Args:
        logits: [B, N+1, V] the verifier's, at the root and after each node.
        draft: N nodes, chains only; -1 nodes are absent and end their row's chain.
        rows: the committed tokens, B of them.
        keys: [B, 2] long on the host: row id and position of the first new token.
        sampler: law, draws and coins.

    Returns:
        The accepted nodes of each row and the verifier's own token behind them.
    """
    if draft.parents is not None:
        raise ValueError("this verifier examines chains; the draft is a tree")
    law = sampler.law(logits, prefixes_of(rows, draft) if sampler.needs_prefixes else [])
    count = draft.tokens.shape[1]
    tokens = draft.tokens.to(logits.device)
    path = torch.full(draft.tokens.shape, -1, dtype=torch.long)
    token = torch.full((len(rows),), -1, dtype=torch.long)
    active = torch.arange(len(rows))
    for depth in range(count + 1):
        where = active.to(logits.device)
        p = law[where, depth]
        x = tokens[where, depth] if depth < count else torch.full_like(where, -1)
        q = draft.probs[where, depth].to(p.dtype) if draft.probs is not None and depth < count else None
        accepted, own = _examine(p, q, x, keys[active] + torch.tensor([0, depth]), sampler)
        if depth < count:
            path[active[accepted], depth] = depth
        token[active[~accepted]] = own
        active = active[accepted]
        if not len(active):
            break
    return Verdict(path, token, law, logits)


def _examine(p: Tensor, q: Tensor | None, x: Tensor, keys: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """One depth of M rows: p [M, V], q [M, V] or None, x [M] (-1: no draft) → accepted [M] bool on
    the host, and the own tokens of the rows that end here, in their order."""
    present = x >= 0
    if q is None or not bool(present.any()):
        # Point masses, and the bonus: t ~ p, accept iff t is the draft, else emit that same t.
        own = sampler.draw(p, keys)
        accepted = (own == x) & present
        return accepted.cpu(), own[~accepted].cpu()
    at = x.clamp(min=0)[:, None]
    ratio = (p.gather(1, at) / q.gather(1, at))[:, 0]
    if bool(ratio[present].isnan().any()):
        raise ValueError("p(x)/q(x) is 0/0: a token was drafted that its own law gives no mass")
    accepted = present.clone()
    accepted[present] = sampler.coin(ratio[present])  # q ≤ p: always accept
    ended = ~accepted
    if not bool(ended.any()):
        return accepted.cpu(), torch.empty(0, dtype=torch.long)
    own_law = torch.where(present[:, None], residual(p, q), p)
    own = sampler.draw(own_law[ended], keys[ended.cpu()])
    return accepted.cpu(), own.cpu()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p − q)⁺) [M, V]; p itself where nothing is left beyond rounding."""
    left = (p - q).clamp_(min=0)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > TINY, left / mass.clamp(min=TINY), p)


def prefixes_of(rows: Rows, draft: Draft) -> Rows:
    """The committed tokens and the drafts before each examined position: B × (N+1) prefixes."""
    tokens = draft.tokens.tolist()
    return [
        row + drafted[:depth] for row, drafted in zip(rows, tokens, strict=True) for depth in range(len(drafted) + 1)
    ]
