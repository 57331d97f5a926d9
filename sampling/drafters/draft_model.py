"""A draft model as a source, and the drafters made of it; :class:`NoDrafter`, with which decoding is plain.

:class:`ModelSource` takes any :class:`sampling.types.LM` and does not know what its session reads of the target;
:class:`Respelled` drafts text with a model of another vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pkgutil import resolve_name
from time import perf_counter

import torch
from torch import Tensor

from sampling.drafters.drawing import Column, Drawing
from sampling.drafters.proposal import Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts, row_of
from sampling.events import Call, Proposal
from sampling.gamma.constants import CONFIDENT, LEAST_PATH
from sampling.models.translated import TranslatedLM, TranslatedSession
from sampling.rows import put
from sampling.types import LM, BlockSession, Budget, Draft, Drafter, Rows, Rule, Sampler, Session, Traits
from sampling.verify.distributions import one_hot
from sampling.vocabulary import likeliest_of_each, spread
from utils.errors import UserError
from utils.timing import Stopwatch

WIDTH = 4  # nodes of a level that are expanded (docs/notes.md)
FEW, MANY = 8, 16  # likeliest tokens offered: in greedy decoding, and under noise, which may favour an unlikely one


def scoring(session: Session, whole: bool = False) -> tuple[Callable[[Rows, Draft], Tensor], Tensor | None]:
    """Return the function that scores with a session, and the ids [n] of its columns; None: all, always if `whole`."""
    short = None if whole else session.reduced_ids
    return (session.score if short is None else session.score_reduced), short


class ModelSource(Source):
    """A model as a source, with a session beside the target's.

    With `draws`, the token of each node is drawn from the processed distribution, which travels with it; it is a point
    mass if the sampler makes it one (greedy, gumbel coupling). Else the likeliest tokens are offered, one level of a
    tree in a pass if the session can `grow`. Rows beyond the model's context get no offers. `width`: nodes of a level
    after which tokens are offered. `ids`: the caller's numbers of the rows, which key the noise. `session`: None if all
    of the prompt's rows are beyond the context.
    """

    lm: LM
    confidence: Sequence[float] = ()  # the model's estimates of this round, if it makes them

    def __init__(self, lm: LM, draws: bool = False, width: int = WIDTH) -> None:
        self.lm, self.name, self.draws, self.width = lm, lm.name, draws, width
        self.session: Session | None = None
        self.ids: list[int] = []
        self.columns: dict[int, Column] = {}  # of this round by depth, but for those forced in all rows
        self._depths: list[int] = []  # tokens to draft
        self._reaches: list[int] = []  # levels, with tokens that a constraint forces
        self._base: Rows = []  # the rows, cut at the model's context
        self._active: Rows = []  # the same rows, extended by the paths that the last pass read
        self._expanded: dict[Node | None, int] = {}  # index of each expanded node in the next two lists
        self._expanded_tokens: list[int] = []
        self._expanded_parents: list[int] = []
        self._passes, self._seconds = 0, 0.0

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.session is None else (self.session,)

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open the answer; the cache of the last one is reused by common prefix."""
        previous, self.session = self.session, None
        self.ids, most = list(range(len(prompt))), self.lm.context
        if min(map(len, prompt)) < most:
            self.session = self.lm.open([row[:most] for row in prompt], previous=previous, target=target)
        short = None if self.session is None else self.session.reduced_ids
        self._short_ids = None if short is None else short.tolist()

    def fitting(self, rows: Rows, depths: list[int]) -> list[int]:
        """Return `depths` limited by the model's context and by its session."""
        if self.session is None:
            return [0] * len(rows)
        limits = zip(depths, rows, map(self.session.draftable, map(len, rows)), strict=True)
        return [max(0, min(depth, self.lm.context - len(row), depth if n is None else n)) for depth, row, n in limits]

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._depths = self._reaches = self.fitting(rows, depths)
        if (constraint := sampler.constraint) is not None:
            self._reaches = self.fitting(rows, [self.lm.context] * len(rows))
        self._constraint, self._unchanged = constraint, constraint is None and not sampler.biases
        self._passes, self._seconds, self.columns = 0, 0.0, {}
        self._expanded, self._expanded_tokens, self._expanded_parents = {}, [], []
        self._count, self._biased = FEW if sampler.greedy else MANY, sampler.biased
        most = self.lm.context
        self._base = [row if len(row) <= most else row[:most] for row in rows]
        self._active = [*self._base]
        if self.session is not None:
            self._score, self._short = scoring(self.session, whole=self.draws and sampler.needs_prefixes)
            if self.draws:
                self.drawing = Drawing(sampler, self.ids, self.session.vocab_size, self._short)

    def expand(self, nodes: list[Node]) -> list[list[Offer]]:
        within = [
            node
            for node in nodes
            if node.depth - node.forced < self._depths[node.row] and node.depth < self._reaches[node.row]
        ]
        began = perf_counter()
        grows = self.session is not None and self.session.can_grow and self._expanded and len(self._active) == 1
        offers_of = self._drawn if self.draws else self._level if grows else self._ranked
        offers: dict[Node, list[Offer]] = offers_of(within) if within else {}
        self._seconds += perf_counter() - began  # the offers are on the host, so the device is done
        return [offers.get(node, []) for node in nodes]

    def considered(self, node: Node, count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        listed = self.drawing.listed(self.columns[node.depth], node.row, count, tokens)
        return tuple(Proposal(*ranked, 0) for ranked in listed)

    def call(self) -> Call | None:
        return Call(self.lm.name, self._passes, self._seconds, (*self.confidence,)) if self._passes else None

    def close(self) -> None:
        self.session = None

    def select(self, rows: list[int]) -> None:
        if self.session is not None:
            self.ids = [self.ids[row] for row in rows]
            self.session.select(torch.tensor(rows))

    def _row_to(self, node: Node) -> list[int]:
        """Return a node's row and its path."""
        base = self._base[node.row]
        return [*base, *node.tokens] if node.depth else base

    def _logits(self, nodes: list[Node]) -> Tensor:
        """Return logits [B, n] after each row; for the rows of these nodes, after the nodes."""
        for node in nodes:
            self._active[node.row] = self._row_to(node)
        self._passes += 1
        return self._score(self._active, Draft.empty(len(self._active)))[:, 0]

    def _drawn(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """Draw one token after each node."""
        depth, active = nodes[0].depth, {node.row for node in nodes}
        if depth not in self.columns:
            logits = self._logits(nodes)
            on_host = logits.device.type == "cpu" or self.drawing.sampler.needs_prefixes
            if depth or on_host or not self._can_step():
                draws = [row in active for row in range(len(self._active))]
                drawn = self.drawing.on_host([self.drawing.column(logits, self._active, draws)])
            else:  # all tokens of the round are drawn on the device first, as the host would wait for each
                drawn = self._chain(logits)
            self.columns |= enumerate(drawn, start=depth)
        column = self.columns[depth]
        tokens, probs = column.tokens.tolist(), column.draft_prob.tolist()
        return {node: [(tokens[node.row], probs[node.row])] for node in nodes}

    def _can_step(self) -> bool:
        return self.session is not None and self.session.can_step

    def _following(self, column: Column, depth: int) -> Tensor:
        """Return logits [B, n] after the drawn tokens of a column."""
        assert self.session is not None
        self._passes += 1
        return self.session.step(column.tokens.clamp(min=0))

    def _chain(self, logits: Tensor) -> list[Column]:
        """Return all columns of the round, of which the first has these logits [B, n], by one transfer."""
        columns = list[Column]()
        for depth in range(most := max(self._depths)):
            active = [depth < limit for limit in self._depths]
            columns.append(self.drawing.column(logits, self._active, active, depth))
            if depth + 1 < most:
                logits = self._following(columns[-1], depth)
        columns = self.drawing.on_host(columns)
        self._fill_in([column.tokens.clamp(min=0).tolist() for column in columns[:-1]])
        return columns

    def _fill_in(self, tokens: Rows) -> None:
        """Give the session the tokens that its steps read, by column and row."""
        if tokens and self.session is not None:
            self.session.fill_in([list(row) for row in zip(*tokens, strict=True)])

    def _ranked(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """Return the likeliest tokens after the likeliest node of each row."""
        best = {node.row: node for node in sorted(nodes, key=attrgetter("path"))}
        if not self._expanded and len(best) == 1:
            self._expanded |= dict.fromkeys(best.values(), -1)
        if (
            self._unchanged
            and len(self._active) == 1
            and self.session is not None
            and (probs := self.session.likeliest(self._row_to(best[0]), self._count)) is not None
        ):
            self._passes += 1
            return {best[0]: self._named(probs)}
        logits = self._logits([*best.values()])
        rows = sorted(best)
        chosen = logits if len(rows) == len(logits) else logits[put(rows, logits.device)]
        return self._likeliest(chosen, [best[row] for row in rows])

    def _level(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """Return, by one pass, the likeliest tokens after the likeliest nodes whose parents were expanded."""
        known = [node for node in nodes if node.parent in self._expanded]
        known = sorted(known, key=lambda node: -node.path)[: self.width]
        if not known:
            return {}
        for node in known:
            self._expanded_parents.append(self._expanded[node.parent])
            self._expanded[node] = len(self._expanded_tokens)
            self._expanded_tokens.append(node.token)
        assert self.session is not None
        self._passes += 1
        return self._likeliest(self.session.grow([*self._expanded_tokens], [*self._expanded_parents]), known)

    def _likeliest(self, logits: Tensor, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """Return the likeliest tokens that can follow, by logits [M, n] after M nodes."""
        logits = self._biased(logits, self._short)
        if self._constraint is not None:
            logits = self._constraint.masked(logits, list(map(self._row_to, nodes)), self._short)
        return dict(zip(nodes, map(self._named, likeliest_of_each(logits, self._count)), strict=True))

    def _named(self, probs: dict[int, float]) -> list[Offer]:
        """Return the columns of probability above 0 as offers: ids with their probabilities."""
        return [(index if self._short_ids is None else self._short_ids[index], p) for index, p in probs.items() if p]


class BlockSource(ModelSource):
    """A model that drafts a block in one pass, which runs before the first draft is chosen or drawn.

    The distribution of a draft may depend on the drafts before it (see :class:`sampling.types.BlockSession`), never
    on those after. If the model estimates the probability that a draft is accepted, nothing is drafted where it
    is below CONFIDENT; that is decided before the token is drawn.
    """

    whole = True
    session: BlockSession
    confidence: list[float]  # the largest estimate at each depth that this round examined

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        super().follow(rows, texts, depths, sampler)
        self.confidence = []

    def _paths(self, nodes: list[Node]) -> tuple[list[int], Rows]:
        return [node.row for node in nodes], [[self._base[node.row][-1], *node.tokens] for node in nodes]

    def _confident(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes after which the model expects its draft to be accepted. The first call runs the pass."""
        if not self._passes:
            self.session.draft_block(self._base, max(self._reaches))
            self._passes = 1
        if (chances := self.session.confidence(*self._paths(nodes))) is None:
            return nodes
        self.confidence.append(max(chances))
        return [node for node, chance in zip(nodes, chances, strict=True) if chance >= CONFIDENT]

    def _logits(self, nodes: list[Node]) -> Tensor:
        """Return logits [B, n]; zeros for rows without a node."""
        for node in nodes:
            self._active[node.row] = [*self._base[node.row], *node.tokens]
        ids = self.session.reduced_ids if self._short is None else None
        logits = spread(self.session.logits_after(*self._paths(nodes)), ids, self.session.vocab_size, -math.inf)
        rows = put([node.row for node in nodes], logits.device)
        return logits.new_zeros(len(self._active), logits.shape[1]).index_copy_(0, rows, logits)

    def _can_step(self) -> bool:
        return not self.session.by_path

    def _following(self, column: Column, depth: int) -> Tensor:
        return self.session.logits[:, depth + 1]

    def _fill_in(self, tokens: Rows) -> None:
        return

    def _drawn(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        kept = self._confident(nodes)
        return super()._drawn(kept) if kept else {}

    def _ranked(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """Return the likeliest tokens after every node of a level."""
        kept = self._confident(nodes)
        if not kept:
            return {}
        logits = self.session.logits_after(*self._paths(kept))
        if not logits.stride(0) and self._constraint is None:  # the same after each
            return dict.fromkeys(kept, self._likeliest(logits[:1], kept[:1])[kept[0]])
        return self._likeliest(logits, kept)


def source_of(lm: LM, draws: bool = False) -> ModelSource:
    """Return the source that drafts from `lm`."""
    return (BlockSource if lm.block else ModelSource)(lm, draws)


class ModelDrafter(Proposer):
    """Drafts chains drawn from `lm` (Leviathan et al., arXiv 2211.17192).

    Drafts are drawn from the processed distribution, which travels with them; they are point masses if the sampler
    makes them so (greedy, gumbel coupling). A row beyond `lm.context` gets no draft.

    `least`: a chain ends *after* the token with which the product of its tokens' own probabilities (temperature 1)
    falls below this; 0 = never.
    `rule`: Rule.BLOCK verifies chains as a whole. UserError for Rule.POINT, which must not verify drawn tokens.
    """

    model: ModelSource

    def __init__(self, lm: LM, least: float = 0.0, rule: Rule = Rule.DRAWN) -> None:
        super().__init__([source_of(lm, draws=True)], least=least, rule=rule)
        self.lm = lm
        if rule is Rule.POINT:
            raise UserError(f"{lm.name}: drawn drafts are not point masses")

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return chains of at most budget.max_depth[b] tokens, those that a constraint forces not counted; probs
        [B, N, V] unless point masses."""
        chain, model = super().propose(rows, budget, sampler), self.model
        if not any(depth < chain.width for depth in model.columns):
            return chain
        if (probs := model.drawing.probs(model.columns, chain.width)) is not None:
            forced = [
                (row, tree, node)
                for row, tree in enumerate(chain.trees)
                for node, source in enumerate(tree.source)
                if source == len(self.sources)
            ]
            for row, tree, node in forced:
                probs[row, node] = one_hot(torch.tensor(tree.tokens[node]), probs)
        return replace(chain, probs=probs)


class Respelled(ModelSource):
    """A model of another vocabulary: it writes text, which is tokenised as the target does (point masses; string-level
    exact match, Timor et al., arXiv 2502.05202). One call answers all depths.

    The row's last tokens are tokenised with the draft, so that a word that they begin is split as the target splits it.
    If no token boundary falls where the draft begins, the draft is tokenised alone.
    """

    whole = True
    lm: TranslatedLM

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        super().follow(rows, texts, depths, sampler)
        self._drafts: Rows | None = None

    def expand(self, nodes: list[Node]) -> list[list[Offer]]:
        if self._drafts is None:
            watch = Stopwatch()
            self._drafts = self._write()
            self._seconds += watch.lap()
        return [[(token, 1.0) for token in self._drafts[node.row][node.depth : node.depth + 1]] for node in nodes]

    def _write(self) -> Rows:
        """Return the model's likeliest text after each row, in the target's tokens."""
        rows, depths, session = self._base, self._depths, self.session
        if not isinstance(session, TranslatedSession) or max(depths) <= 0:
            return [[] for _ in depths]
        own = session.own(rows)
        written: Rows = [[] for _ in rows]
        self._passes = math.ceil(max(depths) * self.lm.translation.ratio)
        for _ in range(self._passes):
            logits = session.score_own([session.fitted(a + b) for a, b in zip(own, written, strict=True)])
            for new, token in zip(written, logits.argmax(dim=-1).tolist(), strict=True):
                new.append(token)
        return [self._retokenised(row, new)[:depth] for row, new, depth in zip(rows, written, depths, strict=True)]

    def _retokenised(self, row: list[int], written: list[int]) -> list[int]:
        """Return the model's tokens as the target's, an end of text as the target's own."""
        translation = self.lm.translation
        target, drafter = translation.target, translation.drafter
        stop = next((at for at, token in enumerate(written) if token in drafter.special.values()), len(written))
        text = b"".join(map(drafter.spelled, written[:stop]))
        tail, special = row[-SEAM:], target.special.values()
        tail = tail[max((end for end, token in enumerate(tail, start=1) if token in special), default=0) :]
        before = b"".join(map(target.spelled, tail))
        tokens, left = target.ids(before + text), len(before)
        while tokens and left > 0:
            left -= len(target.spelled(tokens.pop(0)))
        if left:
            tokens = target.ids(text)
        ends = {theirs: ours for ours, theirs in translation.mates.items()}
        if stop < len(written) and written[stop] in ends:
            tokens.append(ends[written[stop]])
        return tokens[: next((at for at, token in enumerate(tokens) if token >= self.lm.vocab_size), len(tokens))]


SEAM = 8  # last tokens of a row that are tokenised with its draft


class NoDrafter(Drafter):
    """Drafts nothing."""

    traits = Traits(rule=Rule.POINT)


def build(pair: Parts, request: DraftRequest) -> Proposer:
    """Build a drafter on the pair's drafter model; if its vocabulary shares few tokens with the target's, it drafts
    text."""
    if isinstance(pair.model, TranslatedLM) and pair.model.translation.by_text:
        return Proposer([Respelled(pair.model)], least=0.0)
    return of_lm(pair.model, request, 0.0)


def build_none(pair: Parts, request: DraftRequest) -> NoDrafter:
    """Build no drafter."""
    return NoDrafter()


def of_lm(lm: LM, request: DraftRequest, least: float = LEAST_PATH) -> Proposer:
    """Build a drafter from a model: trees of its likeliest tokens, or chains, which end under `gamma auto` once less
    likely than `least`."""
    if request.expand == "dynamic":
        return Proposer(
            [source_of(lm)], tree=True, nodes=request.settings.nodes, learn=request.auto, ratios=request.ratios
        )
    rule = Rule.BLOCK if request.settings.verify == "block" else Rule.DRAWN
    return ModelDrafter(lm, least if request.auto else 0.0, rule)


def build_head(pair: Parts, request: DraftRequest) -> Proposer:
    """Build a drafter on the pair's draft head of the word's kind: chains, or trees by the head's probabilities."""
    word, make = request.word, resolve_name(row_of(request.word).lm)
    return of_lm(pair.head(word, lambda head: make(head, word, pair.target.vocab_size)), request)
