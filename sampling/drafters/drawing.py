"""Drawing drafts: from the logits of one position of all rows, a token for each active row and its distribution.

Logits may cover a short list of ids: the distribution is computed over those alone, which is cheaper (the processors
see the same numbers as in the full vocabulary, where all others are -inf), and spread over the vocabulary only where
that is needed. The sampler is the only source of randomness and of processors. Knows no models.

Shapes: B rows, n ids covered (V without a short list), N drafted positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sampling.rows import fetched, put
from sampling.sampler import SamplerView
from sampling.types import Rows, Sampler
from sampling.vocabulary import best, spread


@dataclass(frozen=True, slots=True)
class Column:
    """One drafted position of all rows.

    tokens [B] (-1 = none), probs [B, n] over the ids covered, the tokens' draft_prob [B] at temperature 1, the logits
    [B, n] with biases (-inf where a constraint refuses the id) and their logsumexp [B].
    """

    tokens: Tensor
    probs: Tensor
    draft_prob: Tensor
    logits: Tensor
    logsumexp: Tensor


class ReducedSampler(SamplerView):
    """A sampler for distributions over a few ids [n]; in distributions of n + 1 columns the last is for all other ids.

    A draw with independent noise is made among the ids covered. A point mass is drawn with the noise of the ids (the
    target's under gumbel coupling), hence over the full vocabulary, unless one id has all the probability. Draws are
    indices into `ids`.
    """

    def __init__(self, sampler: Sampler, ids: Tensor, vocab_size: int) -> None:
        super().__init__(sampler)
        self._ids, self._vocab_size = ids, vocab_size

    def biased(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        return self._sampler.biased(logits, self._ids)

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Draw one index into the ids covered for each distribution [M, n or n + 1]."""
        if not self.point_mass:
            return self._sampler.draw(probs, keys)
        top, index = probs.max(dim=-1)
        if probs.device.type == "cpu" and bool((top == 1).all()):
            return index
        drawn = self._sampler.draw(spread(probs[:, : len(self._ids)], self._ids, self._vocab_size, 0.0), keys)
        return torch.searchsorted(self._ids, drawn)

    def drafting(self, starts: Sequence[Sequence[int]]) -> "ReducedSampler":
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
        logits = sampler.biased(logits)
        if sampler.constraint is not None:
            logits = sampler.constraint.masked(logits, rows)
        probs = sampler.probs(logits, rows if sampler.needs_prefixes else [])
        drawing = [row for row, draws in enumerate(active) if draws]
        keys = torch.tensor([[self.numbers[row], len(rows[row]) + after] for row in drawing])
        where = put(drawing, probs.device)
        drawn = sampler.draw(probs if all(active) else probs[where], keys)
        index = torch.zeros(len(rows), dtype=torch.long, device=drawn.device).index_copy_(0, where, drawn)
        ids = drawn if self.reduced_ids is None else self.reduced_ids.index_select(0, drawn)
        tokens = torch.full_like(index, -1).index_copy_(0, where, ids)
        logsumexp = logits.float().logsumexp(dim=-1)
        draft_prob = (logits.gather(1, index[:, None])[:, 0].float() - logsumexp).exp()
        return Column(tokens, probs, draft_prob, logits, logsumexp)

    @staticmethod
    def on_host(columns: list[Column]) -> list[Column]:
        """Return the columns with their tokens and `draft_prob` on the host, by one transfer."""
        if columns[0].tokens.device.type == "cpu":
            return columns
        tokens, probs = fetched(
            torch.stack([column.tokens for column in columns]), torch.stack([column.draft_prob for column in columns])
        )
        each = zip(columns, tokens.long(), probs.float(), strict=True)
        return [replace(column, tokens=token, draft_prob=prob) for column, token, prob in each]

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

    def probs(self, columns: Mapping[int, Column], count: int) -> Tensor | None:
        """Return the distributions [B, N, V] of the first N = `count` positions, zeros where nothing was drawn; None
        for point masses."""
        if self.sampler.point_mass:
            return None
        drawn = {depth: column.probs for depth, column in columns.items() if depth < count}
        none = torch.zeros_like(next(iter(drawn.values())))
        reduced = torch.stack([drawn.get(depth, none) for depth in range(count)], dim=1)
        return spread(reduced, self.reduced_ids, self.vocab_size, 0.0)
