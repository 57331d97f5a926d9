"""Drafts from a language model of its own: k one-token passes, each token fed to the next; and no drafts at all.

Knows any :class:`sampling.types.LM`; what its session reads of the target's is its own affair. With
:class:`NoDrafter` the loop is plain autoregressive decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sampling.drafters.cape import Expansion
from sampling.drafters.drawing import Column, Drawing
from sampling.drafters.proposal import Node, Offer, Proposer, Source
from sampling.drafters.registry import DraftRequest, Parts
from sampling.events import Call, Proposal
from sampling.models.translated import TranslatedLM, TranslatedSession
from sampling.types import LM, Budget, Draft, Drafter, Rows, Rule, Sampler, Session, Traits, Tree
from sampling.vocabulary import likeliest, spread
from utils.errors import UserError
from utils.timing import Stopwatch

WIDTH = 4  # nodes of a level that are computed (docs/notes.md)
FEW, MANY = 8, 16  # likeliest tokens that are offered; more where noise may lift an unlikely one


def opened(lm: LM, prompt: Rows, previous: Session | None, target: Session) -> Session | None:
    """A session of `lm` beside `target`'s; rows that outgrow its context are cut for it, None if those are all."""
    if min(map(len, prompt)) >= lm.context:
        return None
    fitting = prompt if max(map(len, prompt)) <= lm.context else [row[: lm.context] for row in prompt]
    return lm.open(fitting, previous=previous, target=target)


def scoring(session: Session, whole: bool = False) -> tuple[Callable[[Rows, Draft], Tensor], Tensor | None]:
    """What gives logits of a session and the ids [n] of their columns; None: all, as `whole` asks for."""
    short = None if whole else session.reduced_ids
    return (session.score if short is None else session.score_reduced), short


def check_blocks(traits: Traits) -> None:
    """UserError, by name, for block verification of drafts that may be trees."""
    if traits.rule is Rule.BLOCK and traits.tree is Tree.SIDEWAYS:
        name = ", ".join(traits.names)
        raise UserError(f"{name}: block verification judges chains, an expansion makes trees of them: choose one")


