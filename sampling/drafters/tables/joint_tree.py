"""Trees from what was already said, whose first tokens a trained drafter has a say in.

Where matches and tables are unsure of the next token, one pass of a trained drafter says how likely each is. What all
of them say of a token is added up, each by how far it can be believed beside the others, and the sums share out the
chance between them (a linear pool, sharpened; Ranjan and Gneiting, J. R. Stat. Soc. B 72, 2010, for why a sum of
forecasts wants sharpening); the tree grows on from there as :mod:`sampling.drafters.tables.tree` has it. One pass a
round, and none where what was said is sure, or where past passes brought fewer tokens than their time is worth.
Children are point masses chosen beforehand, so the noise of the target's draw may be looked at here too.
Knows any LM that has a session; not what it reads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from sampling.drafters.draft_model import opened, scoring
from sampling.drafters.fallback import PROBE_EVERY, FallbackDrafter
from sampling.drafters.registry import DraftRequest, Parts, parts
from sampling.drafters.tables.prompt_lookup import Found
from sampling.drafters.tables.table_file import StaticTables
from sampling.drafters.tables.tree import SURE, Noise, TableTreeDrafter, favour
from sampling.events import Call
from sampling.gamma.ratios import Ratios
from sampling.types import LM, Budget, Draft, Drafter, Rows, Sampler, Session, Verdict
from sampling.vocabulary import likeliest
from utils.timing import Stopwatch

ENOUGH = 0.6  # where a token of the tables is likelier than this the drafter is not asked
FLOOR = 0.004  # what a token has of being named at all
NOBODY = 0.067  # weight of all the tokens that nobody names
CANDIDATES = 16  # of the drafter's likeliest tokens
PLAIN_CANDIDATES = 8  # the same where no noise can lift an unlikely one
HOPED = 0.5  # tokens that a pass of the drafter is thought to bring where nothing else says any
HOPED_WORTH = 10.0  # outcomes that this is worth: a few refusals at first say little


class Beliefs(NamedTuple):
    """How far the probability that a match, a table, a recalled distribution, an answer that is over (`shares`, in the
    order of the sources) and a trained drafter (`own`) give a token is believed beside those of the others; the power
    their sum is raised to; how much of the noise is believed.
    """

    shares: tuple[float, float, float, float]
    own: float
    sharpened: float
    noise: float


AGREEING = (0.4, 0.57)
"""How often the likeliest token of two students was the target's greedy one on held-out text, and what fitted beside
them (docs/notes.md, "How probable a token is"): a drafter trained on the same text knows what a table knows.
"""
WEAK = Beliefs((0.95, 0.3, 2.1, 0.5), own=0.42, sharpened=1.4, noise=0.9)
STRONG = Beliefs((0.95, 0.2, 2.1, 0.5), own=0.78, sharpened=1.6, noise=1.0)


def beliefs(agreement: float) -> Beliefs:
    """For a drafter that agrees with the target so often; between and beyond the two that were measured."""
    low, high = AGREEING
    part = min(1.0, max(0.0, (agreement - low) / (high - low)))

    def between(weak: float, strong: float) -> float:
        return weak + part * (strong - weak)

    matches, tables, recalled, said = map(between, WEAK.shares, STRONG.shares)
    return Beliefs((matches, tables, recalled, said), *map(between, WEAK[1:], STRONG[1:]))


class JointTreeDrafter(TableTreeDrafter):
    """As :class:`TableTreeDrafter` with a trained drafter `lm`, which is asked for the root's children of one row.

    A batch, and a row that outgrows the context of `lm`, get what matches and tables offer. `learn`: ask only while
    that pays, by `chances`. `agreement`: how often its likeliest token is the target's. `source` of the drafter's
    tokens is the last of its names. The arguments in `how` are those of :class:`TableTreeDrafter`.
    """

    least_said = 4  # what follows a word or two the drafter knows better (docs/notes/tables.md)

    def __init__(
        self,
        lm: LM,
        tables: StaticTables | None = None,
        *,
        learn: bool = True,
        agreement: float = 0.0,
        chances: Ratios | None = None,
        **how: Any,
    ) -> None:
        chances = Ratios() if chances is None else chances
        super().__init__(tables, chances=chances, **how)
        names = (*self.traits.names, lm.name)
        self.traits = replace(
            self.traits, names=names, needs_hidden=lm.reads_hidden, needs_kv=lm.reads_kv, reads_one_row=True
        )
        self.lm, self.learn, self.beliefs = lm, learn, beliefs(agreement)
        self.gain = chances.of("asked", HOPED, HOPED_WORTH)
        self.price: float | None = None  # of this round's budget
        self.idle = 0  # rounds since it was asked
        self.session: Session | None = None
        self._names: list[int] | None = None  # the ids of its session's columns
        self._asked: float | None = None  # seconds that the drafter took this round
        self._open = 1.0  # the chance that what was said left it
        self._without: int | None = None  # the token that what was said would have come to first
        self._watch = Stopwatch(lm.device)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return () if self.session is None else (self.session,)

    @property
    def models(self) -> tuple[LM, ...]:
        return (self.lm,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        super().start(prompt, target, verifier)
        previous, self.session = self.session, None
        if len(prompt) == 1:
            self.session = opened(self.lm, prompt, previous, target)
        short = None if self.session is None else scoring(self.session)[1]
        self._names = None if short is None else short.tolist()

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """A tree of at most budget.max_depth[0] nodes; `source` is [1, N]."""
        self._asked, self.price = None, budget.opportunity_cost
        draft = super().propose(rows, budget, sampler)
        return draft if self._asked is None else replace(draft, calls=(Call(self.lm.name, 1, self._asked),))

    def _first(self, rows: Rows, offered: list[Found], noise: Noise | None) -> list[Found]:
        """What may follow the row: of matches and tables, and where that pays of the drafter."""
        known = super()._first(rows, offered, noise)
        sure = max((found.p for found in known), default=0.0)
        if self.session is None or len(rows[0]) >= self.lm.context or not self._asks(sure):
            return known
        self._open = 1 - sure
        self._without = max(known, key=lambda found: found.p).token if known else None
        self._watch.lap()
        forecast = self._forecast(self.session, rows, PLAIN_CANDIDATES if noise is None else CANDIDATES)
        self._asked = self._watch.lap()
        return pooled(offered, forecast, len(self.traits.names) - 1, noise, self.beliefs)

    def _asks(self, sure: float) -> bool:
        """Whether the drafter is asked where what was said is `sure` of a token: that bounds what it brings."""
        if not self.learn or self.price is None:
            return sure < ENOUGH
        self.idle += 1
        pays = self.gain.value * (1 - sure) > self.price
        if pays or (self.idle > PROBE_EVERY and sure < ENOUGH):
            self.idle = 0
            return True
        return False

    def _forecast(self, session: Session, rows: Rows, count: int) -> dict[int, float]:
        """The drafter's likeliest tokens behind the row and their probabilities."""
        score, _ = scoring(session)
        found = likeliest(score(rows, Draft.empty(1))[0, 0].float(), count)
        return found if self._names is None else {self._names[place]: p for place, p in found.items()}

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        super().observe(rows, draft, verdict)
        asked, self._asked = self._asked, None  # a round without drafts does not ask it
        if len(rows) == 1 and asked is not None:
            news = self._came[:1] != [self._without]
            self.gain.learn(len(self._came) if news else 0, self._open)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.session is not None:
            self.session.select(rows)


