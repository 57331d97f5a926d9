"""Drawing drafts: from the logits of one position of all rows, a token for each active row and its distribution.

Logits may cover a short list of ids: the distribution is computed over those alone, which is cheaper (the processors
see the same numbers as in the full vocabulary, where all others are -inf), and spread over the vocabulary only where
that is needed. The sampler is the only source of randomness and of processors. Knows no models.

Shapes: B rows, n ids covered (V without a short list), N drafted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.rows import padded
from sampling.sampler import SamplerView
from sampling.transfers import fetched, put
from sampling.types import Rows, Sampler
from sampling.vocabulary import best, spread


@dataclass(frozen=True, slots=True)
class Column:
    """One drafted position of all rows.

    tokens [B] (-1 = none), probs [B, n] over the ids covered, the tokens' draft_prob [B] at temperature 1, the logits
    [B, n] and their logsumexp [B].
    """

    tokens: Tensor
    probs: Tensor
    draft_prob: Tensor
    logits: Tensor
    logsumexp: Tensor


class Other(NamedTuple):
    """A token that was not drawn, and its probability: at temperature 1 if drafts are point masses, else processed."""

    token: int
    p: float


class Leaves(NamedTuple):
    """C siblings at one position: tokens [B, C] (-1 = none), draft_prob [B, C], probs [B, C, n] unless point masses."""

    tokens: Tensor
    draft_prob: Tensor
    probs: Tensor | None


class ReducedSampler(SamplerView):
    """A sampler for distributions over a few ids [n], with one more column for all others if there are n + 1.

    A draw with independent noise is made among the ids covered. A point mass is drawn with the noise of the ids (the
    target's under gumbel coupling), hence over the full vocabulary, unless one id has all the probability. Draws are
    indices into `ids`.
    """

    def __init__(self, sampler: Sampler, ids: Tensor, vocab_size: int) -> None:
        super().__init__(sampler)
        self._ids, self._vocab_size = ids, vocab_size

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Draw one index into the ids covered for each distribution [M, n or n + 1]."""
        if not self.point_mass:
            return self._sampler.draw(probs, keys)
        top, index = probs.max(dim=-1)
        if probs.device.type == "cpu" and bool((top == 1).all()):
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

    def column(self, logits: Tensor, rows: Rows, active: list[bool], after: int = 0) -> Column:
        """Draw a token for each row that is `active`; logits [B, n], at temperature 1 before any processor, after the
        rows and `after` more tokens. Tokens and their probabilities stay where the logits are."""
        sampler = self.sampler
        if self.reduced_ids is not None:
            sampler = ReducedSampler(sampler, self.reduced_ids, self.vocab_size)
        probs = sampler.probs(logits, rows if sampler.needs_prefixes else [])
        drawing = [row for row, draws in enumerate(active) if draws]
        keys = torch.tensor([[self.numbers[row], len(rows[row]) + after] for row in drawing])
        where = put(drawing, probs.device)
        drawn = sampler.draw(probs if all(active) else probs[where], keys)
        index = torch.zeros(len(rows), dtype=torch.long, device=drawn.device).index_copy_(0, where, drawn)
        tokens = torch.full_like(index, -1).index_copy_(0, where, self._ids(drawn))
        logsumexp = logits.float().logsumexp(dim=-1)
        return Column(tokens, probs, _prob(logits, index, logsumexp), logits, logsumexp)

    @staticmethod
    def on_host(columns: list[Column]) -> list[Column]:
        """The columns with their tokens and `draft_prob` on the host, by one transfer."""
        if columns[0].tokens.device.type == "cpu":
            return columns
        parts = [column.tokens for column in columns], [column.draft_prob for column in columns]
        tokens, probs = fetched(*map(torch.stack, parts))
        each = zip(columns, tokens.long(), probs.float(), strict=True)
        return [replace(column, tokens=token, draft_prob=prob) for column, token, prob in each]

    def _ids(self, index: Tensor) -> Tensor:
        """Return the ids of these indices [M] into the ids covered."""
        return index if self.reduced_ids is None else self.reduced_ids.index_select(0, index)

    def listed(self, column: Column, row: int, count: int, tokens: Sequence[int]) -> list[tuple[int, float, int]]:
        """Return id, probability at temperature 1 and rank of the `count` likeliest tokens of a row, and of those of
        `tokens` that are covered."""
        logits = column.logits[row].float()
        ids = list(range(len(logits))) if self.reduced_ids is None else self.reduced_ids.tolist()
        likeliest = best(logits, count)[1].tolist()
        indices = list(dict.fromkeys([*likeliest, *(ids.index(token) for token in tokens if token in ids)]))
        ranks = ((logits[None] > logits[indices][:, None]).sum(dim=-1) + 1).tolist()
        q = (logits[indices] - column.logsumexp[row]).exp().tolist()
        return sorted(zip([ids[index] for index in indices], q, ranks, strict=True), key=lambda listed: listed[2])

    def others(self, columns: list[Column], count: int) -> list[list[list[Other]]]:
        """Return, by column and row, the `count` likeliest tokens but the drawn one, best first, ties by lower id.

        Fewer where fewer have any mass.
        """
        if self.sampler.point_mass:
            probs = torch.stack([(column.logits.float() - column.logsumexp[:, None]).exp() for column in columns])
        else:
            probs = torch.stack([column.probs for column in columns])
        least = probs.topk(min(count + 1, probs.shape[-1]), dim=-1).values[..., -1:]
        where = ((probs >= least) & (probs > 0)).nonzero(as_tuple=True)  # `topk` leaves the order of ties open
        drawn = [column.tokens.tolist() for column in columns]
        others: list[list[list[Other]]] = [[[] for _ in row] for row in drawn]
        listed = (part.tolist() for part in (*where[:2], self._ids(where[2]), probs[where]))
        for depth, row, token, p in zip(*listed, strict=True):
            if token != drawn[depth][row]:
                others[depth][row].append(Other(token, p))
        return [[sorted(row, key=lambda other: -other.p)[:count] for row in rows] for rows in others]

    def beside(
        self, column: Column, others: list[list[Other]], rows: Rows, depth: int, counts: list[int]
    ) -> Leaves | None:
        """Return counts[b] siblings at the same position of row b; None if no row has any.

        Point masses: the first of `others`. Else each is drawn from the distribution without the tokens before it.
        `rows` [B] are the committed tokens; `depth` drafts follow them.
        """
        if not max(counts):
            return None
        if not self.sampler.point_mass:
            return self._drawn_beside(column, rows, depth, counts)
        taken = [row[:count] for row, count in zip(others, counts, strict=True)]
        tokens = padded([[other.token for other in row] for row in taken])
        return Leaves(tokens, padded([[other.p for other in row] for row in taken], 1.0, torch.float32), None)

    def _drawn_beside(self, column: Column, rows: Rows, depth: int, counts: list[int]) -> Leaves:
        """Draw max(counts) ≥ 1 tokens for each row, of which counts[b] are present; no token twice."""
        tokens, draft_prob, probs = [], [], []
        left, index = column.probs, column.tokens.clamp(min=0)
        if self.reduced_ids is not None:
            index = torch.searchsorted(self.reduced_ids.cpu(), index)
        index = index.to(left.device)
        keys = torch.tensor([[number, len(row) + depth, 0] for number, row in zip(self.numbers, rows, strict=True)])
        for turn in range(max(counts)):  # turn 0 of the keys is the chain's own draw
            left = left.scatter(1, index[:, None], 0.0)
            mass = left.sum(dim=-1, keepdim=True)
            left = torch.where(mass > 0, left / mass.clamp(min=torch.finfo(left.dtype).tiny), column.probs)
            index = self.sampler.draw(left, keys + torch.tensor([0, 0, turn + 1]))
            present = torch.tensor([count > turn for count in counts], device=index.device) & (mass[:, 0] > 0)
            tokens.append(torch.where(present, self._ids(index), -1).cpu())
            draft_prob.append(_prob(column.logits, index, column.logsumexp).cpu())
            probs.append(left)
        return Leaves(torch.stack(tokens, dim=1), torch.stack(draft_prob, dim=1), torch.stack(probs, dim=1))

    def probs(self, columns: list[Column]) -> Tensor | None:
        """Return the distributions [B, N, V] of `columns`, N ≥ 1; None for point masses."""
        if self.sampler.point_mass:
            return None
        reduced = torch.stack([column.probs for column in columns], dim=1)
        return spread(reduced, self.reduced_ids, self.vocab_size, 0.0)


def largest_probs(columns: list[Column]) -> list[list[float]]:
    """Return, by column and row, the likeliest id's probability at temperature 1."""
    largest = torch.stack([column.logits for column in columns]).amax(dim=-1).float()
    probs: list[list[float]] = (largest - torch.stack([column.logsumexp for column in columns])).exp().tolist()
    return probs


def _prob(logits: Tensor, index: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the probabilities [B] at temperature 1 of `index` [B] in logits [B, n]."""
    return (logits.gather(1, index[:, None])[:, 0].float() - logsumexp).exp()
