"""A verifier's distributions after the nodes of a draft, their prefixes, residuals after refusals, and the numbers of
block verification. Knows drafts; verifies nothing.

A tree has many more nodes than verification visits, and on a CPU the distribution of a large vocabulary costs as much
as drafting.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.types import Draft, Rows, Sampler, above
from sampling.vocabulary import MANY, largest
from utils.kernels.bindings import at_hand, walk, walkable
from utils.logits_processors import check_finite, check_number

GLANCE_IDS = 4  # likeliest ids of a glance
TINY = 1e-12  # a residual of less mass is rounding: draw from p


class LazyDistributions:
    """The verifier's processed distributions at the root and after each node of a draft, computed at their first use;
    on an accelerator, where a launch costs more than the work, all at once. `quick`: `drawn` computes none.
    """

    def __init__(self, logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> None:
        self._logits, self._draft, self._rows, self._sampler = logits, draft, rows, sampler
        self._all: Tensor | None = None
        self._known: dict[tuple[int, int], Tensor] = {}
        self._glances: dict[tuple[int, int], Seen] = {}
        self._walks = at_hand() and logits.shape[-1] >= MANY and walkable(logits)
        self.quick = self._walks and (sampler.greedy or sampler.tempered is not None)

    def all(self) -> Tensor:
        """Return [B, N+1, V]."""
        if self._all is None:
            self._all = distributions_of(self._logits, self._draft, self._rows, self._sampler)
        return self._all

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return [M, V] of rows [M] after nodes [M] (-1: the root)."""
        if self._all is not None or self._logits.device.type != "cpu":
            distributions = self.all()
            return distributions[rows.to(distributions.device), nodes.to(distributions.device) + 1]
        places = list(zip(rows.tolist(), nodes.tolist(), strict=True))
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        if new:
            distributions = self._processed(new)
            self._known.update(zip(new, distributions, strict=True))
            if new == places:
                return distributions
        return torch.stack([self._known[place] for place in places])

    def drawn(self, row: int, node: int, position: tuple[int, int]) -> int:
        """Draw the token after a node (-1: the root) with the noise of `position`, (row, position).

        A greedy draw needs no distribution. If the kernels are loaded, one walk over the logits draws; near ties are
        left to the sampler.
        """
        sampler, temperature = self._sampler, self._sampler.tempered
        if self.quick:
            state = None if temperature is None else sampler.noise_state(*position)
            seen = self._seen(row, node, temperature or 0.0, state)
            if seen.walk.drawn >= 0:
                return seen.walk.drawn
        if not sampler.greedy or self._logits.device.type != "cpu":
            return int(sampler.draw(self.at(torch.tensor([row]), torch.tensor([node])), torch.tensor([position])))
        logits = self._logits[row, node + 1]
        token = int(largest(logits))
        check_finite(logits[token])
        return token

    def glance(self, row: int, node: int) -> Seen | None:
        """Return facts of the logits after a node, None where they are not cheap."""
        if self._walks and (row, node) not in self._glances:
            self._seen(row, node, None)
        return self._glances.get((row, node))

    def _seen(self, row: int, node: int, temperature: float | None, state: int | None = None) -> Seen:
        seen = self._glances[row, node] = Seen(self._logits, row, node, temperature, state)
        return seen

    def _processed(self, places: list[tuple[int, int]]) -> Tensor:
        prefixes = prefixes_of(self._rows, self._draft, places) if self._sampler.needs_prefixes else []
        if len(places) == 1:  # a view
            ((row, node),) = places
            return self._sampler.probs(self._logits[row, node + 1][None], prefixes)
        rows, nodes = torch.tensor(places).unbind(1)
        return self._sampler.probs(self._logits[rows, nodes + 1], prefixes)


class Seen:
    """A compiled walk over the float32 logits [B, N+1, V] of one position. Their distribution is the softmax at
    `temperature` (None: another one), drawn with the noise of `state`. LogitsError for NaN, +inf, or nothing but -inf.
    """

    def __init__(
        self, logits: Tensor, row: int, node: int, temperature: float | None, state: int | None = None
    ) -> None:
        by_row, by_node, _ = logits.stride()
        self._held, self._temperature = logits, temperature
        self._address = logits.data_ptr() + 4 * (by_row * row + by_node * (node + 1))
        self.walk = walk(self._address, logits.shape[-1], GLANCE_IDS, state, temperature or 1.0)
        check_number(self.walk.mass)

    @property
    def gap(self) -> float:
        """Return the largest logit less the second largest."""
        first, second = self.walk.values[:2]
        return first - second

    def chances(self, ids: Sequence[int]) -> list[float]:
        """Return the probabilities of these ids at temperature 1."""
        top, mass = self.walk.values[0], self.walk.mass
        logits = (ctypes.c_float.from_address(self._address + 4 * token).value for token in ids)
        return [math.exp(logit - top) / mass for logit in logits]

    def likeliest(self) -> list[tuple[int, float]]:
        """Return a few ids and their processed probabilities; [] where these are unknown."""
        if not self._temperature:
            return [] if self._temperature is None else [(self.walk.ids[0], 1.0)]
        top, mass, by = self.walk.values[0], self.walk.tempered, 1 / self._temperature
        return [
            (token, math.exp((value - top) * by) / mass)
            for token, value in zip(self.walk.ids, self.walk.values, strict=True)
        ]


def distributions_of(logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> Tensor:
    """Return the verifier's distributions [B, N+1, V] at the root and after each node."""
    return sampler.probs(logits, prefixes_of(rows, draft) if sampler.needs_prefixes else [])


def prefixes_of(rows: Rows, draft: Draft, places: Sequence[tuple[int, int]] | None = None) -> Rows:
    """Return the committed tokens and the drafts down to these (row, node) places, node -1 being the root; by default
    to all B × (N+1) places."""
    drafts, count = draft.tokens.tolist(), draft.tokens.shape[1]
    parents = above(draft.parents, count)
    if places is None:
        places = [(row, node) for row in range(len(rows)) for node in range(-1, count)]
    prefixes: Rows = []
    for row, node in places:
        tail: list[int] = []
        while node >= 0:
            tail.append(drafts[row][node])
            node = parents[node]
        prefixes.append([*rows[row], *reversed(tail)])
    return prefixes


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm((p − q)⁺) [M, V]; p itself where only rounding is left."""
    return normal((p - q).clamp_(min=0), p)


def normal(left: Tensor, p: Tensor) -> Tensor:
    """Return norm(left) [M, V]; p where only rounding is left."""
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > TINY, left / mass.clamp(min=TINY), p)


def check_ratio(ratio: Tensor) -> None:
    """Raise ValueError where p(x)/q(x) is no number."""
    if bool(ratio.isnan().any()):
        raise ValueError("p(x)/q(x) is 0/0: a token was drafted that its own distribution gives no mass")


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Return the distributions [..., V] with all mass on the tokens [...]; any for absent ones (-1)."""
    distributions = like.new_zeros(*tokens.shape, like.shape[-1])
    return distributions.scatter_(-1, tokens.clamp(min=0)[..., None].to(like.device), 1.0)


# -- block verification (Sun et al., arXiv 2403.10444, algorithm 2), which sampling/verify/rules.py states -----------


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
