"""Drafts from a language model of its own: k one-token passes, each token fed to the next.

Knows any :class:`sampling.types.LM`; what its session reads of the target's is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from sampling.drafters.drawing import Column, Drawing
from sampling.drafters.expand import Expansion
from sampling.events import Call
from sampling.types import LM, Draft, Rows, Sampler, Session, Verdict
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


class ModelDrafter:
    """Draft chains from `lm` (Leviathan et al., arXiv 2211.17192).

    Drafts are drawn from the processed law, which travels with them; they are point masses when
    the sampler says so (greedy, gumbel coupling). A row that would outgrow `lm.context` gets no draft.

    `least`: a chain ends *behind* the token with which the product of its tokens' own probabilities (temperature 1)
    falls below this; 0 = never. The token stays, so nothing is chosen by its fate (a dropped one would bias the rest).
    `expansion`: siblings stand beside the chain (CaPE).
    """

    def __init__(self, lm: LM, least: float = 0.0, expansion: Expansion | None = None) -> None:
        self.lm, self.least, self.expansion = lm, least, expansion
        self.needs_hidden = bool(getattr(lm, "reads_hidden", False))
        self._session: Session | None = None
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
        self._ids = list(range(len(prompt)))
        self._session = opened(self.lm, prompt, previous, target)

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """Chains of at most k[b] tokens; tokens [B, N], probs [B, N, V] unless point masses."""
        session = self._session
        fits = [min(want, self.lm.context - len(row)) for want, row in zip(k, rows, strict=True)]
        if session is None or max(fits) <= 0:
            return Draft.empty(len(rows))
        watch = Stopwatch(getattr(self.lm, "device", None))
        score, short = scoring(session, whole=sampler.needs_prefixes)
        drawing = Drawing(sampler, self._ids, self.lm.vocab_size, short)
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
        if self.expansion is None:
            return drawing.draft(columns, call)
        draft = self.expansion.grow(drawing, columns, rows, call)
        return replace(draft, calls=(call._replace(seconds=call.seconds + watch.lap()),))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        return None  # the cache follows by common prefix

    def select(self, rows: Tensor) -> None:
        self._ids = [self._ids[row] for row in rows.tolist()]
        if self._session is not None:
            self._session.select(rows)
