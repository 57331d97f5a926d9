"""Drafts from a language model of its own: k one-token passes, each token fed to the next.

Knows any :class:`sampling.types.LM`; knows nothing of the target but its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.events import Call
from sampling.types import LM, Draft, Rows, Sampler, Session, Verdict
from utils.timing import Stopwatch


class ModelDrafter:
    """Draft chains from `lm` (Leviathan et al., arXiv 2211.17192).

    Drafts are drawn from the processed law, which travels with them; they are point masses when
    the sampler says so (greedy, gumbel coupling). A row that would outgrow `lm.context` gets no draft.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
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
        if max(map(len, prompt)) < self.lm.context:
            self._session = self.lm.open(prompt, previous=previous)

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """Chains of at most k[b] tokens; tokens [B, N], probs [B, N, V] unless point masses."""
        session = self._session
        fits = [min(want, self.lm.context - len(row)) for want, row in zip(k, rows, strict=True)]
        steps = max(0, *fits) if session is not None else 0
        if session is None or steps == 0:
            return Draft.empty(len(rows))
        watch = Stopwatch(getattr(self.lm, "device", None))
        active = [list(row) for row in rows]
        columns: list[_Column] = []
        for depth in range(steps):
            logits = session.score(active, Draft.empty(len(rows)))[:, 0]
            going = torch.tensor([fit > depth for fit in fits])
            column = self._draw(logits, active, going, sampler)
            columns.append(column)
            for row, token in zip(active, column.tokens.tolist(), strict=True):
                if token >= 0:
                    row.append(token)
        return Draft(
            tokens=torch.stack([column.tokens for column in columns], dim=1),
            probs=None if sampler.point_mass else torch.stack([column.probs for column in columns], dim=1),
            raw=torch.stack([column.raw for column in columns], dim=1),
            calls=(Call(self.lm.name, steps, watch.lap()),),
        )

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        return None  # the cache follows by common prefix

    def select(self, rows: Tensor) -> None:
        self._ids = [self._ids[row] for row in rows.tolist()]
        if self._session is not None:
            self._session.select(rows)

    def _draw(self, logits: Tensor, rows: Rows, going: Tensor, sampler: Sampler) -> _Column:
        """Draw one token for each row that goes on: logits [B, V] → tokens [B], probs [B, V], raw [B]."""
        law = sampler.law(logits, rows if sampler.needs_prefixes else [])
        places = going.nonzero()[:, 0]
        keys = torch.tensor([[self._ids[place], len(rows[place])] for place in places.tolist()])
        drawn = sampler.draw(law[places.to(law.device)], keys).cpu()
        tokens = torch.full((len(rows),), -1, dtype=torch.long)
        tokens[places] = drawn
        at = tokens.clamp(min=0).to(logits.device)[:, None]
        raw = (logits.gather(1, at)[:, 0].float() - logits.float().logsumexp(dim=-1)).exp()
        return _Column(tokens, law, raw.cpu())


class _Column:
    """One drafted position of all rows."""

    __slots__ = ("probs", "raw", "tokens")

    def __init__(self, tokens: Tensor, probs: Tensor, raw: Tensor) -> None:
        self.tokens, self.probs, self.raw = tokens, probs, raw
