"""Dynamic trees of a feature drafter (EAGLE-2, Li et al., arXiv 2406.16858): the likeliest nodes, found level by level.

Of every level the nodes whose whole path the drafter holds for most probable are computed, all in one pass; of all
nodes drawn the best are the draft. A node is never likelier than those above it, so they are a tree. Knows no laws of
a sampler: children are point masses in every mode, which is lossless however they were chosen (draw t ~ p, go down
where a child is t); where chains would be drawn from a law trees are greedy, and the text is plain decoding's with
that seed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampling.drafters.expand import Expansion
from sampling.drafters.feature import FeatureLM, FeatureSession
from sampling.drafters.model import ModelDrafter
from sampling.events import Call
from sampling.types import Draft, Rows, Sampler
from utils.timing import Stopwatch

WIDTH = 4  # nodes of a level that are computed (docs/notes.md)


class Node(NamedTuple):
    """A token drawn: the node above it (-1: none), depth from 1, its probability and that of its whole path."""

    token: int
    parent: int
    depth: int
    chance: float
    path: float


class FeatureTreeDrafter(ModelDrafter):
    """Trees of at most `expansion.nodes` nodes and k[0] levels, from what :class:`FeatureDrafter` drafts chains from.

    `least`: nothing is computed below a node whose path is less likely. `width`: nodes computed a level. Rows of a
    batch share one shape: they get chains with siblings, drawn as the sampler says.
    """

    def __init__(
        self, lm: FeatureLM, least: float = 0.0, expansion: Expansion | None = None, width: int = WIDTH
    ) -> None:
        super().__init__(lm, least, expansion or Expansion())
        self.width = width

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """A tree, its nodes in falling probability of their paths; tokens and raw [1, N], no laws."""
        depth = min(k[0], self.lm.context - len(rows[0]))
        if len(rows) != 1 or depth <= 0 or not self.sessions:
            return super().propose(rows, k, sampler)
        watch = Stopwatch(getattr(self.lm, "device", None))
        drawn, best, passes = self._drawn(rows, depth)
        place = {node: rank for rank, node in enumerate([-1, *best], start=-1)}
        nodes = [drawn[at] for at in best]
        parents = [place[node.parent] for node in nodes]
        return Draft(
            tokens=torch.tensor([[node.token for node in nodes]]),
            raw=torch.tensor([[node.chance for node in nodes]]),
            parents=None if parents == list(range(-1, len(nodes) - 1)) else torch.tensor(parents),
            calls=(Call(self.lm.name, passes, watch.lap()),),
        )

    def _drawn(self, rows: Rows, depth: int) -> tuple[list[Node], list[int], int]:
        """All nodes drawn, which of them are the best, the likeliest first, and how many passes that took."""
        session = self._session
        assert isinstance(session, FeatureSession)
        assert self.expansion is not None
        most, drawn, fed, above = self.expansion.nodes, list[Node](), list[int](), [-1]
        logits = session.score_short(rows, Draft.empty(1))[0]
        for level in range(1, depth + 1):
            drawn += self._children(logits, above, drawn, level, session.short_list)
            best = sorted(range(len(drawn)), key=lambda at: -drawn[at].path)[:most]  # of equals those above come first
            # What is below the last of the best is not among them any more.
            above = [at for at in best[: most - 1] if drawn[at].depth == level and drawn[at].path >= self.least]
            above = above[: self.width]
            if level == depth or not above:
                break
            fed += above
            logits = session.grow([drawn[at].token for at in fed], [_place(fed, drawn[at].parent) for at in fed])
        return drawn, best, level

    def _children(
        self, logits: Tensor, above: list[int], drawn: list[Node], depth: int, short_list: Tensor | None
    ) -> list[Node]:
        """As many of the likeliest tokens behind each of the nodes `above` as may be kept; logits [M, n]."""
        assert self.expansion is not None
        chances, ids = logits.float().softmax(dim=-1).topk(min(self.expansion.nodes, logits.shape[-1]), dim=-1)
        ids = ids if short_list is None else short_list[ids]
        return [
            Node(token, parent, depth, chance, chance * (1.0 if parent < 0 else drawn[parent].path))
            for parent, tokens, row in zip(above, ids.tolist(), chances.tolist(), strict=True)
            for token, chance in zip(tokens, row, strict=True)
            if chance > 0
        ]


def _place(fed: list[int], node: int) -> int:
    return -1 if node < 0 else fed.index(node)
