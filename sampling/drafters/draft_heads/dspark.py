"""A DSpark head: DFlash's pass, and behind it two small heads that read the draft before (*speculators*' `dspark`,
deepseek-ai/DeepSpec).

The Markov head adds to a position's logits what the token before it says: of that token alone (`vanilla`), gated by the
position's state (`gated`), or of all tokens since the last one that the target has read (`rnn`). The confidence head
estimates the chance that a position's draft is accepted from what stands before the draft, so that a chain may end
there and stays exact.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sampling.drafters.draft_heads.dflash import BlockNetwork, DFlashLM, DFlashSession, built
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.proposal import Proposer
from sampling.drafters.registry import DraftRequest, Parts
from sampling.types import Rows


class DSparkNetwork(BlockNetwork):
    """The pass of a DSpark head."""

    def __init__(self, student: DraftHead, pack: bool = True) -> None:
        super().__init__(student, pack)
        trunk = cast(Any, student.model)
        self.markov = trunk.markov_head if self.config.markov else None
        self._onto_ids = self._take(self.markov.markov_w2) if self.markov else None
        self._confidence = trunk.confidence_head if self.config.confidence else None

    @torch.no_grad()
    def bias(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        """Ids [M, k] from the last token to the one before a draft and the states [M, k, H] of the drafts behind them
        → what is added to the last one's logits [M, n]."""
        if self.markov is None:
            return None
        state = states.new_zeros(len(states), self.config.rank)
        first = 0 if self.config.markov == "rnn" else tokens.shape[1] - 1
        for step in range(first, tokens.shape[1]):
            latent, state = self.markov.step(tokens[:, step], states[:, step], state)
        return cast(Tensor, cast(Any, self._onto_ids)(latent))

    @torch.no_grad()
    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        """The chance [M] that the draft behind ids [M], of these states [M, H], is accepted; None: not estimated."""
        if self._confidence is None:
            return None
        if self.config.confidence_with_markov and self.markov is not None:
            states = torch.cat((states, self.markov.markov_w1(tokens)), dim=-1)
        return torch.sigmoid(self._confidence.proj(states)[:, 0])


class DSparkSession(DFlashSession):
    """B rows of a DSpark head."""

    network: DSparkNetwork

    def _before(self, places: list[int], paths: Rows) -> tuple[Tensor, Tensor]:
        """The ids [M, k] before each draft of these paths and the drafts' states [M, k, H]; where the last token's row
        gives no draft, its state stands before them, as in training."""
        lead = self.states.shape[1] - self.drafts
        tokens = torch.tensor([path[:lead] + path for path in paths], device=self.states.device)
        return tokens, self.states[places, : tokens.shape[1]]

    def behind(self, places: list[int], paths: Rows) -> Tensor:
        logits, bias = super().behind(places, paths), self.network.bias(*self._before(places, paths))
        return logits if bias is None else logits + self.cut(bias)

    def confidence(self, places: list[int], paths: Rows) -> list[float] | None:
        tokens, states = self._before(places, paths)
        found = self.network.confidence(tokens[:, -1], states[:, -1])
        return None if found is None else cast("list[float]", found.tolist())


class DSparkLM(DFlashLM):
    """What a DSpark head drafts from."""

    kinds = ("dspark",)
    network_type = DSparkNetwork
    session_type = DSparkSession


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's DSpark head: chains, or trees that grow along the Markov head's order."""
    return built(pair, asked, DSparkLM)
