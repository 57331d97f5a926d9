"""Sessions of students that read their target's session while they run. Knows no kind of student.

What such a student computes at a position depends on how much of its target's state was there. A position
is *settled* if it was computed with all it may ever see; the others (drafted ones) are kept as long as the
target stands still and computed anew as soon as it has moved.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from sampling.drafters.draft_heads.modules import Student
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.models.causal import CausalLM, CausalSession
from sampling.types import Rows, Session
from utils.errors import UserError


class Readable(Session, Protocol):
    """A target's session whose cache can be read."""

    network: object

    @property
    def keeps_hidden(self) -> bool: ...
    def held(self) -> list[int]: ...  # cached tokens of each row


class FollowingSession(CausalSession):
    """B rows of a student beside the session of its target."""

    network: StudentNetwork

    def __init__(self, network: StudentNetwork, prompt: Rows, vocab_size: int, hidden: bool, target: Readable) -> None:
        self.target = target
        super().__init__(network, prompt, vocab_size, hidden)

    def _reset(self, rows: int) -> None:
        super()._reset(rows)
        self._views = [0] * rows  # how much of the target each row's last pass saw

    def settled(self, view: int) -> int:
        """How many leading positions are settled when computed beside a target that held `view` tokens."""
        raise NotImplementedError

    def follow(self, target: Readable, prompt: Rows) -> bool:
        """Go on beside another session of the same target, for another prompt; False where that cannot be."""
        if target.network is not self.target.network or len(prompt) != len(self._tokens):
            return False
        self.target, self.initial = target, prompt
        self.rollback(prompt)
        return True

    def rollback(self, rows: Rows) -> list[int]:
        """See :class:`CausalSession`; drafted positions go as soon as the target has moved."""
        self._settle()
        now = self.target.held()
        for tokens, view, held in zip(self._tokens, self._views, now, strict=True):
            if view != held:
                del tokens[self.settled(view) :]
        return super().rollback(rows)

    def _note(self, feed: Rows, nodes: Rows, end: int, chain: bool) -> None:
        super()._note(feed, nodes, end, chain)
        self._views = self.target.held()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._views = [self._views[row] for row in rows.tolist()]

    def fork(self) -> CausalSession:
        twin = super().fork()
        assert isinstance(twin, FollowingSession)
        twin._views = list(self._views)
        return twin


class FollowingLM(CausalLM):
    """A student that reads its target; a base for the kinds. `vocab_size` as in :class:`CausalLM`."""

    kind = ""

    def __init__(self, student: Student, name: str, vocab_size: int | None = None) -> None:
        if student.config.kind != self.kind:
            raise UserError(f"{name} needs a {self.kind} student, got a {student.config.kind} one")
        super().__init__(StudentNetwork(student), name, vocab_size)

    def readable(self, target: Session | None) -> Readable:
        """`target`, or UserError if it has no cache to be read."""
        if not hasattr(target, "held") or target.source is not None:  # an encoder's states are no rows' keys
            kind = "none" if target is None else type(target).__name__
            raise UserError(f"{self.name} reads the cache of its target's session, got {kind}")
        return cast(Readable, target)
