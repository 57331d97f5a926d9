"""The proposal model: sources offer tokens, and one builder grows the draft from the likeliest of them.

The builder asks every :class:`Source`, level by level, which tokens may follow a node. Sources are matches, n-gram
tables, recalled tokens, a draft model or a draft head. All offers stand in one list, the likeliest path first; the
builder cuts it where a node is expected to bring fewer tokens than its place in the target's pass costs (best-first
trees as in EAGLE-2, Li et al., arXiv 2406.16858). Without trees, and in a batch, each node keeps only its best offer:
a chain is a tree of width one. A model whose tokens are chosen, not drawn, runs at a level only if the expected gain
pays for the pass.

**Why the text stays lossless.** A chosen token is a point mass: the target draws its own token t, and a node is
accepted iff it equals t, so every choice is exact, also one that depends on the noise of the target's draw. A *drawn*
token comes from a distribution that travels with it. Whether a node is drawn, and from which distribution, is settled
before the draw; the drawn node stays, however unlikely its token, and its probability decides only what is drawn after
it. Sources that draw are used alone: a node takes drawn or chosen offers, never both.

Knows no source by name, no clock and no text.
"""

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from sampling.events import Call, Proposal
from sampling.gamma.constants import AFTER_DRAFTED, AFTER_DRAFTED_WORTH, MAX_PROB, MIN_PATH, NEXT_PROB
from sampling.gamma.ratios import Ratios
from sampling.gamma.worth import ModelWorth, floors_of, worthwhile
from sampling.rows import first_rows, lead, prepended
from sampling.sampler import MEAN, gumbel
from sampling.types import (
    LM,
    Budget,
    Draft,
    Drafter,
    DraftTree,
    FormState,
    NodeCosts,
    Rows,
    Rule,
    Sampler,
    Session,
    Traits,
    Verdict,
)

# Share of the noise that is applied where only a few tokens are offered (docs/notes.md, "The noise is known").
NOISE_SHARE = 0.5
MAX_NOISE = 100.0  # bound on the noise of a logit; beyond it the exponential overflows at temperatures of thousands
MOST_FORCED = 64  # nodes of a draft beyond which no forced token is added
FORCED_PATH = 0.5  # paths of a tree less likely than this get no forced tokens, which cost their places in the pass
LISTED_WEIGHT = 0.004  # weight of a token for being offered at all
SHARPENING = 1.5  # exponent of the summed probabilities of a token
POOLED_NOISE_SHARE = 0.95  # share of the noise that is applied where a model offers too
UNLISTED_WEIGHT = 0.067  # weight of all tokens that no source offers

Noise = tuple[int, int, float]  # tokens of a row, and its :meth:`sampling.types.Sampler.noise_key`
NO_NOISE = 0, 0, 0.0

Offer = tuple[int, float]  # a token that may follow a node, and its probability according to the source


class Candidate(NamedTuple):
    """A possible node.

    `source`: index of the source; `p`: probability beside the other candidates; `prob`: the source's own probability.
    """

    token: int
    source: int
    p: float
    prob: float


