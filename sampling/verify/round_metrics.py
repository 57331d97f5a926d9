"""Figures of a round for display: temperature-1 probabilities of the examined drafts, the gap of the two best logits.
No decision depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sampling.events import Step
from sampling.rows import fetched, padded, put
from sampling.types import Draft, Rows, Verdict, above
from sampling.vocabulary import best


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """Per row, for every node: its token, parent, source, p(x) and q(x); per position the top-2 gap.

    p(x) and the gap are known where the verifier looked: at the root, after accepted nodes, and of their children.
    """

    tokens: Rows
    parents: list[int]
    source: Rows
    target_p: list[dict[int, float]]
    draft_p: list[list[float]]
    gaps: list[dict[int, float]]
    chosen: bool

    @staticmethod
    def of(verdict: Verdict, draft: Draft) -> RoundMetrics:
        """Return the metrics of the positions at which a row stood: a tree has many more."""
        rows, count = draft.tokens.shape
        tokens, parents = draft.tokens.tolist(), list(above(draft.parents, count))
        source = [[0] * count] * rows if draft.source is None else draft.source.expand(rows, count).tolist()
        draft_p = [[1.0] * count] * rows if draft.draft_prob is None else draft.draft_prob.tolist()
        stood = [[-1, *(node for node in path if node >= 0)] for path in verdict.path.tolist()]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        looks = [
            _Look(row, node, [child for child in children.get(node, ()) if tokens[row][child] >= 0])
            for row, nodes in enumerate(stood)
            for node in nodes
        ]
        ids = [[tokens[look.row][child] for child in look.children] for look in looks]
        gaps: list[dict[int, float]] = [{} for _ in tokens]
        target_p: list[dict[int, float]] = [{} for _ in tokens]
        for look, (gap, chances) in zip(looks, _read(verdict, looks, ids), strict=True):
            gaps[look.row][look.node] = gap
            target_p[look.row].update(zip(look.children, chances, strict=True))
        return RoundMetrics(tokens, parents, source, target_p, draft_p, gaps, bool(count) and draft.probs is None)

    def step(self, index: int, path: list[int], token: int | None, **more: Any) -> Step:
        """Return the Step of row `index`, `more` being its other fields; absent nodes get no number."""
        tokens, parents, source = self.tokens[index], self.parents, self.source[index]
        present = [node for node, drafted in enumerate(tokens) if drafted >= 0]
        last, target_p, draft_p = path[-1] if path else -1, self.target_p[index], self.draft_p[index]
        examined = path if token is None else [*path, *[node for node in present if parents[node] == last]]
        above, to = [parents[node] for node in present], path
        if present and present[-1] >= len(present):  # some before the last one are absent
            number = {node: count for count, node in enumerate(present)}
            above, to = [number.get(node, -1) for node in above], [number[node] for node in path]
        return Step(
            drafted=tuple([tokens[node] for node in present]),
            parents=tuple(above),
            source=tuple([source[node] for node in present]),
            path=tuple(to),
            token=token,
            target_p=tuple([target_p[node] for node in examined]),
            draft_p=tuple([draft_p[node] for node in examined]),
            chosen=self.chosen,
            top2_gap=self.gaps[index][last if token is not None else parents[last]],
            **more,
        )


class _Look(NamedTuple):
    """A node at which a row stood (-1: the root), and its children."""

    row: int
    node: int
    children: list[int]


def _read(verdict: Verdict, looks: list[_Look], ids: Rows) -> Iterable[tuple[float, list[float]]]:
    """For each look the gap of the two best logits, and the probabilities of its ids.

    Takes what the verifier saw when it drew the tokens, where it is known; else reads all logits at once.
    """
    known = verdict.distributions
    if not isinstance(known, Tensor) and known.glance(looks[0].row, looks[0].node) is not None:
        glances = [known.glance(look.row, look.node) for look in looks]
        return [(seen.gap, seen.chances(wanted)) for seen, wanted in zip(glances, ids, strict=True) if seen is not None]
    rows, nodes = put([look[:2] for look in looks], verdict.logits.device).unbind(1)
    values = verdict.logits[rows, nodes + 1].float()
    top = best(values, 2)[0]
    read = values.softmax(dim=-1).gather(1, put(padded(ids, 0), values.device)), top[:, 0] - top[:, -1]
    chances, gaps = (part.tolist() for part in fetched(*read))
    return [(gap, row[: len(wanted)]) for gap, row, wanted in zip(gaps, chances, ids, strict=True)]
