"""Drafts from what was already said: the conversation's own matches first, static tables behind.

Point-mass chains. Each token follows the longest match of the last tokens in prompt + answer so far,
if it is at least two tokens long; else the longest known context of the static tables; else a match
of one token; else the bigram; and what followed the same tokens in answers that are over, where that is likelier. A
chain ends where nothing is known, or before the chance that the whole chain holds falls below `least`. Needs no model
and knows none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sampling.drafters.tables.suffix import SIZES, SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.rows import behind, common_prefix, lead, padded, parted
from sampling.types import Budget, Draft, Drafter, Rows, Rule, Sampler, Session, Traits
from utils.errors import UserError

NAMES = ("match", "tables", "recalled", "suffix")
MATCH, TABLES, RECALLED, SUFFIX = range(len(NAMES))  # sources: indices into the names of a drafter's traits
_FIELDS = ((0, -1), (1, 0))  # of Found: token and source, and what stands behind a row's end
LONGEST = 5
SURE_MATCH = 2
"""A match this long is followed before the tables are asked (docs/notes.md has the comparison)."""
LEAST = 0.06
CHANCE = (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
"""How often a match of so many tokens held on recorded answers that no table had seen."""


class Found(NamedTuple):
    """A proposed token, its source, how likely it is beside the other candidates, and the source's own probability."""

    token: int
    source: int
    p: float
    prob: float = 1.0


class MatchIndex:
    """What followed each context of 1 … `longest` tokens the last time it occurred in a sequence.

    A drafter behind others is shown rows with uncommitted drafts at their ends, so tokens can be taken back: every
    place remembers the one before it that had the same context. What it costs is what is new, and what goes.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._row: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]  # by context size: place behind
        self._older: list[list[int]] = [[] for _ in range(longest + 1)]  # by context size, of each place; -1: none

    def follow(self, row: list[int]) -> None:
        """Make this the index of `row`: what the last one does not share with it is taken back, what is new is read."""
        self._cut(common_prefix(self._row, row))
        known = len(self._row)
        self._row += row[known:]
        for size in range(1, self.longest + 1):
            last, older = self._last[size], self._older[size]
            for end in range(max(known, size), len(row)):
                context = tuple(row[end - size : end])
                older.append(last.get(context, -1))
                last[context] = end

    def _cut(self, count: int) -> None:
        """Go back to the first `count` tokens."""
        row = self._row
        for size in range(1, self.longest + 1):
            last, older = self._last[size], self._older[size]
            for end in range(len(row) - 1, max(count, size) - 1, -1):
                context, place = tuple(row[end - size : end]), older.pop()
                if place < 0:
                    del last[context]
                else:
                    last[context] = place
        del row[count:]

    def next(self, tail: list[int], least: int = 1, most: int | None = None) -> tuple[int, int] | None:
        """(size, token): the longest suffix of `tail` of `least` … `most` tokens that occurred before."""
        return next(self.every(tail, least, most), None)

    def every(self, tail: list[int], least: int = 1, most: int | None = None) -> Iterator[tuple[int, int]]:
        """The same of all such suffixes, the longest first."""
        for size in range(min(self.longest if most is None else most, len(tail)), least - 1, -1):
            place = self._last[size].get(tuple(tail[-size:]))
            if place is not None:
                yield size, self._row[place]


class RowIndex(Protocol):
    """What is known of one growing row."""

    def follow(self, row: list[int]) -> None: ...  # be the index of this row


Index = TypeVar("Index", bound=RowIndex)


class LookupDrafter(Drafter, Generic[Index]):
    """Point-mass chains from an index of each row; `source` is [B, N].

    `tables` are read as far as the target has their ids, from `_known`.
    """

    def __init__(self, tables: StaticTables | None = None) -> None:
        self.tables = self._known = tables
        self._indices: list[Index] = []
        self._leads: Rows = []

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._leads = lead(prompt, target)
        self._known = None if self.tables is None else self.tables.below(target.vocab_size)

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Chains of at most budget.max_depth[b] tokens."""
        chains: list[list[Found]] = []
        for index, row, most in zip(self._indices, behind(self._leads, rows), budget.max_depth, strict=True):
            chains.append([])
            if most > 0:
                index.follow(row)
                chains[-1] = self._chain(index, row, most)
        tokens, source = (padded([[one[field] for one in chain] for chain in chains], fill) for field, fill in _FIELDS)
        return Draft(tokens, draft_prob=self._probs(chains), source=source)

    def _probs(self, chains: list[list[Found]]) -> Tensor | None:
        """[B, N] the drafter's own probabilities; None for one that copies and has none."""
        return None

    def _chain(self, index: Index, row: list[int], most: int) -> list[Found]:
        """At most so many tokens behind `row`."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Follow rows that are reordered, repeated or dropped; repeated ones part ways."""
        self._indices = parted(self._indices, rows.tolist())
        self._leads = [self._leads[row] for row in rows.tolist()]


