"""A DFlash head: one pass drafts a whole block (z-lab/dflash; *speculators*' `dflash`).

The rows of a block are the last token, which the target has not read, and masks behind it. Every layer lets them attend
to the states of the target, fused to one a token, and to each other; a position's draft is drawn without looking at the
drafts before it. The keys and values of the target's states stay in the cache, those of the block's rows do not.

DSpark and DFlash2 are this network with more behind it (dspark.py, dflash2.py).
Shapes: B rows, C positions of context that are new, R rows of a block, H the head's width, n ids of its output layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sampling.drafters.draft_heads.config import BlockConfig
from sampling.drafters.draft_heads.eagle import at
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_heads.sessions import BlockSession, FollowingLM, FollowingSession
from sampling.drafters.draft_model import ModelDrafter, of_head
from sampling.drafters.proposal import Proposer
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.causal import CausalSession
from sampling.models.llama import norm_of
from sampling.models.masks import additive
from sampling.types import Draft, Hidden, Rows


class BlockNetwork(StudentNetwork):
    """The pass of a block head over the target's states and the rows of a block."""

    def __init__(self, student: DraftHead, pack: bool = True) -> None:
        super().__init__(student, pack)
        self.config, trunk = cast(BlockConfig, student.config), cast(Any, student.model)
        self._fc, self._hidden_norm = self._take(trunk.fc), norm_of(trunk.hidden_norm, self._frozen)
        self.width = student.lm_head.out_features

    def remember(self, features: Tensor, positions: Tensor, cache: Any) -> None:
        """Append the keys and values of the target's states [B, C, K·G] at positions [B, C] to the cache."""
        x = self._hidden_norm(self._fc(features.to(self.device, self.dtype)))
        rotation = self._angles(positions, x)
        for index, layer in enumerate(self._layers):
            layer.remember(x, rotation, cache, index)

    def block(self, ids: Tensor, positions: Tensor, seen: dict[int, Tensor | None], cache: Any) -> Tensor:
        """The rows ids [B, R] at positions [B, R] through all layers → normed states [B, R, H]; `seen`: the mask by
        window."""
        x = self.embed(ids)
        rotation = self._angles(positions, x)
        for index, layer in enumerate(self._layers):
            x = layer.mlp(layer.attend(x, rotation, seen[self.config.windows[index]], cache, index))
        return self._norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """Normed states [..., H] → logits [..., n]."""
        return cast(Tensor, self._head(states))


class DFlashSession(BlockSession, FollowingSession):
    """B rows of a DFlash head. Its cache holds what the target has read, and nothing else between passes."""

    network: BlockNetwork
    reads: tuple[int, ...]
    states: Tensor  # [B, R, H] of the last block

    def settled(self, view: int) -> int:
        """Position p reads state p."""
        return view

    def masks(self, count: int) -> int:
        """The rows of a block see each other: it always has as many as it was trained with."""
        return self.network.config.masks

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, N+1, n] logits of the last N + 1 rows of the block: the last token of each row and a draft of masks."""
        logits = super().score_reduced(rows, draft)
        self._settle([[] for _ in rows])
        self._crop([min(pair) for pair in zip(map(len, rows), self.target.held(), strict=True)])
        return logits

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        network, held = self.network, torch.tensor(self.target.held(), device=positions.device)
        count = keep - 1 + max(0, int((positions[:, -keep] + 1 - held).max()))  # rows of the block; none in a prompt
        new, before = ids.shape[1] - count, self._cache.length
        if new:
            network.remember(at(self.target.hidden(self.reads), positions[:, :new]), positions[:, :new], self._cache)
        if not count:
            return torch.zeros(len(ids), keep, network.width, device=ids.device, dtype=network.dtype), None
        seen = self._seen(positions, mask, new, before)
        states = network.block(ids[:, new:], positions[:, new:], seen, self._cache)
        self.states = states[:, -keep:]
        return network.logits(self.states), None

    def _seen(self, positions: Tensor, mask: Tensor | None, new: int, before: int) -> dict[int, Tensor | None]:
        """By window: which slots the rows of a block, those of `positions` from `new` on, see; None for all."""
        rows, count = len(positions), positions.shape[1] - new
        slots = before + positions.shape[1]
        open_ = torch.ones(rows, count, slots, dtype=torch.bool)
        if mask is not None:
            open_ = mask[:, 0, new:].cpu() == 0
        where = torch.cat((torch.arange(before).expand(rows, -1), positions.cpu()), dim=1)
        found: dict[int, Tensor | None] = {}
        for window in {*self.network.config.windows}:
            seen = open_.clone()
            seen[..., -count:] = True
            if window:
                seen &= (where >= positions[:, new : new + 1].cpu() - window)[:, None]
                if self.network.config.causal:
                    seen[..., -count:] = torch.ones(count, count).tril().bool()
            found[window] = None if bool(seen.all()) else additive(seen, self.network)
        return found


class DFlashLM(FollowingLM):
    """What a DFlash head drafts from."""

    kinds: tuple[str, ...] = ("dflash",)
    reviews = False
    network_type = BlockNetwork
    session_type = DFlashSession

    def __init__(self, student: DraftHead, name: str = "dflash", vocab_size: int | None = None) -> None:
        super().__init__(student, name, vocab_size)
        config = cast(BlockConfig, student.config)
        self.reads_hidden, self.block = config.reads, config.drafts

    def _session(self, prompt: Rows, hidden: Hidden, target: CausalSession) -> DFlashSession:
        session = self.session_type(self.network, prompt, self.vocab_size, False, target)
        config = cast(BlockNetwork, self.network).config
        session.reads, session.mask, session.drafts = config.reads, config.mask, config.drafts
        return session


def built(pair: Parts, asked: DraftRequest, lm: type[DFlashLM]) -> Proposer:
    """A drafter on the pair's head of this class."""
    (kind,) = lm.kinds
    made = pair.head(kind, lambda head: ModelDrafter(lm(head, kind, pair.target.vocab_size)))
    return of_head(made.lm, asked)


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's DFlash head: chains, or trees by the probabilities of its positions (DDTree)."""
    return built(pair, asked, DFlashLM)
