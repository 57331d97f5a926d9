"""A verifier's laws behind the nodes of a draft, and the prefixes that they stand on. Knows drafts; judges nothing.

A tree has many more nodes than a row comes to stand at, and the law of a large vocabulary costs a processor as much as
drafting does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.types import Draft, Rows, Sampler


class LazyLaws:
    """See :class:`sampling.types.Laws`: each is worked out when it is first asked for; on an accelerator, where
    starting the work is what costs, all are at once.
    """

    def __init__(self, logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> None:
        self._logits, self._draft, self._rows, self._sampler = logits, draft, rows, sampler
        self._all: Tensor | None = None
        self._prefixes: Rows | None = None
        self._known: dict[tuple[int, int], Tensor] = {}

    def all(self) -> Tensor:
        if self._all is None:
            self._all = law_of(self._logits, self._draft, self._rows, self._sampler)
        return self._all

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        if self._all is not None or self._logits.device.type != "cpu":
            laws = self.all()
            return laws[rows.to(laws.device), nodes.to(laws.device) + 1]
        places = list(zip(rows.tolist(), nodes.tolist(), strict=True))
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        if new:
            found = self._law(new)
            self._known.update(zip(new, found, strict=True))
            if new == places:
                return found
        return torch.stack([self._known[place] for place in places])

    def _law(self, places: list[tuple[int, int]]) -> Tensor:
        prefixes: Rows = []
        if self._sampler.needs_prefixes:
            if self._prefixes is None:
                self._prefixes = prefixes_of(self._rows, self._draft)
            width = self._logits.shape[1]
            prefixes = [self._prefixes[row * width + node + 1] for row, node in places]
        if len(places) == 1:  # a view
            ((row, node),) = places
            return self._sampler.law(self._logits[row, node + 1][None], prefixes)
        rows, nodes = torch.tensor(places).unbind(1)
        return self._sampler.law(self._logits[rows, nodes + 1], prefixes)


def law_of(logits: Tensor, draft: Draft, rows: Rows, sampler: Sampler) -> Tensor:
    """The verifier's law [B, N+1, V] at the root and after each node."""
    return sampler.law(logits, prefixes_of(rows, draft) if sampler.needs_prefixes else [])


def above(parents: Tensor | None, count: int) -> Sequence[int]:
    """The parent of each node; those of a chain where `parents` is None."""
    found: Sequence[int] = range(-1, count - 1) if parents is None else parents.tolist()
    return found


def prefixes_of(rows: Rows, draft: Draft) -> Rows:
    """The committed tokens and the drafts before each examined position: B × (N+1) prefixes."""
    drafts = draft.tokens.tolist()
    parents = above(draft.parents, draft.tokens.shape[1])
    found: Rows = []
    for row, drafted in zip(rows, drafts, strict=True):
        at = [row]
        for node, parent in enumerate(parents):
            at.append([*at[parent + 1], drafted[node]])
        found += at
    return found