class TablesDrafter(LookupDrafter[MatchIndex]):
    """Point-mass chains from matches in the conversation and from static tables.

    Args:
        tables: None drafts from the conversation alone.
        longest: tokens of the longest match looked for, 0 … 5; 0 drafts from the tables alone.
        least: a chain stops before the product of its tokens' chances falls below this; 0 never does.
        sure_match: matches of so many tokens and more come before the tables.
        said: answers that are over; None: there are none to look at.
    """

    traits = Traits(NAMES[:RECALLED], Rule.POINT)
    least_said = SIZES[-1]  # tokens of context behind which answers that are over are looked at

    def __init__(
        self,
        tables: StaticTables | None = None,
        *,
        longest: int = LONGEST,
        sure_match: int = SURE_MATCH,
        least: float = LEAST,
        said: SuffixIndex | None = None,
    ) -> None:
        if not 0 <= least <= 1:
            raise UserError(f"least must be from 0 to 1, got {least}")
        if not 0 <= longest <= LONGEST:
            raise UserError(f"longest must be from 0 to {LONGEST}, got {longest}")
        super().__init__(tables)
        self.longest, self.least, self.sure_match, self.said = longest, least, sure_match, said
        self._deepest = tables.max_n if tables is not None else 0
        self._reach = max(1, longest, self._deepest, SIZES[0] if said is not None else 0)
        if said is not None:
            self.traits = replace(self.traits, names=NAMES)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Index the prompts; what the last answer left is kept as far as it is still the beginning."""
        super().start(prompt, target, verifier)
        if len(self._indices) != len(prompt):
            self._indices = [MatchIndex(self.longest) for _ in prompt]
        for index, row in zip(self._indices, prompt, strict=True):
            index.follow(row)

    def confidence(self, rows: Rows) -> list[float]:
        """How likely the first token of each row's chain is; 0 where there would be none."""
        found = []
        for index, row in zip(self._indices, behind(self._leads, rows), strict=True):
            index.follow(row)
            first = self._next(index, row[-self._reach :])
            found.append(first.p if first is not None and first.p >= self.least else 0.0)
        return found

    def _chain(self, index: MatchIndex, row: list[int], most: int) -> list[Found]:
        chain: list[Found] = []
        tail, path = row[-self._reach :], 1.0
        for _ in range(most):
            found = self._next(index, tail)
            path *= 0.0 if found is None else found.p
            if found is None or path < self.least:
                break
            chain.append(found)
            tail = [*tail[1 - self._reach :], found.token]
        return chain

    def _probs(self, chains: list[list[Found]]) -> Tensor | None:
        return padded([[one.prob for one in chain] for chain in chains], 1.0, torch.float32)

    def _next(self, index: MatchIndex, tail: list[int]) -> Found | None:
        """One token: what followed in answers that are over, where it is likelier than what the rest would say."""
        found = self._own(index, tail)
        said = next(iter(self._said(tail)), None)
        return said if said is not None and (found is None or said.p > found.p) else found

    def _said(self, tail: list[int]) -> list[Found]:
        """What followed in answers that are over, the likeliest first."""
        return [Found(token, SUFFIX, p, p) for token, p in self.said.behind(tail, self.least_said)] if self.said else []

    def _own(self, index: MatchIndex, tail: list[int]) -> Found | None:
        """One token: sure match, table context of two tokens or more, any match, bigram."""
        match = index.next(tail)
        if match is None or match[0] < self.sure_match:
            known = self._known.next(tail) if self._known is not None else None
            if known is not None and (match is None or known.size > 1):
                return Found(known.token, TABLES, known.confidence, known.confidence)
        return None if match is None else Found(match[1], MATCH, CHANCE[match[0]], CHANCE[match[0]])
