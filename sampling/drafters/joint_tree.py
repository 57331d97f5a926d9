"""Trees from what was already said, whose first tokens a trained drafter has a say in.

Where matches and tables are unsure of the next token, one pass of a trained drafter says how likely each is; a token's
chance is then that of either being right, and the tree grows on from there as :mod:`sampling.drafters.table_tree` has
it. One pass a round, and none where what was said is sure, or where past passes brought fewer tokens than their time
is worth. Children are point masses chosen beforehand, so the noise of the target's draw may be looked at here too.
Knows any LM that has a session; not what it reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from sampling.drafters.model import opened, scoring
from sampling.drafters.table_file import StaticTables
from sampling.drafters.table_tree import SURE, Noise, TableTreeDrafter, favoured
from sampling.drafters.tables import Found
from sampling.drafters.takeover import PROBE_EVERY, Case, Worth
from sampling.events import Call
from sampling.types import LM, Draft, Rows, Sampler, Session, Verdict
from utils.timing import Stopwatch

ENOUGH = 0.6  # where a token of the tables is likelier than this the drafter is not asked
SHARE = 0.5  # of a drafter's probability: the token's chance where nothing else offers it
BELIEVED = 0.7  # of the noise, beside a law
CANDIDATES = 16  # of the drafter's likeliest tokens
HOPED = 0.25  # tokens a pass of the drafter is thought to bring before it has been asked


class JointTreeDrafter(TableTreeDrafter):
    """As :class:`TableTreeDrafter` with a trained drafter `lm`, which is asked for the root's children of one row.

    A batch, and a row that outgrows the context of `lm`, get what matches and tables offer. `learn`: ask only while
    that pays. `source` of the drafter's tokens is the last of `names`. The arguments in `how` are those of
    :class:`TableTreeDrafter`.
    """

    def __init__(self, lm: LM, tables: StaticTables | None = None, *, learn: bool = True, **how: Any) -> None:
        super().__init__(tables, **how)
        self.lm, self.learn = lm, learn
        self.needs_hidden = bool(getattr(lm, "reads_hidden", False))
        self.names = (*self.names, lm.name)
        self.case, self.worth = Case(then=HOPED), Worth()
        self._session: Session | None = None
        self._asked: float | None = None  # seconds that the drafter took this round
        self._watch = Stopwatch(getattr(lm, "device", None))

    @property
    def sessions(self) -> tuple[Session, ...]:  # type: ignore[override]
        return () if self._session is None else (self._session,)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        super().start(prompt, target, verifier)
        previous, self._session = self._session, None
        if len(prompt) == 1:
            self._session = opened(self.lm, prompt, previous, target)

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """A tree of at most k[0] nodes; `source` is [1, N]."""
        self._asked = None
        draft = super().propose(rows, k, sampler)
        self._watch.lap()
        return draft if self._asked is None else replace(draft, calls=(Call(self.lm.name, 1, self._asked),))

    def _first(self, rows: Rows, offered: list[Found], noise: Noise | None) -> list[Found]:
        """What may follow the row: of matches and tables, and where that pays of the drafter."""
        known = super()._first(rows, offered, noise)
        sure = max((found.chance for found in known), default=0.0)
        if sure >= ENOUGH or self._session is None or len(rows[0]) >= self.lm.context:
            return known
        if self.learn and self.case.then <= self.worth.price and self.case.idle < PROBE_EVERY:
            self.case.idle += 1
            return known
        self.case.idle = 0
        self._watch.lap()
        thought = self._thoughts(rows, noise)
        self._asked = self._watch.lap()
        return _joined(known, thought)

    def _thoughts(self, rows: Rows, noise: Noise | None) -> list[Found]:
        """The drafter's likeliest tokens behind the row and the chances that they have by themselves."""
        assert self._session is not None
        score, short = scoring(self._session)
        logits = score(rows, Draft.empty(1))[0, 0].float()
        best = logits.topk(min(CANDIDATES, logits.shape[-1]))
        chances = (best.values - logits.logsumexp(dim=-1)).exp().tolist()
        ids = (best.indices if short is None else short[best.indices]).tolist()
        source = len(self.names) - 1
        found = [Found(token, source, SHARE * chance) for token, chance in zip(ids, chances, strict=True)]
        return favoured(found, noise, 0, BELIEVED)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        super().observe(rows, draft, verdict)
        if len(rows) != 1:
            return
        path = [node for node in verdict.path[0].tolist() if node >= 0]
        if self._asked is not None and draft.source is not None:
            mine = bool(path) and int(draft.source[0, path[0]]) == len(self.names) - 1
            self.case.learn(0, len(path) if mine else 0)
        self.worth.learn(self._asked, self._watch.lap(), len(path) + 1)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self._session is not None:
            self._session.select(rows)


def _joined(known: list[Found], thought: list[Found]) -> list[Found]:
    """Every token of either, with the chance that one of the two is right; who is surer of it proposes it."""
    found = {one.token: one for one in known}
    for one in thought:
        other = found.get(one.token)
        if other is not None:
            surer = max(one, other, key=lambda each: each.chance)
            one = surer._replace(chance=min(SURE, 1 - (1 - one.chance) * (1 - other.chance)))
        found[one.token] = one
    return list(found.values())
