"""Trees from what was already said: of all tokens that a match or a table offers anywhere, those likeliest to hold.

Where the longest context is wrong a shorter one may be right, and asking it costs nothing. The tree grows best first
(as EAGLE-2's does from a model, Li et al., arXiv 2406.16858): the next node is always the one whose whole path has the
best chance, so nodes come in falling worth. Children are point masses. Needs no model and knows none.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from sampling.drafters.tables import CHANCE, MATCH, TABLES, Found, MatchIndex, TablesDrafter
from sampling.rows import behind
from sampling.types import Draft, Rows, Sampler

_CHOICES = 4  # tokens of one context of the tables that may become siblings


class _Offer(NamedTuple):
    """A node that may be taken: less its path's chance, in which order it came, the node above, tokens above."""

    unworth: float
    order: int
    parent: int
    found: Found
    tail: list[int]


class TableTreeDrafter(TablesDrafter):
    """As :class:`TablesDrafter`, but k[b] counts the nodes of a tree, the deepest of which has k[b] above it at most.

    No path is less likely than `least`. Rows of a batch share one shape: they get chains.
    """

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """A tree of at most k[0] nodes; `source` is [1, N]."""
        if len(rows) != 1:
            return super().propose(rows, k, sampler)
        (row,) = behind(self._leads, rows)
        index = self._indices[0]
        index.follow(row)
        taken = self._grown(index, row[-self._reach :], k[0])
        if all(parent == node - 1 for node, (parent, _) in enumerate(taken)):
            parents = None
        else:
            parents = torch.tensor([parent for parent, _ in taken])
        tokens = torch.tensor([[found.token for _, found in taken]], dtype=torch.long)
        source = torch.tensor([[found.source for _, found in taken]], dtype=torch.long)
        return Draft(tokens, parents=parents, source=source)

    def _grown(self, index: MatchIndex, tail: list[int], nodes: int) -> list[tuple[int, Found]]:
        """(parent, what was found) of each node, the likeliest path first."""
        offers: list[_Offer] = []
        taken: list[tuple[int, Found]] = []
        order = 0
        at = _Offer(-1.0, 0, -1, Found(-1, 0, 1.0), tail)
        node = -1
        while len(taken) < nodes:
            for found in self._offered(index, at.tail):
                if (worth := -at.unworth * found.chance) >= self.least:
                    order += 1
                    heappush(offers, _Offer(-worth, order, node, found, at.tail))
            if not offers:
                break
            best = heappop(offers)
            node = len(taken)
            taken.append((best.parent, best.found))
            at = best._replace(tail=[*best.tail[1 - self._reach :], best.found.token])
        return taken

    def _offered(self, index: MatchIndex, tail: list[int]) -> Iterator[Found]:
        """Every token that some context offers, in the order in which a chain would believe them; a later one counts
        for what those before it leave."""
        left, seen = 1.0, set[int]()
        for found in self._all(index, tail):
            if found.token not in seen and left > 0:
                seen.add(found.token)
                yield found._replace(chance=left * found.chance)
                left *= 1 - found.chance

    def _all(self, index: MatchIndex, tail: list[int]) -> Iterator[Found]:
        """As :meth:`TablesDrafter._next`, and what it would have found without that, and so on."""
        matches = [(size, Found(token, MATCH, CHANCE[size])) for size, token in index.every(tail)]
        known = [] if self.tables is None else list(self.tables.every(tail, most=_CHOICES))
        yield from (found for size, found in matches if size >= self.sure_match)
        yield from (Found(one.token, TABLES, one.confidence) for one in known if one.size > 1)
        yield from (found for size, found in matches if size < self.sure_match)
        yield from (Found(one.token, TABLES, one.confidence) for one in known if one.size == 1)
