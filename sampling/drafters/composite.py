"""What drafters made of drafters share: their members, their names, and the draft that grows piece by piece.

Members are what really drafts or reviews. One of them may be used in several places (a cascade of three uses its
smallest model under the middle one and beside it): it is started, observed and selected once. Knows no way of
combining.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sampling.events import Call, Step
from sampling.rows import check_rows
from sampling.types import Draft, Drafter, Rows, Session, Verdict


class Member(Protocol):
    """A drafter's part that follows the rows; every :class:`sampling.types.Drafter` is one."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def sessions(self) -> tuple[Session, ...]: ...
    def start(self, prompt: Rows, target: Session, verifier: Session) -> None: ...
    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None: ...
    def select(self, rows: Tensor) -> None: ...


def members_of(parts: Iterable[Any]) -> tuple[Member, ...]:
    """The members of drafters and members, each once, in their order."""
    found = [member for part in parts for member in (part.members if isinstance(part, Composite) else (part,))]
    return tuple({id(member): member for member in found}.values())


class Composite:
    """A drafter made of others: `members` follow the rows, `names` are theirs, each once."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.members = members_of(parts)
        self.names = tuple(dict.fromkeys(name for member in self.members for name in member.names))
        self.needs_hidden = any(getattr(member, "needs_hidden", False) for member in self.members)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(session for member in self.members for session in member.sessions)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer. A member may have several reviewers: all are given the outermost one."""
        for member in self.members:
            check_rows(member, prompt)
            member.start(prompt, target, verifier)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        for member in self.members:
            member.observe(rows, draft, verdict)

    def select(self, rows: Tensor) -> None:
        for member in self.members:
            member.select(rows)

    def numbered(self, part: Drafter) -> list[int]:
        """What the sources of a part's drafts are here: indices into `names`."""
        return [self.names.index(name) for name in part.names]


class _Piece(NamedTuple):
    """What was added at once: node where[1] of row where[0] stands at depth where[2]; where [3, K]."""

    draft: Draft
    where: Tensor


@dataclass
class Growing:
    """A draft that grows from pieces, row by row; `rows` are the committed tokens [B]."""

    rows: Rows
    names: tuple[str, ...]
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    trace: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens: Rows = [[] for _ in self.rows]
        self._source: Rows = [[] for _ in self.rows]
        self._raw: list[list[float]] = [[] for _ in self.rows]
        self._pieces: list[_Piece] = []

    @property
    def texts(self) -> Rows:
        """The rows with what has grown behind them."""
        return [row + new for row, new in zip(self.rows, self.tokens, strict=True)]

    def append(self, draft: Draft, numbers: Sequence[int], cut: Sequence[int]) -> list[int]:
        """Add a piece behind each row, at most cut[b] tokens; how many each row gained.

        `numbers[i]` is what the piece's source i is called here. Its calls and trace are taken over.
        """
        count = draft.tokens.shape[1]
        source = torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)
        raw = None if draft.raw is None else draft.raw.tolist()
        gained, where = [], []
        for place, (drafted, whose) in enumerate(zip(draft.tokens.tolist(), source.tolist(), strict=True)):
            present = [node for node in range(count) if drafted[node] >= 0][: max(0, cut[place])]
            where += [(place, node, len(self.tokens[place]) + at) for at, node in enumerate(present)]
            self.tokens[place] += [drafted[node] for node in present]
            self._source[place] += [numbers[whose[node]] for node in present]
            self._raw[place] += [1.0 if raw is None else raw[place][node] for node in present]
            gained.append(len(present))
        if where:
            self._pieces.append(_Piece(draft, torch.tensor(where).T))
        for call in draft.calls:
            self.called(call)
        self.trace += [renumbered(step, numbers) for step in draft.trace]
        return gained

    def called(self, call: Call) -> None:
        """Add forward passes to those of the same model."""
        passes, seconds = self.calls.get(call.model, (0, 0.0))
        self.calls[call.model] = (passes + call.passes, seconds + call.seconds)

    def draft(self) -> Draft:
        """What has grown; laws and point masses together become laws, [B, N, V]."""
        width = max(map(len, self.tokens))
        return Draft(
            tokens=_padded(self.tokens, width, -1, torch.long),
            probs=self._probs(width),
            raw=_padded(self._raw, width, 1.0, torch.float32),
            source=_padded(self._source, width, 0, torch.long),
            calls=tuple(Call(name, passes, seconds) for name, (passes, seconds) in self.calls.items()),
            trace=tuple(self.trace),
        )

    def _probs(self, width: int) -> Tensor | None:
        like = next((piece.draft.probs for piece in self._pieces if piece.draft.probs is not None), None)
        if like is None:
            return None
        probs = like.new_zeros(len(self.rows), width, like.shape[-1])
        for draft, where in self._pieces:
            rows, nodes, at = where.to(like.device)
            if draft.probs is None:
                probs[rows, at, draft.tokens.to(like.device)[rows, nodes]] = 1.0
            else:
                probs[rows, at] = draft.probs[rows, nodes].to(like)
        return probs


def renumbered(step: Step, numbers: Sequence[int]) -> Step:
    """A nested round whose sources, at every level, are numbered anew."""
    if all(index == number for index, number in enumerate(numbers)):
        return step
    inner = tuple(renumbered(one, numbers) for one in step.inner)
    return replace(step, source=tuple(numbers[index] for index in step.source), inner=inner)


def _padded(values: Sequence[Sequence[float]], width: int, fill: float, dtype: torch.dtype) -> Tensor:
    rows = [[*row, *[fill] * (width - len(row))] for row in values]
    return torch.tensor(rows, dtype=dtype).view(len(rows), width)
