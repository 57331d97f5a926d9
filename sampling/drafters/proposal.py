"""The proposal model: sources offer tokens, one builder grows the draft from the likeliest of them.

A :class:`Source` is asked, level by level, which tokens may follow a node: matches, tables, recalled tokens, a draft
model, a draft head. The builder keeps the offers of all sources in one order, the likeliest path first, and cuts where
a node brings fewer tokens than its place in the target's pass costs (best-first trees as in EAGLE-2, Li et al.,
arXiv 2406.16858). Without trees, and in a batch, only the best offer of each node is kept: a chain is a tree of width
one. A source that runs a model is asked at a level only where the others leave a gain that pays for the pass.

**Why the text stays lossless.** A chosen token is a point mass: the target draws its own token t, and a node is
accepted iff it is t, so any choice is exact, one by the noise of the target's draw too. A *drawn* token comes from a
distribution that travels with it. Whether a node is drawn, and from what, is settled before the draw; the node stays,
however unlikely the token that came, and its probability decides only about what is drawn behind it. Sources that draw
stand alone: a node takes drawn or chosen offers, never both.

Knows no source by name, no clock and no text.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.events import Call, Proposal
from sampling.gamma.ratios import RETRY, Ratios, RunningRatio
from sampling.rows import behind, first_rows, lead, padded
from sampling.types import (
    LM,
    Budget,
    Draft,
    Drafter,
    NodeCosts,
    Rows,
    Rule,
    Sampler,
    Session,
    Traits,
    Tree,
    Verdict,
)

LEAST = 0.03  # less likely paths are not drafted
LIKELY = 0.5  # of the tokens behind a node the likeliest, as far as it was not looked up
FURTHER, FURTHER_WORTH = 0.85, 20.0  # share of what is offered behind drafted tokens that comes; outcomes it is worth
GAINS = 0.5, 0.1  # tokens that a pass of a model brings where nothing else offers any: the first of a round, later ones
GAIN_WORTH = 10.0  # outcomes that this guess is worth
PRICE = 0.15  # tokens that a pass of a model is worth before it is measured
NOISE = 0.5
"""Share of the noise that is believed where only few tokens are offered (docs/notes.md, "The noise is known")."""
LOUDEST = 100.0  # noise in a logit beyond which it makes no difference; at a temperature of thousands there is more
SURE = 0.97  # no token is likelier
FLOOR = 0.004  # what a token has of being named at all
UNNAMED = 0.067  # weight of all the tokens that nobody names

Noise = Callable[[int, Sequence[int]], list[float]]  # tokens above a node, ids → what the draw adds to their logits


Offer = tuple[int, float]
"""A token that may follow a node, and how likely it is by its source."""


class Candidate(NamedTuple):
    """A possible node: the token, who offers it, how likely it is beside all others, its source's own probability."""

    token: int
    source: int
    p: float
    prob: float


@dataclass(slots=True, eq=False)
class Node:
    """A node of a draft. The root (depth 0) is the last committed token of a row."""

    row: int  # the row's place in the batch
    tail: list[int]  # the last tokens of the path, its own the last
    parent: Node | None = None
    depth: int = 0
    token: int = -1
    source: int = 0
    prob: float = 1.0
    path: float = 1.0  # the chance that the target comes here

    @property
    def tokens(self) -> list[int]:
        """The drafted tokens down to this node."""
        return [] if self.parent is None else [*self.parent.tokens, self.token]


