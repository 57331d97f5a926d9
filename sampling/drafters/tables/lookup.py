"""Sources that look tokens up: in the conversation, in n-gram tables, in finished answers, and among the tokens that
the target held likely earlier.

A match follows the last tokens of a path to where they occurred before, in the prompt or in the answer. Tables know
what followed a context in the text that they were counted from. Finished answers are searched for the row's last tokens
(SuffixDecoding; sampling/drafters/tables/suffix.py). Recalled tokens are those that the target held likely after the
same one or two tokens earlier in this answer: a pass computes the distribution at every position, of which decoding
keeps only the drawn token (token recycling, Luo et al., arXiv 2408.08696). None of them runs a model.
"""

from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof
from functools import cache
from itertools import chain, repeat
from struct import Struct
from typing import Any

from sampling.drafters.draft_model import ModelSource, Respelled, source_of
from sampling.drafters.proposal import (
    LISTED_WEIGHT,
    MAX_NOISE,
    NOISE_SHARE,
    POOLED_NOISE_SHARE,
    SHARPENING,
    UNLISTED_WEIGHT,
    Candidate,
    Node,
    Noise,
    Offer,
    Proposer,
    Source,
)
from sampling.drafters.registry import DraftRequest, Parts
from sampling.drafters.tables.suffix import SIZES, SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.gamma.constants import MAX_PROB, MIN_PATH
from sampling.rows import common_prefix, parted
from sampling.sampler import MEAN
from sampling.types import Draft, Rows, Sampler, Session, Verdict
from sampling.vocabulary import best
from utils.kernels.bindings import OFFERED, Offers, at_hand, kernels, packer

