"""A P-EAGLE head: an EAGLE-3 head that drafts several tokens in one pass (*speculators*' `peagle`).

Its rows are tokens, each with the target's states one position before, and then masks, each with the mask's embedding
and one learned state instead of the target's. All rows are causal. The last token's row yields the first draft, each
mask's row the next one; the masks' rows leave the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.drafters.draft_heads.eagle import FeatureLM, FeatureSession, at
from sampling.drafters.draft_heads.sessions import BlockSession
from sampling.models.causal import CausalSession
from sampling.transfers import put
from sampling.types import Draft, Rows


class PEagleSession(BlockSession, FeatureSession):
    """B rows of a P-EAGLE head."""

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """Return [B, N+1, n] logits after each row and each mask of a draft."""
        return CausalSession.score_reduced(self, rows, draft)

    def _joined(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Join tokens [B, T, H] at positions [B, T] with the target's state one position before, or the mask's."""
        before, held = positions - 1, torch.tensor(self.target.held())
        states = at(self.target.hidden(self.reads), before).to(embedded)
        mask = put((before >= held[:, None])[..., None], self.device)
        return self.network.join_target(embedded, torch.where(mask, self.network.mask_hidden, states))


class PEagleLM(FeatureLM):
    """A P-EAGLE head as an LM."""

    kinds = ("peagle",)
    session_type = PEagleSession
    keeps = False
