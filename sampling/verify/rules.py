"""The rules by which the target verifies a draft, and their parts. Exact for every drafter, but for the lossy one.
Knows distributions and drafts; no models, no caches, no text.

Theorem (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): if x ~ q is accepted
with probability min(1, p(x)/q(x)) and a rejection is answered by a draw from norm((p − q)⁺), the
token has distribution p. A point mass is lossless however it was chosen: draw t ~ p and accept iff t is x.

Trees: a chain is the tree whose nodes have one child each. If a node's children are point masses, t is drawn once
and the child that is t is accepted; if they are drawn, each in its turn from a separate distribution, p
becomes norm((p − q)⁺) with every rejected one (Miao et al., arXiv 2305.09781). The drafter determines the rule, never
the draft.

A model between drafter and target reviews chains (:func:`review`). It may be lenient: then its tokens have another
distribution than its own, and the review returns that one (Chen et al., arXiv 2312.11462).

Blocks: a drawn chain may be verified as a whole (Sun et al., "Block Verification Accelerates Speculative Decoding",
arXiv 2403.10444, algorithm 2). Exact, and on average it accepts at least as many tokens as token by token.
r₀ = 1, rᵢ = min(1, rᵢ₋₁·p(xᵢ)/q(xᵢ)); for i < γ sᵢ = Σ(rᵢp − q)⁺ after x₁…xᵢ and hᵢ = sᵢ/(sᵢ + 1 − rᵢ), h_γ = r_γ.
The first n drafts are accepted, n the largest i whose coin, with chance hᵢ, accepts; the next token is a draw from
norm((rₙp − q)⁺), after all drafts from p. Point masses among the drafts are distributions with all mass on one
id; a chain of point masses alone gains nothing: the chance that i are accepted is ∏p(xⱼ) by either rule.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.events import DELTA, EPSILON
from sampling.rows import padded, put
from sampling.types import Draft, Drafter, DraftTree, Rows, Rule, Sampler, Verdict
from sampling.verify.distributions import (
    TINY,
    DeviceDistributions,
    HostDistributions,
    at_once,
    distributions_for,
    normal,
    one_hot,
    residual,
)

Keys = Sequence[Sequence[int]]  # of each row its number and the position of its first new token
Decision = tuple[Rows, list[int]]  # of each row the accepted nodes, and the own token after them (-1: not examined)


def verify(logits: Tensor, draft: Draft, rows: Rows, keys: Keys, sampler: Sampler, rule: Rule) -> Verdict:
    """Examine a draft.

    Args:
        logits: [B, N+1, V] the verifier's, at the root and after each node.
        draft: a tree for each row.
        rows: the committed tokens, B of them.
        keys: each row's number and the position of its first new token, where the round starts.
        sampler: distribution, draws and coins.
        rule: the drafter's (:func:`rule_of`), not one that this draft suggests.

    Returns:
        The accepted nodes of each row and the verifier's own token after them.
    """
    distributions = distributions_for(logits, draft, rows, sampler)
    return Verdict(*_RULES[rule](draft, keys, distributions, sampler), distributions, logits)


def rule_of(drafter: Drafter, sampler: Sampler) -> Rule:
    """Return the rule that verifies every draft of an answer."""
    rule = drafter.traits.rule
    return Rule.POINT if sampler.point_mass and rule is not Rule.TYPICAL else rule


# -- point masses --------------------------------------------------------------------------------------------------


def verify_points(draft: Draft, keys: Keys, distributions: HostDistributions, sampler: Sampler) -> Decision:
    """Walk down to the child that is drawn, until none is: draw t ~ p, accept iff t is the draft."""
    if distributions.at_once:
        distributions.draw_all(keys)
    paths, tokens = list[list[int]](), list[int]()
    for row, (tree, (number, start)) in enumerate(zip(draft.trees, keys, strict=True)):
        path, node = list[int](), -1
        while True:
            # a compiled walk passes the drafts that are drawn one after the other; without one, none are passed
            passed, token = distributions.descend(row, node, (number, start + len(path)))
            path += passed
            node = path[-1] if path else -1
            node = next((child for child in tree.children[node + 1] if tree.tokens[child] == token), -1)
            if node < 0:
                break
            path.append(node)
        paths.append(path)
        tokens.append(token)
    return paths, tokens


# -- drawn children --------------------------------------------------------------------------------------------------


class Examined(NamedTuple):
    """A rule's decisions at M places, each a row and a node: which of the node's children is accepted, counted from 0
    (-1: none), the verifier's own token if none is, and whether the decision is undefined (p(x)/q(x) is 0/0)."""

    child: Tensor  # [M]
    token: Tensor  # [M]
    undefined: Tensor  # [M] bool


