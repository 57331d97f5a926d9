"""The rules by which the target verifies a draft, and their parts. Exact for every drafter. Knows distributions and
drafts; no models, no caches, no text.

Theorem (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): if x ~ q is accepted
with probability min(1, p(x)/q(x)) and a refusal is answered by a draw from norm((p − q)⁺), the
token has distribution p. A point mass is lossless however it was chosen: draw t ~ p and accept iff t is x.

Trees: a chain is the tree whose nodes have one child each. If a node's children are point masses, t is drawn once
and the child that is t is accepted; if they are drawn, each in its turn from a separate distribution, p
becomes norm((p − q)⁺) with every refused one (Miao et al., arXiv 2305.09781). The drafter determines the rule, never
the draft.

A model between drafter and target reviews chains (:func:`review`). It may be lenient, so that its tokens have another
distribution than its own, which it returns (Chen et al., arXiv 2312.11462).

Blocks: a drawn chain may be verified as a whole (Sun et al., "Block Verification Accelerates Speculative Decoding",
arXiv 2403.10444, algorithm 2). Exact, and in the mean it accepts at least as many tokens as token by token.
r₀ = 1, rᵢ = min(1, rᵢ₋₁·p(xᵢ)/q(xᵢ)); for i < γ sᵢ = Σ(rᵢp − q)⁺ after x₁…xᵢ and hᵢ = sᵢ/(sᵢ + 1 − rᵢ), h_γ = r_γ.
The first n drafts are accepted, n the largest i whose coin of chance hᵢ fell; the next token is a draw from
norm((rₙp − q)⁺), after all drafts from p. Point masses among the drafts are distributions with all mass on one
id; alone they gain nothing by it: the chance that i are accepted is ∏p(xⱼ) by either rule.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.rows import fetched, few, padded, put
from sampling.types import Draft, Drafter, Rows, Rule, Sampler, Verdict, above, depths_of
from sampling.verify.at_once import verify_at_once
from sampling.verify.distributions import (
    TINY,
    LazyDistributions,
    block_of,
    check_ratio,
    coin_keys,
    distributions_of,
    normal,
    one_hot,
    residual,
)

# the nodes at which rows stand [M] (-1: the root), the rows [M], their keys [M, 3] (row, position, the round's start) →
# the child of each that is accepted [M] (-1: none) on the host, the verifier's tokens for those that end
Examine = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

# the draft, keys [B, 2], the verifier's distributions and the sampler → path [B, depth] and token [B], on the host
Verify = Callable[[Draft, Tensor, LazyDistributions, Sampler], tuple[Tensor, Tensor]]


def verify(logits: Tensor, draft: Draft, rows: Rows, keys: Tensor, sampler: Sampler, rule: Rule) -> Verdict:
    """Examine a draft.

    Args:
        logits: [B, N+1, V] the verifier's, at the root and after each node.
        draft: N nodes, parents first. -1 nodes are absent, and so are their descendants.
        rows: the committed tokens, B of them.
        keys: [B, 2] long on the host: row id and position of the first new token, which is the round's start.
        sampler: distribution, draws and coins.
        rule: the drafter's (:func:`rule_of`), not one that this draft suggests.

    Returns:
        The accepted nodes of each row and the verifier's own token after them.
    """
    if logits.device.type != "cpu" and not sampler.notes:
        return verify_at_once(logits, draft, rows, keys, sampler, rule)
    distributions = LazyDistributions(logits, draft, rows, sampler)
    return Verdict(*_RULES[rule](draft, keys, distributions, sampler), distributions, logits)


def rule_of(drafter: Drafter, sampler: Sampler) -> Rule:
    """Return the rule that verifies every draft of an answer."""
    return Rule.POINT if sampler.point_mass else drafter.traits.rule


def verify_points(
    draft: Draft, keys: Tensor, distributions: LazyDistributions, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """Verify point masses: walk down row by row to the child that is drawn, without tensors of a few elements."""
    count = draft.tokens.shape[1]
    parents, depth = above(draft.parents, count), max(depths_of(draft.parents, count), default=0)
    paths, tokens = list[list[int]](), []
    for index, (drafted, (row, start)) in enumerate(zip(draft.tokens.tolist(), keys.tolist(), strict=True)):
        child_of: dict[tuple[int, int], int] = {}  # by parent and token
        for node, (parent, token) in enumerate(zip(parents, drafted, strict=True)):
            if token >= 0:
                child_of.setdefault((parent, token), node)
        path = [-1]  # the root, then accepted nodes
        while True:
            token = distributions.drawn(index, path[-1], (row, start + len(path) - 1))
            if (path[-1], token) not in child_of:
                break
            path.append(child_of[path[-1], token])
        paths.append([*path[1:], *[-1] * (depth + 1 - len(path))])
        tokens.append(token)
    return few(paths), few(tokens)


def verify_drawn(
    draft: Draft, keys: Tensor, distributions: LazyDistributions, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """Verify drawn children, each in its turn; point masses are distributions with all mass on one id."""
    tokens, table = F.pad(draft.tokens.cpu(), (0, 1), value=-1), children(draft.parents, draft.tokens.shape[1])

    def examine(here: Tensor, active: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        kids, p = table[here + 1], distributions.at(active, here)
        x = tokens[active[:, None], kids[:, :-1]].to(p.device)
        q = one_hot(x, p)
        if draft.probs is not None:
            where = draft.probs.device
            q = draft.probs[put(active[:, None], where), put(kids[:, :-1].clamp(min=0), where)].to(p)
        chosen, token = examine_drawn(p, q.unbind(1), x, at, sampler)
        return kids[torch.arange(len(kids)), chosen], token

    return descend(draft, keys, examine)


def children(parents: Tensor | None, count: int) -> Tensor:
    """Return [N+1, C], the children of the root and of each node, -1 padded; the last column is all -1."""
    kids: list[list[int]] = [[] for _ in range(count + 1)]
    for node, parent in enumerate(above(parents, count)):
        kids[parent + 1].append(node)
    return F.pad(padded(kids), (0, 1), value=-1)


def descend(draft: Draft, keys: Tensor, examine: Examine, going: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Examine depth by depth until every row has ended: path [B, depth] and the verifier's token [B], on the host.

    `going` [M]: the rows to examine, None for all; the others accept nothing, and their token is -1.
    """
    rows, count = draft.tokens.shape
    most = max(depths_of(draft.parents, count), default=0)
    path = torch.full((rows, most), -1, dtype=torch.long)
    token = torch.full((rows,), -1, dtype=torch.long)
    active = torch.arange(rows) if going is None else going
    here, started = torch.full_like(active, -1), torch.cat([keys, keys[:, 1:]], dim=1)
    for depth in range(most + 1):
        chosen, own = examine(here, active, started[active] + torch.tensor([0, depth, 0]))
        accepted = chosen >= 0
        token[active[~accepted]] = own
        active, here = active[accepted], chosen[accepted]
        if not len(active):
            break
        path[active, depth] = here
    return path, token


