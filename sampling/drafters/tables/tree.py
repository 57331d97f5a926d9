"""Trees from what was already said: of all tokens that a match or a table offers anywhere, those likeliest to hold.

Where the longest context is wrong a shorter one may be right, and asking it costs nothing. The tree grows best first
(as EAGLE-2's does from a model, Li et al., arXiv 2406.16858): the next node is always the one whose whole path has the
best chance, so the best nodes come first. A node must be worth its place in the target's pass: the round's budget says
what that costs. Children are point masses. Needs no model and knows none.

A target that samples draws with noise that its seed fixes before any pass. The tree may look at it: a token that the
noise favours is likelier to be drawn than its frequency says. Of the distribution only the frequency is known, so half
of the noise is believed (docs/notes.md, "The noise is known"). What is said does not change: a point mass is lossless
however it was chosen (shared randomness as in Daliri et al., arXiv 2408.07978).

It may also recall what the target itself thought likely behind the same one or two tokens when they last stood there:
of a sampled text no match knows what was likely and not drawn. A pass computes the target's distribution at every
position it looks at, and decoding throws all but the drawn token away; :class:`Recalled` keeps the likeliest few by
the tokens before them, as in token recycling (Luo et al., arXiv 2408.08696: by one token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampling.drafters.registry import DraftRequest, Parts
from sampling.drafters.tables.prompt_lookup import (
    CHANCE,
    MATCH,
    NAMES,
    RECALLED,
    TABLES,
    Found,
    MatchIndex,
    TablesDrafter,
)
from sampling.drafters.tables.table_file import StaticTables
from sampling.gamma.ratios import Ratios
from sampling.rows import behind
from sampling.types import Budget, Draft, NodeCosts, Rows, Rule, Sampler, Session, Traits, Tree, Verdict
from sampling.vocabulary import best

SHARES = {2: 0.6, 1: 0.3}
"""By tokens of context: so much of a token's probability then is its chance of being drawn now (docs/notes.md,
"Distributions recalled")."""
_MOST = 4  # tokens kept behind a context

LEAST = 0.03
"""Less likely paths are not looked at."""
_KEPT = 4096  # contexts whose entries in the tables are at hand
_CHOICES = 4  # tokens of one context of the tables that may become siblings
LIKELY = 0.5  # of the tokens behind a node the likeliest, as far as it was not looked up
BELIEVED = 0.5  # of the noise
LOUDEST = 100.0  # noise in a logit beyond which it makes no difference; at a temperature of thousands there is more
SURE = 0.97  # no token favoured by the noise is likelier
FURTHER = 0.85  # of the chances of tokens behind drafted ones what comes, and how many outcomes this is worth at first
FURTHER_WORTH = 20.0
_Said = list[tuple[int, int, float]]  # token, source, its chance by that source
Noise = Callable[[int, Sequence[int]], list[float]]  # tokens above a node, ids → what the draw adds to their logits


def worthwhile(paths: Sequence[float], costs: NodeCosts | None) -> int:
    """How many nodes, given by the probabilities of their paths, the likeliest first, are worth their place in the
    pass: trust · Σ paths − rate · v is largest. All where nothing is known of costs."""
    if costs is None:
        return len(paths)
    sums = [0.0, *accumulate(paths)]
    counts = range(min(len(paths), max(0, len(costs.v) - 1)) + 1)
    return max(counts, key=lambda n: costs.calibration * sums[n] - costs.rate * costs.v[n])


def likely_enough(costs: NodeCosts) -> list[float]:
    """By the nodes that are taken: what the path of a further one must exceed, or :func:`worthwhile` takes no number of
    further ones of which none is likelier."""
    believed = costs.rate / costs.calibration if costs.calibration > 0 else math.inf
    return [believed * slope for slope in _gentlest(tuple(costs.v))]


@lru_cache(maxsize=8)
def _gentlest(v: tuple[float, ...]) -> list[float]:
    """By the nodes of a pass: the least that each of some further ones adds to it; ∞ where it holds no more."""
    return [
        min(((v[n] - here) / (n - taken) for n in range(taken + 1, len(v))), default=math.inf)
        for taken, here in enumerate(v)
    ]


class Recalled:
    """By context: the ids that the target thought likeliest behind it last time, and their chances now."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def learn(self, row: list[int], likely: Sequence[Sequence[tuple[int, float]]]) -> None:
        """The likeliest ids and their probabilities behind each of the last tokens of `row`. What leaves no choice says
        no more than the text."""
        for end, here in enumerate(likely, start=len(row) - len(likely) + 1):
            if here[0][1] == 1:
                continue
            for size, share in SHARES.items():
                self._behind[tuple(row[max(0, end - size) : end])] = [(token, share * p) for token, p in here if p > 0]

    def behind(self, tail: list[int], size: int) -> list[tuple[int, float]]:
        """(id, chance) behind the last `size` tokens, the likeliest first; none where they were not seen."""
        return self._behind.get(tuple(tail[-size:]), [])


