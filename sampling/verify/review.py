"""The review by a model between drafter and target: it may be lenient, so that its tokens have another distribution
than its own, which it returns (Chen et al., arXiv 2312.11462). Reviews chains; knows distributions and drafts,
no models and no text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampling.transfers import put
from sampling.types import Draft, Rows, Sampler, Verdict
from sampling.verify.distributions import TINY, distributions_of, one_hot, residual
from sampling.verify.rules import descend, examine_drawn, examine_points


class Review(NamedTuple):
    """A reviewer's verdict, and the distributions that its tokens really have.

    `probs` [B, N+1, V] hold at each depth the distribution of the token emitted there, accepted or the
    reviewer's own; None where its tokens are to be taken as point masses.
    """

    verdict: Verdict
    probs: Tensor | None


def review(
    logits: Tensor,
    draft: Draft,
    rows: Rows,
    keys: Tensor,
    sampler: Sampler,
    lenience: float = 1.0,
    going: Tensor | None = None,
) -> Review:
    """Examine a chain before the target does: `lenience` λ ≥ 1 lets more pass.

    Arguments as for :func:`sampling.verify.rules.verify`; `sampler` is the drafters', `going` [M] the rows to examine
    (None: all; the others' own token is -1). Drawn drafts: x ~ q is accepted with
    probability min(1, λ·m(x)/q(x)), else the token is drawn from r = norm((m − q)⁺); the emitted token has the
    distribution q̃ = min(q, λm) + (1 − Σ min(q, λm))·r, a point mass d being q = 1[d]. Where the sampler's drafts are
    point masses (greedy, gumbel coupling) x is accepted if it is the reviewer's own token, or, for λ > 1, if m(x) >
    q(x)/λ at temperature 1. Raises ValueError for a tree.
    """
    if draft.parents is not None:
        raise ValueError("a review examines chains; the draft is a tree")
    probs, tokens = distributions_of(logits, draft, rows, sampler), put(draft.tokens, logits.device)
    own = sampler.point_mass
    emitted = None if own else probs.clone()
    passes = _lenient(logits, draft, tokens, lenience) if own else None
    count = tokens.shape[1]

    def examine(here: Tensor, active: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        depth = int(here[0]) + 1  # all rows stand equally deep
        where = put(active, probs.device)
        p = probs[where, depth]
        x = tokens[where, depth] if depth < count else torch.full_like(where, -1)
        if emitted is None:
            also = passes[where, depth] if passes is not None and depth < count else None
            chosen, token = examine_points(p, x[:, None], at, sampler, also)
        else:
            drawn = draft.probs is not None and depth < count
            q = draft.probs[where, depth].to(p.dtype) if drawn else one_hot(x, p)  # type: ignore[index]
            kept = torch.minimum(q, lenience * p)
            rest = residual(p, q)
            rejected = (1 - kept.sum(dim=-1, keepdim=True)).clamp(min=TINY)  # never 0 for a token that can be drawn
            emitted[where, depth] = torch.where((x >= 0)[:, None], kept + rejected * rest, p)
            chosen, token = examine_drawn(p, [q], x[:, None], at, sampler, rest, lenience)
        return torch.where(chosen >= 0, depth, -1), token

    return Review(Verdict(*descend(draft, keys, examine, going), probs, logits), emitted)


def _lenient(logits: Tensor, draft: Draft, tokens: Tensor, lenience: float) -> Tensor | None:
    """Return [B, N] whether m(x) > q(x)/λ at temperature 1; None for λ = 1, where the rule lets nothing pass."""
    if lenience <= 1 or not tokens.shape[1]:
        return None
    before = logits[:, :-1].float()
    chosen = before.gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    p = (chosen - before.logsumexp(dim=-1)).exp()
    raw = torch.ones_like(p) if draft.draft_prob is None else put(draft.draft_prob, p.device).to(p)
    return (p > raw / lenience) & (tokens >= 0)
