"""Verification on an accelerator, where each answer that the host waits for costs more than the arithmetic: every node
is decided as if a row stood there, and one transfer brings the host all that it walks down by. The rules are those of
sampling/verify/rules.py, with the same keys. Knows drafts and distributions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.rows import fetched, padded, put
from sampling.types import Draft, Rows, Rule, Sampler, Verdict, above, depths_of
from sampling.verify.distributions import GLANCE_IDS, block_of, coin_keys, distributions_of, normal, one_hot, residual
from utils.logits_processors import check_number


class Decided(NamedTuple):
    """What a rule decides at the root and each node: its child `kids` [N+1, C] (-1: none) is `accepted` [B, N+1, C],
    NaN where that is undefined; `drawn` [B, N+1] is the token of a row that ends there."""

    accepted: Tensor
    drawn: Tensor


class Fetched:
    """The likeliest logits of one position and the probabilities of its drafts, on the host."""

    def __init__(self, values: list[float], mass: float, chances: Mapping[int, float], known: list[tuple[int, float]]):
        check_number(mass)
        self._values, self._chances, self._known = values, chances, known

    @property
    def gap(self) -> float:
        return self._values[0] - self._values[-1]

    def chances(self, ids: Sequence[int]) -> list[float]:
        return [self._chances[token] for token in ids]

    def likeliest(self) -> list[tuple[int, float]]:
        return self._known


class DeviceDistributions:
    """The distributions [B, N+1, V] of a draft, and what the host knows of each position."""

    def __init__(self, probs: Tensor, glances: list[list[Fetched]]) -> None:
        self._probs, self._glances = probs, glances

    def all(self) -> Tensor:
        return self._probs

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        return self._probs[put(rows, self._probs.device), put(nodes + 1, self._probs.device)]

    def glance(self, row: int, node: int) -> Fetched:
        return self._glances[row][node + 1]


def verify_at_once(logits: Tensor, draft: Draft, rows: Rows, keys: Tensor, sampler: Sampler, rule: Rule) -> Verdict:
    """:func:`sampling.verify.rules.verify` by one transfer."""
    count, device = draft.tokens.shape[1], logits.device
    parents, host = above(draft.parents, count), draft.tokens.cpu()
    probs = distributions_of(logits, draft, rows, sampler)  # [B, N+1, V]
    kids: list[list[int]] = [[] for _ in range(count + 1)]
    for node, parent in enumerate(parents):
        kids[parent + 1].append(node)
    table = padded(kids)  # [N+1, C]
    tokens = F.pad(host, (0, 1), value=-1)[:, table]  # [B, N+1, C]
    depths = torch.tensor([0, *depths_of(draft.parents, count)])
    stands = torch.stack([keys[:, :1].expand(-1, count + 1), keys[:, 1:] + depths], dim=-1)  # [B, N+1, 2]
    found = _DECIDE[rule](probs, draft, put(tokens, device), table, stands, keys, sampler)
    scores = logits.float()
    values, _ = scores.topk(min(2, scores.shape[-1]), dim=-1)
    mass = scores.logsumexp(dim=-1)
    chances = (scores.gather(2, put(tokens.clamp(min=0), device)) - mass[..., None]).exp()
    likely, ids = probs.topk(min(GLANCE_IDS, probs.shape[-1]), dim=-1)
    accepted, drawn, *facts = fetched(*found, values, mass, chances, likely, ids.double())
    glances = _glances(facts, tokens)
    path, token = _walked(accepted, drawn.long(), kids, host, max(depths.tolist()))
    return Verdict(path, token, DeviceDistributions(probs, glances), logits)


def _glances(facts: list[Tensor], tokens: Tensor) -> list[list[Fetched]]:
    values, mass, chances, likely, ids = (part.flatten(0, 1).tolist() for part in facts)
    each = zip(values, mass, tokens.flatten(0, 1).tolist(), chances, ids, likely, strict=True)
    flat = [
        Fetched(top, m, dict(zip(drafts, p, strict=True)), [(int(one), q) for one, q in zip(near, known, strict=True)])
        for top, m, drafts, p, near, known in each
    ]
    wide = tokens.shape[1]
    return [flat[start : start + wide] for start in range(0, len(flat), wide)]


def _walked(
    accepted: Tensor, drawn: Tensor, kids: list[list[int]], tokens: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Path [B, depth] and token [B]: down to the first accepted child until there is none."""
    paths, said = list[list[int]](), list[int]()
    for takes, draws, drafted in zip(accepted.tolist(), drawn.tolist(), tokens.tolist(), strict=True):
        path, node = list[int](), -1
        while True:
            for kid, takes_it in zip(kids[node + 1], takes[node + 1], strict=False):
                if drafted[kid] < 0:
                    continue
                if takes_it != takes_it:
                    raise ValueError("p(x)/q(x) is 0/0: a token was drafted that its own distribution gives no mass")
                if takes_it:
                    path.append(kid)
                    break
            else:
                break
            node = path[-1]
        paths.append(path + [-1] * (depth - len(path)))
        said.append(draws[node + 1])
    return torch.tensor(paths, dtype=torch.long).view(len(paths), depth), torch.tensor(said)