NOTHING = Candidate(-1, 0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class Node:
    """A node of a draft. The root (depth 0) is the last committed token of a row."""

    row: int  # index in the batch
    tail: list[int]  # last tokens of the row and the path, ending with this node's
    parent: "Node | None" = None
    depth: int = 0
    token: int = -1
    source: int = 0
    prob: float = 1.0
    path: float = 1.0  # probability that the target reaches this node
    state: FormState | None = None  # of a constraint, once the level is grown
    forced: int = 0  # tokens on the path that it forces

    @property
    def tokens(self) -> list[int]:
        """The drafted tokens from the root to this node."""
        return [] if self.parent is None else [*self.parent.tokens, self.token]


class Source:
    """A base for sources of tokens; its defaults are those of a source without a model.

    `reach`: tokens of context that it reads. `trust`: weight of its probabilities beside a model's. `lm`: the model
    that it runs. `draws`: it draws one token a node. `whole`: its first call answers all depths.
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
        """Open an answer to `prompt`; `begun` are the rows at its start, with the tokens that precede them."""

    def close(self) -> None:
        """Offer nothing in this answer."""

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        """Begin a round, for a model before its first pass in it. `texts` are the rows with the tokens that precede
        them, `depths` the most levels of each."""

    def offers(self, node: Node) -> list[Offer]:
        """Return the tokens that may follow a node. For a source without a model."""
        raise NotImplementedError

    def expand(self, nodes: list[Node]) -> list[list[Offer]]:
        """Return the offers after each node of a level, by one pass of a model. Calls go from level to level."""
        raise NotImplementedError

    def observe(self, texts: Rows, paths: Rows, draft: Draft, verdict: Verdict) -> None:
        """Learn from a round; `paths` are the accepted nodes of each row."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows: reordered, repeated or dropped."""

    def considered(self, node: Node, count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        """Return the `count` likeliest tokens after a node at which a token was drawn, and those of `tokens`."""
        return ()

    def call(self) -> Call | None:
        """Return the passes and seconds of its model in this round."""
        return None


class Growth:
    """The nodes of one row, likeliest path first: at most `most` nodes and `depth` levels.

    `nodes`: most nodes if the budget names no number. `least`: paths less likely than this are not kept. `wide`: nodes
    may have several children, and each must be worth what it costs. `depth_with_forced`: levels, with those that a
    constraint forces. `floors[n]`: the probability that a path must exceed after `n` likelier ones.
    """

    def __init__(self, root: Node, depth: int, budget: Budget, nodes: int | None, least: float, wide: bool) -> None:
        self.root, self.depth, self.depth_with_forced, self.least, self.wide = root, depth, depth, least, wide
        self.most = (budget.max_nodes or nodes or depth) if wide else depth
        self.floors = floors_of(budget.costs, self.most) if wide and budget.costs else [-1.0] * (self.most + 1)
        self.kept, self._order = list[Node](), list[float]()  # _order: −path of each kept node, ascending

    def add(self, parent: Node, candidates: Sequence[Candidate], reach: int, share: float = 1.0) -> None:
        """Add chosen children whose paths are likely enough; `share` scales their probabilities."""
        if not self.wide:
            candidates = sorted(candidates, key=itemgetter(2), reverse=True)[:1]
        for token, source, p, prob in candidates:
            part = share * p
            path = parent.path * part if part < 1.0 else parent.path
            if path < self.least or (index := bisect(self._order, -path)) >= self.most or path <= self.floors[index]:
                continue
            tail = [*parent.tail[1 - reach :], token] if reach > 1 else [token]
            self.kept.insert(index, Node(parent.row, tail, parent, parent.depth + 1, token, source, prob, path))
            self._order.insert(index, -path)
            if len(self.kept) > self.most:
                del self.kept[-1], self._order[-1]

    def add_drawn(self, parent: Node, offer: Offer) -> None:
        """Add a drawn child, whatever its probability."""
        token, prob = offer
        self.kept.append(Node(parent.row, [token], parent, parent.depth + 1, token, 0, prob, parent.path * prob))
        self._order.append(-self.kept[-1].path)

    def level(self, depth: int) -> list[Node]:
        """Return the nodes of this depth after which a further token may pay."""
        nodes = list[Node]()
        for count, node in enumerate(self.kept if depth < self.depth_with_forced else (), start=1):
            wanted = node.depth == depth and node.path >= self.least and (count < self.most or not self.wide)
            if wanted and node.path * NEXT_PROB > self.floors[count]:
                nodes.append(node)
        return nodes


def _in_order(offers: list[tuple[float, int, int]]) -> list[Candidate]:
    """Return candidates from (probability, source, token): each gets its share of the probability that those before it
    leave."""
    offers.sort(key=itemgetter(0), reverse=True)
    left, candidates = 1.0, dict[int, Candidate]()
    for prob, source, token in offers:
        if token not in candidates and left > 0:
            candidates[token] = Candidate(token, source, left * prob, prob)
            left *= 1 - prob
    return list(candidates.values())


def noise_factors(noise: Noise, depth: int, tokens: Sequence[int], share: float) -> list[float]:
    """Return the factor by which `share` of the noise at this depth changes the probability of each token."""
    length, key, temperature = noise
    each = gumbel(key, length + depth, tokens) if temperature else repeat(MEAN, len(tokens))
    return [math.exp(min(MAX_NOISE, share * temperature * (one - MEAN))) for one in each]


def _with_noise(noise: Noise, node: Node, candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates after a node with their probabilities under the noise."""
    factors = noise_factors(noise, node.depth, [candidate.token for candidate in candidates], NOISE_SHARE)
    each = zip(candidates, factors, strict=True)
    return [Candidate(token, source, min(MAX_PROB, p * factor), prob) for (token, source, p, prob), factor in each]


def pooled(
    trust: Sequence[float], candidates: list[Candidate], offers: list[Offer], depth: int, noise: Noise
) -> list[Candidate]:
    """Return the candidates of several sources and the offers of a model after one node as one distribution.

    The probabilities that all sources give a token are added, each with its `trust` (the model's last) and those of the
    candidates before any noise, which their order tells; the sums are sharpened by an exponent and normalised (a linear
    pool; Ranjan and Gneiting, J. R. Stat. Soc. B 72, 2010, show why sums of forecasts need sharpening). Figures:
    docs/notes.md, "One builder for all sources".
    """
    known, forecast = {candidate.token: candidate for candidate in candidates}, dict(offers)
    model, own, left = len(trust) - 1, trust[-1], 1.0
    tokens = list(known | forecast)
    weights, origins = list[float](), list[tuple[int, float]]()
    for token in tokens:
        candidate, prob, others = known.get(token), forecast.get(token, 0.0), 0.0
        if candidate is not None:
            others = trust[candidate.source] * left * candidate.prob
            left *= 1 - candidate.prob
        weights.append((others + own * prob + LISTED_WEIGHT) ** SHARPENING)
        if candidate is None or own * prob >= others:
            origins.append((model, prob))
        else:
            origins.append((candidate.source, candidate.prob))
    factors = noise_factors(noise, depth, tokens, POOLED_NOISE_SHARE)
    weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    total = UNLISTED_WEIGHT + sum(weights)
    return [
        Candidate(token, source, min(MAX_PROB, weight / total), prob)
        for token, weight, (source, prob) in zip(tokens, weights, origins, strict=True)
    ]


def tree_of(nodes: list[Node]) -> DraftTree:
    """Return the draft of these nodes."""
    index: dict[Node | None, int] = dict(zip(nodes, range(len(nodes)), strict=True))
    each = [(node.token, index.get(node.parent, -1), node.source, node.prob) for node in nodes]
    return DraftTree.of(*map(list, zip(*each, strict=True))) if each else DraftTree.of([])


class Proposer(Drafter):
    """A drafter made of sources.

    Args:
        sources: at most one of them runs a model.
        tree: best-first trees where one row is decoded and the target takes trees; else chains.
        nodes: nodes of a tree if the budget names no number; None: as many as it has levels.
        least: paths less likely than this are not drafted; after a drawn path less likely than this nothing is drawn.
        shared_noise: chosen offers are weighed by the noise of the target's draw. Not beside drawn drafts.
        rule: verifies the drafts.
        learn: run the model only where its measured gain pays; else where the guess MODEL_GAINS[0] does.
        ratios: estimates that outlive this drafter; None: its own.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        tree: bool = False,
        nodes: int | None = None,
        least: float = MIN_PATH,
        rule: Rule = Rule.POINT,
        shared_noise: bool = False,
        learn: bool = False,
        ratios: Ratios | None = None,
    ) -> None:
        self.sources, self.nodes, self.least = tuple(sources), nodes, least
        self.model = next((source for source in sources if source.lm is not None), None)
        self._trust = [source.trust for source in sources]
        self.lookups = [(index, source) for index, source in enumerate(sources) if source is not self.model]
        # those that do anything in these steps of every round; the model follows before its first pass
        self._following = [each for _, each in self.lookups if type(each).follow is not Source.follow]
        self._observing = [each for each in self.sources if type(each).observe is not Source.observe]
        self._reach = max((source.reach for source in sources), default=1)
        self._ratios = Ratios() if ratios is None else ratios
        self._after_drafted = self._ratios.of("further", AFTER_DRAFTED, AFTER_DRAFTED_WORTH)
        lm = self.model.lm if self.model else None
        self.traits = Traits(
            tuple(source.name for source in sources),
            rule,
            needs_hidden=lm.reads_hidden if lm else False,
            needs_kv=lm.reads_kv if lm else False,
            reads_one_row=lm is not None and bool(self.lookups),
            shared_noise=shared_noise,
            tree=tree,
        )
        self._takes_trees, self._model_follows = True, False  # _model_follows: the model knows of this round
        self._leads: Rows = []
        self._ids: list[int] = []  # the caller's numbers of the rows, which key the noise
        self._drafted: list[list[Node]] = []  # nodes of the last draft, by row
        # Of each level at which the model ran in this round: its depth, the probability that the other sources left
        # open, and their likeliest token after each node.
        self._calls: list[tuple[int, float, dict[Node | None, int]]] = []
        self._offered: list[tuple[Node, list[Candidate]]] = []  # after each node that was examined in this round
        self._model_worth = ModelWorth(self._ratios, learn, alone=not self.lookups)
        self._noise, self._share = NO_NOISE, 1.0  # _share: of what is offered after drafted tokens, the part accepted
        self._banned: frozenset[int] = frozenset()  # ids that the target never draws

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.model is None else self.model.sessions

    @property
    def models(self) -> tuple[LM, ...]:
        return () if self.model is None or self.model.lm is None else (self.model.lm,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._leads, self._takes_trees = lead(prompt, target), target.takes_trees
        self._ids, self._drafted = list(range(len(prompt))), []
        begun = prepended(self._leads, first_rows(prompt, target))
        for source in self.sources:
            if source is self.model and self.traits.reads_one_row and len(prompt) > 1:
                source.close()
            else:
                source.start(prompt, begun, target)

    def select(self, rows: Tensor) -> None:
        indices = rows.tolist()
        self._leads, self._ids = (
            [self._leads[row] for row in indices if self._leads],
            [self._ids[row] for row in indices],
        )
        for source in self.sources:
            source.select(indices)

    # -- growing --------------------------------------------------------------------------------

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return a best-first tree of one row, or a chain for each row."""
        texts = prepended(self._leads, rows)
        wide = self.traits.tree and len(rows) == 1 and self._takes_trees
        self._round, self._model_follows = (rows, texts, budget.max_depth, sampler), False
        for source in self._following:
            source.follow(*self._round)
        self._noise, self._calls, self._offered, self._banned = NO_NOISE, [], [], sampler.banned
        if len(rows) == 1 and self.traits.shared_noise and not sampler.greedy:
            self._noise = (len(rows[0]), *sampler.noise_key(self._ids[0]))
        growths = [
            Growth(Node(row, text[-self._reach :]), depth, budget, self.nodes, self.least, wide)
            for row, (text, depth) in enumerate(zip(texts, budget.max_depth, strict=True))
        ]
        if (constraint := sampler.constraint) is not None:
            for growth, text, most in zip(growths, rows, budget.depth_with_forced or budget.max_depth, strict=True):
                growth.root.state, growth.depth_with_forced = constraint.at(text), most
        self._model_worth.begin(budget.opportunity_cost)
        self._share = self._after_drafted.value
        depth, level = 0, [growth.root for growth in growths if growth.depth_with_forced > 0]
        while level:
            self._grow(growths, level if constraint is None else self._force(growths, level))
            depth += 1
            level = [*chain.from_iterable(map(Growth.level, growths, repeat(depth)))]
        return self._draft(growths, budget.costs if wide else None)

    def _grow(self, growths: list[Growth], level: list[Node]) -> None:
        """Add the tokens that may follow the nodes of a level."""
        if (model := self.model) is not None and model.draws:  # in a level of forced tokens too, so that it follows
            for node, offers in zip(level, self._model_offers(model, level), strict=True):
                for offer in offers:
                    growths[node.row].add_drawn(node, offer)
                    self._offered.append((node, []))
            return
        if not level:
            return
        looked_up = [*map(self.look_up, level)]
        if banned := self._banned:
            looked_up = [[candidate for candidate in each if candidate.token not in banned] for each in looked_up]
        if level[0].state is not None:
            looked_up = [
                [candidate for candidate in each if node.state and node.state.after(candidate.token)]
                for node, each in zip(level, looked_up, strict=True)
            ]
        by_model: Iterable[list[Offer]] = repeat([])
        if model is not None and (self._calls or level[0].depth == level[0].forced):
            by_model = self._run_model(model, level, looked_up)
        for node, known, offers in zip(level, looked_up, by_model, strict=False):
            share = 1.0 if offers or not node.depth else self._share
            if not offers:
                candidates = known
            elif self.lookups:
                candidates = self.pool(node, known, offers)
            else:
                candidates = [Candidate(token, 0, p, p) for token, p in offers]
            self._offered.append((node, candidates))
            growths[node.row].add(node, candidates, self._reach, share)

    def _force(self, growths: list[Growth], level: list[Node]) -> list[Node]:
        """Add the only token that can follow a node where a constraint leaves one; return the nodes after which several
        can. A forced token costs no draft and is not counted as one."""
        free, number = list[Node](), len(self.sources)
        for node in level:
            growth, parent = growths[node.row], node.parent
            if parent is not None and parent.state is not None:
                node.forced = parent.forced + (node.source == number)
                node.state = parent.state.after(node.token)
            if node.state is None:
                continue
            if (token := node.state.forced) is None:
                free += [node] if node.depth - node.forced < growth.depth else []
            elif len(growth.kept) < MOST_FORCED and (node.path >= FORCED_PATH or not growth.wide):
                growth.most, growth.floors = growth.most + 1, [growth.floors[0], *growth.floors]  # an additional node
                self._offered.append((node, [Candidate(token, number, 1.0, 1.0)]))
                growth.add(node, self._offered[-1][1], self._reach)
        return free

    def look_up(self, node: Node) -> list[Candidate]:
        """Return the offers of the sources without a model after a node, the likeliest first, under the noise."""
        known = _in_order([(p, index, token) for index, source in self.lookups for token, p in source.offers(node)])
        return _with_noise(self._noise, node, known) if self._noise[2] else known

    def pool(self, node: Node, known: list[Candidate], offers: list[Offer]) -> list[Candidate]:
        """Return :func:`pooled` of the candidates after a node and the model's offers."""
        return pooled(self._trust, known, offers, node.depth, self._noise)

    # -- a model beside the others ---------------------------------------------------------------

    def _model_offers(self, model: Source, level: list[Node]) -> list[list[Offer]]:
        """Return the model's offers after the nodes of a level; its first pass in a round begins the round for it."""
        if not self._model_follows:
            model.follow(*self._round)
            self._model_follows = True
        return model.expand(level)

    def _run_model(self, model: Source, level: list[Node], known: list[list[Candidate]]) -> Iterable[list[Offer]]:
        """Return the model's offers after the nodes of a level; nothing where its pass would not pay."""
        depth, worth = level[0].depth - level[0].forced, self._model_worth
        if depth and model.whole:
            return self._model_offers(model, level)
        rows = len({node.row for node in level}) if len(level) > 1 else 1
        first, left = dict[Node | None, int](), 0.0
        for node, each in zip(level, known, strict=True):
            likeliest = max(each, key=itemgetter(2)) if each else NOTHING
            first[node], left = likeliest.token, left + node.path * (1 - likeliest.p)
        if not worth.pays(depth, left, rows) or not model.sessions:
            return repeat([])
        offers = self._model_offers(model, level)
        if any(offers):
            worth.ran()
            self._calls.append((depth, left, first))
        return offers

    # -- the draft and its outcome ----------------------------------------------------------------

    def _draft(self, growths: list[Growth], costs: NodeCosts | None) -> Draft:
        drafted, promised = [growth.kept for growth in growths], 0.0
        if len(drafted) == 1 and self.traits.tree:
            paths = [node.path for node in drafted[0]]
            constrained = growths[0].root.state is not None
            free = [node.path for node in drafted[0] if node.source < len(self.sources)] if constrained else paths
            drafted = [drafted[0][: worthwhile(free, costs) + len(paths) - len(free)]]
            promised = sum(paths[: len(drafted[0])])
        self._drafted = drafted
        call = self.model.call() if self.model and self._model_follows else None
        return Draft(list(map(tree_of, drafted)), calls=() if call is None else (call,), promised=promised)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        """Learn which offers were accepted."""
        drafted, self._drafted = self._drafted, []
        paths, texts = verdict.path, prepended(self._leads, rows)
        for source in self._observing:
            source.observe(texts, paths, draft, verdict)
        if len(rows) != 1 or not drafted or [node.token for node in drafted[0]] != draft.trees[0].tokens:
            return
        accepted = [node for node in map(drafted[0].__getitem__, paths[0]) if node.source < len(self.sources)]
        count, offered = 0, 0.0
        for node in drafted[0]:
            if (parent := node.parent) in accepted and parent is not None and node.source < len(self.sources):
                count, offered = count + (node in accepted), offered + node.path / parent.path
        if offered:  # learn the share of the probability offered after accepted tokens that was accepted
            self._after_drafted.learn(count, offered / self._share)
        for depth, left, first in self._calls:
            new = len(accepted) > depth and first.get(accepted[depth].parent) != accepted[depth].token
            self._model_worth.learn(depth, len(accepted) - depth if new else 0, left)

    def considered(self, row: int, path: list[int], count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        examined = ((node, known) for node, known in self._offered if node.row == row and node.tokens == path)
        node, known = next(examined, (None, []))
        if node is None:
            return ()
        if self.model is not None and self.model.draws and not known:
            return self.model.considered(node, count, tokens)
        ranked = enumerate(sorted(known, key=lambda candidate: -candidate.prob), start=1)
        return tuple(
            Proposal(c.token, c.prob, rank, c.source) for rank, c in ranked if rank <= count or c.token in tokens
        )
