"""N-gram drafting (n-gram assisted speculative decoding of romsto's Speculative-Decoding; with top_k_filler = 1 it is
ANPD, Ou et al., arXiv 2404.08698): drafts from counts of the tokens that followed each context in this conversation.
Needs no model and knows none.
"""

import random
from collections.abc import Iterator
from itertools import repeat

from torch import Tensor

from sampling.drafters.proposal import Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts
from sampling.rows import common_prefix, put
from sampling.types import Draft, Rows, Session, Verdict
from sampling.vocabulary import best
from utils.errors import whole

Context = tuple[int, ...]


class NgramStore:
    """Counts context → {token: count} and the best token of each context.

    Args:
        n: tokens of an n-gram, 2 or more; contexts have n − 1 tokens.
        multi_level: also keep the shorter contexts, down to one token; look-ups take the longest known.
    """

    def __init__(self, n: int = 3, *, multi_level: bool = True) -> None:
        n = whole("n", n, 2, "a whole number, at least 2")
        self.sizes = range(n - 1, 0, -1) if multi_level else range(n - 1, n - 2, -1)
        self.counts: dict[Context, dict[int, int]] = {}
        self.best: dict[Context, int] = {}

    def fill(self, sequence: list[int], start: int = 0) -> None:
        """Count every token of `sequence` from index `start` on."""
        for size in self.sizes:
            for end in range(max(start, size), len(sequence)):
                context, token = tuple(sequence[end - size : end]), sequence[end]
                counts = self.counts.setdefault(context, {})
                counts[token] = counts.get(token, 0) + 1
                # Only a strictly greater count takes over.
                if counts[token] > counts.get(self.best.get(context, -1), 0):
                    self.best[context] = token

    def offer(self, before: list[int]) -> tuple[int, float] | None:
        """Return the most frequent token after the longest known context, and its share; None if none is known."""
        for size in self.sizes:
            context = tuple(before[-size:])
            if size <= len(before) and (token := self.best.get(context)) is not None:
                counts = self.counts[context]
                return token, counts[token] / sum(counts.values())
        return None


class Ngrams(Source):
    """Offers the most frequent token after the longest known context of each row, after an unknown one a random token
    or none; arguments as in :class:`NgramDrafter` (`forgets` is its `reset`)."""

    name = "ngram"

    def __init__(
        self,
        vocab_size: int,
        n: int,
        multi_level: bool,
        top_k_filler: int,
        stop_if_unknown: bool,
        forgets: bool,
        seed: int,
    ) -> None:
        self.vocab_size, self.reach, self.multi_level, self.forgets = vocab_size, n, multi_level, forgets
        self.top_k_filler, self.stop_if_unknown = top_k_filler, stop_if_unknown
        self._seed, self._random, self._end = seed, random.Random(), vocab_size
        self.reset()

    def reset(self, rows: int = 1) -> None:
        """Forget everything."""
        self._stores = [NgramStore(self.reach, multi_level=self.multi_level) for _ in range(rows)]
        self._seen: Rows = [[] for _ in range(rows)]

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Fill the stores from the prompts."""
        self._random.seed(self._seed)
        self._end = min(self.vocab_size, target.vocab_size)
        if self.forgets or len(self._stores) != len(prompt):
            self.reset(len(prompt))
        for store, row, seen in zip(self._stores, prompt, self._seen, strict=True):
            store.fill(row, common_prefix(seen, row))
        self._seen = [list(row) for row in prompt]

    def offers(self, node: Node) -> list[Offer]:
        if (offer := self._stores[node.row].offer(node.tail)) is not None:
            return [offer]
        return [] if self.stop_if_unknown else [(self._random.randrange(self._end), 1 / self._end)]

    def observe(self, texts: Rows, paths: Rows, draft: Draft, verdict: Verdict) -> None:
        """Count the emitted tokens and, with a filler above 1, the target's likeliest ones beside them."""
        fillers = self._fillers(paths, verdict.logits) if self.top_k_filler > 1 else repeat([])
        for row, (store, text, path) in enumerate(zip(self._stores, texts, paths, strict=True)):
            emitted = [*draft.trees[row].path_tokens(path), verdict.token[row]]
            before = text[-self.reach :]
            for token in emitted:
                for counted in (token, *next(fillers)):
                    store.fill([*before, counted], len(before))
                before = [*before, token]
            self._seen[row] = [*text, *emitted]

    def _fillers(self, paths: list[list[int]], logits: Tensor) -> Iterator[list[int]]:
        """Yield the likeliest ids after the root and after each node of these paths, row by row."""
        visited = [(row, node + 1) for row, path in enumerate(paths) for node in (-1, *path)]
        if logits.device.type == "cpu":  # one at a time without copies; on a GPU one call for all is faster
            return (best(logits[position], self.top_k_filler)[1].tolist() for position in visited)
        rows, nodes = put(visited, logits.device).unbind(1)
        return iter(best(logits[rows, nodes], self.top_k_filler)[1].tolist())

    def select(self, rows: list[int]) -> None:
        """Keep these rows; repeated ones share a store, which is lossless."""
        self._stores, self._seen = [self._stores[row] for row in rows], [self._seen[row] for row in rows]


class NgramDrafter(Proposer):
    """Drafts point-mass chains from an :class:`NgramStore` for each row.

    Args:
        vocab_size: ids below it may be drawn for unknown contexts.
        n, multi_level: see :class:`NgramStore`.
        top_k_filler: above 1, the target's k best tokens at every examined position are counted too.
        stop_if_unknown: end the draft at an unknown context; otherwise propose a random token there.
        reset: forget between answers; otherwise only the new tokens of a prompt are added.
        seed: of the random tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        n: int = 3,
        multi_level: bool = True,
        top_k_filler: int = 3,
        stop_if_unknown: bool = True,
        reset: bool = True,
        seed: int = 0,
    ) -> None:
        whole("top_k_filler", top_k_filler, 1, "a whole number, at least 1")
        self.ngrams = Ngrams(vocab_size, n, multi_level, top_k_filler, stop_if_unknown, reset, seed)
        super().__init__([self.ngrams], least=0.0)


class NGramStorage(NgramDrafter):
    """The n-gram storage of romsto's Speculative-Decoding: counts accumulate over answers until `reset()`.

    Each call of :func:`sampling.ngram_assisted_speculative_generate` sets its fillers and `stop_if_unknown`.
    """

    multi_level = True

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(vocab_size, n=n, multi_level=self.multi_level, reset=False)

    def reset(self) -> None:
        """Forget everything."""
        self.ngrams.reset()

    def under(self, top_k_filler: int, stop_if_unknown: bool) -> "NGramStorage":
        """Return this storage with the settings of a call."""
        self.ngrams.top_k_filler, self.ngrams.stop_if_unknown = top_k_filler, stop_if_unknown
        return self


class OneLevelNGramStorage(NGramStorage):
    """The same with contexts of n − 1 tokens only."""

    multi_level = False


def build(pair: Parts, request: DraftRequest) -> NgramDrafter:
    """Build n-gram drafts by the settings."""
    settings = request.settings
    return NgramDrafter(
        pair.target.vocab_size,
        n=settings.ngram_n,
        multi_level=settings.ngram_multi_level,
        top_k_filler=settings.ngram_filler,
        stop_if_unknown=settings.ngram_stop_if_unknown,
        reset=settings.ngram_reset,
    )