def _draw(probs: Tensor, stands: Tensor, sampler: Sampler) -> Tensor:
    """[B, N+1] a token drawn from each of probs [B, N+1, V] with the keys [B, N+1, 2]."""
    return sampler.draw(probs.flatten(0, 1), stands.flatten(0, 1)).view(stands.shape[:2])


def _points(
    probs: Tensor, draft: Draft, tokens: Tensor, table: Tensor, stands: Tensor, keys: Tensor, sampler: Sampler
) -> Decided:
    """A child is accepted if it is the token that is drawn."""
    drawn = _draw(probs, stands, sampler)
    return Decided(tokens == drawn[..., None], drawn)


def _drawn(
    probs: Tensor, draft: Draft, tokens: Tensor, table: Tensor, stands: Tensor, keys: Tensor, sampler: Sampler
) -> Decided:
    """Children are tried in turn, each as if those before it were refused."""
    p, accepted = probs, list[Tensor]()
    started = torch.cat([stands, keys[:, None, 1:].expand(-1, stands.shape[1], -1)], dim=-1)  # [B, N+1, 3]
    for turn in range(tokens.shape[2]):
        x = tokens[..., turn]
        q = one_hot(x, p)
        if draft.probs is not None:
            q = draft.probs.to(p).index_select(1, put(table[:, turn].clamp(min=0), p.device))
        at = x.clamp(min=0)[..., None]
        ratio = (p.gather(2, at) / q.gather(2, at))[..., 0]
        coins = sampler.coin(ratio.flatten(), F.pad(started, (0, 1), value=turn).flatten(0, 1))
        accepted.append(torch.where(ratio.isnan(), ratio, coins.view_as(ratio).to(ratio)))  # q ≤ p: always accept
        p = torch.where((x >= 0)[..., None], residual(p.flatten(0, 1), q.flatten(0, 1)).view_as(p), p)
    return Decided(torch.stack(accepted, dim=-1) if accepted else tokens, _draw(p, stands, sampler))


def _block(
    probs: Tensor, draft: Draft, tokens: Tensor, table: Tensor, stands: Tensor, keys: Tensor, sampler: Sampler
) -> Decided:
    """As many drafts of a chain are accepted as the last coin that falls says."""
    count = draft.tokens.shape[1]
    if not count:
        return Decided(tokens, _draw(probs, stands, sampler))
    present, lengths, r, left, h = block_of(probs, draft, tokens[:, :count, 0])
    each = torch.arange(count, device=probs.device)
    coins = sampler.coin(h.flatten(), coin_keys(keys, count).flatten(0, 1)).view_as(h)
    most = ((coins & present) * (each + 1)).amax(dim=1, keepdim=True)
    accepted = torch.where(r.isnan().any(dim=1, keepdim=True), torch.nan, (each < most).to(r))
    short = (each < lengths[:, None])[..., None]
    after = torch.cat([torch.where(short, normal(left, probs[:, :-1]), probs[:, :-1]), probs[:, -1:]], dim=1)
    return Decided(F.pad(accepted, (0, 1))[..., None], _draw(after, stands, sampler))


_DECIDE = {Rule.POINT: _points, Rule.DRAWN: _drawn, Rule.BLOCK: _block}
