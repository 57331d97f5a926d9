"""Max-gram drafting, MaG (Cascade Speculative Drafting, arXiv 2312.11462, section 3.4): the tokens that followed the
earlier occurrence of the answer's longest suffix, then bigrams. Needs no model and knows none.

The longest suffix of the generated tokens, of one token or more, is searched in the prompt and in all generated tokens
but the last; on a tie the earliest position counts. Up to k tokens after it are copied. If that is too few, the same is
done once more after the copied tokens, and the rest is chained from bigrams; an id without a bigram ends the chain.
"""

from __future__ import annotations

import numpy as np

from sampling.drafters.proposal import Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts
from sampling.drafters.tables.lookup import Tables
from sampling.drafters.tables.table_file import StaticTables
from sampling.rows import common_prefix, parted
from sampling.types import Rows, Sampler, Session

_KEPT = 128  # latest lengths of the row that are kept, to return to


class SuffixMatches:
    """For one growing row: at every earlier position, how many tokens before it equal the row's last ones.

    `lengths[e]` is the length of the longest common suffix of the first e tokens and of the row, at most the number of
    generated tokens. One more token updates all positions at once, so a proposal costs a few passes over an array of
    the row's length.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._start = len(prompt)
        self._row = list(prompt)
        self._ids = np.empty(max(64, 2 * len(prompt)), dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._lengths = [np.zeros(len(prompt), dtype=np.int32)]  # of the last few lengths of the row
        self._first = len(prompt)  # the row's length at self._lengths[0]

    def follow(self, row: list[int]) -> None:
        """Make these the matches of `row`, which begins with the prompt; the prefix shared with the last is kept."""
        shared = common_prefix(self._row, row)
        if shared < self._start:
            self.__init__(row)  # type: ignore[misc]
            return
        self._cut(shared if shared >= self._first else self._start)
        for token in row[len(self._row) :]:
            self._append(token)

    def _cut(self, count: int) -> None:
        """Keep the first `count` tokens: a length that is kept, or the prompt's."""
        if count < self._first:
            self._lengths, self._first = [np.zeros(self._start, dtype=np.int32)], self._start
        del self._row[count:]
        del self._lengths[count - self._first + 1 :]

    def _append(self, token: int) -> None:
        count = len(self._row)
        if count == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
        self._ids[count] = token
        self._row.append(token)
        # Position e + 1 ends with this token if ids[e] equals it; e = count is the row itself.
        grown = np.zeros(count + 1, dtype=np.int32)
        np.multiply(self._lengths[-1] + 1, self._ids[:count] == token, out=grown[1:])
        self._lengths.append(grown)
        if len(self._lengths) > _KEPT:
            self._first += len(self._lengths) - _KEPT // 2
            del self._lengths[: -(_KEPT // 2)]

    def copied(self, most: int) -> list[int]:
        """Return up to `most` tokens after the earliest of the longest matches; if the row ends before, once more after
        those; [] if the last token never occurred before."""
        copied = self._after_match(most)
        if not copied or len(copied) >= most:
            return copied
        count, lengths, first = len(self._row), list(self._lengths), self._first  # a long copy may drop lengths
        for token in copied:
            self._append(token)
        copied = copied + self._after_match(most - len(copied))
        del self._row[count:]
        self._lengths, self._first = lengths, first
        return copied

    def _after_match(self, most: int) -> list[int]:
        lengths = self._lengths[-1]
        if not len(lengths):
            return []
        position = int(lengths.argmax())  # the first of equal ones
        return self._row[position : position + most] if lengths[position] else []


class Copies(Source):
    """Offers the tokens after the longest match."""

    name = "maxgram"

    def __init__(self) -> None:
        self._indices: list[SuffixMatches] = []
        self._copied: Rows = []

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open the answer, which begins without a match."""
        self._indices = [SuffixMatches(row) for row in begun]

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._copied = []
        for index, text, depth in zip(self._indices, texts, depths, strict=True):
            if depth > 0:
                index.follow(text)
            self._copied.append(index.copied(depth) if depth > 0 else [])

    def offers(self, node: Node) -> list[Offer]:
        tokens = self._copied[node.row]
        if len(tokens) <= node.depth or tokens[: node.depth] != node.tokens:
            return []
        return [(tokens[node.depth], 1.0)]

    def select(self, rows: list[int]) -> None:
        self._indices = parted(self._indices, rows)


class MaxGramDrafter(Proposer):
    """Drafts point-mass chains by MaG.

    `tables`: their contexts of one token are the bigrams; None = no bigrams. Ids from `vocab_size` on, and those beyond
    the target's vocabulary, are not drafted. `source` [B, N] is "maxgram" for copied tokens and "bigram" after them.
    """

    def __init__(self, tables: StaticTables | None = None, vocab_size: int = 1 << 30) -> None:
        bigrams = [] if tables is None else [Tables(tables.below(vocab_size), "bigram", longest=1)]
        super().__init__([Copies(), *bigrams], least=0.0)


def build(pair: Parts, request: DraftRequest) -> MaxGramDrafter:
    """Build MaG, with bigrams if the pair has tables."""
    return MaxGramDrafter(pair.tables())
