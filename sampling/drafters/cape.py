"""Siblings around a drafted chain: CaPE, confidence-aware proposal expansion (GLIDE with a CaPE, arXiv 2402.02082,
section 3.2). At every position of the chain the drafter's next best tokens stand beside the chosen one as leaves, the
more of them the less sure it is.

Where drafts are point masses the siblings are the most likely other tokens; where they are drawn, siblings are drawn
too, each from what those before it leave of the distribution (no token twice), and that distribution travels with it.
How many there are is settled by distributions and by the chain, before a sibling is drawn. Knows no models;
sampling/drafters/draft_model.py drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sampling.drafters.drawing import Column, Drawing, Leaves, Other, sure
from sampling.types import Budget, Draft, Rows
from sampling.vocabulary import spread

BINS = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))  # (top probability up to, siblings): the paper's
_MOST = max(count for _, count in BINS)


def siblings_of(confidence: float) -> int:
    """How many siblings stand beside a token whose drafter gives its best one this probability at temperature 1."""
    return next((count for limit, count in BINS if confidence <= limit), BINS[-1][1])


@dataclass(frozen=True)
class Expansion:
    """How far chains grow sideways: at most `nodes` draft nodes a row, the chain's own among them, where the budget of
    a round names no other number. The chain is never cut.
    """

    nodes: int = 1 << 20

    def most(self, budget: Budget) -> int:
        """Nodes of a row in this round."""
        return self.nodes if budget.max_nodes is None else budget.max_nodes

    def grow(self, chain: Draft, drawing: Drawing, columns: list[Column], rows: Rows, most: int) -> Draft:
        """The tree made of a chain: its nodes first, then the siblings by depth. `rows` [B] are the committed ones."""
        others = drawing.others(columns, _MOST)
        counts = _counts(chain, sure(columns), others, most)
        beside = (
            drawing.beside(column, more, rows, depth, [row[depth] for row in counts])
            for depth, (column, more) in enumerate(zip(columns, others, strict=True))
        )
        leaves = {depth: found for depth, found in enumerate(beside) if found is not None}
        return _joined(chain, leaves, drawing) if leaves else chain


def _counts(chain: Draft, best: list[list[float]], others: list[list[list[Other]]], most: int) -> list[list[int]]:
    """Of each row and depth the siblings: as many as the bins say, those of the largest expected gain within `most`.

    `best`, the probability of the likeliest token, and `others` by depth and row.
    """
    assert chain.draft_prob is not None
    found = []
    for place, (tokens, raw) in enumerate(zip(chain.tokens.tolist(), chain.draft_prob.tolist(), strict=True)):
        path, offers, length = 1.0, [], sum(token >= 0 for token in tokens)
        for depth in range(length):
            bound = siblings_of(best[depth][place])
            offers += [(path * other.p, depth) for other in others[depth][place][:bound]]
            path *= raw[depth]
        taken = [depth for _, depth in sorted(offers, reverse=True)[: max(0, most - length)]]
        found.append([taken.count(depth) for depth in range(len(tokens))])
    return found


def _joined(chain: Draft, leaves: dict[int, Leaves], drawing: Drawing) -> Draft:
    """Chain and leaves, by depth, as one draft; the parent of a leaf is the chain's node above it."""
    parents = list(range(-1, chain.tokens.shape[1] - 1))
    parents += [depth - 1 for depth, found in leaves.items() for _ in range(found.tokens.shape[1])]
    probs = chain.probs
    if probs is not None:
        beside = torch.cat([found.probs for found in leaves.values() if found.probs is not None], dim=1)
        probs = torch.cat([probs, spread(beside, drawing.reduced_ids, drawing.vocab_size, 0.0)], dim=1)
    assert chain.draft_prob is not None
    return replace(
        chain,
        source=None,
        tokens=torch.cat([chain.tokens, *(found.tokens for found in leaves.values())], dim=1),
        probs=probs,
        draft_prob=torch.cat([chain.draft_prob, *(found.raw for found in leaves.values())], dim=1),
        parents=torch.tensor(parents),
    )