def pooled(
    offered: list[Found], forecast: dict[int, float], source: int, noise: Noise | None, believed: Beliefs
) -> list[Found]:
    """Every token that is `offered` or in the `forecast`, its chance beside all others, and who adds most to it.

    `forecast`: the probabilities of a trained drafter, which is called `source`.
    """
    known = {one.token: one for one in offered}
    tokens = list({**forecast, **known})
    weights, sources, probs = list[float](), list[int](), list[float]()
    for token, louder in zip(tokens, favour(noise, 0, tokens, believed.noise), strict=True):
        said, own = known.get(token), believed.own * forecast.get(token, 0.0)
        others = 0.0 if said is None else believed.shares[said.source] * said.p
        weights.append((others + own + FLOOR) ** believed.sharpened * louder)
        by_table = None if own >= others else said
        sources.append(source if by_table is None else by_table.source)
        probs.append(forecast.get(token, 0.0) if by_table is None else by_table.prob)
    total = math.fsum([NOBODY, *weights])
    return [
        Found(token, by, min(SURE, weight / total), prob)
        for token, by, weight, prob in zip(tokens, sources, weights, probs, strict=True)
    ]


UNSURE = 0.35
"""How likely the first token of the tables must be, for a draft head not to take over (docs/notes.md)."""


def build(pair: Parts, asked: DraftRequest) -> Drafter:
    """What looks up, and a draft head: one tree of both, or the second where the first is unsure."""
    first, second = parts(asked.word)
    joint = asked.grown == "joint"
    head: Any = pair.build(replace(asked, word=second.word, grown="none" if joint else asked.grown))
    looks_up: Any = pair.build(replace(asked, word=first.word, grown="none"))
    if joint:
        agreement, recall = pair.agreement(second.needs), first.word == "tables"
        return JointTreeDrafter(
            head.lm,
            looks_up.tables,
            learn=asked.auto,
            agreement=agreement,
            shared_noise=True,
            recall=recall,
            said=looks_up.said,
            chances=asked.chances,
        )
    return FallbackDrafter(looks_up, head, sure=UNSURE, learn=asked.auto, chances=asked.chances)
