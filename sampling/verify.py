"""The target's judgement of a draft, and what every judgement is made of. Exact for every drafter. Knows laws and
drafts; no models, no caches, no text.

Theorem (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): if x ~ q is accepted
with probability min(1, p(x)/q(x)) and a refusal is answered by a draw from norm((p − q)⁺), the
token has law p. A point mass is lossless however it was chosen: draw t ~ p and accept iff t is x.

Trees: a chain is the tree whose nodes have one child each. Where a node's children are point masses t is drawn once
and the child that is t is gone down to; where they are drawn, each in its turn from a law of its own, p becomes
norm((p − q)⁺) with every refused one (Miao et al., arXiv 2305.09781). Blocks are judged by sampling/block.py, reviews
between drafters by sampling/review.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sampling.laws import LazyLaws, above
from sampling.types import Draft, Laws, Rows, Sampler, Verdict

TINY = 1e-12  # a residual with less mass than this is rounding: draw from p

# the nodes at which rows stand [M] (-1: the root), the rows [M], their keys [M, 2] → the child that each goes down to
# [M] (-1: none) on the host, own tokens of those that end
Examine = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def verify(logits: Tensor, draft: Draft, rows: Rows, keys: Tensor, sampler: Sampler) -> Verdict:
    """Examine a draft.

    Args:
        logits: [B, N+1, V] the verifier's, at the root and after each node.
        draft: N nodes; those of a tree come behind their parents. -1 nodes are absent, and so is what follows them.
        rows: the committed tokens, B of them.
        keys: [B, 2] long on the host: row id and position of the first new token.
        sampler: law, draws and coins; where its `block` is true, drawn chains are judged as blocks.

    Returns:
        The accepted nodes of each row and the verifier's own token behind them.
    """
    laws = LazyLaws(logits, draft, rows, sampler)
    if draft.parents is None and draft.probs is not None and draft.tokens.shape[1] and getattr(sampler, "block", False):
        from sampling.block import judged

        return Verdict(*judged(laws.all(), draft, keys, sampler), laws, logits)
    if len(rows) == 1 and draft.probs is None:
        return Verdict(*followed(draft, keys, laws, sampler), laws, logits)
    tokens, table = draft.tokens.to(logits.device), children(draft.parents, draft.tokens.shape[1])

    def examine(here: Tensor, active: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        kids, where = table[here + 1], active.to(logits.device)
        p = laws.at(active, here)
        x = absent_as(kids, tokens[where[:, None], kids.clamp(min=0).to(where.device)] if tokens.shape[1] else None)
        if draft.probs is None or not bool((x >= 0).any()):
            chosen, own = examine_points(p, x, at, sampler)
        else:
            drawn = draft.probs.to(p)
            ways = [drawn[where, kids[:, turn].clamp(min=0).to(where.device)] for turn in range(kids.shape[1])]
            chosen, own = examine_laws(p, ways, x, at, sampler)
        return gone_down(kids, chosen), own

    return Verdict(*descend(draft, keys, examine), laws, logits)


def followed(draft: Draft, keys: Tensor, laws: Laws, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Path [1, depth] and own token [1] of one row whose drafts are point masses: down to the child that is drawn until
    there is none. What :func:`descend` and :func:`examine_points` do, without their tensors of one element.
    """
    kids: dict[tuple[int, int], int] = {}  # by node above and token
    count = draft.tokens.shape[1]
    for node, (parent, token) in enumerate(zip(above(draft.parents, count), draft.tokens[0].tolist(), strict=True)):
        if token >= 0:
            kids.setdefault((parent, token), node)
    place, path, here = torch.zeros(1, dtype=torch.long), list[int](), -1
    while True:
        own = int(sampler.draw(laws.at(place, torch.tensor([here])), keys + torch.tensor([0, len(path)])))
        found = kids.get((here, own))
        if found is None:
            break
        path.append(found)
        here = found
    padded = [*path, *[-1] * (depth_of(draft.parents, count) - len(path))]
    return torch.tensor([padded], dtype=torch.long), torch.tensor([own])


def children(parents: Tensor | None, count: int) -> Tensor:
    """[N+1, C] the children of the root and of each node in draft order, -1 padded; C is at least 1."""
    kids: list[list[int]] = [[] for _ in range(count + 1)]
    for node, parent in enumerate(above(parents, count)):
        kids[parent + 1].append(node)
    width = max(1, *map(len, kids)) if count else 1
    return torch.tensor([[*nodes, *[-1] * (width - len(nodes))] for nodes in kids])