# Rows [M], in each the node whose children are examined [M] (-1: the root), keys [M, 3] (row number, position, the
# round's start).
Examine = Callable[[list[int], list[int], Tensor], Examined]


def verify_drawn(draft: Draft, keys: Keys, distributions: HostDistributions, sampler: Sampler) -> Decision:
    """Verify drawn children, each in its turn; point masses are distributions with all mass on one id."""
    wide = max(len(children) for tree in draft.trees for children in tree.children)

    def examine(rows: list[int], nodes: list[int], at: Tensor) -> Examined:
        p = distributions.at(rows, nodes)
        children = [draft.trees[row].children[node + 1] for row, node in zip(rows, nodes, strict=True)]
        tokens = [draft.trees[row].path_tokens(each) for row, each in zip(rows, children, strict=True)]
        x = put(padded(tokens, -1, wide), p.device)
        if draft.probs is None:
            q = one_hot(x, p)
        else:
            where = draft.probs.device
            q = draft.probs[put(rows, where)[:, None], put(padded(children, 0, wide), where)].to(p)
        return examine_drawn(p, q.unbind(1), x, at, sampler)

    return descend(draft.trees, keys, examine, distributions)


def descend(
    trees: Sequence[DraftTree],
    keys: Keys,
    examine: Examine,
    distributions: HostDistributions,
    going: Sequence[int] | None = None,
) -> Decision:
    """Examine depth by depth until every row has ended; on an accelerator examine all places at once and walk down.

    `going`: the rows to examine, None for all. ValueError where p(x)/q(x) is 0/0.
    """
    paths: Rows = [[] for _ in trees]
    tokens, active = [-1] * len(trees), list(range(len(trees)) if going is None else going)
    decided: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def decide(rows: list[int], nodes: list[int]) -> None:
        depths = [0 if node < 0 else trees[row].depths[node] for row, node in zip(rows, nodes, strict=True)]
        at = torch.tensor([[keys[row][0], keys[row][1] + d, keys[row][1]] for row, d in zip(rows, depths, strict=True)])
        child, token, undefined = distributions.bring(*examine(rows, nodes, at))
        each = zip(child.long().tolist(), token.long().tolist(), undefined.bool().tolist(), strict=True)
        decided.update(zip(zip(rows, nodes, strict=True), each, strict=True))

    if distributions.at_once:
        places = [(row, node) for row in active for node in range(-1, len(trees[row].tokens))]
        decide([row for row, _ in places], [node for _, node in places])
    while active:
        nodes = [paths[row][-1] if paths[row] else -1 for row in active]
        if not distributions.at_once:
            decide(active, nodes)
        still = list[int]()
        for row, node in zip(active, nodes, strict=True):
            turn, token, undefined = decided[row, node]
            if undefined:
                raise ValueError(UNDEFINED)
            if turn < 0:
                tokens[row] = token
            else:
                paths[row].append(trees[row].children[node + 1][turn])
                still.append(row)
        active = still
    return paths, tokens


