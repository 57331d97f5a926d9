"""A PARD model: a small model with a mask's token, trained to draft several tokens in one pass (amd/PARD-…).

Behind the row it reads masks; each is a row of an ordinary causal pass, so fewer of them change nothing, and a model of
a family drafts for all targets with its vocabulary. Nothing of it is the target's.
"""

from __future__ import annotations

from typing import Any

from sampling.drafters.draft_heads.sessions import BlockSession
from sampling.models.causal import CausalLM
from sampling.types import Hidden, Rows, Session

DRAFTS = 12  # tokens of a block at most: its authors' figure


class PardLM(CausalLM):
    """A PARD model by name; `mask` is the mask's id."""

    session_type = BlockSession

    def __init__(self, model: Any, mask: int, name: str = "drafter", vocab_size: int | None = None) -> None:
        super().__init__(model, name, vocab_size)
        self.mask, self.block = mask, DRAFTS

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> BlockSession:
        """See :meth:`CausalLM.open`."""
        session = super().open(prompt, previous=previous, target=target, hidden=hidden)
        assert isinstance(session, BlockSession)
        session.mask, session.drafts = self.mask, self.block
        return session


def mask_of(model: Any) -> int | None:
    """The mask's id where a model's configuration has one (`pard_token`); None for any other model."""
    mask = getattr(getattr(model, "config", None), "pard_token", None)
    return mask if isinstance(mask, int) else None