def depths_of(parents: Tensor | None, count: int) -> list[int]:
    """How many tokens there are on the way down to each node, itself included."""
    depths: list[int] = []
    for parent in above(parents, count):
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def depth_of(parents: Tensor | None, count: int) -> int:
    """Nodes on the longest way down."""
    return max(depths_of(parents, count), default=0)


def descend(draft: Draft, keys: Tensor, examine: Examine) -> tuple[Tensor, Tensor]:
    """Examine depth by depth until every row has ended: path [B, depth] and own token [B], on the host."""
    rows, count = draft.tokens.shape
    most = depth_of(draft.parents, count)
    path = torch.full((rows, most), -1, dtype=torch.long)
    token = torch.full((rows,), -1, dtype=torch.long)
    active, here = torch.arange(rows), torch.full((rows,), -1, dtype=torch.long)
    for depth in range(most + 1):
        chosen, own = examine(here, active, keys[active] + torch.tensor([0, depth]))
        going = chosen >= 0
        if depth < most:
            path[active[going], depth] = chosen[going]
        token[active[~going]] = own
        active, here = active[going], chosen[going]
        if not len(active):
            break
    return path, token


def absent_as(kids: Tensor, tokens: Tensor | None) -> Tensor:
    """The tokens [M, C] of children [M, C], -1 where there is none."""
    if tokens is None:
        return torch.full_like(kids, -1)
    return torch.where(kids.to(tokens.device) >= 0, tokens, torch.full_like(tokens, -1))


def gone_down(kids: Tensor, chosen: Tensor) -> Tensor:
    """The nodes that rows go down to: turn `chosen` [M] (-1: none) of children [M, C]."""
    return torch.where(chosen >= 0, kids.gather(1, chosen.clamp(min=0)[:, None])[:, 0], -1)


def examine_points(
    p: Tensor, x: Tensor, keys: Tensor, sampler: Sampler, also: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Point masses x [M, C], -1 = none: the one that is drawn from p [M, V], or (of one child) is named by `also` [M].

    → which child [M], -1 = none, on the host; and the drawn tokens of the rows that end here, in their order.
    """
    own = sampler.draw(p, keys)
    hit = (x == own[:, None]) & (x >= 0)
    if also is not None:
        hit |= also[:, None]
    chosen = torch.where(hit.any(dim=1), hit.int().argmax(dim=1), -1).cpu()
    return chosen, own.cpu()[chosen < 0]


def examine_laws(
    p: Tensor,
    laws: Sequence[Tensor],
    x: Tensor,
    keys: Tensor,
    sampler: Sampler,
    rest: Tensor | None = None,
    lenience: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Children x [M, C] drawn from `laws`, C of [M, V]: each in its turn accepted with probability min(1, λ·p(x)/q(x)),
    p being norm((p − q)⁺) from then on. Of one child that may be given as `rest`. → as :func:`examine_points`.
    """
    chosen = torch.full(x.shape[:1], -1, device=x.device)
    for turn, q in enumerate(laws):
        open_ = (chosen < 0) & (x[:, turn] >= 0)
        if not bool(open_.any()):
            continue
        at = x[:, turn].clamp(min=0)[:, None]
        ratio = lenience * (p.gather(1, at) / q.gather(1, at))[:, 0]
        check_ratio(ratio[open_])
        accepted = open_.clone()
        accepted[open_] = sampler.coin(ratio[open_])  # q ≤ λp: always accept
        chosen[accepted] = turn
        refused = open_ & ~accepted
        if bool(refused.any()):
            p = torch.where(refused[:, None], residual(p, q) if rest is None else rest, p)
    ended, chosen = chosen < 0, chosen.cpu()
    if not bool(ended.any()):
        return chosen, torch.empty(0, dtype=torch.long)
    return chosen, sampler.draw(p[ended], keys[chosen < 0]).cpu()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p − q)⁺) [M, V]; p itself where nothing is left beyond rounding."""
    return normal((p - q).clamp_(min=0), p)


def normal(left: Tensor, p: Tensor) -> Tensor:
    """norm(left) [M, V]; p where nothing is left beyond rounding."""
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > TINY, left / mass.clamp(min=TINY), p)


def check_ratio(ratio: Tensor) -> None:
    """ValueError where p(x)/q(x) is no number."""
    if bool(ratio.isnan().any()):
        raise ValueError("p(x)/q(x) is 0/0: a token was drafted that its own law gives no mass")
