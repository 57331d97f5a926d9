"""Drawing drafts: logits of one position of all rows → one token for each row that goes on, and its law.

Logits may cover a short list of ids only: the law is then made of those alone (the processors see the same
numbers as in the full vocabulary, where all others are -inf), which is cheaper, and is laid out in full only
where somebody needs it. The sampler stays the only source of randomness and of processors. Knows no models.

Shapes: B rows, n ids covered (V without a short list), N drafted positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sampling.events import Call
from sampling.short_list import spread
from sampling.types import Draft, Rows, Sampler


@dataclass(frozen=True, slots=True)
class Column:
    """One drafted position of all rows: tokens [B] (-1 = none), the law over the ids covered [B, n], raw [B], and the
    logits [B, n] that all came from."""

    tokens: Tensor
    law: Tensor
    raw: Tensor
    logits: Tensor


class Covered:
    """A sampler for laws over a few ids [n], with one more column for all others if the laws have n + 1.

    A draw with noise of its own may be made among the ids covered. A point mass is drawn with noise that
    belongs to the ids (the target's under gumbel coupling), hence over the full vocabulary, unless nothing
    is left to chance. Draws are indices into `ids`. Satisfies :class:`sampling.types.Sampler`.
    """

    def __init__(self, sampler: Sampler, ids: Tensor, vocab_size: int) -> None:
        self._sampler, self._ids, self._vocab_size = sampler, ids, vocab_size

    @property
    def needs_prefixes(self) -> bool:
        return self._sampler.needs_prefixes

    @property
    def point_mass(self) -> bool:
        return self._sampler.point_mass

    def law(self, logits: Tensor, prefixes: Rows) -> Tensor:
        return self._sampler.law(logits, prefixes)

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """One index into the ids covered for each law [M, n or n + 1]."""
        if not self._sampler.point_mass:
            return self._sampler.draw(probs, keys)
        top, index = probs.max(dim=-1)
        if bool((top == 1).all()):
            return index
        drawn = self._sampler.draw(spread(probs[:, : len(self._ids)], self._ids, self._vocab_size, 0.0), keys)
        return torch.searchsorted(self._ids, drawn)

    def coin(self, prob: Tensor) -> Tensor:
        return self._sampler.coin(prob)

    def drafting(self) -> Covered:
        return Covered(self._sampler.drafting(), self._ids, self._vocab_size)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws the columns of one draft.

    `numbers` are the caller's numbers of the rows, which key the noise; `short_list` [n] the ids that the
    logits cover, ascending, None = all `vocab_size` of them.
    """

    sampler: Sampler
    numbers: list[int]
    vocab_size: int
    short_list: Tensor | None = None

    def column(self, logits: Tensor, rows: Rows, going: list[bool]) -> Column:
        """Draw for each row with `going`; logits [B, n], at temperature 1 before any processor."""
        sampler = self.sampler
        if self.short_list is not None:
            sampler = Covered(sampler, self.short_list, self.vocab_size)
        law = sampler.law(logits, rows if sampler.needs_prefixes else [])
        places = [place for place, goes in enumerate(going) if goes]
        keys = torch.tensor([[self.numbers[place], len(rows[place])] for place in places])
        if len(places) == len(rows):
            at = sampler.draw(law, keys)
            tokens = at if self.short_list is None else self.short_list.index_select(0, at)
        else:
            where = torch.tensor(places, device=law.device)
            drawn = sampler.draw(law[where], keys)
            at = torch.zeros(len(rows), dtype=torch.long, device=law.device).index_copy_(0, where, drawn)
            ids = drawn if self.short_list is None else self.short_list.index_select(0, drawn)
            tokens = torch.full_like(at, -1).index_copy_(0, where, ids)
        return Column(tokens.cpu(), law, _chances(logits, at).cpu(), logits)

    def beside(self, column: Column, law: Tensor, rows: Rows, depth: int, counts: list[int]) -> list[Column]:
        """max(counts) further tokens of the same position, counts[b] of row b: each from what `law` [B, n] leaves.

        `rows` [B] are the committed tokens, `depth` drafts behind them. Point masses: the most likely ones.
        """
        found: list[Column] = []
        left, at = law, self._index(column.tokens).to(law.device)
        numbers = torch.tensor([[name, len(row) + depth] for name, row in zip(self.numbers, rows, strict=True)])
        for turn in range(max(counts)):
            left = left.scatter(1, at[:, None], 0.0)
            mass = left.sum(dim=-1, keepdim=True)
            left = torch.where(mass > 0, left / mass.clamp(min=torch.finfo(left.dtype).tiny), law)
            at = left.argmax(dim=-1) if self.sampler.point_mass else self.sampler.draw(left, numbers)
            goes = torch.tensor([count > turn for count in counts], device=at.device) & (mass[:, 0] > 0)
            ids = at if self.short_list is None else self.short_list.index_select(0, at)
            tokens = torch.where(goes, ids, torch.full_like(ids, -1)).cpu()
            found.append(Column(tokens, left, _chances(column.logits, at).cpu(), column.logits))
        return found

    def _index(self, tokens: Tensor) -> Tensor:
        """Where tokens [B] stand among the ids covered; 0 for absent ones."""
        tokens = tokens.clamp(min=0)
        return tokens if self.short_list is None else torch.searchsorted(self.short_list.cpu(), tokens)

    def draft(self, columns: list[Column], call: Call) -> Draft:
        """The draft made of `columns`, N ≥ 1: its laws [B, N, V] travel with it unless they are point masses."""
        probs = None
        if not self.sampler.point_mass:
            law = torch.stack([column.law for column in columns], dim=1)
            probs = spread(law, self.short_list, self.vocab_size, 0.0)
        return Draft(
            tokens=torch.stack([column.tokens for column in columns], dim=1),
            probs=probs,
            raw=torch.stack([column.raw for column in columns], dim=1),
            calls=(call,),
        )


def _chances(logits: Tensor, at: Tensor) -> Tensor:
    """The probabilities at temperature 1 of ids `at` [B] in logits [B, n]."""
    return (logits.gather(1, at[:, None])[:, 0].float() - logits.float().logsumexp(dim=-1)).exp()
