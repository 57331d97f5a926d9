"""An EAGLE head, for chains and dynamic trees: each token enters with its target's hidden state one position before,
that of the last layer (EAGLE, Li et al., arXiv 2401.15077) or of several layers (EAGLE-3, Li et al., arXiv 2503.01840).

Two kinds draft this way: `feature`, a kind of this project, and `eagle`, the published one, which cannot see token 0.

Until the target's state is known, the draft head's own state stands in: after a round one pass reads all newly
committed tokens with the target's states and yields the first draft, then each pass reads the draft before it, or a
level of a tree of drafts. Positions computed with stand-ins are dropped when the target has moved
(sampling/drafters/draft_heads/sessions.py), tree nodes with the next round. The loop feeds the prompt in pieces, as for
any model. The head cannot review drafts: its own states are not the target's. Knows nothing of how the target computes
its states.

Its session grows trees too (EAGLE-2, Li et al., arXiv 2406.16858): :meth:`FeatureSession.grow` computes a level of
nodes in one pass.
"""

import numpy as np
import torch
from torch import Tensor

from sampling.drafters.draft_heads.modules import NONE, OWN, THEIRS, DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_heads.sessions import FollowingLM, FollowingSession
from sampling.drafters.draft_model import ModelDrafter
from sampling.models.cache import Buffer, RowStates, additive, places
from sampling.models.causal import Pending
from sampling.rows import common_prefix, put
from sampling.types import Draft, DraftTree, Hidden, Rows
from sampling.vocabulary import likeliest_at
from utils.kernels.bindings import WALKED


