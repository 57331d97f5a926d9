"""One drafter where it has something to say, another where it has not.

For each row the first drafter proposes; rows that it leaves empty are drafted for by the second. So a match
that costs nothing is followed where there is one, and a trained drafter earns its time where there is none. How sure
the first must be is its own business (`TablesDrafter(least=…)`). Knows neither of the two.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.types import Draft, Drafter, Rows, Sampler, Session, Verdict


class TakeOverDrafter:
    """`first`, and `then` for the rows that `first` proposes nothing for. `source` is [B, N]."""

    def __init__(self, first: Drafter, then: Drafter) -> None:
        self.first, self.then = first, then
        self.needs_hidden = any(getattr(one, "needs_hidden", False) for one in (first, then))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.first.names, *self.then.names)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (*self.first.sessions, *self.then.sessions)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self.first.start(prompt, target, verifier)
        self.then.start(prompt, target, verifier)

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """A chain for each row, of one drafter alone."""
        draft = self.first.propose(rows, k, sampler)
        spoken = (draft.tokens >= 0).any(dim=1).tolist()
        rest = [0 if has else want for has, want in zip(spoken, k, strict=True)]
        if not any(rest):
            return draft
        other = self.then.propose(rows, rest, sampler)
        other = replace(other, source=_sources(other) + len(self.first.names), calls=(*draft.calls, *other.calls))
        return other if not any(spoken) else _merged(draft, other, torch.tensor(spoken))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        self.first.observe(rows, draft, verdict)
        self.then.observe(rows, draft, verdict)

    def select(self, rows: Tensor) -> None:
        self.first.select(rows)
        self.then.select(rows)


def _sources(draft: Draft) -> Tensor:
    """[B, N], also where the drafter has one name and gives none."""
    return torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)


def _merged(one: Draft, other: Draft, spoken: Tensor) -> Draft:
    """Rows of `one` where it has spoken [B], else of `other`; point masses become one-hot laws beside laws."""
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    chosen = spoken[:, None]
    tokens = torch.where(chosen, _wide(one.tokens, width, -1), _wide(other.tokens, width, -1))
    source = torch.where(chosen, _wide(_sources(one), width, 0), _wide(_sources(other), width, 0))
    raw = torch.where(chosen, _wide(_raw(one), width, 1.0), _wide(_raw(other), width, 1.0))
    return Draft(tokens, _laws(one, other, tokens, chosen), raw, source=source, calls=other.calls)


def _laws(one: Draft, other: Draft, tokens: Tensor, chosen: Tensor) -> Tensor | None:
    known = one.probs if one.probs is not None else other.probs
    if known is None:
        return None
    masses = F.one_hot(tokens.clamp(min=0), known.shape[-1]).to(known)
    ours, theirs = (
        masses if draft.probs is None else F.pad(draft.probs, (0, 0, 0, tokens.shape[1] - draft.probs.shape[1]))
        for draft in (one, other)
    )
    return torch.where(chosen[..., None], ours, theirs)


def _raw(draft: Draft) -> Tensor:
    return torch.ones(draft.tokens.shape) if draft.raw is None else draft.raw.float()


def _wide(values: Tensor, width: int, fill: float) -> Tensor:
    return F.pad(values, (0, width - values.shape[1]), value=fill)
