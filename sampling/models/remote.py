"""A target that runs in a server: each round's draft is scored by one request. Greedy only; no caches, no text.

Logits are the server's log-probabilities where it gives them; what it leaves unsaid is shared out evenly among the
other ids, so that probabilities of those it names are right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sampling.types import LM, Draft, Hidden, Rows, Session
from utils.errors import UserError
from utils.remote.scoring import Ranked, Score

_LEAST = 1e-9  # probability that is left for all ids which the server does not name, at least


class RemoteLM(LM):
    """A server's model; satisfies :class:`sampling.types.LM`.

    Args:
        scorer: asks the server; None where its token ids are not known, and nothing can be scored.
        vocab_size: ids that may be said.
    """

    takes_trees = False

    def __init__(self, scorer: Score | None, vocab_size: int = 0, context: int = 1 << 30, name: str = "target") -> None:
        self.scorer, self.vocab_size, self.context, self.name = scorer, vocab_size, context, name

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> RemoteSession:
        """A session of one row; UserError for several, and where hidden states are asked for."""
        if self.scorer is None:
            raise UserError(f"{self.name} answers in text: its tokens cannot be scored")
        if hidden:
            raise UserError(f"{self.name} runs in a server: it has no hidden states for a drafter to read")
        if len(prompt) != 1:
            raise UserError(f"{self.name} runs in a server: one prompt at a time, got {len(prompt)}")
        return RemoteSession(self.scorer, prompt, self.vocab_size, self.name)


class RemoteSession(Session):
    """One row; satisfies :class:`sampling.types.Session`. The server keeps what cache it likes."""

    def __init__(self, scorer: Score, prompt: Rows, vocab_size: int, name: str) -> None:
        self._scorer, self.initial, self.vocab_size, self._name = scorer, prompt, vocab_size, name
        self.described = f"{name} runs in a server: it"

    takes_trees = False

    def rollback(self, rows: Rows) -> list[int]:
        """Nothing is read ahead: the first request reads the prompt."""
        return [len(row) - 1 for row in rows]

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[1, N+1, V] by one request."""
        drafted: list[int] = draft.tokens[0].tolist()
        scored = self._scorer([*rows[0], *drafted], len(drafted))
        return torch.stack([self._logits(place) for place in scored])[None]

    def _logits(self, place: Ranked) -> Tensor:
        known = {token: value for token, value in place.items() if 0 <= token < self.vocab_size}
        if not known:
            raise UserError(f"{self._name} names no token of this vocabulary of {self.vocab_size}")
        left = max(_LEAST, 1 - sum(map(math.exp, known.values())))
        rest = math.log(left / max(1, self.vocab_size - len(known)))
        logits = torch.full((self.vocab_size,), rest)
        for token, value in known.items():
            logits[token] = value
        return logits

    def select(self, rows: Tensor) -> None:
        return None  # there is one row

    def fork(self) -> RemoteSession:
        return RemoteSession(self._scorer, self.initial, self.vocab_size, self._name)