def examine_points(
    p: Tensor, x: Tensor, keys: Tensor, sampler: Sampler, also: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Examine a point mass x [M], -1 = none, of each row: it is accepted if drawn from p [M, V], or by `also` [M].

    → the accepted child [M], 0 or -1 = none, on the host; and the drawn tokens of the rows that end here, in order.
    """
    drawn = sampler.draw(p, keys[:, :2])
    hit = (x == drawn) & (x >= 0)
    if also is not None:
        hit |= also
    chosen, drawn = (part.long() for part in fetched(hit.long() - 1, drawn))
    return chosen, drawn[chosen < 0]


def examine_drawn(
    p: Tensor,
    distributions: Sequence[Tensor],
    x: Tensor,
    keys: Tensor,
    sampler: Sampler,
    rest: Tensor | None = None,
    lenience: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Examine children x [M, C] drawn from `distributions`, C of [M, V]: each in turn is accepted with probability
    min(1, λ·p(x)/q(x)); after a refusal p is norm((p − q)⁺), for a single child given as `rest`. → as
    :func:`examine_points`.
    """
    chosen = torch.full(x.shape[:1], -1, device=x.device)
    for turn, q in enumerate(distributions):
        open_ = (chosen < 0) & (x[:, turn] >= 0)
        if not bool(open_.any()):
            continue
        at = x[:, turn].clamp(min=0)[:, None]
        ratio = lenience * (p.gather(1, at) / q.gather(1, at))[:, 0]
        check_ratio(ratio[open_])
        accepted = open_.clone()
        tossed = F.pad(keys[open_.cpu()], (0, 1), value=turn)
        accepted[open_] = sampler.coin(ratio[open_], tossed)  # q ≤ λp: always accept
        chosen[accepted] = turn
        rejected = open_ & ~accepted
        if bool(rejected.any()):
            p = torch.where(rejected[:, None], residual(p, q) if rest is None else rest, p)
    ended, chosen = chosen < 0, chosen.cpu()
    if not bool(ended.any()):
        return chosen, torch.empty(0, dtype=torch.long)
    return chosen, sampler.draw(p[ended], keys[chosen < 0, :2]).cpu()


def verify_block(
    draft: Draft, keys: Tensor, distributions: LazyDistributions, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """Verify a block: path [B, N] and token [B] on the host. ValueError for a tree."""
    probs = distributions.all()
    rows, count = draft.tokens.shape
    if not count:
        return draft.tokens, sampler.draw(probs[:, 0], keys).cpu()
    present, lengths, r, left, h = block_of(probs, draft, draft.tokens.to(probs.device))
    check_ratio(r)
    fell = torch.zeros_like(present)
    open_ = present & (h > 0)
    if bool(open_.any()):
        fell[open_] = sampler.coin(h[open_], coin_keys(keys, count)[open_.cpu()])
    n = (fell * torch.arange(1, count + 1, device=probs.device)).amax(dim=1)
    last = probs[torch.arange(rows, device=probs.device), n]
    short = n < lengths
    if bool(short.any()):
        last[short] = normal(left[short, n[short]], last[short])
    n = n.cpu()
    path = torch.where(torch.arange(count)[None] < n[:, None], torch.arange(count)[None], -1)
    return path, sampler.draw(last, keys + F.pad(n[:, None], (1, 0))).cpu()


_RULES: Mapping[Rule, Verify] = {Rule.POINT: verify_points, Rule.DRAWN: verify_drawn, Rule.BLOCK: verify_block}


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
            chosen, token = examine_points(p, x, at, sampler, also)
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