def examine_points(p: Tensor, x: Tensor, keys: Tensor, sampler: Sampler, also: Tensor | None = None) -> Examined:
    """Examine a point mass x [M], -1 = none, at each place: it is accepted if drawn from p [M, V], or where `also` [M]
    is true."""
    drawn = sampler.draw(p, keys[:, :2]).to(p.device)
    hit = (x == drawn) & (x >= 0)
    if also is not None:
        hit |= also
    return Examined(hit.long() - 1, drawn, torch.zeros_like(hit))


def examine_drawn(
    p: Tensor,
    distributions: Sequence[Tensor],
    x: Tensor,
    keys: Tensor,
    sampler: Sampler,
    rest: Tensor | None = None,
    lenience: float = 1.0,
) -> Examined:
    """Examine children x [M, C] drawn from `distributions`, C of [M, V]: each in turn is accepted with probability
    min(1, λ·p(x)/q(x)); after a rejection p is norm((p − q)⁺). `rest` [M, V]: norm((p − q)⁺) of a single child, if the
    caller has it.
    """
    chosen = torch.full(x.shape[:1], -1, device=x.device)
    undefined = torch.zeros_like(chosen, dtype=torch.bool)
    for turn, q in enumerate(distributions):
        open_ = (chosen < 0) & (x[:, turn] >= 0)
        if not at_once(p, sampler) and not bool(open_.any()):
            continue
        at = x[:, turn].clamp(min=0)[:, None]
        ratio = lenience * (p.gather(1, at) / q.gather(1, at))[:, 0]
        undefined |= open_ & ratio.isnan()
        accepted = _tossed(ratio, open_, F.pad(keys, (0, 1), value=turn), sampler)  # q ≤ λp: always accept
        chosen = torch.where(accepted, turn, chosen)
        p = torch.where((open_ & ~accepted)[:, None], residual(p, q) if rest is None else rest, p)
    ended = chosen < 0
    if at_once(p, sampler):
        return Examined(chosen, sampler.draw(p, keys[:, :2]), undefined)
    token = torch.full_like(chosen, -1)
    if bool((ended & ~undefined).any()):
        token[ended] = sampler.draw(p[ended], keys[ended.cpu(), :2]).to(token)
    return Examined(chosen, token, undefined)


def _tossed(chance: Tensor, open_: Tensor, keys: Tensor, sampler: Sampler) -> Tensor:
    """Return whether the coin of each chance [M] accepts; False where not `open_` [M]. No coin is tossed there, unless
    all places are decided at once."""
    if at_once(chance, sampler):
        return sampler.coin(chance.flatten(), keys.flatten(0, -2)).view_as(open_) & open_
    accepts = torch.zeros_like(open_)
    tossing = open_ & ~chance.isnan()
    if bool(tossing.any()):
        accepts[tossing] = sampler.coin(chance[tossing], keys[tossing.cpu()])
    return accepts


# -- typical acceptance, lossy ----------------------------------------------------------------------------------------


