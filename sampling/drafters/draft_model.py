"""Drafts from a language model of its own: k one-token passes, each token fed to the next; and no drafts at all.

Knows any :class:`sampling.types.LM`; what its session reads of the target's is its own affair. With
:class:`NoDrafter` the loop is plain autoregressive decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from sampling.drafters.cape import Expansion
from sampling.drafters.drawing import Column, Drawing
from sampling.drafters.registry import DraftRequest, Parts
from sampling.events import Call
from sampling.rows import takes_trees
from sampling.types import LM, Draft, Rows, Rule, Sampler, Session, Verdict
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
    beside: Any = session
    short = None if whole else getattr(beside, "short_list", None)
    return (beside.score if short is None else beside.score_short), short


def check_blocks(rule: Rule, expansion: Expansion | None, name: str) -> None:
    """UserError, by name, for block verification of drafts that may be trees."""
    if rule is Rule.BLOCK and expansion is not None:
        raise UserError(f"{name}: block verification judges chains, an expansion makes trees of them: choose one")


class ModelDrafter:
    """Draft chains from `lm` (Leviathan et al., arXiv 2211.17192).

    Drafts are drawn from the processed law, which travels with them; they are point masses when
    the sampler says so (greedy, gumbel coupling). A row that would outgrow `lm.context` gets no draft.

    `least`: a chain ends *behind* the token with which the product of its tokens' own probabilities (temperature 1)
    falls below this; 0 = never. The token stays, so nothing is chosen by its fate (a dropped one would bias the rest).
    `expansion`: siblings stand beside the chain (CaPE) where the target takes trees.
    `rule`: Rule.BLOCK has chains judged as a whole, Rule.POINT drafts point masses under every sampler.

    UserError for blocks beside an expansion: whether siblings come is seen when the chain is drawn, too late to choose
    a rule.
    """

    def __init__(self, lm: LM, least: float = 0.0, expansion: Expansion | None = None, rule: Rule = Rule.DRAWN) -> None:
        check_blocks(rule, expansion, lm.name)
        self.lm, self.least, self.expansion, self.rule = lm, least, expansion, rule
        self.needs_hidden = bool(getattr(lm, "reads_hidden", False))
        self._session: Session | None = None
        self._trees = True  # whether the target takes them
        self._ids: list[int] = []  # the caller's numbers of the rows: they key the noise

    @property
    def names(self) -> tuple[str, ...]:
        return (self.lm.name,)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self._session is None else (self._session,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer; the cache of the last answer is reused by common prefix."""
        previous, self._session = self._session, None
        self._ids, self._trees = list(range(len(prompt))), takes_trees(target)
        self._session = opened(self.lm, prompt, previous, target)

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """Chains of at most k[b] tokens; tokens [B, N], probs [B, N, V] unless point masses."""
        session = self._session
        fits = [min(want, self.lm.context - len(row)) for want, row in zip(k, rows, strict=True)]
        if session is None or max(fits) <= 0:
            return Draft.empty(len(rows))
        watch = Stopwatch(getattr(self.lm, "device", None))
        score, short = scoring(session, whole=sampler.needs_prefixes)
        drawing = Drawing(sampler, self._ids, session.vocab_size, short, self.rule is Rule.POINT)
        active = [list(row[: self.lm.context]) for row in rows]  # longer ones draft nothing
        nothing = Draft.empty(len(rows))
        columns: list[Column] = []
        chances = [1.0] * len(rows)
        while any(fit > len(columns) for fit in fits):
            logits = score(active, nothing)[:, 0]
            columns.append(drawing.column(logits, active, [fit > len(columns) for fit in fits]))
            tokens, raw = columns[-1].tokens.tolist(), columns[-1].raw.tolist()
            for place, token in enumerate(tokens):
                if token >= 0:
                    active[place].append(token)
                    chances[place] *= raw[place]
                    if chances[place] < self.least:
                        fits[place] = len(columns)
        call = Call(self.lm.name, len(columns), watch.lap())
        if self.expansion is None or not self._trees:
            return drawing.draft(columns, call)
        draft = self.expansion.grow(drawing, columns, rows, call)
        return replace(draft, calls=(call._replace(seconds=call.seconds + watch.lap()),))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        return None  # the cache follows by common prefix

    def select(self, rows: Tensor) -> None:
        self._ids = [self._ids[row] for row in rows.tolist()]
        if self._session is not None:
            self._session.select(rows)


class NoDrafter:
    """Proposes nothing."""

    names: tuple[str, ...] = ()
    rule = Rule.POINT
    sessions: tuple[Session, ...] = ()

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        return None

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        return Draft.empty(len(rows))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        return None

    def select(self, rows: Tensor) -> None:
        return None


LEAST = 0.12
"""Under `gamma auto` a draft head's chain ends where it has become less likely than this (docs/notes.md)."""


def build(pair: Parts, asked: DraftRequest) -> ModelDrafter:
    """The pair's drafter model."""
    return ModelDrafter(pair.model, 0.0, expansion_of(asked), rule_of(asked))


def build_none(pair: Parts, asked: DraftRequest) -> NoDrafter:
    """Nothing is drafted."""
    return NoDrafter()


def chain_of_head(fresh: ModelDrafter, asked: DraftRequest) -> ModelDrafter:
    """A new drafter on the weights of `fresh`, one that never starts."""
    made, expansion, rule = copy.copy(fresh), expansion_of(asked), rule_of(asked)
    check_blocks(rule, expansion, asked.word)
    made.least, made.expansion, made.rule = least_of(asked), expansion, rule
    return made


def least_of(asked: DraftRequest) -> float:
    """Where a draft head's chains end."""
    return LEAST if asked.auto else 0.0


def expansion_of(asked: DraftRequest) -> Expansion | None:
    """How chains grow siblings, if they do."""
    return None if asked.grown == "none" else Expansion(asked.settings.nodes)


def rule_of(asked: DraftRequest) -> Rule:
    """The rule that accepts what a model drafts."""
    return Rule.BLOCK if asked.settings.verify == "block" else Rule.DRAWN
