"""A verifier's distributions after the nodes of a draft, their prefixes, and residuals after refusals. Knows drafts;
verifies nothing.

A tree has many more nodes than verification visits, and on a CPU the distribution of a large vocabulary costs as much
as drafting, so it is computed when it is used. On an accelerator each answer that the host waits for costs more than
the arithmetic: everything about all nodes comes by one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.rows import fetched, padded, put
from sampling.types import Distributions, Draft, Rows, Sampler
from sampling.verify.facts import LIKELIEST, PositionFacts, facts_of_few, facts_of_walk
from sampling.vocabulary import MANY, largest
from utils.kernels.bindings import at_hand, walk, walkable
from utils.logits_processors import check_finite

TINY = 1e-12  # a residual of less mass is rounding: draw from p

Place = tuple[int, int]
"""A row, and a node at which it stands (-1: the root)."""


def distributions_for(logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> HostDistributions:
    """Return the distributions of a draft under the verifier's logits [B, N+1, V]."""
    # Coins that are noted must decide something, so not all nodes are decided at once.
    at_once = logits.device.type != "cpu" and not sampler.notes
    return (DeviceDistributions if at_once else HostDistributions)(logits, draft, rows, sampler)


class HostDistributions(Distributions):
    """The verifier's processed distributions at the root and after each node of a draft, computed at their first use.

    `at_once`: facts and draws of all places are brought to the host together.
    """

    at_once = False

    def __init__(self, logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> None:
        self.logits, self.draft, self.sampler, self._rows = logits, draft, sampler, rows
        self._known: dict[Place, Tensor] = {}
        self._facts: dict[Place, PositionFacts] = {}
        self._walks = logits.shape[-1] >= MANY and at_hand() and walkable(logits)

    def all(self) -> Tensor:
        """Return [B, N+1, V]."""
        return distributions_of(self.logits, self.draft, self._rows, self.sampler)

    def at(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return [M, V] of these rows after these nodes (-1: the root)."""
        places = list(zip(rows, nodes, strict=True))
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        if new:
            distributions = self._processed(new)
            self._known.update(zip(new, distributions, strict=True))
            if new == places:
                return distributions
        return torch.stack([self._known[place] for place in places])

    def drawn(self, row: int, node: int, key: tuple[int, int]) -> int:
        """Draw the token after a node (-1: the root) with the noise of `key`, (row number, position).

        A greedy draw needs no distribution. If the kernels are loaded, one walk over the logits draws; near ties are
        left to the sampler.
        """
        sampler, temperature = self.sampler, self.sampler.tempered
        if self._walks and (sampler.greedy or temperature is not None):
            walked = self._walk(row, node, temperature or 0.0, None if temperature is None else key)
            if walked >= 0:
                return walked
        if not sampler.greedy or self.logits.device.type != "cpu":
            return int(sampler.draw(self.at([row], [node]), torch.tensor([key])))
        logits = self.logits[row, node + 1]
        token = int(largest(logits))
        check_finite(logits[token])
        return token

    def facts(self, row: int, node: int) -> PositionFacts | None:
        """Return the facts of the logits after a node; None where they are not cheap."""
        if self._walks and (row, node) not in self._facts:
            self._walk(row, node, None)
        return self._facts.get((row, node))

    def _walk(self, row: int, node: int, temperature: float | None, key: tuple[int, int] | None = None) -> int:
        """Walk over the logits after a node; the token that is drawn with the noise of `key`, -1: undecided."""
        by_row, by_node, _ = self.logits.stride()
        address = self.logits.data_ptr() + 4 * (by_row * row + by_node * (node + 1))
        state = None if key is None else self.sampler.noise_state(*key)
        walked = walk(address, self.logits.shape[-1], LIKELIEST, state, temperature or 1.0)
        self._facts[row, node] = facts_of_walk(walked, address, temperature)
        return walked.drawn

    def _processed(self, places: list[Place]) -> Tensor:
        prefixes = prefixes_of(self._rows, self.draft, places) if self.sampler.needs_prefixes else []
        if len(places) == 1:  # a view
            ((row, node),) = places
            return self.sampler.probs(self.logits[row, node + 1][None], prefixes)
        rows, nodes = torch.tensor(places).unbind(1)
        return self.sampler.probs(self.logits[rows, nodes + 1], prefixes)


class DeviceDistributions(HostDistributions):
    """The same on an accelerator: all places are computed together, and :meth:`bring` brings what the host needs of
    them by one transfer."""

    at_once = True

    def __init__(self, logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> None:
        super().__init__(logits, draft, rows, sampler)
        self._probs = super().all()
        self._draws: list[list[int]] | None = None

    def all(self) -> Tensor:
        return self._probs

    def at(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        device = self._probs.device
        return self._probs[put(rows, device), put([node + 1 for node in nodes], device)]

    def draw_all(self, keys: Sequence[Sequence[int]]) -> None:
        """Draw the token of every place with its noise; `keys`: row number and position of each row's first token."""
        count, trees = self.draft.width, zip(keys, self.draft.trees, strict=True)
        depths = [(key, [0, *tree.depths, *[0] * (count - len(tree.depths))]) for key, tree in trees]
        stands = torch.tensor([[number, start + depth] for (number, start), each in depths for depth in each])
        drawn = self.sampler.draw(self._probs.flatten(0, 1), stands).view(self._probs.shape[:2])
        self._draws = self.bring(drawn)[0].long().tolist()

    def drawn(self, row: int, node: int, key: tuple[int, int]) -> int:
        assert self._draws is not None
        return self._draws[row][node + 1]

    def facts(self, row: int, node: int) -> PositionFacts | None:
        return self._facts[row, node]

    def bring(self, *tensors: Tensor) -> list[Tensor]:
        """Return these tensors on the host, and keep the facts of all places, by one transfer."""
        logits, count = self.logits.float(), self.draft.width
        places = [(row, node) for row in range(len(self.draft.trees)) for node in range(-1, count)]
        children: Rows = []
        for tree in self.draft.trees:
            children += [*map(tree.path_tokens, tree.children), *[[]] * (count - len(tree.tokens))]
        ids = padded(children, 0).view(*logits.shape[:2], -1)
        values = logits.topk(min(2, logits.shape[-1]), dim=-1)[0]
        mass = (logits - values[..., :1]).exp().sum(dim=-1)
        of_drafts = logits.gather(2, put(ids, logits.device))
        probs, likely = self._probs.topk(min(LIKELIEST, self._probs.shape[-1]), dim=-1)
        *first, tops, masses, drafts, near, near_ids = fetched(*tensors, values, mass, of_drafts, probs, likely)
        flat = (part.flatten(0, 1).tolist() for part in (tops, masses, drafts, near, near_ids))
        for place, tokens, top, total, own, p, known in zip(places, children, *flat, strict=True):
            pairs = [(int(token), share) for token, share in zip(known, p, strict=True)]
            self._facts[place] = facts_of_few(top, total, dict(zip(tokens, own, strict=False)), pairs)
        return first


def distributions_of(logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> Tensor:
    """Return the verifier's distributions [B, N+1, V] at the root and after each node."""
    return sampler.probs(logits, prefixes_of(rows, draft) if sampler.needs_prefixes else [])


def prefixes_of(rows: Rows, draft: Draft, places: Sequence[Place] | None = None) -> Rows:
    """Return the committed tokens and the drafts down to these places; by default to all B × (N+1). A row that lacks a
    node has its tokens alone there."""
    if places is None:
        places = [(row, node) for row in range(len(rows)) for node in range(-1, draft.width)]
    prefixes: Rows = []
    for row, node in places:
        tree, tail = draft.trees[row], list[int]()
        while 0 <= node < len(tree.tokens):
            tail.append(tree.tokens[node])
            node = tree.parents[node]
        prefixes.append([*rows[row], *reversed(tail)])
    return prefixes


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm((p − q)⁺) [M, V]; p itself where only rounding is left."""
    return normal((p - q).clamp_(min=0), p)


def normal(left: Tensor, p: Tensor) -> Tensor:
    """Return norm(left) [M, V]; p where only rounding is left."""
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > TINY, left / mass.clamp(min=TINY), p)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Return the distributions [..., V] with all mass on the tokens [...]; any for absent ones (-1)."""
    distributions = like.new_zeros(*tokens.shape, like.shape[-1])
    return distributions.scatter_(-1, tokens.clamp(min=0)[..., None].to(like.device), 1.0)
