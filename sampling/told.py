"""What a round tells the watcher: temperature-1 probabilities of the examined drafts and the gap
of the two best logits. Display only; no decision is taken from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sampling.types import Draft, Verdict


@dataclass(frozen=True, slots=True)
class Told:
    """Per row, for every node: its token, parent, source, p(x) and q(x); per position the top-2 gap."""

    tokens: list[list[int]]
    parents: list[int]
    source: list[list[int]]
    target_p: list[list[float]]
    draft_p: list[list[float]]
    gaps: list[list[float]]

    @staticmethod
    def of(verdict: Verdict, draft: Draft) -> Told:
        """Read everything off the device at once."""
        logits, tokens = verdict.logits, draft.tokens
        rows, count = tokens.shape
        parents = list(range(-1, count - 1)) if draft.parents is None else draft.parents.tolist()
        source = [[0] * count] * rows if draft.source is None else draft.source.expand(rows, count).tolist()
        best = logits.topk(min(2, logits.shape[-1]), dim=-1).values.float()
        gaps = (best[..., 0] - best[..., -1]).tolist()
        if not count:
            nothing: list[list[float]] = [[] for _ in range(rows)]
            return Told(tokens.tolist(), parents, source, nothing, nothing, gaps)
        at = torch.tensor(parents, device=logits.device) + 1
        before = logits.index_select(1, at).float()
        chosen = before.gather(2, tokens.clamp(min=0).to(logits.device)[..., None])[..., 0]
        target_p = (chosen - before.logsumexp(dim=-1)).exp().tolist()
        draft_p = [[1.0] * count for _ in range(rows)] if draft.raw is None else draft.raw.tolist()
        return Told(tokens.tolist(), parents, source, target_p, draft_p, gaps)

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
            "top2_gap": self.gaps[place][ended + 1],
        }
