"""Max-gram drafting, MaG (Cascade Speculative Drafting, arXiv 2312.11462, section 3.4): the tokens that followed the
earlier occurrence of the answer's longest suffix, then bigrams. Needs no model and knows none.

The longest suffix of the generated tokens, of one token or more, is searched in the prompt and in all generated tokens
but the last; on a tie the earliest position counts. The tokens after it are copied, up to the draft's length. If these
are too few, the same is done once more after the copied tokens, and the rest is chained from bigrams; an id without a
bigram ends the chain.
"""

from bisect import bisect_left

from sampling.drafters.proposal import Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts
from sampling.drafters.tables.lookup import Tables
from sampling.drafters.tables.table_file import StaticTables
from sampling.types import Rows, Sampler, Session


def after_match(row: list[int], generated: int, most: int) -> list[int]:
    """Return up to `most` tokens after the earliest of the longest matches of the last `generated` tokens of a row; []
    if its last token never occurred before."""
    text = "".join(chr(token % 0x110000) for token in row)  # str.find is fast; 0x110000 is the number of characters

    def end_of_match(size: int) -> int:
        """Return where the last `size` tokens first end before the row's end; 0: nowhere."""
        index = text.find(text[-size:], 0, -1)
        return index + size if index >= 0 else 0

    longest = bisect_left(range(1, generated + 1), True, key=lambda size: not end_of_match(size))
    position = end_of_match(longest) if longest else len(row)
    return row[position : position + most]


class Copies(Source):
    """Offers the tokens after the longest match."""

    name = "maxgram"

    def __init__(self) -> None:
        self._begins: list[int] = []  # tokens of each row before its generated ones
        self._copied: Rows = []

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open the answer; its first round has no generated tokens to match."""
        self._begins = list(map(len, begun))

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._copied = []
        for begin, text, depth in zip(self._begins, texts, depths, strict=True):
            copied = after_match(text, len(text) - begin, depth) if depth > 0 else []
            if 0 < len(copied) < depth:
                longer = text + copied
                copied = copied + after_match(longer, len(longer) - begin, depth - len(copied))
            self._copied.append(copied)

    def offers(self, node: Node) -> list[Offer]:
        tokens = self._copied[node.row]
        return [(token, 1.0) for token in tokens[node.depth : node.depth + 1] if tokens[: node.depth] == node.tokens]

    def select(self, rows: list[int]) -> None:
        self._begins = [self._begins[row] for row in rows]


class MaxGramDrafter(Proposer):
    """Drafts point-mass chains by MaG.

    `tables`: their contexts of one token are the bigrams; None = no bigrams. Ids beyond the target's vocabulary are not
    drafted. The sources are "maxgram" for copied tokens and "bigram" after them.
    """

    def __init__(self, tables: StaticTables | None = None) -> None:
        bigrams = [] if tables is None else [Tables(tables, "bigram", longest=1)]
        super().__init__([Copies(), *bigrams], least=0.0)


def build(pair: Parts, request: DraftRequest) -> MaxGramDrafter:
    """Build MaG, with bigrams if the pair has tables."""
    return MaxGramDrafter(pair.tables())
