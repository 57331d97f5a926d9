"""A DFlash2 head: DFlash's pass with a convolution over the block's rows around each sublayer, and a selector that
scores a position's likeliest tokens again by the token before (*speculators*' `dflash2`, z-lab/dflash).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from sampling.drafters.draft_heads.dflash import BlockNetwork, DFlashLM, DFlashSession, built
from sampling.drafters.draft_heads.modules import Convolution, DraftHead
from sampling.drafters.proposal import Proposer
from sampling.drafters.registry import DraftRequest, Parts
from sampling.types import Rows

Map = Callable[[Tensor], Tensor]


class Around:
    """A convolution before a sublayer and after it; the coefficients of both follow from the sublayer's input."""

    def __init__(self, convolution: Convolution, before: Map, after: Map) -> None:
        self._convolution, self._before, self._after = convolution, before, after

    def enter(self, x: Tensor) -> Tensor:
        """The normed and mixed input of a sublayer."""
        x = self._before(x)
        first, self._last = self._convolution.coefficients(x)
        return cast(Tensor, self._convolution(x, first))

    def leave(self, x: Tensor) -> Tensor:
        """The mixed output of the sublayer that was entered last."""
        return cast(Tensor, self._convolution(self._after(x), self._last))


class DFlash2Network(BlockNetwork):
    """The pass of a DFlash2 head."""

    def __init__(self, student: DraftHead, pack: bool = True) -> None:
        super().__init__(student, pack)
        trunk = cast(Any, student.model)
        for index, (layer, own) in enumerate(zip(self._layers, trunk.layers, strict=True)):
            mixed = Around(own.attention_conv, layer.before, layer.o)
            further = Around(own.mlp_conv, layer.after, layer.down)
            ends: Any = {"o": mixed.leave, "down": further.leave}
            self._layers[index] = replace(layer, before=mixed.enter, after=further.enter, **ends)
        self.selector = trunk.candidate_selector

    @torch.no_grad()
    def selected(self, logits: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        """Logits [M, n], the ids before [M] and states [M, H] → the scores of the likeliest ids, −∞ elsewhere."""
        found = logits.topk(min(self.config.choices, logits.shape[-1]), dim=-1)
        scores = found.values + self.selector(tokens, states, found.indices)
        return torch.full_like(logits, float("-inf")).scatter(1, found.indices, scores)


class DFlash2Session(DFlashSession):
    """B rows of a DFlash2 head."""

    network: DFlash2Network

    def behind(self, places: list[int], paths: Rows) -> Tensor:
        states = self.states[:, -self.drafts :][places, len(paths[0]) - 1]
        last = torch.tensor([path[-1] for path in paths], device=states.device)
        return self.network.selected(super().behind(places, paths), last, states)


class DFlash2LM(DFlashLM):
    """What a DFlash2 head drafts from."""

    kinds = ("dflash2",)
    network_type = DFlash2Network
    session_type = DFlash2Session


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's DFlash2 head: chains, or trees of the selector's candidates."""
    return built(pair, asked, DFlash2LM)