class _Offer(NamedTuple):
    """A node that may be taken: less its path's probability, in which order it came, the node above, how many tokens
    stand above it, and the last of them."""

    less: float
    order: int
    parent: int
    depth: int
    found: Found
    tail: list[int]

    @property
    def path(self) -> float:
        return -self.less


class TableTreeDrafter(TablesDrafter):
    """As :class:`TablesDrafter`, but the budget's depth counts the nodes of a tree, and its costs say which pay.

    No path is less likely than `least`. Rows of a batch share one shape: they get chains, and so does a target that
    takes no trees. `shared_noise`: the noise of the target's draw is looked at where the sampler shows it. Not for a
    drafter beside which another one draws from distributions of its own: which of them drafts must not depend on the
    noise. `recall`: what the target thought likely in this answer is offered too.

    What is drafted is what seems likeliest, and so it is held for likelier than it is, most of all behind drafted
    tokens: `chances` learn how much of such chances comes.
    """

    def __init__(
        self,
        tables: StaticTables | None = None,
        *,
        least: float = LEAST,
        shared_noise: bool = False,
        recall: bool = False,
        chances: Ratios | None = None,
        **how: Any,
    ) -> None:
        super().__init__(tables, least=least, **how)
        self.further = (Ratios() if chances is None else chances).of("further", FURTHER, FURTHER_WORTH)
        names = NAMES[: RECALLED + 1] if recall and self.said is None else self.traits.names
        self.traits = Traits(names, Rule.POINT, shared_noise=shared_noise, tree=Tree.BEST_FIRST)
        self._recalled = Recalled() if recall else None
        self._trees = True  # whether the target takes them
        self._looked_up: dict[tuple[int, ...], tuple[_Said, _Said]] = {}
        self._certain = False  # whether the target's draws leave no choice
        self._ids: list[int] = []  # the caller's numbers of the rows, which key the noise
        self._taken: list[_Offer] = []  # the nodes of the last draft
        self._came: list[int] = []  # the tokens that were accepted of it
        self._weighed: NodeCosts | None = None  # the last budget's, and what follows from them
        self._floors: tuple[list[float], list[float]] = [], []

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        super().start(prompt, target, verifier)
        self._ids, self._trees = list(range(len(prompt))), target.takes_trees
        self._recalled = None if self._recalled is None else Recalled()
        self._looked_up.clear()  # the target may have other ids

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._ids = [self._ids[row] for row in rows.tolist()]

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        """Learn how much came of what was hoped for, and keep the distributions at which the row stood; greedy ones
        leave no choice."""
        taken, self._taken, self._came = self._taken, [], []
        if len(rows) != 1 or (not draft.tokens.shape[1] and (self._recalled is None or self._certain)):
            return
        (nodes,), (tokens,) = verdict.path.tolist(), draft.tokens.tolist()
        path = [node for node in nodes if node >= 0]
        self._came = [tokens[node] for node in path]
        if path and [one.found.token for one in taken] == tokens:
            self._accepted(taken, path)
        if self._recalled is not None and not self._certain:
            self._recalled.learn([*rows[0][-2:], *self._came], thought_likely(verdict, [-1, *path]))

    def _accepted(self, taken: list[_Offer], path: list[int]) -> None:
        """Of these nodes a path was accepted: what was hoped for behind each of them, and whether it came."""
        behind = [(node in path, one.found.p) for node, one in enumerate(taken) if one.parent in path]
        if behind:
            self.further.learn(sum(came for came, _ in behind), sum(hoped for _, hoped in behind))

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """A tree of at most budget.max_depth[0] nodes; `source` is [1, N]."""
        if len(rows) != 1:
            return super().propose(rows, budget, sampler)
        self._certain = sampler.greedy
        noise = self._noise(len(rows[0]), sampler) if self.traits.shared_noise and not sampler.greedy else None
        (row,) = behind(self._leads, rows)
        index = self._indices[0]
        index.follow(row)
        tail = row[-self._reach :]
        first = self._first(rows, self._offered(index, tail), noise)
        grown = self._grown(index, tail, budget, noise, first)
        paths = [one.path for one in grown]
        self._taken = taken = grown[: worthwhile(paths, budget.costs)]
        parents = [one.parent for one in taken]
        return Draft(
            torch.tensor([[one.found.token for one in taken]], dtype=torch.long),
            parents=None if parents == list(range(-1, len(taken) - 1)) else torch.tensor(parents),
            draft_prob=torch.tensor([[one.found.prob for one in taken]], dtype=torch.float32),
            source=torch.tensor([[one.found.source for one in taken]], dtype=torch.long),
            promised=[0.0, *accumulate(paths)][len(taken)],
        )

    def _noise(self, length: int, sampler: Sampler) -> Noise:
        """The noise behind a row of `length` tokens."""
        (name,) = self._ids
        return lambda depth, ids: sampler.shared_noise(name, length + depth, ids)

    def _first(self, rows: Rows, offered: list[Found], noise: Noise | None) -> list[Found]:
        """What may follow the committed tokens `rows` [1], of what is offered there."""
        return favoured(offered, noise, 0)

    def _grown(
        self, index: MatchIndex, tail: list[int], budget: Budget, noise: Noise | None, offered: list[Found]
    ) -> list[_Offer]:
        """The nodes, the likeliest path first, as far as they may be worth while; `offered` behind the root."""
        deepest = budget.max_depth[0]
        most = deepest if budget.max_nodes is None else budget.max_nodes
        if budget.costs is not self._weighed or budget.costs is None:
            floors = likely_enough(budget.costs) if budget.costs else [-1.0] * most
            self._weighed, self._floors = budget.costs, (floors, [*accumulate(reversed(floors), min)][::-1])
        floors, lowest = self._floors  # what a node's path must exceed, and what no node behind may be below
        offers: list[_Offer] = []
        taken: list[_Offer] = []
        order, count, share = 0, 0, 1.0  # share: of what is offered how much comes
        at = _Offer(-1.0, 0, -1, -1, Found(-1, 0, 1.0, 1.0), tail)  # the root, then the node taken last
        while count < min(most, len(floors)):
            above, least = -at.less, max(self.least, lowest[count])
            if taken and above * LIKELY <= floors[count]:
                offered = []  # looking further costs more than it brings
            elif taken and at.depth + 1 >= deepest:
                offered = []
            elif taken:
                tail, share = [*at.tail[1 - self._reach :], at.found.token], self.further.value
                offered = self._offered(index, tail, least / above if noise is None else 0.0)
                offered = favoured(offered, noise, at.depth + 1)
            for found in offered:
                if (path := above * min(1.0, share * found.p)) >= least:
                    order += 1
                    heappush(offers, _Offer(-path, order, count - 1, at.depth + 1, found, tail))
            if not offers or -offers[0].less <= floors[count]:
                break
            at = heappop(offers)
            if not self._trees:
                offers.clear()  # what stands beside it
            taken.append(at)
            count += 1
        return taken

    def _offered(self, index: MatchIndex, tail: list[int], least: float = 0.0) -> list[Found]:
        """Every token that some context offers, in the order in which a chain would believe them; a later one counts
        for what those before it leave. Answers that are over are believed where the tables say less of a token.

        Nothing is looked up any more once less than `least` is left.
        """
        left, offered = 1.0, dict[int, Found]()
        for part in self._parts(index, tail):
            for token, source, p in part:
                if token not in offered and left > 0:
                    offered[token] = Found(token, source, left * p, p)
                    left *= 1 - p
            if left < least:
                break
        return list(offered.values())

    def _parts(self, index: MatchIndex, tail: list[int]) -> Iterator[Sequence[tuple[int, int, float]]]:
        """What is said by where it is known from, the ones to believe first."""
        sure, unsure = _Said(), _Said()
        for size, token in index.every(tail):
            (sure if size >= self.sure_match else unsure).append((token, MATCH, CHANCE[size]))
        said = self._said(tail)
        if not said:
            yield sure
        longer, bigrams = self._of_tables(tail)
        if said:
            told = {token: p for token, _, p in longer}
            known = [found[:3] for found in said if found.p > told.get(found.token, 0.0)]
            yield sorted([*sure, *known], key=lambda one: -one[2])
        yield longer
        yield self._from_recalled(tail, 2)
        yield unsure
        yield bigrams
        yield self._from_recalled(tail, 1)

    def _of_tables(self, tail: list[int]) -> tuple[_Said, _Said]:
        """What the tables offer behind two tokens and more, and behind one. They never change: what a round has looked
        up is there for the next ones, most of whose contexts it has met."""
        context = tuple(tail[-self._deepest :]) if self._deepest else ()
        if (found := self._looked_up.get(context)) is None:
            longer, bigrams = _Said(), _Said()
            for size, token, p in () if self._known is None else self._known.entries(tail, most=_CHOICES):
                (longer if size > 1 else bigrams).append((token, TABLES, p))
            if len(self._looked_up) >= _KEPT:
                self._looked_up.clear()
            found = self._looked_up[context] = longer, bigrams
        return found

    def _from_recalled(self, tail: list[int], size: int) -> _Said:
        """What the target thought likely behind the last `size` tokens, if it is to be recalled."""
        if self._recalled is None:
            return []
        return [(token, RECALLED, p) for token, p in self._recalled.behind(tail, size)]