def verify_typical(
    draft: Draft,
    keys: Keys,
    distributions: HostDistributions,
    sampler: Sampler,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> Decision:
    """Verify by typical acceptance (Medusa, Cai et al., arXiv 2401.10774): the first child x with p(x) >
    min(ε, δ·exp(−H(p))) is accepted, p the softmax of the logits at temperature 1, H its entropy. Not exact.
    """

    def examine(rows: list[int], nodes: list[int], at: Tensor) -> Examined:
        logits, device = distributions.logits, distributions.logits.device
        log_p = logits[put(rows, device), put([node + 1 for node in nodes], device)].log_softmax(-1, torch.float)
        least = delta * (log_p.exp() * log_p.clamp(min=torch.finfo().min)).sum(-1).exp()  # 0 · −∞ is 0
        children = [(row, draft.trees[row].children[node + 1]) for row, node in zip(rows, nodes, strict=True)]
        x = put(padded([draft.trees[row].path_tokens(each) for row, each in children]), device)
        p = log_p.gather(1, x.clamp(min=0)).exp()
        passes = F.pad((p > least.clamp(max=epsilon)[:, None]) & (x >= 0), (0, 1))
        chosen = torch.where(passes.any(1), passes.int().argmax(1), -1)
        return Examined(chosen, chosen, torch.zeros_like(chosen))

    paths, _ = descend(draft.trees, keys, examine, distributions)
    ends = enumerate(zip(paths, keys, strict=True))
    return paths, [distributions.drawn(row, [-1, *path][-1], (at[0], at[1] + len(path))) for row, (path, at) in ends]


# -- blocks ----------------------------------------------------------------------------------------------------------


def verify_block(draft: Draft, keys: Keys, distributions: HostDistributions, sampler: Sampler) -> Decision:
    """Verify a block (Sun et al., arXiv 2403.10444, algorithm 2): the drafts up to the last one whose coin accepts are
    accepted. ValueError for a tree, and where p(x)/q(x) is 0/0."""
    if not all(tree.is_chain for tree in draft.trees):
        raise ValueError("block verification judges chains; the draft is a tree")
    probs, count, lengths = distributions.all(), draft.width, [len(tree.tokens) for tree in draft.trees]
    tokens = put(padded(draft.tokens, -1, count), probs.device)
    q = one_hot(tokens, probs) if draft.probs is None else draft.probs.to(probs)
    present = tokens >= 0
    r = carried(probs, q, tokens, present)
    left = (r[:, :-1, None] * probs[:, :-1] - q).clamp_(min=0)
    chance = acceptance(r, left.sum(dim=-1), put(lengths, probs.device))
    draw_keys = torch.tensor([[[number, start + depth, start] for depth in range(count + 1)] for number, start in keys])
    coins = _tossed(chance, present & (chance > 0), F.pad(draw_keys[:, :-1], (0, 1)), sampler)
    accepted = (coins * torch.arange(1, count + 1, device=coins.device)).amax(dim=1) if count else coins.sum(dim=1)
    # the distribution of the token after n drafts: norm((rₙp − q)⁺), after all of them p
    short = (torch.arange(count, device=coins.device) < put(lengths, coins.device)[:, None])[..., None]
    after = torch.cat([torch.where(short, normal(left, probs[:, :-1]), probs[:, :-1]), probs[:, -1:]], dim=1)
    undefined = r.isnan().any(dim=1)
    if isinstance(distributions, DeviceDistributions):
        drawn = sampler.draw(after.flatten(0, 1), draw_keys[..., :2].flatten(0, 1)).view(after.shape[:2])
        n, undefined, drawn = distributions.bring(accepted, undefined, drawn)
        n, token = n.long(), drawn.gather(1, n.long()[:, None])[:, 0]
    else:
        n, each = accepted, torch.arange(len(lengths))
    if bool(undefined.any()):
        raise ValueError(UNDEFINED)
    if not isinstance(distributions, DeviceDistributions):
        token = sampler.draw(after[each, n], draw_keys[each, n, :2])
    return [list(range(length)) for length in n.tolist()], [int(own) for own in token.tolist()]


def carried(probs: Tensor, q: Tensor, tokens: Tensor, present: Tensor) -> Tensor:
    """Return rᵢ [B, N+1], after a chain's end its last one. NaN after a draft whose p(x)/q(x) is 0/0."""
    at = tokens.clamp(min=0)[..., None]
    ratio = (probs[:, :-1].gather(2, at) / q.gather(2, at))[..., 0]
    r = [torch.ones_like(probs[:, 0, 0])]
    for depth in range(tokens.shape[1]):
        r.append(torch.where(present[:, depth], (r[-1] * ratio[:, depth]).clamp(max=1), r[-1]))
    return torch.stack(r, dim=1)


def acceptance(r: Tensor, s: Tensor, lengths: Tensor) -> Tensor:
    """Return hᵢ for i = 1 … N [B, N]: r itself at the end of a chain, before it s/(s + 1 − r)."""
    count = s.shape[1]
    inner, mass = r[:, 1:count], s[:, 1:]
    below = mass + 1 - inner
    part = torch.where(below > TINY, mass / below.clamp(min=TINY), 0.0)
    last = torch.arange(1, count + 1, device=r.device)[None] == lengths[:, None]
    return torch.where(last, r[:, 1:], torch.cat([part, r[:, count:]], dim=1))


UNDEFINED = "p(x)/q(x) is 0/0: a token was drafted that its own distribution gives no mass"
_RULES: Mapping[Rule, Callable[[Draft, Keys, HostDistributions, Sampler], Decision]] = {
    Rule.POINT: verify_points,
    Rule.DRAWN: verify_drawn,
    Rule.BLOCK: verify_block,
    Rule.TYPICAL: verify_typical,
}


# -- a review between drafters ---------------------------------------------------------------------------------------


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
    keys: Keys,
    sampler: Sampler,
    lenience: float = 1.0,
    going: Sequence[int] | None = None,
) -> Review:
    """Examine a chain before the target does: `lenience` λ ≥ 1 lets more pass.

    Arguments as for :func:`verify`; `sampler` is the drafters', `going` the rows to examine (None: all; the others' own
    token is -1). m is the reviewer's distribution. Drawn drafts: x ~ q is accepted with
    probability min(1, λ·m(x)/q(x)), else the token is drawn from r = norm((m − q)⁺); the emitted token has the
    distribution q̃ = min(q, λm) + (1 − Σ min(q, λm))·r, a point mass d being q = 1[d]. Where the sampler's drafts are
    point masses (greedy, gumbel coupling) x is accepted if it is the reviewer's own token, or, for λ > 1, if m(x) >
    q(x)/λ at temperature 1. Raises ValueError for a tree, and where m(x)/q(x) is 0/0.
    """
    if not all(tree.is_chain for tree in draft.trees):
        raise ValueError("a review examines chains; the draft is a tree")
    distributions = HostDistributions(logits, draft, rows, sampler)
    probs, count = distributions.all(), draft.width
    tokens = put(padded(draft.tokens, -1, count + 1), logits.device)
    own = sampler.point_mass
    emitted = None if own else probs.clone()
    passes = _lenient(logits, draft, tokens, lenience) if own else None

    def examine(rows: list[int], nodes: list[int], at: Tensor) -> Examined:
        depth = nodes[0] + 1  # the same in all rows
        where = put(rows, probs.device)
        p, x = probs[where, depth], tokens[where, depth]
        if emitted is None:
            return examine_points(p, x, at, sampler, None if passes is None else passes[where, depth])
        q = draft.probs[where, depth].to(p) if draft.probs is not None and depth < count else one_hot(x, p)
        kept = torch.minimum(q, lenience * p)
        rest = residual(p, q)
        rejected = (1 - kept.sum(dim=-1, keepdim=True)).clamp(min=TINY)  # never 0 for a token that can be drawn
        emitted[where, depth] = torch.where((x >= 0)[:, None], kept + rejected * rest, p)
        return examine_drawn(p, [q], x[:, None], at, sampler, rest, lenience)

    path, token = descend(draft.trees, keys, examine, distributions, going)
    return Review(Verdict(path, token, distributions, logits), emitted)


def _lenient(logits: Tensor, draft: Draft, tokens: Tensor, lenience: float) -> Tensor | None:
    """Return [B, N+1] whether m(x) > q(x)/λ at temperature 1; None for λ = 1, under which no draft passes by this."""
    if lenience <= 1 or not draft.width:
        return None
    scores = logits.float()
    chosen = scores.gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    p = (chosen - scores.logsumexp(dim=-1)).exp()
    own = padded([tree.draft_prob for tree in draft.trees], 1.0, p.shape[1], np.float32)
    return (p > put(own, p.device) / lenience) & (tokens >= 0)
