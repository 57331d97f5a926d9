"""Drawing drafts: logits of one position of all rows → one token for each row that goes on, and its distribution.

Logits may cover a short list of ids only: the distribution is then made of those alone (the processors see the same
numbers as in the full vocabulary, where all others are -inf), which is cheaper, and is laid out in full only
where somebody needs it. The sampler stays the only source of randomness and of processors. Knows no models.

Shapes: B rows, n ids covered (V without a short list), N drafted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.rows import padded
from sampling.sampler import SamplerView
from sampling.types import Rows, Sampler
from sampling.vocabulary import best, spread


@dataclass(frozen=True, slots=True)
class Column:
    """One drafted position of all rows: tokens [B] (-1 = none), the distribution over the ids covered [B, n], raw [B],
    the logits [B, n] that all came from and the logarithm of the sum of their exponentials [B]."""

    tokens: Tensor
    probs: Tensor
    raw: Tensor
    logits: Tensor
    whole: Tensor


class Other(NamedTuple):
    """A token that was not drawn and its probability: at temperature 1 beside point masses, else in the
    distribution."""

    token: int
    p: float


class Leaves(NamedTuple):
    """C further tokens of one position: tokens [B, C] (-1 = none), raw [B, C], distributions [B, C, n] unless point
    masses."""

    tokens: Tensor
    raw: Tensor
    probs: Tensor | None


class ReducedSampler(SamplerView):
    """A sampler for distributions over a few ids [n], with one more column for all others if there are n + 1.

    A draw with noise of its own may be made among the ids covered. A point mass is drawn with noise that
    belongs to the ids (the target's under gumbel coupling), hence over the full vocabulary, unless nothing
    is left to chance. Draws are indices into `ids`.
    """

    def __init__(self, sampler: Sampler, ids: Tensor, vocab_size: int) -> None:
        super().__init__(sampler)
        self._ids, self._vocab_size = ids, vocab_size

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """One index into the ids covered for each distribution [M, n or n + 1]."""
        if not self.point_mass:
            return self._sampler.draw(probs, keys)
        top, index = probs.max(dim=-1)
        if bool((top == 1).all()):
            return index
        drawn = self._sampler.draw(spread(probs[:, : len(self._ids)], self._ids, self._vocab_size, 0.0), keys)
        return torch.searchsorted(self._ids, drawn)

    def drafting(self, starts: Tensor) -> ReducedSampler:
        return ReducedSampler(self._sampler.drafting(starts), self._ids, self._vocab_size)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws the columns of one draft.

    `numbers` are the caller's numbers of the rows, which key the noise; `reduced_ids` [n] the ids that the
    logits cover, ascending, None = all `vocab_size` of them.
    """

    sampler: Sampler
    numbers: list[int]
    vocab_size: int
    reduced_ids: Tensor | None = None

    @property
    def point_mass(self) -> bool:
        """Whether the drafts are point masses."""
        return self.sampler.point_mass

    def column(self, logits: Tensor, rows: Rows, going: list[bool]) -> Column:
        """Draw for each row with `going`; logits [B, n], at temperature 1 before any processor."""
        sampler = self.sampler
        if self.reduced_ids is not None:
            sampler = ReducedSampler(sampler, self.reduced_ids, self.vocab_size)
        probs = sampler.probs(logits, rows if sampler.needs_prefixes else [])
        places = [place for place, goes in enumerate(going) if goes]
        keys = torch.tensor([[self.numbers[place], len(rows[place])] for place in places])
        where = torch.tensor(places, device=probs.device)
        chosen = probs if all(going) else probs[where]
        drawn = sampler.draw(chosen, keys)
        at = torch.zeros(len(rows), dtype=torch.long, device=drawn.device).index_copy_(0, where, drawn)
        tokens = torch.full_like(at, -1).index_copy_(0, where, self._ids(drawn))
        whole = logits.float().logsumexp(dim=-1)
        return Column(tokens.cpu(), probs, _raw(logits, at, whole).cpu(), logits, whole)

    def _ids(self, at: Tensor) -> Tensor:
        """The ids at these places [M] among those covered."""
        return at if self.reduced_ids is None else self.reduced_ids.index_select(0, at)

    def listed(self, column: Column, row: int, count: int, tokens: Sequence[int]) -> list[tuple[int, float, int]]:
        """The `count` likeliest tokens of a row, and those of `tokens` that are covered: id, probability at temperature
        1, and rank."""
        logits = column.logits[row].float()
        ids = list(range(len(logits))) if self.reduced_ids is None else self.reduced_ids.tolist()
        places = best(logits, count)[1].tolist()
        places = list(dict.fromkeys([*places, *(ids.index(token) for token in tokens if token in ids)]))
        ranks = ((logits[None] > logits[places][:, None]).sum(dim=-1) + 1).tolist()
        q = (logits[places] - column.whole[row]).exp().tolist()
        return sorted(zip([ids[at] for at in places], q, ranks, strict=True), key=lambda listed: listed[2])

    def others(self, columns: list[Column], count: int) -> list[list[list[Other]]]:
        """By column and row the `count` likeliest tokens but the drawn one, best first, of equals the lower id.

        Fewer where fewer have any mass.
        """
        each = [(one.logits.float() - one.whole[:, None]).exp() if self.point_mass else one.probs for one in columns]
        probs = torch.stack(each)
        least = probs.topk(min(count + 1, probs.shape[-1]), dim=-1).values[..., -1:]
        where = ((probs >= least) & (probs > 0)).nonzero(as_tuple=True)  # `topk` orders equals as it likes
        depths, places, at = where
        ids = at if self.reduced_ids is None else self.reduced_ids[at]
        drawn = [column.tokens.tolist() for column in columns]
        found: list[list[list[Other]]] = [[[] for _ in row] for row in drawn]
        listed = (part.tolist() for part in (depths, places, ids, probs[where]))
        for depth, place, token, p in zip(*listed, strict=True):
            if token != drawn[depth][place]:
                found[depth][place].append(Other(token, p))
        return [[sorted(row, key=lambda other: -other.p)[:count] for row in rows] for rows in found]

    def beside(
        self, column: Column, others: list[list[Other]], rows: Rows, depth: int, counts: list[int]
    ) -> Leaves | None:
        """counts[b] further tokens of the same position of row b, None if there are none at all.

        Point masses: the first of `others`. Else each is drawn from what those before it leave of the distribution.
        `rows` [B] are the committed tokens, `depth` drafts behind them.
        """
        if not max(counts):
            return None
        if not self.point_mass:
            return self._drawn_beside(column, rows, depth, counts)
        taken = [row[:count] for row, count in zip(others, counts, strict=True)]
        tokens = padded([[other.token for other in row] for row in taken])
        return Leaves(tokens, padded([[other.p for other in row] for row in taken], 1.0, torch.float32), None)

    def _drawn_beside(self, column: Column, rows: Rows, depth: int, counts: list[int]) -> Leaves:
        """max(counts) ≥ 1 tokens of each row, counts[b] of them present; no token twice."""
        tokens, raw, probs = [], [], []
        left, first = column.probs, column.tokens.clamp(min=0)
        at = (first if self.reduced_ids is None else torch.searchsorted(self.reduced_ids.cpu(), first)).to(left.device)
        places = [[name, len(row) + depth, 0] for name, row in zip(self.numbers, rows, strict=True)]
        keys = torch.tensor(places)  # turn 0 is the chain's own draw
        for turn in range(max(counts)):
            left = left.scatter(1, at[:, None], 0.0)
            mass = left.sum(dim=-1, keepdim=True)
            left = torch.where(mass > 0, left / mass.clamp(min=torch.finfo(left.dtype).tiny), column.probs)
            at = self.sampler.draw(left, keys + torch.tensor([0, 0, turn + 1]))
            goes = torch.tensor([count > turn for count in counts], device=at.device) & (mass[:, 0] > 0)
            tokens.append(torch.where(goes, self._ids(at), -1).cpu())
            raw.append(_raw(column.logits, at, column.whole).cpu())
            probs.append(left)
        return Leaves(torch.stack(tokens, dim=1), torch.stack(raw, dim=1), torch.stack(probs, dim=1))

    def probs(self, columns: list[Column]) -> Tensor | None:
        """[B, N, V] the distributions of `columns`, N ≥ 1; None for point masses."""
        if self.point_mass:
            return None
        reduced = torch.stack([column.probs for column in columns], dim=1)
        return spread(reduced, self.reduced_ids, self.vocab_size, 0.0)


def sure(columns: list[Column]) -> list[list[float]]:
    """By column and row the likeliest id's probability at temperature 1."""
    best = torch.stack([column.logits for column in columns]).amax(dim=-1).float()
    found: list[list[float]] = (best - torch.stack([column.whole for column in columns])).exp().tolist()
    return found


def _raw(logits: Tensor, at: Tensor, whole: Tensor) -> Tensor:
    """The probabilities at temperature 1 of ids `at` [B] in logits [B, n]; `whole` as in :class:`Column`."""
    return (logits.gather(1, at[:, None])[:, 0].float() - whole).exp()