def thought_likely(verdict: Verdict, nodes: list[int]) -> list[list[tuple[int, float]]]:
    """The few likeliest ids behind these nodes of the first row, and their processed probabilities."""
    known = verdict.distributions
    seen = [] if isinstance(known, Tensor) else [known.glance(0, node) for node in nodes]
    told = [one.likeliest()[:_MOST] for one in seen if one is not None]
    if told and all(told):
        return told
    values, ids = best(verdict.at(torch.zeros(len(nodes), dtype=torch.long), torch.tensor(nodes)), _MOST)
    return [list(zip(*one, strict=True)) for one in zip(ids.tolist(), values.tolist(), strict=True)]


def favoured(offered: list[Found], noise: Noise | None, depth: int) -> list[Found]:
    """The same tokens with the chances that the noise leaves them at this depth; as they are where there is none."""
    if noise is None:
        return offered
    louder = favour(noise, depth, [found.token for found in offered], BELIEVED)
    return [
        found if factor == 1 else found._replace(p=min(SURE, found.p * factor))
        for found, factor in zip(offered, louder, strict=True)
    ]


def favour(noise: Noise | None, depth: int, ids: Sequence[int], believed: float) -> list[float]:
    """What the noise at this depth multiplies the chance of each id by, if so much of it is believed."""
    if noise is None:
        return [1.0] * len(ids)
    return [math.exp(min(LOUDEST, believed * one)) for one in noise(depth, ids)]


def build(pair: Parts, asked: DraftRequest) -> TablesDrafter:
    """Matches, then the pair's tables."""
    tables, said = pair.tables(), pair.said(asked)
    if asked.grown == "dynamic":
        return TableTreeDrafter(tables, shared_noise=True, recall=True, said=said, chances=asked.chances)
    return TablesDrafter(tables, said=said)


def build_match(pair: Parts, asked: DraftRequest) -> TablesDrafter:
    """Matches alone; of `suffix` in answers that are over too."""
    said = pair.said(asked)
    return (
        TableTreeDrafter(None, shared_noise=True, said=said, chances=asked.chances)
        if asked.grown == "dynamic"
        else TablesDrafter(None, said=said)
    )


def build_static(pair: Parts, asked: DraftRequest) -> TablesDrafter:
    """The pair's tables alone."""
    tables = pair.tables()
    if asked.grown == "dynamic":
        return TableTreeDrafter(tables, shared_noise=True, longest=0, chances=asked.chances)
    return TablesDrafter(tables, longest=0)
