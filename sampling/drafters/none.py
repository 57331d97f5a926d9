"""No drafts: with this drafter the loop is plain autoregressive decoding."""

from __future__ import annotations

from torch import Tensor

from sampling.types import Draft, Rows, Sampler, Session, Verdict


class NoDrafter:
    """Proposes nothing."""

    names: tuple[str, ...] = ()
    sessions: tuple[Session, ...] = ()

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        return None

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        return Draft.empty(len(rows))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        return None

    def select(self, rows: Tensor) -> None:
        return None
