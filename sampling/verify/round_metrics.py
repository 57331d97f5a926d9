"""What a round tells the watcher: temperature-1 probabilities of the examined drafts and the gap
of the two best logits. Display only; no decision is taken from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sampling.types import Draft, Verdict, above
from sampling.vocabulary import best


@dataclass(frozen=True, slots=True)
class Told:
    """Per row, for every node: its token, parent, source, p(x) and q(x); per position the top-2 gap.

    p(x) and the gap are known where the verifier looked: at the root, behind accepted nodes, and of their children.
    """

    tokens: list[list[int]]
    parents: list[int]
    source: list[list[int]]
    target_p: list[dict[int, float]]
    draft_p: list[list[float]]
    gaps: list[dict[int, float]]

    @staticmethod
    def of(verdict: Verdict, draft: Draft) -> Told:
        """Read everything off the device at once."""
        tokens, path, device = draft.tokens, verdict.path, verdict.logits.device
        rows, count = tokens.shape
        parents = list(above(draft.parents, count))
        source = [[0] * count] * rows if draft.source is None else draft.source.expand(rows, count).tolist()
        draft_p = [[1.0] * count for _ in range(rows)] if draft.raw is None else draft.raw.tolist()
        # Of all positions only those where a row stood, its stages [B, A+1]: a tree has many more.
        accepted = int((path >= 0).sum(dim=1).max()) if rows else 0
        stood = torch.cat([torch.full((rows, 1), -1), path[:, :accepted]], dim=1)
        places = stood + 1 + torch.arange(rows)[:, None] * (count + 1)
        logits = verdict.logits.flatten(0, 1).index_select(0, places.flatten().to(device)).float()
        logits = logits.unflatten(0, places.shape)
        top = best(logits, 2)[0]
        gaps = [
            dict(zip(nodes, values, strict=True))
            for nodes, values in zip(stood.tolist(), (top[..., 0] - top[..., -1]).tolist(), strict=True)
        ]
        told = Told(tokens.tolist(), parents, source, [{} for _ in range(rows)], draft_p, gaps)
        if count:
            told._judge(stood, logits)
        return told

    def _judge(self, stood: Tensor, logits: Tensor) -> None:
        """p(x) of the children of the nodes at which each row stood, from their logits [B, A+1, V]."""
        wanted: list[tuple[int, int, int]] = []  # of each: row, stage, token
        nodes: list[int] = []
        for place, passed in enumerate(stood.tolist()):
            stages = {node: stage for stage, node in reversed(list(enumerate(passed)))}  # -1 is the root, then padding
            for node, (parent, token) in enumerate(zip(self.parents, self.tokens[place], strict=True)):
                if parent in stages and token >= 0:
                    wanted.append((place, stages[parent], token))
                    nodes.append(node)
        if not wanted:
            return
        places, at, ids = torch.tensor(wanted, device=logits.device).unbind(1)
        chances = logits.softmax(dim=-1)[places, at, ids]
        for (place, _, _), node, chance in zip(wanted, nodes, chances.tolist(), strict=True):
            self.target_p[place][node] = chance

    def row(self, place: int, path: list[int], token: int | None) -> dict[str, Any]:
        """The fields of row `place`'s Step; nodes are numbered anew without the absent ones."""
        present = [node for node, drafted in enumerate(self.tokens[place]) if drafted >= 0]
        number = {node: index for index, node in enumerate(present)}
        last = path[-1] if path else -1
        refused = [] if token is None else [node for node in present if self.parents[node] == last]
        examined = [*path, *refused]
        ended = last if token is not None else self.parents[last]
        return {
            "drafted": tuple(self.tokens[place][node] for node in present),
            "parents": tuple(number.get(self.parents[node], -1) for node in present),
            "source": tuple(self.source[place][node] for node in present),
            "path": tuple(number[node] for node in path),
            "target_p": tuple(self.target_p[place][node] for node in examined),
            "draft_p": tuple(self.draft_p[place][node] for node in examined),
            "top2_gap": self.gaps[place][ended],
        }