class Model(Source):
    """A model as a source, with its session beside the target's.

    `draws`: the token of each node is drawn from the processed distribution, which travels with it; a point mass where
    the sampler says so (greedy, gumbel coupling). Else the likeliest tokens are offered, one level of a tree a pass
    where the session can `grow`. Rows that outgrow the model's context get no offers. `ids` are the caller's numbers of
    the rows, which key the noise. `session` is None where the prompt outgrew it.
    """

    lm: LM

    def __init__(self, lm: LM, draws: bool = False, width: int = WIDTH) -> None:
        self.lm, self.name, self.draws, self.width = lm, lm.name, draws, width
        self.session: Session | None = None
        self.ids: list[int] = []
        self.columns: list[Column] = []  # what was drawn in this round
        self._depths: list[int] = []
        self._base: Rows = []  # the rows as far as the model's context goes: longer ones get no offers
        self._active: Rows = []  # the same with the path that was asked for last
        self._fed: dict[Node, int] = {}  # of nodes that `grow` has computed: their places among these
        self._fed_tokens: list[int] = []
        self._fed_parents: list[int] = []
        self._passes, self._seconds = 0, 0.0

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.session is None else (self.session,)

    def start(self, prompt: Rows, begun: Rows, target: Session) -> None:
        """Open the answer; the cache of the last answer is reused by common prefix."""
        previous, self.session = self.session, None
        self.ids = list(range(len(prompt)))
        self.session = opened(self.lm, prompt, previous, target)
        short = None if self.session is None else self.session.reduced_ids
        self._names = None if short is None else short.tolist()

    def fitting(self, rows: Rows, depths: list[int]) -> list[int]:
        """`depths` as far as the model's context goes, and as its session may be asked."""
        if self.session is None:
            return [0] * len(rows)
        asked = zip(depths, rows, map(self.session.draftable, map(len, rows)), strict=True)
        return [max(0, min(most, self.lm.context - len(row), most if n is None else n)) for most, row, n in asked]

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        self._depths = self.fitting(rows, depths)
        self._passes, self._seconds, self.columns = 0, 0.0, []
        self._fed, self._fed_tokens, self._fed_parents = {}, [], []
        self._count = FEW if sampler.greedy else MANY
        self._base = [row[: self.lm.context] for row in rows]
        self._active = [*self._base]
        if self.session is not None:
            self._score, self._short = scoring(self.session, whole=self.draws and sampler.needs_prefixes)
            if self.draws:
                self.drawing = Drawing(sampler, self.ids, self.session.vocab_size, self._short)

    def expand(self, nodes: list[Node]) -> list[list[Offer]]:
        able = [node for node in nodes if node.depth < self._depths[node.row]]
        watch = Stopwatch(self.lm.device)
        answer = self._drawn if self.draws else self._grown if self._grows(able) else self._ranked
        offers: dict[Node, list[Offer]] = answer(able) if able else {}
        self._seconds += watch.lap()
        return [offers.get(node, []) for node in nodes]

    def considered(self, node: Node, count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        listed = self.drawing.listed(self.columns[node.depth], node.row, count, tokens)
        return tuple(Proposal(*ranked, 0) for ranked in listed)

    def call(self) -> Call | None:
        return Call(self.lm.name, self._passes, self._seconds) if self._passes else None

    def close(self) -> None:
        self.session = None

    def select(self, rows: list[int]) -> None:
        if self.session is not None:
            self.ids = [self.ids[row] for row in rows]
            self.session.select(torch.tensor(rows))

    def _logits(self, nodes: list[Node]) -> Tensor:
        """[B, n] behind each row, of the rows of these nodes behind the nodes."""
        for node in nodes:
            self._active[node.row] = [*self._base[node.row], *node.tokens]
        self._passes += 1
        return self._score(self._active, Draft.empty(len(self._active)))[:, 0]

    def _drawn(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """One drawn token behind each node."""
        going = {node.row for node in nodes}
        logits = self._logits(nodes)
        column = self.drawing.column(logits, self._active, [row in going for row in range(len(self._active))])
        self.columns.append(column)
        tokens, raw = column.tokens.tolist(), column.raw.tolist()
        return {node: [(tokens[node.row], raw[node.row])] for node in nodes}

    def _grows(self, nodes: list[Node]) -> bool:
        return bool(nodes) and nodes[0].depth > 0 and len(self._active) == 1 and hasattr(self.session, "grow")

    def _ranked(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """The likeliest tokens behind the likeliest node of each row."""
        best = {node.row: node for node in sorted(nodes, key=lambda node: node.path)}
        logits = self._logits([*best.values()])
        if len(best) == 1 and (node := next(iter(best.values()))).depth == 0:
            self._fed[node] = -1
        return {node: self._likeliest(logits[row]) for row, node in best.items()}

    def _grown(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """The likeliest tokens behind the likeliest nodes of a level whose parents were computed, all in one pass."""
        known = [node for node in nodes if node.parent in self._fed]
        known = sorted(known, key=lambda node: -node.path)[: self.width]
        if not known:
            return {}
        for node in known:
            assert node.parent is not None
            self._fed_parents.append(self._fed[node.parent])
            self._fed[node] = len(self._fed_tokens)
            self._fed_tokens.append(node.token)
        session: Any = self.session
        logits = session.grow([*self._fed_tokens], [*self._fed_parents])
        self._passes += 1
        return {node: self._likeliest(row) for node, row in zip(known, logits, strict=True)}

    def _likeliest(self, logits: Tensor) -> list[Offer]:
        found = likeliest(logits.float(), self._count)
        return [(place if self._names is None else self._names[place], p) for place, p in found.items()]


class Block(Model):
    """A model whose one pass drafts a block: its distributions of all depths are known before the first draft.

    They may depend on the drafts before (`behind` of :class:`sampling.drafters.draft_heads.sessions.BlockSession`),
    never on those after. Where the model estimates the chance that a draft is accepted, nothing is drafted below
    CONFIDENT: that is decided before the token is drawn.
    """

    whole = True
    session: Any
    confidence: list[float]  # by the depths of this round that were considered, of the most confident place

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        super().follow(rows, texts, depths, sampler)
        self.confidence = []

    def call(self) -> Call | None:
        call = super().call()
        return None if call is None else call._replace(confidence=tuple(self.confidence))

    def _paths(self, nodes: list[Node]) -> tuple[list[int], Rows]:
        return [node.row for node in nodes], [[self._base[node.row][-1], *node.tokens] for node in nodes]

    def _confident(self, nodes: list[Node]) -> list[Node]:
        """The nodes behind which the model expects its draft to be accepted. The first call runs the pass."""
        if not self._passes:
            self.session.block(self._base, max(self._depths))
            self._passes = 1
        if (chances := self.session.confidence(*self._paths(nodes))) is None:
            return nodes
        self.confidence.append(max(chances))
        return [node for node, chance in zip(nodes, chances, strict=True) if chance >= CONFIDENT]

    def _logits(self, nodes: list[Node]) -> Tensor:
        """[B, n], of rows without a node zeros."""
        for node in nodes:
            self._active[node.row] = [*self._base[node.row], *node.tokens]
        found = self.session.behind(*self._paths(nodes))
        ids = self.session.reduced_ids if self._short is None else None
        found = spread(found, ids, self.session.vocab_size, -math.inf)
        rows = torch.tensor([node.row for node in nodes], device=found.device)
        return found.new_zeros(len(self._active), found.shape[1]).index_copy_(0, rows, found)

    def _drawn(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        kept = self._confident(nodes)
        return super()._drawn(kept) if kept else {}

    def _grows(self, nodes: list[Node]) -> bool:
        return False

    def _ranked(self, nodes: list[Node]) -> dict[Node, list[Offer]]:
        """The likeliest tokens behind every node of a level."""
        kept = self._confident(nodes)
        if not kept:
            return {}
        logits = self.session.behind(*self._paths(kept))
        if not logits.stride(0):  # the same behind each
            return dict.fromkeys(kept, self._likeliest(logits[0]))
        return {node: self._likeliest(row) for node, row in zip(kept, logits, strict=True)}


CONFIDENT = 0.2  # estimated chance of being accepted below which nothing is drafted


def source_of(lm: LM, draws: bool = False) -> Model:
    """The source that drafts from `lm`."""
    return (Block if lm.block else Model)(lm, draws)


class ModelDrafter(Proposer):
    """Draft chains drawn from `lm` (Leviathan et al., arXiv 2211.17192).

    Drafts are drawn from the processed distribution, which travels with them; they are point masses when
    the sampler says so (greedy, gumbel coupling). A row that would outgrow `lm.context` gets no draft.

    `least`: a chain ends *behind* the token with which the product of its tokens' own probabilities (temperature 1)
    falls below this; 0 = never.
    `expansion`: siblings stand beside the chain (CaPE) where the target takes trees.
    `rule`: Rule.BLOCK has chains verified as a whole.

    UserError for blocks beside an expansion: whether siblings come is seen when the chain is drawn, too late to choose
    a rule; and for Rule.POINT, by which drawn tokens must not be judged.
    """

    model: Model

    def __init__(self, lm: LM, least: float = 0.0, expansion: Expansion | None = None, rule: Rule = Rule.DRAWN) -> None:
        super().__init__([source_of(lm, draws=True)], least=least, rule=rule)
        self.lm, self.expansion = lm, expansion
        if rule is Rule.POINT:
            raise UserError(f"{lm.name}: drafts that are drawn are no point masses")
        if expansion is not None:
            self.traits = replace(self.traits, tree=Tree.SIDEWAYS)
        check_blocks(self.traits)

    @property
    def session(self) -> Session | None:
        """The model's session."""
        return self.model.session

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Chains of at most budget.max_depth[b] tokens; tokens [B, N], probs [B, N, V] unless point masses."""
        chain, model = super().propose(rows, budget, sampler), self.model
        if not model.columns:
            return chain
        chain = replace(chain, probs=model.drawing.probs(model.columns[: chain.tokens.shape[1]]))
        if self.expansion is None or not self._takes_trees:
            return chain
        return self.expansion.grow(chain, model.drawing, model.columns, rows, self.expansion.most(budget))


class Respelled(Model):
    """A model of another vocabulary, which writes freely; what it wrote is spelled in the target's tokens, point masses
    (string-level match, Timor et al., arXiv 2502.05202). One call answers all depths.

    A few of the row's last tokens are spelled along with it, so that a word which they begin is cut as the target would
    cut it; where its tokens would not end at the seam the draft is spelled by itself.
    """

    whole = True
    lm: TranslatedLM

    def follow(self, rows: Rows, texts: Rows, depths: list[int], sampler: Sampler) -> None:
        super().follow(rows, texts, depths, sampler)
        self._spelled: Rows | None = None

    def expand(self, nodes: list[Node]) -> list[list[Offer]]:
        if self._spelled is None:
            watch = Stopwatch(self.lm.device)
            self._spelled = self._written()
            self._seconds += watch.lap()
        drafts = [self._spelled[node.row][node.depth : node.depth + 1] for node in nodes]
        return [[(token, 1.0) for token in draft] for draft in drafts]

    def _written(self) -> Rows:
        """The model's likeliest text behind each row, in the target's tokens."""
        rows, depths, session, by = self._base, self._depths, self.session, self.lm.translation
        if not isinstance(session, TranslatedSession) or max(depths) <= 0:
            return [[] for _ in depths]
        own = session.own(rows)
        said: Rows = [[] for _ in rows]
        self._passes = math.ceil(max(depths) * by.ratio)
        for _ in range(self._passes):
            chosen = session.score_own([session.fitted(a + b) for a, b in zip(own, said, strict=True)])
            for written, token in zip(said, chosen.argmax(dim=-1).tolist(), strict=True):
                written.append(token)
        return [self._respelled(*one)[: one[2]] for one in zip(rows, said, depths, strict=True)]

    def _respelled(self, row: list[int], said: list[int], most: int) -> list[int]:
        """What the model said as the target's ids, the end of a text as the target's own."""
        by, size = self.lm.translation, self.lm.vocab_size
        ends = {theirs: ours for ours, theirs in by.mates.items()}
        stop = next((at for at, token in enumerate(said) if token in by.drafter.special.values()), len(said))
        text = b"".join(map(by.drafter.spelled, said[:stop]))
        tail, apart = row[-SEAM:], by.target.special.values()
        tail = tail[max((place for place, token in enumerate(tail, start=1) if token in apart), default=0) :]
        before = b"".join(map(by.target.spelled, tail))
        found, left = by.target.ids(before + text), len(before)
        while found and left > 0:
            left -= len(by.target.spelled(found.pop(0)))
        if left:
            found = by.target.ids(text)
        if stop < len(said) and said[stop] in ends:
            found.append(ends[said[stop]])
        known = next((at for at, token in enumerate(found) if token >= size), len(found))
        return found[:known]


SEAM = 8  # tokens of a row that are spelled along with what is drafted behind them


class NoDrafter(Drafter):
    """Proposes nothing."""

    traits = Traits(rule=Rule.POINT)


LEAST = 0.12
"""Under `gamma auto` a draft head's chain ends where it has become less likely than this (docs/notes.md)."""


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's drafter model. One of another vocabulary that hardly ever shares tokens drafts by its text."""
    if isinstance(pair.model, TranslatedLM) and pair.model.translation.by_text:
        return Proposer([Respelled(pair.model)], least=0.0)
    return ModelDrafter(pair.model, 0.0, expansion_of(asked), rule_of(asked))


def build_none(pair: Parts, asked: DraftRequest) -> NoDrafter:
    """Nothing is drafted."""
    return NoDrafter()


def of_head(lm: LM, asked: DraftRequest) -> Proposer:
    """A new drafter on a draft head: chains, or trees of its likeliest tokens."""
    if asked.grown == "dynamic":
        return Proposer([source_of(lm)], tree=True, nodes=asked.settings.nodes, learn=asked.auto, ratios=asked.ratios)
    return ModelDrafter(lm, LEAST if asked.auto else 0.0, expansion_of(asked), rule_of(asked))


def expansion_of(asked: DraftRequest) -> Expansion | None:
    """How chains grow siblings, if they do."""
    return None if asked.grown == "none" else Expansion(asked.settings.nodes)


def rule_of(asked: DraftRequest) -> Rule:
    """The rule that accepts what a model drafts."""
    return Rule.BLOCK if asked.settings.verify == "block" else Rule.DRAWN
