"""A PARD model: a small model with a mask's token, trained to draft several tokens in one pass (amd/PARD-…).

After the row it reads masks; each is a row of an ordinary causal pass, so that their number changes no logits. It reads
nothing of its target: one model drafts for all targets with its vocabulary.
"""

from __future__ import annotations

from typing import Any

from sampling.drafters.draft_heads.sessions import BlockSession
from sampling.models.causal import CausalLM
from sampling.types import Hidden, Rows, Session

DRAFTS = 12  # tokens of a block at most, as its authors have it


class PardLM(CausalLM):
    """A PARD model as an LM; `mask` is the mask's id."""

    session_type = BlockSession

    def __init__(self, model: Any, mask: int, name: str = "drafter", vocab_size: int | None = None) -> None:
        super().__init__(model, name, vocab_size)
        self.mask, self.block = mask, DRAFTS

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> BlockSession:
        """Open a session as :meth:`CausalLM.open` does."""
        session = super().open(prompt, previous=previous, target=target, hidden=hidden)
        assert isinstance(session, BlockSession)
        session.mask, session.drafts = self.mask, self.block
        return session


def mask_of(model: Any) -> int | None:
    """Return the mask's id if a model's configuration has one (`pard_token`); None for any other model."""
    mask = getattr(getattr(model, "config", None), "pard_token", None)
    return mask if isinstance(mask, int) else None
