"""Sources that look up what was already said: matches in the conversation, n-gram tables, answers that are over, and
what the target itself thought likely.

A match follows the last tokens of a path as far back as they stood before, in the prompt or in the answer. Tables know
what followed a context in text that they were counted from. Earlier answers are looked up by their suffixes
(SuffixDecoding; sampling/drafters/tables/suffix.py). Recalled tokens are those that the target held likely behind the
same one or two tokens when it last stood there: a pass computes its distribution at every position, and decoding throws
all but the drawn token away (token recycling, Luo et al., arXiv 2408.08696). None of them runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sampling.drafters.draft_model import Model, Respelled, source_of
from sampling.drafters.proposal import MIN_PATH, Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts
from sampling.drafters.tables.suffix import SIZES, SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.gamma.ratios import Ratios
from sampling.rows import common_prefix, parted
from sampling.types import Draft, Rows, Sampler, Session, Verdict
from sampling.vocabulary import best
from utils.errors import UserError

LONGEST = 5  # tokens of a match
CHANCE = (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
"""How often a match of so many tokens held on recorded answers that no table had seen."""
SHARES = {2: 0.6, 1: 0.3}
"""By tokens of context: so much of a token's probability then is its chance of being drawn now (docs/notes.md,
"Distributions recalled")."""
COUNTED = 0.5  # trust in what was counted or recalled, beside a match or a model (docs/notes.md)
CHOICES = 4  # tokens of one context of the tables, and tokens kept behind a context
KEPT = 4096  # contexts whose entries in the tables are at hand


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

    def every(self, tail: list[int]) -> list[tuple[int, int]]:
        """(size, token) of each suffix of `tail` that occurred before, the longest first."""
        found = []
        for size in range(1, min(self.longest, len(tail)) + 1):
            place = self._last[size].get(tuple(tail[-size:]))
            if place is None:  # what never stood before has no longer context that did
                break
            found.append((size, self._row[place]))
        return found[::-1]


class Matches(Source):
    """The token that followed the last time, by each length of the match."""

    name = "match"

    def __init__(self, longest: int = LONGEST) -> None:
        if not 1 <= longest <= LONGEST:
            raise UserError(f"longest must be from 1 to {LONGEST}, got {longest}")
        self.reach = longest
        self._indices: list[MatchIndex] = []

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """What the last answer left is kept as far as it is still the beginning."""
        if len(self._indices) != len(begun):
            self._indices = [MatchIndex(self.reach) for _ in begun]

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        for index, text in zip(self._indices, texts, strict=True):
            index.follow(text)

    def offers(self, node: Node) -> list[Offer]:
        return [(token, CHANCE[size]) for size, token in self._indices[node.row].every(node.tail)]

    def select(self, rows: list[int]) -> None:
        self._indices = parted(self._indices, rows)


class Tables(Source):
    """The likeliest tokens behind each known context, the longest first."""

    name = "tables"
    trust = COUNTED

    def __init__(self, tables: StaticTables, name: str = "tables", longest: int = 1 << 30) -> None:
        self.name, self.tables, self.reach = name, tables, max(1, min(longest, tables.max_n))
        self._known = tables
        self._looked_up: dict[tuple[int, ...], list[Offer]] = {}  # tables never change, and most contexts come again

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        self._known = self.tables.below(target.vocab_size)
        self._looked_up.clear()

    def offers(self, node: Node) -> list[Offer]:
        context = tuple(node.tail[-self.reach :])
        if (found := self._looked_up.get(context)) is None:
            if len(self._looked_up) >= KEPT:
                self._looked_up.clear()
            entries = self._known.entries([*context], most=CHOICES)
            found = self._looked_up[context] = [(token, p) for _, token, p in entries]
        return found


class Earlier(Source):
    """What followed the same tokens in answers that are over. `least`: tokens of context at least."""

    name = "suffix"
    trust = COUNTED
    reach = SIZES[0]

    def __init__(self, said: SuffixIndex, least: int = SIZES[-1]) -> None:
        self.said, self.least = said, least

    def offers(self, node: Node) -> list[Offer]:
        return self.said.behind(node.tail, self.least) if self.said else []


class Recalled(Source):
    """What the target thought likely behind the same one or two tokens, in this answer. Follows one row."""

    name = "recalled"
    trust = COUNTED
    reach = 2

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], list[Offer]] = {}
        self._certain = False  # whether the target's draws leave no choice

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        self._behind = {}

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._certain = sampler.greedy

    def offers(self, node: Node) -> list[Offer]:
        if not self._behind:
            return []
        return [offer for size in SHARES for offer in self._behind.get(tuple(node.tail[-size:]), ())]

    def observe(self, texts: Rows, paths: Rows, draft: Draft, verdict: Verdict) -> None:
        if len(texts) != 1 or self._certain:
            return
        tokens = draft.tokens[0].tolist()
        row = [*texts[0][-2:], *(tokens[node] for node in paths[0])]
        self.learn(row, thought_likely(verdict, [-1, *paths[0]]))

    def learn(self, row: list[int], likely: Sequence[Sequence[Offer]]) -> None:
        """Keep the likeliest ids and their probabilities behind each of the last tokens of `row`. A distribution that
        leaves no choice says no more than the text."""
        for end, offers in enumerate(likely, start=len(row) - len(likely) + 1):
            if offers[0][1] == 1:
                continue
            for size, share in SHARES.items():
                self._behind[tuple(row[max(0, end - size) : end])] = [
                    (token, share * p) for token, p in offers if p > 0
                ]


def thought_likely(verdict: Verdict, nodes: list[int]) -> list[list[Offer]]:
    """The few likeliest ids behind these nodes of the first row, and their processed probabilities."""
    known = verdict.distributions
    seen = [] if isinstance(known, Tensor) else [known.glance(0, node) for node in nodes]
    told = [one.likeliest()[:CHOICES] for one in seen if one is not None]
    if told and all(told):
        return told
    values, ids = best(verdict.at(torch.zeros(len(nodes), dtype=torch.long), torch.tensor(nodes)), CHOICES)
    return [list(zip(*one, strict=True)) for one in zip(ids.tolist(), values.tolist(), strict=True)]


class LookupDrafter(Proposer):
    """A drafter of matches, tables, recalled tokens and earlier answers, and of a model beside them.

    Args:
        tables: None: there are none.
        matches: whether the conversation is looked at.
        recall: whether recalled tokens are offered, in trees.
        said: answers that are over; None: there are none.
        model: a source that runs a model; `agreement`: how often its likeliest token is the target's.
        how: see :class:`sampling.drafters.proposal.Proposer`.
    """

    def __init__(
        self,
        tables: StaticTables | None = None,
        *,
        matches: bool = True,
        recall: bool = False,
        said: SuffixIndex | None = None,
        model: Model | None = None,
        tree: bool = False,
        least: float = MIN_PATH,
        shared_noise: bool = False,
        learn: bool = False,
        ratios: Ratios | None = None,
    ) -> None:
        if not 0 <= least <= 1:
            raise UserError(f"least must be from 0 to 1, got {least}")
        # What follows a word or two a model knows better than answers that are over (docs/notes/tables.md).
        sources = [
            Matches() if matches else None,
            None if tables is None else Tables(tables),
            Recalled() if recall else None,
            None if said is None else Earlier(said, SIZES[-1] if model is None else SIZES[-2]),
            model,
        ]
        present = [source for source in sources if source is not None]
        super().__init__(
            present,
            tree=tree,
            least=least,
            shared_noise=shared_noise,
            learn=learn,
            ratios=ratios,
        )


def _looking_up(
    pair: Parts, asked: DraftRequest, tables: StaticTables | None, matches: bool = True, recall: bool = False
) -> LookupDrafter:
    return LookupDrafter(
        tables,
        matches=matches,
        recall=recall,
        said=pair.said(asked) if matches else None,
        tree=asked.grown == "dynamic",
        shared_noise=asked.grown == "dynamic",
        ratios=asked.ratios,
    )


def build(pair: Parts, asked: DraftRequest) -> LookupDrafter:
    """Matches and the pair's tables."""
    return _looking_up(pair, asked, pair.tables(), recall=asked.grown == "dynamic")


def build_match(pair: Parts, asked: DraftRequest) -> LookupDrafter:
    """Matches alone; of `suffix` in answers that are over too."""
    return _looking_up(pair, asked, None)


def build_static(pair: Parts, asked: DraftRequest) -> LookupDrafter:
    """The pair's tables alone."""
    return _looking_up(pair, asked, pair.tables(), matches=False)


def build_beside(pair: Parts, asked: DraftRequest) -> LookupDrafter:
    """What the first word looks up, and the draft head or model of the second."""
    first, second = asked.word.split("+")
    tree = asked.grown in ("joint", "dynamic")
    head: Any = pair.build(DraftRequest(second, asked.settings))
    return LookupDrafter(
        pair.tables() if first == "tables" else None,
        recall=first == "tables" and tree,
        said=pair.said(asked),
        model=head.model if isinstance(head.model, Respelled) else source_of(head.lm),
        tree=tree,
        shared_noise=tree,
        learn=asked.auto,
        ratios=asked.ratios,
    )