LONGEST = 5  # most tokens of a match
# By tokens of a match: how often the token after it was right, on recorded answers from which no table was counted.
CHANCE = (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
# By tokens of context: the factor from a recalled token's earlier probability to its present one (docs/notes/tables.md,
# "Distributions recalled").
SHARES = {2: 0.6, 1: 0.3}
COUNTED = 0.5  # weight of counted and recalled tokens beside a model's; a match has 1
CHOICES = 4  # likeliest tokens kept for a context
OFFER, ONCE, EACH = packer("Offer"), packer("Offers", "longest", "model"), packer("Offers", "row", "temperature")
_packer_of = cache(lambda count: Struct("@" + count * OFFER.format.removeprefix("@")))  # packs `count` offers


class TextSoFar:
    """The tokens of a row as 64-bit numbers, which a compiled look-up reads without a copy."""

    def __init__(self) -> None:
        self._row: list[int] = []
        self.tokens = array("q")

    def follow(self, row: list[int]) -> None:
        """Hold the tokens of `row` from now on."""
        known = common_prefix(self._row, row)
        del self._row[known:], self.tokens[known:]
        self._row += row[known:]
        self.tokens.extend(row[known:])

    def matches(self, tail: list[int]) -> list[tuple[int, int]]:
        """Return (size, token after it) of the last earlier occurrence of each suffix of `tail` that has one, the
        longest first; suffixes have up to LONGEST tokens."""
        size, matches = self.tokens.itemsize, list[tuple[int, int]]()
        text = self.tokens.tobytes()[:-size]
        for count in range(1, min(LONGEST, len(tail)) + 1):
            suffix = array("q", tail[-count:]).tobytes()
            at = text.rfind(suffix)
            while at % size and at > 0:
                at = text.rfind(suffix, 0, at + len(suffix) - 1)
            if at < 0 or at % size:  # no longer suffix occurred before either
                break
            matches.append((count, self.tokens[at // size + count]))
        return matches[::-1]


class Matches(Source):
    """Offers, for each length of a match, the token after its last occurrence."""

    name = "match"
    reach = LONGEST

    def __init__(self) -> None:
        self.texts: list[TextSoFar] = []

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open the answer; the text of the last one is reused by common prefix."""
        if len(self.texts) != len(begun):
            self.texts = [TextSoFar() for _ in begun]

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        for known, text in zip(self.texts, texts, strict=True):
            known.follow(text)

    def offers(self, node: Node) -> list[Offer]:
        return [(token, CHANCE[size]) for size, token in self.texts[node.row].matches(node.tail)]

    def select(self, rows: list[int]) -> None:
        self.texts = parted(self.texts, rows)


class Tables(Source):
    """Offers the likeliest tokens after each known context, the longest first. `longest`: most tokens of context."""

    name = "tables"
    trust = COUNTED

    def __init__(self, tables: StaticTables, name: str = "tables", longest: int = 1 << 30) -> None:
        self.name, self.tables, self.reach = name, tables, max(1, min(longest, tables.max_n))
        self.known = tables

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        self.known = self.tables.below(target.vocab_size)

    def offers(self, node: Node) -> list[Offer]:
        return [(token, p) for _, token, p in self.known.entries(node.tail[-self.reach :], CHOICES)]


class Earlier(Source):
    """Offers the tokens that followed the same tokens in finished answers. `least`: fewest tokens of context."""

    name = "suffix"
    trust = COUNTED
    reach = SIZES[0]

    def __init__(self, finished: SuffixIndex, least: int = SIZES[-1]) -> None:
        self.finished, self.least = finished, least

    def offers(self, node: Node) -> list[Offer]:
        return self.finished.after(node.tail, self.least) if self.finished else []


class Recalled(Source):
    """Offers the tokens that the target held likely after the same one or two tokens in this answer. Learns only while
    one row is decoded."""

    name = "recalled"
    trust = COUNTED
    reach = 2

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], Sequence[Offer]] = {}
        self._learns = True  # not when the target decodes greedily or under a constraint

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        self._after = {}

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._learns = not (sampler.greedy or sampler.constraint is not None)

    def offers(self, node: Node) -> list[Offer]:
        after, each = self._after, SHARES.items() if self._after else ()
        return [(token, s * p) for n, s in each for token, p in after.get(tuple(node.tail[-n:]), ()) if p > 0]

    def observe(self, texts: Rows, paths: Rows, draft: Draft, verdict: Verdict) -> None:
        if len(texts) != 1 or not self._learns:
            return
        likely = likeliest_tokens(verdict, [-1, *paths[0]])
        self.learn([*texts[0][-2:], *draft.trees[0].path_tokens(paths[0])], likely)

    def learn(self, row: list[int], likely: Sequence[Sequence[Offer]]) -> None:
        """Keep the likeliest ids after each of the last tokens of `row`, and their probabilities.

        Distributions with one possible token are skipped: that token is in the text, where matches find it.
        """
        for end, offers in enumerate(likely, start=len(row) - len(likely) + 1):
            for size in SHARES if offers[0][1] < 1 else ():
                self._after[tuple(row[max(0, end - size) : end])] = offers


def likeliest_tokens(verdict: Verdict, nodes: list[int]) -> list[list[Offer]]:
    """Return the CHOICES likeliest ids after these nodes of the first row, and their processed probabilities."""
    known = verdict.distributions
    likeliest = [facts.likeliest[:CHOICES] for node in nodes if (facts := known.facts(0, node)) is not None]
    if len(likeliest) == len(nodes) and all(likeliest):
        return likeliest
    values, ids = best(known.at([0] * len(nodes), nodes), CHOICES)
    return [list(zip(*both, strict=True)) for both in zip(ids.tolist(), values.tolist(), strict=True)]


class CompiledLookUps:
    """Looks up matches and tables after a node by one compiled call (utils/kernels/lookup.c), which also takes the
    offers of the other sources, and pools them with a model's by another; the candidates are those of
    :meth:`Proposer.look_up` and :meth:`Proposer.pool`. `trust` in each source; `number` returns the index of one."""

    def __init__(
        self,
        matches: Matches | None,
        tables: Tables | None,
        trust: Sequence[float],
        number: Callable[[Source], int],
    ) -> None:
        self._matches, self._tables, self._record = matches, tables and tables.known, Offers()
        self._address, self._tail = addressof(self._record), self._record.tail
        self._find, self._pool = kernels().find_offers, kernels().pool_offers
        self._offers = memoryview(self._record).cast("B")[Offers.offers.offset :]
        self._numbers = array("d", [*CHANCE, *trust])
        chance = self._numbers.buffer_info()[0]
        numbers = [LONGEST, chance, number(matches)] if matches else [0, 0, 0]
        if tables and (known := self._tables):
            numbers += known.compiled, min(tables.reach, known.max_n), CHOICES, known.end, number(tables)
        ONCE.pack_into(
            *(self._record, 0, *numbers, *[0] * (8 - len(numbers)), NOISE_SHARE, POOLED_NOISE_SHARE, MAX_NOISE, MEAN),
            *(MAX_PROB, LISTED_WEIGHT, SHARPENING, UNLISTED_WEIGHT, chance + 8 * len(CHANCE), len(trust) - 1),
        )

    def candidates(self, node: Node, others: Sequence[tuple[int, Source]], noise: Noise) -> list[Candidate]:
        """Return the candidates after a node, the likeliest first."""
        row = (0, 0) if self._matches is None else self._matches.texts[node.row].tokens.buffer_info()
        given = [(token, index, 0.0, p) for index, source in others for token, p in source.offers(node)[: OFFERED // 4]]
        self._tail[: len(node.tail)] = node.tail
        return self._called(self._find, given, node, noise, *row, len(node.tail), 0)

    def pool(self, node: Node, known: list[Candidate], offers: list[Offer], noise: Noise) -> list[Candidate]:
        """Return the candidates after a node and a model's offers there as one distribution."""
        each = [*known, *[(token, -1, p, p) for token, p in offers]]
        return self._called(self._pool, each, node, noise, 0, 0, 0, len(known))

    def _called(
        self, function: Any, offers: Sequence[tuple[int, int, float, float]], node: Node, noise: Noise, *numbers: int
    ) -> list[Candidate]:
        length, key, temperature = noise
        if offers:
            _packer_of(len(offers)).pack_into(self._offers, 0, *chain.from_iterable(offers))
        EACH.pack_into(self._record, ONCE.size, *numbers, len(offers), key, length + node.depth, temperature)
        found = OFFER.iter_unpack(self._offers[: OFFER.size * function(self._address)])
        return list(map(tuple.__new__, repeat(Candidate), found))  # Candidate._make without Python code for each


class LookupDrafter(Proposer):
    """A drafter of matches, tables, recalled tokens and finished answers, with or without a model.

    Args:
        tables: the n-gram tables, if any.
        matches: whether to match in the conversation.
        recall: whether to offer recalled tokens.
        finished: the index of finished answers, if any.
        model: a source that runs a model, if any.
        least, proposer: arguments of :class:`sampling.drafters.proposal.Proposer`.
    """

    def __init__(
        self,
        tables: StaticTables | None = None,
        *,
        matches: bool = True,
        recall: bool = False,
        finished: SuffixIndex | None = None,
        model: ModelSource | None = None,
        least: float = MIN_PATH,
        **proposer: Any,
    ) -> None:
        # Contexts of two tokens help only without a model (docs/notes/tables.md).
        sources = [
            Matches() if matches else None,
            None if tables is None else Tables(tables),
            Recalled() if recall else None,
            None if finished is None else Earlier(finished, SIZES[-1] if model is None else SIZES[-2]),
            model,
        ]
        super().__init__([source for source in sources if source is not None], least=least, **proposer)
        self._compiled: CompiledLookUps | None = None
        self._others = [(index, source) for index, source in self.lookups if not isinstance(source, Matches | Tables)]

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        super().start(prompt, target, verifier)
        matches = next((source for source in self.sources if isinstance(source, Matches)), None)
        tables = next((source for source in self.sources if isinstance(source, Tables)), None)
        self._compiled = CompiledLookUps(matches, tables, self._trust, self.sources.index) if at_hand() else None

    def look_up(self, node: Node) -> list[Candidate]:
        """Return the offers of all sources without a model, by one compiled call if the kernels are loaded."""
        return self._compiled.candidates(node, self._others, self._noise) if self._compiled else super().look_up(node)

    def pool(self, node: Node, known: list[Candidate], offers: list[Offer]) -> list[Candidate]:
        compiled = self._compiled
        return compiled.pool(node, known, offers, self._noise) if compiled else super().pool(node, known, offers)


def build(pair: Parts, request: DraftRequest) -> LookupDrafter:
    """Build the drafter of a word: `tables` (matches and tables), `static` (tables alone), `match`, or `suffix`
    (matches and finished answers). All but `static` use finished answers if the setting `suffix` lets them. `a+b` has
    the look-ups of the first word and the draft head or model of the second."""
    first, _, second = request.word.partition("+")
    tree = request.expand in ("joint", "dynamic")
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
