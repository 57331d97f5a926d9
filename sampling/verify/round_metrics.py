"""What a round looks like to who watches it: temperature-1 probabilities of the examined drafts and the gap of the two
best logits. Display only; no decision is taken from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sampling.events import Step
from sampling.types import Draft, Rows, Verdict, above
from sampling.vocabulary import best


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """Per row, for every node: its token, parent, source, p(x) and q(x); per position the top-2 gap.

    p(x) and the gap are known where the verifier looked: at the root, behind accepted nodes, and of their children.
    """

    tokens: Rows
    parents: list[int]
    source: Rows
    target_p: list[dict[int, float]]
    draft_p: list[list[float]]
    gaps: list[dict[int, float]]

    @staticmethod
    def of(verdict: Verdict, draft: Draft) -> RoundMetrics:
        """Read everything off the device at once."""
        path, device = verdict.path, verdict.logits.device
        rows, count = draft.tokens.shape
        tokens, parents = draft.tokens.tolist(), list(above(draft.parents, count))
        source = [[0] * count] * rows if draft.source is None else draft.source.expand(rows, count).tolist()
        draft_p = [[1.0] * count] * rows if draft.raw is None else draft.raw.tolist()
        # Of all positions only those where a row stood, its stages [B, A+1]: a tree has many more.
        accepted = int((path >= 0).sum(dim=1).max()) if rows else 0
        stood = torch.cat([torch.full((rows, 1), -1), path[:, :accepted]], dim=1)
        places = stood + 1 + torch.arange(rows)[:, None] * (count + 1)
        logits = verdict.logits.flatten(0, 1).index_select(0, places.flatten().to(device)).float()
        logits = logits.unflatten(0, places.shape)
        top = best(logits, 2)[0]
        values = (top[..., 0] - top[..., -1]).tolist()
        gaps = [dict(zip(nodes, gap, strict=True)) for nodes, gap in zip(stood.tolist(), values, strict=True)]
        return RoundMetrics(tokens, parents, source, _examined_p(tokens, parents, stood, logits), draft_p, gaps)

    def step(self, place: int, path: list[int], token: int | None, **more: Any) -> Step:
        """The Step of row `place`, `more` being its other fields; nodes are numbered anew without the absent ones."""
        tokens, parents, source = self.tokens[place], self.parents, self.source[place]
        present = [node for node, drafted in enumerate(tokens) if drafted >= 0]
        number = {node: index for index, node in enumerate(present)}
        last = path[-1] if path else -1
        rejected = [] if token is None else [node for node in present if parents[node] == last]
        examined = [*path, *rejected]
        return Step(
            drafted=tuple(tokens[node] for node in present),
            parents=tuple(number.get(parents[node], -1) for node in present),
            source=tuple(source[node] for node in present),
            path=tuple(number[node] for node in path),
            token=token,
            target_p=tuple(self.target_p[place][node] for node in examined),
            draft_p=tuple(self.draft_p[place][node] for node in examined),
            top2_gap=self.gaps[place][last if token is not None else parents[last]],
            **more,
        )


def _examined_p(tokens: Rows, parents: list[int], stood: Tensor, logits: Tensor) -> list[dict[int, float]]:
    """By row and node p(x) of the children of the nodes at which each row stood, from their logits [B, A+1, V]."""
    wanted: list[tuple[int, int, int, int]] = []  # of each: row, stage, token, node
    for place, passed in enumerate(stood.tolist()):
        stages = {node: stage for stage, node in reversed(list(enumerate(passed)))}  # -1 is the root, then padding
        wanted += [
            (place, stages[parent], token, node)
            for node, (parent, token) in enumerate(zip(parents, tokens[place], strict=True))
            if parent in stages and token >= 0
        ]
    found: list[dict[int, float]] = [{} for _ in tokens]
    if wanted:
        places, at, ids, _ = torch.tensor(wanted, device=logits.device).unbind(1)
        values = logits.softmax(dim=-1)[places, at, ids].tolist()
        for (place, _, _, node), p in zip(wanted, values, strict=True):
            found[place][node] = p
    return found
