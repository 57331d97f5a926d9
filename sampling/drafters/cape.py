"""Siblings of a drafted chain: CaPE, confidence-aware proposal expansion (GLIDE with a CaPE, arXiv 2402.02082,
section 3.2). At every position of the chain the drafter's next best tokens join the chosen one as leaves, more of them
where the drafter is less confident.

If drafts are point masses the siblings are the likeliest other tokens. If they are drawn, siblings are drawn too, each
from the distribution without the tokens before it (no token twice), and that distribution travels with it. Their
number is settled by the distributions and the chain, before a sibling is drawn. Knows no models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sampling.drafters.drawing import Column, Drawing, Leaves, Other, largest_probs
from sampling.types import Draft, Rows
from sampling.vocabulary import spread

BINS = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))  # (top probability up to, siblings): the paper's
_MOST = max(count for _, count in BINS)


def siblings_of(confidence: float) -> int:
    """Return the number of siblings where the drafter's likeliest token has this probability at temperature 1."""
    return next((count for limit, count in BINS if confidence <= limit), BINS[-1][1])


@dataclass(frozen=True)
class Expansion:
    """Adds siblings to chains: at most `nodes` nodes a row, the chain included, unless the budget of a round names
    another number. The chain is never cut.
    """

    nodes: int = 1 << 20

    def grow(self, chain: Draft, drawing: Drawing, columns: list[Column], rows: Rows, most: int) -> Draft:
        """Return the tree of a chain: its nodes, then the siblings by depth. `rows` [B] are the committed tokens."""
        others = drawing.others(columns, _MOST)
        counts = _counts(chain, largest_probs(columns), others, most)
        beside = (
            drawing.beside(column, more, rows, depth, [row[depth] for row in counts])
            for depth, (column, more) in enumerate(zip(columns, others, strict=True))
        )
        leaves = {depth: siblings for depth, siblings in enumerate(beside) if siblings is not None}
        return _joined(chain, leaves, drawing) if leaves else chain


def _counts(chain: Draft, best: list[list[float]], others: list[list[list[Other]]], most: int) -> list[list[int]]:
    """Return the number of siblings by row and depth: what the bins say, of largest expected gain within `most`.

    `best` (the probability of the likeliest token) and `others` are by depth and row.
    """
    assert chain.draft_prob is not None
    counts = []
    for row, (tokens, draft_prob) in enumerate(zip(chain.tokens.tolist(), chain.draft_prob.tolist(), strict=True)):
        path, offers, length = 1.0, [], sum(token >= 0 for token in tokens)
        for depth in range(length):
            bound = siblings_of(best[depth][row])
            offers += [(path * other.p, depth) for other in others[depth][row][:bound]]
            path *= draft_prob[depth]
        taken = [depth for _, depth in sorted(offers, reverse=True)[: max(0, most - length)]]
        counts.append([taken.count(depth) for depth in range(len(tokens))])
    return counts


def _joined(chain: Draft, leaves: dict[int, Leaves], drawing: Drawing) -> Draft:
    """Return a chain and its leaves, by depth, as one draft; the parent of a leaf is the chain's node above it."""
    parents = list(range(-1, chain.tokens.shape[1] - 1))
    parents += [depth - 1 for depth, siblings in leaves.items() for _ in range(siblings.tokens.shape[1])]
    probs = chain.probs
    if probs is not None:
        beside = torch.cat([siblings.probs for siblings in leaves.values() if siblings.probs is not None], dim=1)
        probs = torch.cat([probs, spread(beside, drawing.reduced_ids, drawing.vocab_size, 0.0)], dim=1)
    assert chain.draft_prob is not None
    return replace(
        chain,
        source=None,
        tokens=torch.cat([chain.tokens, *(siblings.tokens for siblings in leaves.values())], dim=1),
        probs=probs,
        draft_prob=torch.cat([chain.draft_prob, *(siblings.draft_prob for siblings in leaves.values())], dim=1),
        parents=torch.tensor(parents),
    )
