"""An EAGLE head, as a chain and as a dynamic tree: each token enters with its target's hidden state one
position before (EAGLE, Li et al., arXiv 2401.15077), the last one or several (EAGLE-3, Li et al., arXiv 2503.01840).

Two kinds draft so: `feature`, trained here, and `eagle`, as others publish it, to which token 0 is unknown.

Where the target's state is not there yet, the draft head's own state stands in: after a round one pass
reads all newly committed tokens with their true features and gives the first draft, then each pass reads the
draft before it, or a level of a tree of drafts. What was computed with stand-ins is dropped when
the target has moved (sampling/drafters/draft_heads/sessions.py), what belongs to a tree with the next round.
The prompt is read as any model's is: the loop feeds the session in pieces. It drafts only: its own states are
no target's, so it reviews nothing. Knows nothing of how the target computes its states.

Its session grows trees too (EAGLE-2, Li et al., arXiv 2406.16858): :meth:`FeatureSession.grow` computes a level of
nodes in one pass.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sampling.drafters.draft_heads.modules import NONE, OWN, THEIRS, DraftHead
from sampling.drafters.draft_heads.sessions import FollowingLM, FollowingSession
from sampling.drafters.draft_model import ModelDrafter, of_head
from sampling.drafters.proposal import Proposer
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.causal import CausalSession
from sampling.models.masks import additive, places
from sampling.rows import common_prefix
from sampling.types import Draft, Hidden, Rows, states_of
from utils.errors import UserError


class FeatureDrafter(ModelDrafter):
    """Draft chains from an EAGLE head. The target's session must be opened with `hidden=True`.

    Drafts, their distributions and limits are those of :class:`ModelDrafter`. Raises UserError for a draft head of
    another kind and, in `start`, for a target's session that keeps no hidden states. `vocab_size`: use only the first
    so many ids.
    """

    def __init__(self, student: DraftHead, name: str = "feature", vocab_size: int | None = None) -> None:
        super().__init__(FeatureLM(student, name, vocab_size))


class FeatureLM(FollowingLM):
    """What `FeatureDrafter` drafts from: opens sessions that feed tokens with states."""

    kinds: tuple[str, ...] = ("feature", "eagle")
    reviews = False

    def __init__(self, student: DraftHead, name: str, vocab_size: int | None = None) -> None:
        super().__init__(student, name, vocab_size)
        self.reads_hidden = student.config.reads or (-1,)

    def _session(self, prompt: Rows, hidden: Hidden, target: CausalSession) -> FeatureSession:
        session = FeatureSession(self.network, prompt, self.vocab_size, True, target)
        session.reads = states_of(self.reads_hidden)
        return session


class FeatureSession(FollowingSession):
    """B rows of an EAGLE head. The states it keeps are its own, as the network returns them."""

    reads: tuple[int, ...] = (-1,)  # of its target's states

    def settled(self, view: int) -> int:
        """Position p reads state p − 1, which the target has if p ≤ view."""
        return view + 1

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, 1, n] logits behind each row. Takes more than one pass if a row is over a token ahead of its target.

        Raises UserError for a draft: there is nothing to review with.
        """
        if draft.tokens.shape[1]:
            raise UserError("an EAGLE head cannot review drafts: it has no states but its target's")
        if len(rows) == 1 and self.network.compiled is not None:
            return self._behind(rows[0])
        cached, valid = self.rollback(rows), self.target.held()
        # Each pass may read its own states only as far as earlier passes made them.
        done = [min(length, len(row) - 1) for length, row in zip(cached, rows, strict=True)]
        ends = [max(count, held) + 1 for count, held in zip(done, valid, strict=True)]
        while True:
            logits = super().score_reduced([row[:end] for row, end in zip(rows, ends, strict=True)], draft)
            if all(end >= len(row) for row, end in zip(rows, ends, strict=True)):
                return logits
            ends = [end + 1 for end in ends]

    def _behind(self, row: list[int]) -> Tensor:
        """:meth:`score_reduced` of one row by the compiled step, without tensors of a few elements."""
        self._settle()
        (valid,), (tokens,), hidden = self.target.held(), self._tokens, self._hidden
        assert hidden is not None
        if self._views[0] != valid:
            del tokens[self.settled(self._views[0]) :]
        done = min(common_prefix(tokens, row), len(row) - 1)
        self._crop([done])
        theirs = self.target.hidden(self.reads)[0] if valid else None
        try:
            while done < len(row):
                end = min(len(row), max(done, valid) + 1)
                logits = self.network.compiled.of_one_row(row[done:end], done, theirs, valid, hidden, self._cache)
                tokens += row[done:end]
                done = end
        except BaseException:
            self._reset(1)
            raise
        self._nodes, self._views = None, [valid]
        return self.cut(logits[None, None])

    @torch.inference_mode()
    def grow(self, tokens: list[int], parents: list[int]) -> Tensor:
        """[M, n] logits behind the last M of N nodes of a tree behind the one row just scored; the others are here.

        `parents` [N] are places in `tokens`, -1 = the row. A node reads its parent's own state and sees the row and its
        path. No two of the M may be above each other. The next `score_reduced` or `sync` drops all of them. (Of a draft
        head with a window the nodes beside count as well.) An error in the pass leaves an empty cache.
        """
        if not self._nodes or not self._nodes[0]:
            self._settle()
            self._nodes, self._fed, self._chain = [[]], [[]], False
        here, known = len(self._tokens[0]), len(self._nodes[0])
        above = torch.tensor([here + parent for parent in parents[known:]], device=self.device)
        try:
            logits = self._level(tokens, torch.tensor(parents), above, known, here)
        except BaseException:
            self._reset(1)
            raise
        self._nodes[0] += [(token, here + place) for place, token in enumerate(tokens[known:], start=known)]
        return self.cut(logits)

    def _level(self, tokens: list[int], parents: Tensor, above: Tensor, known: int, here: int) -> Tensor:
        """The pass over the nodes from `known` on, whose parents' states lie in the slots `above` [M]."""
        assert self._hidden is not None
        network = self.network
        positions, seen = places([here], [[]], parents, here, 0, len(tokens))
        if network.compiled is not None:
            base, size = self._hidden.view(), self._hidden.view().stride(2)
            states = base.data_ptr() + base.element_size() * size * above.numpy()
            kinds, mask = np.full(len(above), OWN), additive(seen[:, known:], network)
            ids = torch.tensor([tokens[known:]])
            logits, own = network.compiled(ids, positions[:, known:], mask, self._cache, len(above), kinds, states)
            self._hidden.append(own[:, None])
            return cast(Tensor, logits[0])
        embedded = network.embed(torch.tensor([tokens[known:]], device=self.device))
        joined = network.join_own(embedded, self._hidden.view()[:, 0].index_select(1, above))
        own = network.run(joined, positions[:, known:].to(self.device), additive(seen[:, known:], network), self._cache)
        self._hidden.append(own[:, None])
        return network.answer(own, own.shape[1])[0][0]

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        network = self.network
        if network.compiled is not None:
            kinds, states, held = self._standing(positions.numpy() - 1)
            found: tuple[Tensor, Tensor] = network.compiled(ids, positions, mask, self._cache, keep, kinds, states)
            del held  # what the addresses point to
            return found
        own = network.run(self._joined(network.embed(ids), positions), positions, mask, self._cache)
        return network.answer(own, keep)[0], own

    def _standing(self, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
        """Whose state stands at positions [B, T], −1 for nobody's, and where it lies: [B · T] each."""
        theirs = self.target.hidden(self.reads).to("cpu", torch.float32)
        own = None if self._hidden is None or self._hidden.data is None else self._hidden.data[:, 0]
        valid, rows = np.array(self.target.held())[:, None], np.arange(len(before))[:, None]
        kinds = np.where(before < 0, NONE, np.where(before < valid, THEIRS, OWN))
        states = _addresses(theirs, rows, before)
        if own is not None:
            states = np.where(kinds == OWN, _addresses(own, rows, before), states)
        return kinds.reshape(-1), states.reshape(-1), (theirs, own)

    def _joined(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, T, H] at positions [B, T] with the state one position before each of them."""
        valid = self.target.held()
        if len(valid) == 1:
            return self._joined_row(embedded, int(positions[0, 0]), valid[0])
        before = positions - 1
        theirs = before < torch.tensor(valid, device=positions.device)[:, None]
        x = self.network.join_none(embedded)
        if bool((known := theirs & (before >= 0)).any()):
            joined = self.network.join_target(embedded, at(self.target.hidden(self.reads), before))
            x = torch.where(known[..., None], joined, x)
        if not bool(theirs.all()):
            joined = self.network.join_own(embedded, at(self.hidden(), before))
            x = torch.where(theirs[..., None], x, joined)
        return x

    def _joined_row(self, embedded: Tensor, start: int, valid: int) -> Tensor:
        """The same for one row, whose tokens stand at `start`, start + 1 …: one of three cases each."""
        network, count = self.network, embedded.shape[1]
        if start > valid:
            return network.join_own(embedded, self.hidden()[:, start - 1 : start])
        if start:
            return network.join_target(embedded, self.target.hidden(self.reads)[:, start - 1 : start - 1 + count])
        first = network.join_none(embedded[:, :1])
        if count == 1:
            return first
        rest = network.join_target(embedded[:, 1:], self.target.hidden(self.reads)[:, : count - 1])
        return torch.cat((first, rest), dim=1)


def _addresses(states: Tensor, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Where the numbers of states [B, S, D] begin at rows and places [B, T]."""
    row, place, _ = states.stride()
    found: np.ndarray = states.data_ptr() + states.element_size() * (row * rows + place * np.maximum(places, 0))
    return found


def at(states: Tensor, places: Tensor) -> Tensor:
    """states [B, S, D] at places [B, T], clamped to what is there: [B, T, D]."""
    index = places.clamp(0, states.shape[1] - 1).to(states.device)
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))


def build(pair: Parts, asked: DraftRequest) -> Proposer:
    """The pair's EAGLE head: chains, or dynamic trees."""

    def made(student: DraftHead) -> ModelDrafter:
        return FeatureDrafter(student, student.config.kind, pair.target.vocab_size)

    return of_head(pair.head(asked.word, made).lm, asked)
