"""A P-EAGLE head: an EAGLE-3 head that drafts several tokens in one pass (*speculators*' `peagle`).

The usual rows, each a token with the target's states one position before; behind them rows of a mask, each with the
mask's embedding and one learned state in the place of the target's. All are causal. The last token's row gives the
first draft, each mask's row the next one; the masks' rows leave the cache.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sampling.drafters.draft_heads.config import BlockConfig
from sampling.drafters.draft_heads.eagle import FeatureLM, FeatureSession, at
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_heads.sessions import BlockSession
from sampling.drafters.draft_model import ModelDrafter, of_head
from sampling.drafters.proposal import Proposer
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.causal import CausalSession
from sampling.types import Draft, Hidden, Rows


class PEagleNetwork(StudentNetwork):
    """The pass of an EAGLE-3 head; `mask_hidden` [K·G] stands for the states behind the last token."""

    def __init__(self, student: DraftHead, pack: bool = True) -> None:
        super().__init__(student, pack)
        self.mask_hidden = cast(Any, student.model).mask_hidden[0, 0]


class PEagleSession(BlockSession, FeatureSession):
    """B rows of a P-EAGLE head."""

    network: PEagleNetwork

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, N+1, n] logits behind each row and each mask of a draft."""
        return CausalSession.score_reduced(self, rows, draft)

    def _joined(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, T, H] at positions [B, T] with the target's state one position before, or the mask's."""
        before, held = positions - 1, torch.tensor(self.target.held(), device=positions.device)
        states = at(self.target.hidden(self.reads), before).to(embedded)
        mask = before >= held[:, None]
        return self.network.join_target(embedded, torch.where(mask[..., None], self.network.mask_hidden, states))


class PEagleLM(FeatureLM):
    """What a P-EAGLE head drafts from."""

    kinds = ("peagle",)
    network_type = PEagleNetwork

    def __init__(self, student: DraftHead, name: str = "peagle", vocab_size: int | None = None) -> None:
        super().__init__(student, name, vocab_size)
        self.config = cast(BlockConfig, student.config)
        self.block = self.config.drafts

    def _session(self, prompt: Rows, hidden: Hidden, target: CausalSession) -> PEagleSession:
        session = PEagleSession(self.network, prompt, self.vocab_size, False, target)
        session.reads, session.mask, session.drafts = self.config.reads, self.config.mask, self.block
        return session


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's P-EAGLE head: chains, or trees by the probabilities of its positions."""
    made = pair.head("peagle", lambda head: ModelDrafter(PEagleLM(head, "peagle", pair.target.vocab_size)))
    return of_head(made.lm, asked)
