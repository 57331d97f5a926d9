"""A verifier's distributions after the nodes of a draft, their prefixes, and residuals after rejections. Knows drafts;
verifies nothing.

A tree has many more nodes than verification visits, and on a CPU the distribution of a large vocabulary costs as much
as drafting, so it is computed at its first use. On an accelerator each wait of the host for a result costs more than
the arithmetic, so the results for all nodes come by one transfer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.events import Filters
from sampling.rows import fetched, padded, put
from sampling.types import Distributions, Draft, Rows, Sampler
from sampling.verify.facts import LIKELIEST, PositionFacts, WalkedFacts
from sampling.vocabulary import MANY, largest
from utils.kernels.bindings import Structure, at_hand, descend, walk, walkable
from utils.logits_processors import check_finite

GREEDY = Filters(0.0)
TINY = 1e-12  # a residual of less mass is rounding: draw from p

Place = tuple[int, int]  # a row, and a node of its draft (-1: the root)


def distributions_for(logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> "HostDistributions":
    """Return the distributions of a draft under the verifier's logits [B, N+1, V]."""
    return (DeviceDistributions if at_once(logits, sampler) else HostDistributions)(logits, draft, rows, sampler)


def at_once(tensor: Tensor, sampler: Sampler) -> bool:
    """Return whether all places are decided together: on an accelerator, unless coins are recorded, since every
    recorded coin must decide something. Only the device of `tensor` counts."""
    return not tensor.is_cpu and not sampler.notes


class HostDistributions(Distributions):
    """The verifier's processed distributions at the root and after each node of a draft, computed at their first use.

    `logits` [B, N+1, V]. `at_once`: facts and draws of all places are brought to the host together.
    """

    at_once = False

    def __init__(self, logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> None:
        self.logits, self.draft, self.sampler, self._rows = logits, draft, sampler, rows
        self._known: dict[Place, Tensor] = {}
        self._walked: dict[Place, Structure] = {}
        self._walks = logits.shape[-1] >= MANY and at_hand() and walkable(logits)
        # of the draw; None: a walk cannot draw
        self._filters = (GREEDY if sampler.greedy else sampler.filters) if self._walks else None

    def all(self) -> Tensor:
        """Return [B, N+1, V]."""
        prefixes = prefixes_of(self._rows, self.draft) if self.sampler.needs_prefixes else []
        return self.sampler.probs(self.logits, prefixes)

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

    def descend(self, row: int, node: int, key: tuple[int, int]) -> tuple[list[int], int]:
        """Return the drafts that are drawn one after the other after a node (-1: the root), and the token drawn after
        them. `key`: the row's number and the position of the first draw.

        If a compiled walk over the logits can draw as the sampler does, it goes down as far as it can; near ties are
        left to the sampler. Otherwise no drafts are passed.
        """
        filters = self._filters
        if filters is None:
            return [], self.drawn(row, node, key)
        tree = self.draft.trees[row]
        noise = (self.sampler.noise_key(key[0])[0], key[1]) if filters.temperature else None
        cut = (filters.temperature or 1.0, *filters[1:])
        visited, walks = descend(self.logits, row, node, tree.tokens, tree.parents, LIKELIEST, noise, *cut)
        for each, walked in zip(visited, walks, strict=False):
            self._walked[row, each] = walked
        token = walks[len(visited) - 1].drawn
        if token < 0:
            token = self.drawn(row, visited[-1], (key[0], key[1] + len(visited) - 1))
        return visited[1:], token

    def bring(self, *tensors: Tensor) -> list[Tensor]:
        """Return these tensors, of any shape, on the host."""
        return fetched(*tensors)

    def draw_all(self, keys: Sequence[Sequence[int]]) -> None:
        """Draw the tokens of all places, where they are decided at once."""

    def drawn(self, row: int, node: int, key: tuple[int, int]) -> int:
        """Draw the token after a node (-1: the root) with the noise of `key`. A greedy draw needs no distribution, and
        a token that a constraint forces needs no draw."""
        if (constraint := self.sampler.constraint) is not None:
            state = constraint.at(prefixes_of(self._rows, self.draft, [(row, node)])[0])
            if state is not None and state.forced is not None:
                return state.forced
        if not self.sampler.greedy or self.logits.device.type != "cpu":
            return int(self.sampler.draw(self.at([row], [node]), torch.tensor([key])))
        logits = self.logits[row, node + 1]
        token = int(largest(logits))
        check_finite(logits[token])
        return token

    def facts(self, row: int, node: int) -> PositionFacts | None:
        """Return the facts of the logits after a node; None unless a compiled walk can read these."""
        if not self._walks:
            return None
        walked, filters = self._walked.get((row, node)), self._filters
        if walked is None:
            by_row, by_node, size = *self.logits.stride()[:2], self.logits.shape[-1]
            walked = walk(self.logits.data_ptr() + 4 * (by_row * row + by_node * (node + 1)), size, LIKELIEST)
            filters = None
        return WalkedFacts(walked, filters)

    def _processed(self, places: list[Place]) -> Tensor:
        prefixes = prefixes_of(self._rows, self.draft, places) if self.sampler.needs_prefixes else []
        if len(places) == 1:  # without a copy
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
        self._probs, self._facts = super().all(), dict[Place, PositionFacts]()
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
        draw_keys = torch.tensor([[number, start + depth] for (number, start), each in depths for depth in each])
        drawn = self.sampler.draw(self._probs.flatten(0, 1), draw_keys)
        self._draws = self.bring(drawn.view(self._probs.shape[:2]))[0].long().tolist()

    def descend(self, row: int, node: int, key: tuple[int, int]) -> tuple[list[int], int]:
        assert self._draws is not None
        return [], self._draws[row][node + 1]

    def facts(self, row: int, node: int) -> PositionFacts | None:
        return self._facts[row, node]

    def bring(self, *tensors: Tensor) -> list[Tensor]:
        """Return these tensors, of any shape, on the host, and keep the facts of all places, by one transfer."""
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
            self._facts[place] = PositionFacts(top, total, dict(zip(tokens, own, strict=False)).__getitem__, pairs)
        return first


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
