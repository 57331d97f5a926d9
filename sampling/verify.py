"""The only accept/reject code. Knows laws and drafts; no models, no caches, no text.

Theorem (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): if x ~ q is accepted
with probability min(1, p(x)/q(x)) and a refusal is answered by a draw from norm((p − q)⁺), the
token has law p. A point mass is lossless however it was chosen: draw t ~ p and accept iff t is x.

`verify` is the target's judgement and exact. `review` is that of a model between drafter and target, which may
be lenient: what it emits has another law than its own, and it says which (Chen et al., arXiv 2312.11462).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.types import Draft, Rows, Sampler, Verdict

TINY = 1e-12  # a residual with less mass than this is rounding: draw from p

# depth, the rows still examined [M], their keys [M, 2] → accepted [M] bool on the host, own tokens of those that end
_Examine = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


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
    law, tokens = _laws(logits, draft, rows, sampler), draft.tokens.to(logits.device)

    def examine(depth: int, active: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        p, x, q = _taken(law, tokens, draft, depth, active)
        return _examine(p, q, x, at, sampler)

    return Verdict(*_descend(tokens.shape, keys, examine), law, logits)


class Review(NamedTuple):
    """A reviewer's judgement: its verdict, and the laws that its tokens really have.

    `laws` [B, N+1, V] hold at each depth the law of the token emitted there, accepted or the reviewer's own; None
    where its tokens are to be taken as point masses.
    """

    verdict: Verdict
    laws: Tensor | None


def review(logits: Tensor, draft: Draft, rows: Rows, keys: Tensor, sampler: Sampler, lenience: float = 1.0) -> Review:
    """Examine a draft on the way to the target: `lenience` λ ≥ 1 lets more pass (ALGORITHMS section 3).

    Arguments as for :func:`verify`; `sampler` is the drafters'. Drawn drafts: x ~ q is accepted with probability
    min(1, λ·m(x)/q(x)), else the token is drawn from r = norm((m − q)⁺); what is emitted has the law
    q̃ = min(q, λm) + (1 − Σ min(q, λm))·r, a point mass d being q = 1[d]. Where the sampler's drafts are point masses
    (greedy, gumbel coupling) x is accepted if it is the reviewer's own token, or, for λ > 1, if m(x) > q(x)/λ at
    temperature 1.
    """
    law, tokens = _laws(logits, draft, rows, sampler), draft.tokens.to(logits.device)
    own = sampler.point_mass
    emitted = None if own else law.clone()
    passes = _lenient(logits, draft, tokens, lenience) if own else None

    def examine(depth: int, active: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        p, x, q = _taken(law, tokens, draft, depth, active)
        if emitted is None:
            let = passes[active, depth] if passes is not None and depth < len(tokens[0]) else None
            return _examine_points(p, x, at, sampler, let)
        q = F.one_hot(x.clamp(min=0), p.shape[-1]).to(p) if q is None else q
        kept = torch.minimum(q, lenience * p)
        rest = residual(p, q)
        refused = (1 - kept.sum(dim=-1, keepdim=True)).clamp(min=TINY)  # what can be drawn has a law above 0
        truly = kept + refused * rest
        emitted[active.to(p.device), depth] = torch.where((x >= 0)[:, None], truly, p)
        return _examine_law(p, q, x, at, sampler, rest, lenience)

    return Review(Verdict(*_descend(tokens.shape, keys, examine), law, logits), emitted)


def _laws(logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> Tensor:
    if draft.parents is not None:
        raise ValueError("this verifier examines chains; the draft is a tree")
    return sampler.law(logits, prefixes_of(rows, draft) if sampler.needs_prefixes else [])


def _descend(shape: torch.Size, keys: Tensor, examine: _Examine) -> tuple[Tensor, Tensor]:
    """Examine depth by depth until every row has ended: path [B, N] and own token [B], on the host."""
    rows, count = shape
    path = torch.full((rows, count), -1, dtype=torch.long)
    token = torch.full((rows,), -1, dtype=torch.long)
    active = torch.arange(rows)
    for depth in range(count + 1):
        accepted, own = examine(depth, active, keys[active] + torch.tensor([0, depth]))
        if depth < count:
            path[active[accepted], depth] = depth
        token[active[~accepted]] = own
        active = active[accepted]
        if not len(active):
            break
    return path, token


def _taken(
    law: Tensor, tokens: Tensor, draft: Draft, depth: int, active: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """p [M, V], x [M] (-1: no draft) and q [M, V] (None: point masses) of the active rows at one depth."""
    where, count = active.to(law.device), tokens.shape[1]
    p = law[where, depth]
    x = tokens[where, depth] if depth < count else torch.full_like(where, -1)
    q = draft.probs[where, depth].to(p.dtype) if draft.probs is not None and depth < count else None
    return p, x, q


def _examine(p: Tensor, q: Tensor | None, x: Tensor, keys: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """One depth of M rows: p [M, V], q [M, V] or None, x [M] (-1: no draft) → accepted [M] bool on
    the host, and the own tokens of the rows that end here, in their order."""
    if q is None or not bool((x >= 0).any()):
        # Point masses, and the bonus: t ~ p, accept iff t is the draft, else emit that same t.
        return _examine_points(p, x, keys, sampler, None)
    return _examine_law(p, q, x, keys, sampler, residual(p, q))


def _examine_points(p: Tensor, x: Tensor, keys: Tensor, sampler: Sampler, also: Tensor | None) -> tuple[Tensor, Tensor]:
    """Point masses: accepted if drawn from p, or named by `also` [M]."""
    own = sampler.draw(p, keys)
    accepted = (own == x) & (x >= 0)
    if also is not None:
        accepted |= also
    return accepted.cpu(), own[~accepted].cpu()


def _examine_law(
    p: Tensor, q: Tensor, x: Tensor, keys: Tensor, sampler: Sampler, rest: Tensor, lenience: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Drafts drawn from q: accepted with probability min(1, λ·p(x)/q(x)), else drawn from `rest` [M, V]."""
    present = x >= 0
    at = x.clamp(min=0)[:, None]
    ratio = lenience * (p.gather(1, at) / q.gather(1, at))[:, 0]
    if bool(ratio[present].isnan().any()):
        raise ValueError("p(x)/q(x) is 0/0: a token was drafted that its own law gives no mass")
    accepted = present.clone()
    if bool(present.any()):
        accepted[present] = sampler.coin(ratio[present])  # q ≤ λp: always accept
    ended = ~accepted
    if not bool(ended.any()):
        return accepted.cpu(), torch.empty(0, dtype=torch.long)
    own_law = torch.where(present[:, None], rest, p)
    own = sampler.draw(own_law[ended], keys[ended.cpu()])
    return accepted.cpu(), own.cpu()


def _lenient(logits: Tensor, draft: Draft, tokens: Tensor, lenience: float) -> Tensor | None:
    """[B, N] whether m(x) > q(x)/λ at temperature 1; None for λ = 1, where nothing passes that way."""
    if lenience <= 1 or not tokens.shape[1]:
        return None
    before = logits[:, :-1].float()
    chosen = before.gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    chance = (chosen - before.logsumexp(dim=-1)).exp()
    raw = torch.ones_like(chance) if draft.raw is None else draft.raw.to(chance)
    return (chance > raw / lenience) & (tokens >= 0)


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
