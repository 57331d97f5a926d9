"""Drafts from a language model of its own: k one-token passes, each token fed to the next; and no drafts at all.

Knows any :class:`sampling.types.LM`; what its session reads of the target's is its own affair. With
:class:`NoDrafter` the loop is plain autoregressive decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sampling.drafters.cape import Expansion
from sampling.drafters.drawing import Column, Drawing
from sampling.drafters.registry import DraftRequest, Parts
from sampling.events import Call
from sampling.models.translated import TranslatedLM, TranslatedSession
from sampling.rows import padded
from sampling.types import LM, Budget, Draft, Drafter, Rows, Rule, Sampler, Session, Traits, Tree
from utils.errors import UserError
from utils.timing import Stopwatch


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


class ModelMember(Drafter):
    """A model beside the target, with its session: what a drafter of its own and a reviewer of a cascade share.

    `ids` are the caller's numbers of the rows, which key the noise. `session` is None where the prompt outgrew it.
    """

    def __init__(self, lm: LM, traits: Traits) -> None:
        self.lm, self.traits = lm, replace(traits, needs_hidden=lm.reads_hidden, needs_kv=lm.reads_kv)
        self.session: Session | None = None
        self.ids: list[int] = []

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.session is None else (self.session,)

    @property
    def models(self) -> tuple[LM, ...]:
        return (self.lm,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer; the cache of the last answer is reused by common prefix."""
        previous, self.session = self.session, None
        self.ids = list(range(len(prompt)))
        self.session = opened(self.lm, prompt, previous, target)

    def fitting(self, rows: Rows, depth: list[int]) -> list[int]:
        """`depth` as far as the model's context goes, and as its session may be asked."""
        if self.session is None:
            return [0] * len(rows)
        asked = zip(depth, rows, map(self.session.draftable, map(len, rows)), strict=True)
        return [max(0, min(most, self.lm.context - len(row), most if n is None else n)) for most, row, n in asked]

    def select(self, rows: Tensor) -> None:
        self.ids = [self.ids[row] for row in rows.tolist()]
        if self.session is not None:
            self.session.select(rows)


class ModelDrafter(ModelMember):
    """Draft chains from `lm` (Leviathan et al., arXiv 2211.17192).

    Drafts are drawn from the processed distribution, which travels with them; they are point masses when
    the sampler says so (greedy, gumbel coupling). A row that would outgrow `lm.context` gets no draft.

    `least`: a chain ends *behind* the token with which the product of its tokens' own probabilities (temperature 1)
    falls below this; 0 = never. The token stays, so nothing is chosen by its fate (a dropped one would bias the rest).
    `expansion`: siblings stand beside the chain (CaPE) where the target takes trees.
    `rule`: Rule.BLOCK has chains verified as a whole, Rule.POINT drafts point masses under every sampler.

    UserError for blocks beside an expansion: whether siblings come is seen when the chain is drawn, too late to choose
    a rule.
    """

    def __init__(self, lm: LM, least: float = 0.0, expansion: Expansion | None = None, rule: Rule = Rule.DRAWN) -> None:
        super().__init__(lm, Traits((lm.name,), rule, tree=None if expansion is None else Tree.SIDEWAYS))
        check_blocks(self.traits)
        self.least, self.expansion = least, expansion
        self._trees = True  # whether the target takes them

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._trees = target.takes_trees
        super().start(prompt, target, verifier)

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Chains of at most budget.max_depth[b] tokens; tokens [B, N], probs [B, N, V] unless point masses."""
        session, depth = self.session, self.fitting(rows, budget.max_depth)
        if session is None or max(depth) <= 0:
            return Draft.empty(len(rows))
        watch = Stopwatch(self.lm.device)
        score, short = scoring(session, whole=sampler.needs_prefixes)
        drawing = Drawing(sampler, self.ids, session.vocab_size, short, self.traits.rule is Rule.POINT)
        active = [list(row[: self.lm.context]) for row in rows]  # longer ones draft nothing
        nothing = Draft.empty(len(rows))
        columns: list[Column] = []
        paths = [1.0] * len(rows)
        while max(depth) > len(columns):
            logits = score(active, nothing)[:, 0]
            columns.append(drawing.column(logits, active, [most > len(columns) for most in depth]))
            for place, (token, p) in enumerate(zip(columns[-1].tokens.tolist(), columns[-1].raw.tolist(), strict=True)):
                if token >= 0:
                    active[place].append(token)
                    paths[place] *= p
                    if paths[place] < self.least:
                        depth[place] = len(columns)
        call = Call(self.lm.name, len(columns), watch.lap())
        if self.expansion is None or not self._trees:
            return drawing.draft(columns, call)
        draft = self.expansion.grow(drawing, columns, rows, call, self.expansion.most(budget))
        return replace(draft, calls=(call._replace(seconds=call.seconds + watch.lap()),))


class RespelledDrafter(ModelMember):
    """Drafts of a model of another vocabulary, which writes freely; what it wrote is spelled in the target's tokens,
    point masses (string-level match, Timor et al., arXiv 2502.05202).

    A few of the row's last tokens are spelled along with it, so that a word which they begin is cut as the target would
    cut it; where its tokens would not end at the seam the draft is spelled by itself.
    """

    lm: TranslatedLM

    def __init__(self, lm: TranslatedLM) -> None:
        super().__init__(lm, Traits((lm.name,), Rule.POINT))

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Chains of at most budget.max_depth[b] tokens, the model's likeliest."""
        depth = self.fitting(rows, budget.max_depth)
        if not isinstance(self.session, TranslatedSession) or max(depth) <= 0:
            return Draft.empty(len(rows))
        watch, session, by = Stopwatch(self.lm.device), self.session, self.lm.translation
        own = session.own(rows)
        said: Rows = [[] for _ in rows]
        calls = math.ceil(max(depth) * by.ratio)
        for _ in range(calls):
            chosen = session.score_own([session.fitted(a + b) for a, b in zip(own, said, strict=True)])
            for written, token in zip(said, chosen.argmax(dim=-1).tolist(), strict=True):
                written.append(token)
        drafted = [self._respelled(*one)[: one[2]] for one in zip(rows, said, depth, strict=True)]
        return Draft(padded(drafted), calls=(Call(self.lm.name, calls, watch.lap()),))

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


def build(pair: Parts, asked: DraftRequest) -> ModelMember:
    """The pair's drafter model. One of another vocabulary that hardly ever shares tokens drafts by its text."""
    if isinstance(pair.model, TranslatedLM) and pair.model.translation.by_text:
        return RespelledDrafter(pair.model)
    return ModelDrafter(pair.model, 0.0, expansion_of(asked), rule_of(asked))


def build_none(pair: Parts, asked: DraftRequest) -> NoDrafter:
    """Nothing is drafted."""
    return NoDrafter()


def chain_of_head(fresh: ModelDrafter, asked: DraftRequest) -> ModelDrafter:
    """A new drafter on the weights of `fresh`, one that never starts."""
    return ModelDrafter(fresh.lm, least_of(asked), expansion_of(asked), rule_of(asked))


def least_of(asked: DraftRequest) -> float:
    """Where a draft head's chains end."""
    return LEAST if asked.auto else 0.0


def expansion_of(asked: DraftRequest) -> Expansion | None:
    """How chains grow siblings, if they do."""
    return None if asked.grown == "none" else Expansion(asked.settings.nodes)


def rule_of(asked: DraftRequest) -> Rule:
    """The rule that accepts what a model drafts."""
    return Rule.BLOCK if asked.settings.verify == "block" else Rule.DRAWN