class FeatureSession(FollowingSession):
    """B rows of an EAGLE head. The states it keeps are its own, as the network returns them."""

    _hidden: Buffer  # never None, since FeatureLM.keeps is True
    _logits: Tensor | None = None  # memory for the logits of `likeliest`

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """Return [B, 1, n] logits after each row, in several passes if a row is more than a token ahead of its target;
        `draft` is empty."""
        if len(rows) == 1 and self.network.compiled is not None:
            return self.cut(self._score_row(rows[0]))
        # A pass may read only own states of earlier passes.
        done = [min(length, len(row) - 1) for length, row in zip(self.rollback(rows), rows, strict=True)]
        ends = [max(count, held) + 1 for count, held in zip(done, self.target.held(), strict=True)]
        while True:
            logits = super().score_reduced([row[:end] for row, end in zip(rows, ends, strict=True)], draft)
            if all(end >= len(row) for row, end in zip(rows, ends, strict=True)):
                return logits
            ends = [end + 1 for end in ends]

    def likeliest(self, row: list[int], count: int) -> dict[int, float] | None:
        if self.network.compiled is None or self.columns % WALKED:
            return None
        self._logits = self._score_row(row, self._logits)
        return likeliest_at(self._logits.data_ptr(), self.columns, count)

    def _score_row(self, row: list[int], into: Tensor | None = None) -> Tensor:
        """Return the logits [1, 1, n] of :meth:`score_reduced` for one row, by the compiled step and without tensors of
        a few elements; they are written to `into` if that is given."""
        self._settle()
        (valid,), (tokens,), hidden = self.target.held(), self._tokens, self._hidden
        if self._views[0] != valid:
            del tokens[self.final_positions(self._views[0]) :]
        done = min(common_prefix(tokens, row), len(row) - 1)
        self._crop([done])
        theirs = self.target.states_of_row(self.lm.reads, max(0, done - 1)) if valid else RowStates()
        try:
            while done < len(row):
                end = min(len(row), max(done, valid) + 1)
                new = row[done:end]
                logits: Tensor = self.network.compiled.of_one_row(new, done, theirs, valid, hidden, self._cache, into)
                tokens += new
                done = end
        except BaseException:
            self._reset(1)
            raise
        self._pending, self._views = None, [valid]
        return logits

    can_grow = True

    @torch.inference_mode()
    def grow(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Return [M, n] logits after the last M of N nodes of a tree that follows the row just scored.

        The first N − M nodes are cached. `parents` [N] are indices in `tokens`, -1 = the row. A node reads its parent's
        own state and sees the row and its path. No two of the M may be on one path. The next `score_reduced` or
        `rollback` drops all of them. (In a window, sibling nodes count as well.) An error in the pass leaves an empty
        cache.
        """
        if not self._pending or not self._pending[0].tree.tokens:
            self._settle()
        tree, length = DraftTree.of(tokens, parents), len(self._tokens[0])
        known = len(self._pending[0].tree.tokens) if self._pending else 0
        positions, seen = places([length], [[]], [tree], length, 0, len(tokens))
        above = torch.tensor([[length + parent for parent in parents[known:]]])
        ids, mask = put([tokens[known:]], self.device), additive(seen[:, known:], self.network)
        try:
            logits, own = self._run(ids, positions[:, known:], mask, len(parents) - known, above)
        except BaseException:
            self._reset(1)
            raise
        self._hidden.append(own[:, None])
        self._pending = [Pending(0, length, tree, False)]
        return self.cut(logits[0])

    def _run(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int, above: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the pass; `above` [1, T]: the slots of the own states that nodes read; None: tokens read those of the
        position before."""
        network = self.network
        if network.compiled is not None:
            if above is None:
                kinds, states, held = self._standing(positions.numpy() - 1)
            else:
                own = self._hidden.view()[:, 0]
                held = own, None
                kinds, states = np.full(keep, OWN), _addresses(own, np.zeros(1, np.int64), above.numpy()[0])
            result: tuple[Tensor, Tensor] = network.compiled(ids, positions, mask, self._cache, keep, kinds, states)
            del held  # the addresses point into it
            return result
        x = self._joined(network.embed(ids), positions - 1 if above is None else above)
        own = network.run(x, put(positions, self.device), mask, self._cache)
        return network.answer(own, keep)[0], own

    def _standing(self, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[Tensor, Tensor | None]]:
        """Return the kind of the state at positions [B, T] (-1: none) and its address, [B · T] each, and the
        tensors that hold them."""
        theirs = self.target.hidden(self.lm.reads).to("cpu", torch.float32)
        own = None if self._hidden.data is None else self._hidden.data[:, 0]
        valid, rows = np.array(self.target.held())[:, None], np.arange(len(before))[:, None]
        kinds = np.where(before < 0, NONE, np.where(before < valid, THEIRS, OWN))
        states = _addresses(theirs, rows, before)
        if own is not None:
            states = np.where(kinds == OWN, _addresses(own, rows, before), states)
        return kinds.reshape(-1), states.reshape(-1), (theirs, own)

    def _joined(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Join tokens [B, T, H] with the states in slots [B, T]: the target's, or where it has none the head's own."""
        held = torch.tensor(self.target.held())[:, None]
        theirs, own = (before >= 0) & (before < held), before >= held
        x = self.network.join_none(embedded)
        if bool(theirs.any()):
            joined = self.network.join_target(embedded, at(self.target.hidden(self.lm.reads), before))
            x = torch.where(put(theirs[..., None], x.device), joined, x)
        if bool(own.any()):
            joined = self.network.join_own(embedded, at(self._hidden.view()[:, 0], before))
            x = torch.where(put(own[..., None], x.device), joined, x)
        return x


class FeatureLM(FollowingLM):
    """An EAGLE head as an LM: its sessions feed tokens with states."""

    parts = dict.fromkeys(("feature", "eagle"), (StudentNetwork, FeatureSession))
    reviews = False
    reads_hidden: Hidden = (-1,)
    keeps = True


class FeatureDrafter(ModelDrafter):
    """A drafter of chains from an EAGLE head. The target's session must be opened with `hidden=True`.

    Drafts, their distributions and limits are those of :class:`ModelDrafter`. Raises UserError for a draft head of
    another kind and, in `start`, for a target's session that keeps no hidden states. `vocab_size`: the number of ids
    that may be drafted.
    """

    def __init__(self, student: DraftHead, name: str = "feature", vocab_size: int | None = None) -> None:
        super().__init__(FeatureLM(student, name, vocab_size))


def _addresses(states: Tensor, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the addresses of states [B, S, D] at rows and places [B, T]."""
    row, slot, _ = states.stride()
    return np.asarray(states.data_ptr() + states.element_size() * (row * rows + slot * np.maximum(places, 0)))


def at(states: Tensor, places: Tensor) -> Tensor:
    """Return states [B, S, D] at places [B, T], clamped to 0 … S − 1: [B, T, D]."""
    index = put(places.clamp(0, states.shape[1] - 1), states.device)
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