class Source:
    """Offers tokens behind nodes. A base with what a source has no need of.

    `reach`: tokens of context that it looks at. `trust`: how far its probabilities are believed beside a model's.
    `lm`: the model that it runs, which has a price. `draws`: its offers are drawn, one a node. `whole`: its first call
    answers all depths.
    """

    name = ""
    reach = 1
    trust = 1.0
    lm: LM | None = None
    draws = False
    whole = False

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions of its model."""
        return ()

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open an answer to `prompt`; `begun` are the rows as they stand, with what is before them."""

    def close(self) -> None:
        """Follow no rows in this answer."""

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        """A round begins: the rows of the loop, and as texts with what stands before them."""

    def offers(self, node: Node) -> list[Offer]:
        """The tokens that may follow a node; of a source without a model."""
        raise NotImplementedError

    def expand(self, nodes: list[Node]) -> list[list[Offer]]:
        """The same behind each node of a level, in one pass of a model; nearer levels were asked before."""
        raise NotImplementedError

    def observe(self, texts: Rows, paths: Rows, draft: Draft, verdict: Verdict) -> None:
        """A round is over: `paths` are the accepted nodes of each row."""

    def select(self, rows: list[int]) -> None:
        """Follow these rows: reordered, repeated or dropped."""

    def considered(self, node: Node, count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        """The likeliest tokens behind a node at which a token was drawn, and `tokens`."""
        return ()

    def call(self) -> Call | None:
        """What its model did in this round."""
        return None


class Growth:
    """The nodes of one row, the likeliest path first, `most` of them and `depth` levels at most.

    `floors`: by the nodes that are likelier, what a path must exceed. `wide`: a node may have several children.
    """

    def __init__(self, root: Node, depth: int, most: int, floors: Sequence[float], least: float, wide: bool) -> None:
        self.root, self.depth, self.most, self.floors, self.least, self.wide = root, depth, most, floors, least, wide
        self.kept: list[Node] = []
        self._less: list[float] = []  # of each kept node less its path

    def add(self, parent: Node, candidates: Sequence[Candidate], reach: int, share: float = 1.0) -> None:
        """Take chosen children, as far as their paths are likely enough; `share` of their chances is believed."""
        if not self.wide:
            candidates = sorted(candidates, key=itemgetter(2), reverse=True)[:1]
        for token, source, p, prob in candidates:
            path = parent.path * min(1.0, share * p)
            if path < self.least:
                continue
            place = bisect(self._less, -path)
            if place < self.most and path > self.floors[place]:
                tail = [*parent.tail[1 - reach :], token] if reach > 1 else [token]
                self._insert(place, Node(parent.row, tail, parent, parent.depth + 1, token, source, prob, path))

    def add_drawn(self, parent: Node, offer: Offer) -> None:
        """Take a drawn child, whatever its probability."""
        token, prob = offer
        node = Node(parent.row, [token], parent, parent.depth + 1, token, 0, prob, parent.path * prob)
        self._insert(len(self.kept), node)

    def _insert(self, place: int, node: Node) -> None:
        self.kept.insert(place, node)
        self._less.insert(place, -node.path)
        del self.kept[self.most :], self._less[self.most :]

    def level(self, depth: int) -> list[Node]:
        """The nodes of this depth behind which something may be worth while."""
        if depth >= self.depth:
            return []
        nodes = enumerate(self.kept, start=1)
        return [
            node
            for count, node in nodes
            if node.depth == depth
            and node.path >= self.least
            and (count < self.most or not self.wide)
            and node.path * LIKELY > self.floors[min(count, self.most)]
        ]


def worthwhile(paths: Sequence[float], costs: NodeCosts | None) -> int:
    """How many nodes, given by the probabilities of their paths, the likeliest first, are worth their place in the
    pass: calibration · Σ paths − rate · v is largest. All where nothing is known of costs."""
    if costs is None:
        return len(paths)
    sums = [0.0, *accumulate(paths)]
    counts = range(min(len(paths), max(0, len(costs.v) - 1)) + 1)
    return max(counts, key=lambda n: costs.calibration * sums[n] - costs.rate * costs.v[n])


def floors_of(costs: NodeCosts, most: int) -> list[float]:
    """By the nodes that are likelier: what a path must exceed, or :func:`worthwhile` never takes it, nor any behind."""
    believed = costs.rate / costs.calibration if costs.calibration > 0 else math.inf
    slopes = _gentlest(tuple(costs.v))
    floors = [*(believed * slope for slope in slopes), *[math.inf] * (most + 1 - len(slopes))][: most + 1]
    return [*accumulate(reversed(floors), min)][::-1]


@lru_cache(maxsize=8)
def _gentlest(v: tuple[float, ...]) -> list[float]:
    """By the nodes of a pass: the least that each of some further ones adds to it; ∞ where it holds no more."""
    return [
        min(((v[n] - now) / (n - taken) for n in range(taken + 1, len(v))), default=math.inf)
        for taken, now in enumerate(v)
    ]


def _in_turn(said: list[tuple[float, int, int]]) -> list[Candidate]:
    said.sort(key=itemgetter(0), reverse=True)
    left, found = 1.0, dict[int, Candidate]()
    for prob, index, token in said:
        if token not in found and left > 0:
            found[token] = Candidate(token, index, left * prob, prob)
            left *= 1 - prob
    return list(found.values())


def loudness(noise: Noise, depth: int, tokens: Sequence[int], believed: float) -> list[float]:
    """What the noise at this depth multiplies the chance of each token by, if so much of it is believed."""
    return [math.exp(min(LOUDEST, believed * one)) for one in noise(depth, tokens)]


def _heard(noise: Noise, node: Node, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates behind a node with the chances that the noise leaves them."""
    louder = loudness(noise, node.depth, [one.token for one in candidates], NOISE)
    return [one._replace(p=min(SURE, one.p * factor)) for one, factor in zip(candidates, louder, strict=True)]


class Pool:
    """What several sources and a model say of one node, as one distribution.

    What all of them say of a token is added up, each by how far it is believed beside the others, and the sums,
    sharpened, share out the chance between them (a linear pool; Ranjan and Gneiting, J. R. Stat. Soc. B 72, 2010, for
    why a sum of forecasts wants sharpening). Figures: docs/notes.md, "One builder for all sources".

    Args:
        trust: by source, the model's the last.
    """

    def __init__(self, trust: Sequence[float], sharpened: float = 1.5, noise: float = 0.95) -> None:
        self.trust, self.sharpened, self.noise = trust, sharpened, noise

    def __call__(
        self, candidates: list[Candidate], offers: list[Offer], depth: int, noise: Noise | None
    ) -> list[Candidate]:
        """The candidates of the others and the model's offers together."""
        known, forecast = {one.token: one for one in candidates}, dict(offers)
        model, own, sharpened = len(self.trust) - 1, self.trust[-1], self.sharpened
        tokens = list(known | forecast)
        weights, said = list[float](), list[tuple[int, float]]()
        for token in tokens:
            one, prob = known.get(token), forecast.get(token, 0.0)
            others = 0.0 if one is None else self.trust[one.source] * one.p
            weights.append((others + own * prob + FLOOR) ** sharpened)
            said.append((model, prob) if one is None or own * prob >= others else (one.source, one.prob))
        if noise is not None:
            louder = loudness(noise, depth, tokens, self.noise)
            weights = [weight * factor for weight, factor in zip(weights, louder, strict=True)]
        total = UNNAMED + sum(weights)
        return [
            Candidate(token, source, min(SURE, weight / total), prob)
            for token, weight, (source, prob) in zip(tokens, weights, said, strict=True)
        ]


class Asked(NamedTuple):
    """A level at which a model was asked: the chance that the others left open there, and their first token by node."""

    depth: int
    left: float
    first: dict[Node | None, int]


class Proposer(Drafter):
    """A drafter made of sources.

    Args:
        sources: at most one of them runs a model.
        tree: best-first trees where one row is decoded and the target takes trees; else chains.
        nodes: of a tree, where the budget names no number; None: as many as it has levels.
        least: less likely paths are not drafted; behind a drawn token that is less likely nothing is drawn.
        shared_noise: chosen offers are weighed by the noise of the target's draw. Not beside drawn drafts.
        learn: a model is asked only where that pays; else wherever what is known of it says so.
        ratios: what it learns with, if that is to outlive it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        tree: bool = False,
        nodes: int | None = None,
        least: float = LEAST,
        rule: Rule = Rule.POINT,
        shared_noise: bool = False,
        learn: bool = False,
        ratios: Ratios | None = None,
    ) -> None:
        self.sources, self.nodes, self.least, self.learn = tuple(sources), nodes, least, learn
        self.model = next((source for source in sources if source.lm is not None), None)
        self._pool = Pool([source.trust for source in sources])
        self._cheap = [(index, source) for index, source in enumerate(sources) if source is not self.model]
        self._reach = max((source.reach for source in sources), default=1)
        self._ratios = Ratios() if ratios is None else ratios
        self._further = self._ratios.of("further", FURTHER, FURTHER_WORTH)
        lm = self.model.lm if self.model else None
        self.traits = Traits(
            tuple(source.name for source in sources),
            rule,
            needs_hidden=lm.reads_hidden if lm else False,
            needs_kv=lm.reads_kv if lm else False,
            reads_one_row=lm is not None and bool(self._cheap),
            shared_noise=shared_noise,
            tree=Tree.BEST_FIRST if tree else None,
        )
        self._takes_trees = True
        self._leads: Rows = []
        self._ids: list[int] = []  # the caller's numbers of the rows, which key the noise
        self._grown: list[list[Node]] = []  # of the last draft, by row
        self._asked: list[Asked] = []  # levels at which the model was asked in this round
        self._offered: list[tuple[Node, list[Candidate]]] = []  # behind each node that was looked at in this round
        self._idle = 0  # rounds since the model was asked
        self._noise: Noise | None = None

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.model is None else self.model.sessions

    @property
    def models(self) -> tuple[LM, ...]:
        return () if self.model is None or self.model.lm is None else (self.model.lm,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._leads, self._ids = lead(prompt, target), list(range(len(prompt)))
        self._takes_trees = target.takes_trees
        self._grown, self._asked = [], []
        begun = behind(self._leads, first_rows(prompt, target))
        for source in self.sources:
            if source is self.model and self.traits.reads_one_row and len(prompt) > 1:
                source.close()
            else:
                source.start(prompt, begun, target)

    def select(self, rows: Tensor) -> None:
        places = rows.tolist()
        self._leads, self._ids = [self._leads[row] for row in places], [self._ids[row] for row in places]
        for source in self.sources:
            source.select(places)

    # -- growing --------------------------------------------------------------------------------

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """A best-first tree of one row, or a chain for each; `source` is [B, N]."""
        texts, wide = behind(self._leads, rows), self._wide(rows)
        for source in self.sources:
            source.follow(rows, texts, budget.max_depth, sampler)
        self._noise, self._asked, self._offered = None, [], []
        if len(rows) == 1 and self.traits.shared_noise and not sampler.greedy:
            row, length = self._ids[0], len(rows[0])
            self._noise = lambda depth, ids: sampler.shared_noise(row, length + depth, ids)
        grown = [
            self._growth(Node(row, text[-self._reach :]), depth, budget, wide)
            for row, (text, depth) in enumerate(zip(texts, budget.max_depth, strict=True))
        ]
        price = PRICE if budget.opportunity_cost is None or not self.learn else budget.opportunity_cost
        self._idle += 1
        depth, level = 0, [one.root for one in grown if one.depth > 0]
        while level:
            self._grow(grown, level, price)
            depth += 1
            level = [node for one in grown for node in one.level(depth)]
        return self._drafted(grown, budget.costs if wide else None)

    def _wide(self, rows: Rows) -> bool:
        return self.traits.tree is Tree.BEST_FIRST and len(rows) == 1 and self._takes_trees

    def _growth(self, root: Node, depth: int, budget: Budget, wide: bool) -> Growth:
        most = depth
        if wide:
            most = budget.max_nodes or self.nodes or depth
        floors = floors_of(budget.costs, most) if wide and budget.costs else [-1.0] * (most + 1)
        return Growth(root, depth, most, floors, self.least, wide)

    def _grow(self, grown: list[Growth], level: list[Node], price: float) -> None:
        """Add what may follow the nodes of a level."""
        if self.model is not None and self.model.draws:
            for node, offers in zip(level, self.model.expand(level), strict=True):
                for offer in offers:
                    grown[node.row].add_drawn(node, offer)
                    self._offered.append((node, []))
            return
        said = self._said(level)
        noise = self._noise
        heard = said if noise is None else [_heard(noise, *both) for both in zip(level, said, strict=True)]
        own = self._ask(level, heard, price)
        for node, candidates, alone, offers in zip(level, said, heard, own, strict=True):
            share = 1.0 if offers or not node.depth else self._further.value
            if not offers:
                found = alone
            elif self._cheap:
                found = self._pool(candidates, offers, node.depth, noise)
            else:
                found = [Candidate(token, 0, p, p) for token, p in offers]
            self._offered.append((node, found))
            grown[node.row].add(node, found, self._reach, share)

    def _said(self, level: list[Node]) -> list[list[Candidate]]:
        """What the sources without a model offer behind each node, the likeliest first; a later one counts for what
        those before it leave."""
        return [
            _in_turn([(prob, index, token) for index, source in self._cheap for token, prob in source.offers(node)])
            for node in level
        ]

    # -- a model beside the others ---------------------------------------------------------------

    def _gain(self, depth: int) -> RunningRatio:
        """Tokens that a pass of the model brings at this depth, over the chance that the others leave open there."""
        return self._ratios.of(("gain", depth), GAINS[depth > 0], GAIN_WORTH)

    def _ask(self, level: list[Node], said: list[list[Candidate]], price: float) -> list[list[Offer]]:
        """What the model offers behind the nodes of a level, nothing where it is not asked."""
        nothing: list[list[Offer]] = [[] for _ in level]
        if self.model is None or not self.model.sessions or (level[0].depth and not self._asked):
            return nothing
        if level[0].depth and self.model.whole:
            return self.model.expand(level)
        depth = level[0].depth
        gain = self._gain(depth).value if self.learn else GAINS[0]
        price *= len({node.row for node in level}) if len(level) > 1 else 1
        if depth and self.learn and gain * sum(node.path for node in level) <= price:
            return nothing
        first = {node: max(known, key=itemgetter(2)) for node, known in zip(level, said, strict=True) if known}
        left = sum(node.path * (1 - (first[node].p if node in first else 0.0)) for node in level)
        alone = not self._cheap and not (depth and self.learn)
        again = not depth and self.learn and self._idle > RETRY and left > 1 - SURE
        if not (gain * left > price or alone or again):
            return nothing
        offers = self.model.expand(level)
        if any(offers):
            self._idle = 0
            self._asked.append(Asked(depth, left, {node: one.token for node, one in first.items()}))
        return offers

    # -- the draft, and what came of it -----------------------------------------------------------

    def _drafted(self, grown: list[Growth], costs: NodeCosts | None) -> Draft:
        taken = [one.kept for one in grown]
        promised, parents = 0.0, None
        if len(taken) == 1 and self.traits.tree is Tree.BEST_FIRST:
            paths = [node.path for node in taken[0]]
            taken = [taken[0][: worthwhile(paths, costs)]]
            promised = sum(paths[: len(taken[0])])
            place: dict[Node | None, int] = {node: at for at, node in enumerate(taken[0])}
            above = [place.get(node.parent, -1) for node in taken[0]]
            parents = None if above == list(range(-1, len(above) - 1)) else torch.tensor(above)
        self._grown = taken
        call = self.model.call() if self.model else None
        return Draft(
            padded([[node.token for node in nodes] for nodes in taken]),
            parents=parents,
            draft_prob=padded([[node.prob for node in nodes] for nodes in taken], 1.0, torch.float32),
            source=padded([[node.source for node in nodes] for nodes in taken], 0),
            calls=() if call is None else (call,),
            promised=promised,
        )

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        """Learn what came of what was offered."""
        taken, self._grown = self._grown, []
        paths = [[node for node in path if node >= 0] for path in verdict.path.tolist()]
        texts = behind(self._leads, rows)
        for source in self.sources:
            source.observe(texts, paths, draft, verdict)
        asked, self._asked = self._asked, []
        if len(rows) != 1 or not taken or [node.token for node in taken[0]] != draft.tokens[0].tolist():
            return
        came = [taken[0][node] for node in paths[0]]
        self._learn_further(taken[0], came)
        for depth, left, without in asked:
            news = len(came) > depth and without.get(came[depth].parent) != came[depth].token
            self._gain(depth).learn(len(came) - depth if news else 0, left)

    def considered(self, row: int, path: list[int], count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        behind_path = ((node, known) for node, known in self._offered if node.row == row and node.tokens == path)
        node, known = next(behind_path, (None, []))
        if node is None:
            return ()
        if self.model is not None and self.model.draws:
            return self.model.considered(node, count, tokens)
        ranked = sorted(known, key=lambda candidate: -candidate.prob)
        listed = enumerate(ranked, start=1)
        return tuple(Proposal(c.token, c.prob, at, c.source) for at, c in listed if at <= count or c.token in tokens)

    def _learn_further(self, nodes: list[Node], came: list[Node]) -> None:
        """How much of what was hoped for behind accepted tokens came."""
        behind_these = [(node in came, node.path / node.parent.path) for node in nodes if node.parent in came]
        if behind_these:
            share = self._further.value
            self._further.learn(sum(ok for ok, _ in behind_these), sum(p for _, p in behind_these) / share)
