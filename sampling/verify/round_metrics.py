"""What a round looks like to who watches it: temperature-1 probabilities of the examined drafts and the gap of the two
best logits. Display only; no decision is taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampling.events import Step
from sampling.rows import padded
from sampling.types import Draft, Glance, Rows, Verdict, above
from sampling.vocabulary import best, chances_of, gap_of

_MANY, _VALUES = 16, 1 << 19  # looks that are worth a copy of their logits, and logits that are few enough to copy


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
    chosen: bool

    @staticmethod
    def of(verdict: Verdict, draft: Draft) -> RoundMetrics:
        """Of all positions only those where a row stood are looked at: a tree has many more."""
        rows, count = draft.tokens.shape
        tokens, parents = draft.tokens.tolist(), list(above(draft.parents, count))
        source = [[0] * count] * rows if draft.source is None else draft.source.expand(rows, count).tolist()
        draft_p = [[1.0] * count] * rows if draft.draft_prob is None else draft.draft_prob.tolist()
        stood = [[-1, *(node for node in path if node >= 0)] for path in verdict.path.tolist()]
        kids: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            kids.setdefault(parent, []).append(node)
        looks = [
            _Look(row, node, [kid for kid in kids.get(node, ()) if tokens[row][kid] >= 0])
            for row, nodes in enumerate(stood)
            for node in nodes
        ]
        ids = [[tokens[look.row][kid] for kid in look.kids] for look in looks]
        gaps: list[dict[int, float]] = [{} for _ in tokens]
        target_p: list[dict[int, float]] = [{} for _ in tokens]
        logits = verdict.logits
        together = logits.device.type != "cpu" or _MANY <= len(looks) <= _VALUES // logits.shape[-1]
        seen = None if isinstance(verdict.distributions, Tensor) else verdict.distributions.glance
        if seen is not None and looks and seen(*looks[0][:2]) is not None:
            found = _seen(seen, looks, ids)
        else:
            found = (_read_together if together else _read_each)(logits, looks, ids)
        for look, (gap, chances) in zip(looks, found, strict=True):
            gaps[look.row][look.node] = gap
            target_p[look.row].update(zip(look.kids, chances, strict=True))
        return RoundMetrics(tokens, parents, source, target_p, draft_p, gaps, bool(count) and draft.probs is None)

    def step(self, place: int, path: list[int], token: int | None, **more: Any) -> Step:
        """The Step of row `place`, `more` being its other fields; nodes are numbered anew without the absent ones."""
        tokens, parents, source = self.tokens[place], self.parents, self.source[place]
        present = [node for node, drafted in enumerate(tokens) if drafted >= 0]
        last, target_p, draft_p = path[-1] if path else -1, self.target_p[place], self.draft_p[place]
        examined = path if token is None else [*path, *[node for node in present if parents[node] == last]]
        above, to = [parents[node] for node in present], path
        if present and present[-1] >= len(present):  # some before the last one are absent
            number = {node: index for index, node in enumerate(present)}
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
            top2_gap=self.gaps[place][last if token is not None else parents[last]],
            **more,
        )


class _Look(NamedTuple):
    """A node at which a row stood (-1: the root), and those behind it."""

    row: int
    node: int
    kids: list[int]


Reading = Iterable[tuple[float, list[float]]]  # of each look: the gap, and the probabilities of its ids


def _seen(glance: Callable[[int, int], Glance | None], looks: list[_Look], ids: Rows) -> Reading:
    """What was seen when their tokens were drawn."""
    for look, wanted in zip(looks, ids, strict=True):
        if (seen := glance(look.row, look.node)) is not None:
            yield seen.gap, seen.chances(wanted)


def _read_each(logits: Tensor, looks: list[_Look], ids: Rows) -> Reading:
    """One after the other, in the host's memory, by one thread: nothing large is copied."""
    for look, wanted in zip(looks, ids, strict=True):
        values = logits[look.row, look.node + 1].float().numpy()
        yield gap_of(values), chances_of(values, wanted) if wanted else []


def _read_together(logits: Tensor, looks: list[_Look], ids: Rows) -> Reading:
    """At once, where a call costs more than what it does: on an accelerator, and of many rows of small vocabularies."""
    rows, nodes = torch.tensor([look[:2] for look in looks], device=logits.device).unbind(1)
    values = logits[rows, nodes + 1].float()
    top = best(values, 2)[0]
    wanted = padded(ids, 0).to(logits.device)
    chances = values.softmax(dim=-1).gather(1, wanted).tolist()
    gaps = (top[:, 0] - top[:, -1]).tolist()
    return [(gap, row[: len(one)]) for gap, row, one in zip(gaps, chances, ids, strict=True)]
