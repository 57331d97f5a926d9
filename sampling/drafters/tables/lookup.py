"""Sources that look tokens up: in the conversation, in n-gram tables, in finished answers, and among the tokens that
the target held likely earlier.

A match follows the last tokens of a path to where they occurred before, in the prompt or in the answer. Tables know
what followed a context in the text that they were counted from. Finished answers are looked up by their suffixes
(SuffixDecoding; sampling/drafters/tables/suffix.py). Recalled tokens are those that the target held likely after the
same one or two tokens earlier in this answer: a pass computes the distribution at every position, of which decoding
keeps only the drawn token (token recycling, Luo et al., arXiv 2408.08696). None of them runs a model.
"""

from collections.abc import Sequence
from typing import Any

from sampling.drafters.draft_model import Model, Respelled, source_of
from sampling.drafters.proposal import MIN_PATH, Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts
from sampling.drafters.tables.suffix import SIZES, SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.rows import common_prefix, parted
from sampling.types import Draft, Rows, Sampler, Session, Verdict
from sampling.vocabulary import best

LONGEST = 5  # tokens of a match
CHANCE = (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
"""By tokens of a match: how often it held on recorded answers that were in no table."""
SHARES = {2: 0.6, 1: 0.3}
"""By tokens of context: share of a recalled token's earlier probability that it has now (docs/notes.md,
"Distributions recalled")."""
COUNTED = 0.5  # trust in counted and recalled tokens, beside a match or a model (docs/notes.md)
CHOICES = 4  # tokens kept of one context
KEPT = 4096  # contexts of the tables whose entries are cached


class MatchIndex:
    """The token that followed each context of 1 … LONGEST tokens the last time it occurred in a sequence.

    A later drafter of a chain sees rows that end in uncommitted drafts, so tokens can be removed again: every position
    keeps the one before it with the same context. The cost is proportional to the tokens added and removed.
    """

    def __init__(self) -> None:
        self._row: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [
            {} for _ in range(LONGEST + 1)
        ]  # by context size: the position after it
        self._older: list[list[int]] = [
            [] for _ in range(LONGEST + 1)
        ]  # by context size: the position before each; -1: none

    def follow(self, row: list[int]) -> None:
        """Make this the index of `row`: remove what it does not share with the last one, then read its new tokens."""
        self._cut(common_prefix(self._row, row))
        known = len(self._row)
        self._row += row[known:]
        for size in range(1, LONGEST + 1):
            last, older = self._last[size], self._older[size]
            for end in range(max(known, size), len(row)):
                context = tuple(row[end - size : end])
                older.append(last.get(context, -1))
                last[context] = end

    def _cut(self, count: int) -> None:
        """Keep only the first `count` tokens."""
        row = self._row
        for size in range(1, LONGEST + 1):
            last, older = self._last[size], self._older[size]
            for end in range(len(row) - 1, max(count, size) - 1, -1):
                context, position = tuple(row[end - size : end]), older.pop()
                if position < 0:
                    del last[context]
                else:
                    last[context] = position
        del row[count:]

    def every(self, tail: list[int]) -> list[tuple[int, int]]:
        """Return (size, token) of each suffix of `tail` that occurred before, the longest first."""
        matches = []
        for size in range(1, min(LONGEST, len(tail)) + 1):
            position = self._last[size].get(tuple(tail[-size:]))
            if position is None:  # no longer suffix occurred before either
                break
            matches.append((size, self._row[position]))
        return matches[::-1]


class Matches(Source):
    """Offers the token that followed the last time, for each length of the match."""

    name = "match"
    reach = LONGEST

    def __init__(self) -> None:
        self._indices: list[MatchIndex] = []

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open the answer; the index of the last one is reused by common prefix."""
        if len(self._indices) != len(begun):
            self._indices = [MatchIndex() for _ in begun]

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        for index, text in zip(self._indices, texts, strict=True):
            index.follow(text)

    def offers(self, node: Node) -> list[Offer]:
        return [(token, CHANCE[size]) for size, token in self._indices[node.row].every(node.tail)]

    def select(self, rows: list[int]) -> None:
        self._indices = parted(self._indices, rows)


class Tables(Source):
    """Offers the likeliest tokens after each known context, the longest first."""

    name = "tables"
    trust = COUNTED

    def __init__(self, tables: StaticTables, name: str = "tables", longest: int = 1 << 30) -> None:
        self.name, self.tables, self.reach = name, tables, max(1, min(longest, tables.max_n))
        self._known = tables
        self._looked_up: dict[tuple[int, ...], list[Offer]] = {}  # tables never change, and most contexts recur

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        self._known = self.tables.below(target.vocab_size)
        self._looked_up.clear()

    def offers(self, node: Node) -> list[Offer]:
        context = tuple(node.tail[-self.reach :])
        if (offers := self._looked_up.get(context)) is None:
            if len(self._looked_up) >= KEPT:
                self._looked_up.clear()
            entries = self._known.entries([*context], CHOICES)
            offers = self._looked_up[context] = [(token, p) for _, token, p in entries]
        return offers


class Earlier(Source):
    """Offers what followed the same tokens in finished answers. `least`: fewest tokens of context."""

    name = "suffix"
    trust = COUNTED
    reach = SIZES[0]

    def __init__(self, finished: SuffixIndex, least: int = SIZES[-1]) -> None:
        self.finished, self.least = finished, least

    def offers(self, node: Node) -> list[Offer]:
        return self.finished.after(node.tail, self.least) if self.finished else []


class Recalled(Source):
    """Offers what the target held likely after the same one or two tokens in this answer. Follows one row."""

    name = "recalled"
    trust = COUNTED
    reach = 2

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], list[Offer]] = {}
        self._certain = False  # whether the target decodes greedily

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        self._after = {}

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._certain = sampler.greedy

    def offers(self, node: Node) -> list[Offer]:
        if not self._after:
            return []
        return [offer for size in SHARES for offer in self._after.get(tuple(node.tail[-size:]), ())]

    def observe(self, texts: Rows, paths: Rows, draft: Draft, verdict: Verdict) -> None:
        if len(texts) != 1 or self._certain:
            return
        row = [*texts[0][-2:], *draft.trees[0].path_tokens(paths[0])]
        self.learn(row, likeliest_tokens(verdict, [-1, *paths[0]]))

    def learn(self, row: list[int], likely: Sequence[Sequence[Offer]]) -> None:
        """Keep the likeliest ids and their probabilities after each of the last tokens of `row`.

        A distribution with one possible token adds nothing to the text.
        """
        for end, offers in enumerate(likely, start=len(row) - len(likely) + 1):
            if offers[0][1] == 1:
                continue
            for size, share in SHARES.items():
                self._after[tuple(row[max(0, end - size) : end])] = [(token, share * p) for token, p in offers if p > 0]


def likeliest_tokens(verdict: Verdict, nodes: list[int]) -> list[list[Offer]]:
    """Return the CHOICES likeliest ids after these nodes of the first row, and their processed probabilities."""
    known = verdict.distributions
    likeliest = [facts.likeliest[:CHOICES] for node in nodes if (facts := known.facts(0, node)) is not None]
    if len(likeliest) == len(nodes) and all(likeliest):
        return likeliest
    values, ids = best(known.at([0] * len(nodes), nodes), CHOICES)
    return [list(zip(*both, strict=True)) for both in zip(ids.tolist(), values.tolist(), strict=True)]


class LookupDrafter(Proposer):
    """A drafter of matches, tables, recalled tokens and finished answers, with or without a model.

    Args:
        tables: None: no tables.
        matches: whether to match in the conversation.
        recall: whether to offer recalled tokens, in trees.
        finished: the finished answers; None: no such look-up.
        model: a source that runs a model.
        proposer: further arguments of :class:`sampling.drafters.proposal.Proposer`.
    """

    def __init__(
        self,
        tables: StaticTables | None = None,
        *,
        matches: bool = True,
        recall: bool = False,
        finished: SuffixIndex | None = None,
        model: Model | None = None,
        least: float = MIN_PATH,
        **proposer: Any,
    ) -> None:
        # After one or two tokens a model knows better than finished answers (docs/notes/tables.md).
        sources = [
            Matches() if matches else None,
            None if tables is None else Tables(tables),
            Recalled() if recall else None,
            None if finished is None else Earlier(finished, SIZES[-1] if model is None else SIZES[-2]),
            model,
        ]
        super().__init__([source for source in sources if source is not None], least=least, **proposer)


def build(pair: Parts, request: DraftRequest) -> LookupDrafter:
    """Build the look-ups of a word: `tables`, `static`, `match`, or `suffix`, which is `match` in finished answers too;
    of `a+b` those of the first word beside the draft head or model of the second."""
    first, _, second = request.word.partition("+")
    tree = request.grown in ("joint", "dynamic")
    head: Any = pair.build(DraftRequest(second, request.settings)) if second else None
    return LookupDrafter(
        pair.tables() if first in ("tables", "static") else None,
        matches=first != "static",
        recall=first == "tables" and tree,
        finished=None if first == "static" else pair.finished(request),
        model=None if head is None else head.model if isinstance(head.model, Respelled) else source_of(head.lm),
        tree=tree,
        shared_noise=tree,
        learn=head is not None and request.auto,
        ratios=request.ratios,
    )
