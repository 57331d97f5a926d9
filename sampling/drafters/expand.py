"""Siblings around a drafted chain: CaPE, confidence-aware proposal expansion (GLIDE with a CaPE, arXiv 2402.02082,
section 3.2). At every position of the chain the drafter's next best tokens stand beside the chosen one as leaves, the
more of them the less sure it is.

Where drafts are point masses the siblings are the most likely other tokens; where they are drawn, siblings are drawn
too, each from what those before it leave of the law (no token twice), and that law travels with it. How many there are
is settled by laws and by the chain, before a sibling is drawn. Knows no models; sampling/drafters/model.py drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sampling.drafters.drawing import Column, Drawing
from sampling.events import Call
from sampling.short_list import spread
from sampling.types import Draft, Rows

BINS = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))  # (top probability up to, siblings): the paper's
_MOST = max(count for _, count in BINS)
_LIMIT = 1 << 20


def siblings_of(confidence: float) -> int:
    """How many siblings stand beside a token whose drafter gives its best one this probability at temperature 1."""
    return next((count for limit, count in BINS if confidence <= limit), BINS[-1][1])


@dataclass
class Expansion:
    """How far chains grow sideways: at most `nodes` draft nodes a row, the chain's own among them.

    The chain is never cut. May be set anew between rounds.
    """

    nodes: int = _LIMIT

    def grow(self, drawing: Drawing, columns: list[Column], rows: Rows, call: Call) -> Draft:
        """The tree made of a chain: its nodes first, then the siblings by depth. `rows` [B] are the committed ones."""
        chain = drawing.draft(columns, call)
        laws = [
            column.law if not drawing.sampler.point_mass else column.logits.float().softmax(-1) for column in columns
        ]
        counts = self._counts(chain, columns, laws, drawing.short_list)
        widths = [max(beside[depth] for beside in counts) for depth in range(len(columns))]
        if not any(widths):
            return chain
        leaves = [
            drawing.beside(column, law, rows, depth, [beside[depth] for beside in counts])
            for depth, (column, law) in enumerate(zip(columns, laws, strict=True))
        ]
        return _joined(chain, leaves, drawing)

    def _counts(
        self, chain: Draft, columns: list[Column], laws: list[Tensor], short_list: Tensor | None
    ) -> list[list[int]]:
        """Of each row and depth the siblings: as many as the bins say, the most promising ones within `nodes`."""
        best = [law.topk(min(_MOST + 1, law.shape[-1]), dim=-1) for law in laws]
        sure = [column.logits.float().softmax(dim=-1).amax(dim=-1).tolist() for column in columns]
        found = []
        for place, tokens in enumerate(chain.tokens.tolist()):
            reach, offers, length = 1.0, [], sum(token >= 0 for token in tokens)
            for depth in range(length):
                values, ids = (part[place].tolist() for part in best[depth])
                if short_list is not None:
                    ids = short_list[best[depth].indices[place]].tolist()
                others = [
                    value for value, token in zip(values, ids, strict=True) if token != tokens[depth] and value > 0
                ]
                offers += [(reach * value, depth) for value in others[: siblings_of(sure[depth][place])]]
                assert chain.raw is not None
                reach *= float(chain.raw[place, depth])
            kept = [depth for _, depth in sorted(offers, reverse=True)[: max(0, self.nodes - length)]]
            found.append([kept.count(depth) for depth in range(len(columns))])
        return found


def _joined(chain: Draft, leaves: list[list[Column]], drawing: Drawing) -> Draft:
    """Chain and leaves as one draft; the parent of a leaf is the chain's node above it."""
    parents = list(range(-1, chain.tokens.shape[1] - 1))
    parents += [depth - 1 for depth, columns in enumerate(leaves) for _ in columns]
    flat = [column for columns in leaves for column in columns]
    probs = chain.probs
    if probs is not None:
        laws = torch.stack([column.law for column in flat], dim=1)
        probs = torch.cat([probs, spread(laws, drawing.short_list, drawing.vocab_size, 0.0)], dim=1)
    assert chain.raw is not None
    return replace(
        chain,
        tokens=torch.cat([chain.tokens, torch.stack([column.tokens for column in flat], dim=1)], dim=1),
        probs=probs,
        raw=torch.cat([chain.raw, torch.stack([column.raw for column in flat], dim=1)], dim=1),
        parents=torch.tensor(parents),
    )
