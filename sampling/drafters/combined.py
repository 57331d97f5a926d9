"""Drafters made of drafters: their members, their names and rule, the draft that grows piece by piece, and the chain.

Members are what really drafts or reviews. One of them may be used in several places (a cascade of three uses its
smallest model under the middle one and beside it): it is started, observed and selected once. A chain has its
members one behind the other, cheaper ones for later positions, which are less likely to be reached: the horizontal
cascade of Cascade Speculative Drafting (arXiv 2312.11462, section 3.3). Knows none of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sampling.drafters.draft_model import check_blocks
from sampling.events import Call, Step
from sampling.rows import check_rows
from sampling.types import Draft, Drafter, Rows, Rule, Sampler, Session, Verdict
from utils.errors import UserError


class Member(Protocol):
    """A drafter's part that follows the rows; every :class:`sampling.types.Drafter` is one."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def rule(self) -> Rule: ...
    @property
    def sessions(self) -> tuple[Session, ...]: ...
    def start(self, prompt: Rows, target: Session, verifier: Session) -> None: ...
    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None: ...
    def select(self, rows: Tensor) -> None: ...


def members_of(parts: Iterable[Any]) -> tuple[Member, ...]:
    """The members of drafters and members, each once, in their order."""
    found = [member for part in parts for member in (part.members if isinstance(part, Composite) else (part,))]
    return tuple({id(member): member for member in found}.values())


def joint_rule(parts: Sequence[Any]) -> Rule:
    """The rule that judges what several draft together: the highest of theirs, so that point masses beside drawn drafts
    are laws.

    UserError, by name, for blocks beside an expansion, and for a part that looks at the target's noise beside drawn
    drafts: a refusal is answered by a draw with that noise, which must not have chosen what was refused.
    """
    rule = max((part.rule for part in parts), default=Rule.POINT)
    for part in parts:
        check_blocks(rule, getattr(part, "expansion", None), ", ".join(part.names))
        if rule is not Rule.POINT and getattr(part, "peek", False):
            raise UserError(f"{', '.join(part.names)}: peek must be False beside drafters that draw")
    return rule


class Composite:
    """A drafter made of others: `members` follow the rows, `names` are theirs, each once."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.members = members_of(parts)
        self.names = tuple(dict.fromkeys(name for member in self.members for name in member.names))
        self.rule = joint_rule(self.members)
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


class Link(NamedTuple):
    """One part of a chain. `tokens`: how many it adds, at least; `call`: how many it is asked for at a time, None
    for as many as are missing; `over`: how many more than missing a call may bring."""

    drafter: Drafter
    tokens: int
    call: int | None = None
    over: int = 0


class ChainDrafter(Composite):
    """Each link drafts behind the ones before it until the chain holds the sum of their `tokens` and its own.

    A link that brings nothing is passed over, and so is one whose tokens the links before it brought already.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__(link.drafter for link in links)
        self.links = tuple(links)

    @property
    def most(self) -> int:
        """The largest number of tokens that a proposal may hold."""
        longest = total = 0
        for link in self.links:
            total += link.tokens
            if total:  # it may be asked when all but one of these are there, whatever those before it might bring
                longest = max(longest, total + link.over)
        return longest

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        """Chains of at most k[b] tokens; k only cuts."""
        grown = Growing(rows, self.names)
        total = 0
        for link in self.links:
            total += link.tokens
            self._extend(grown, link, [min(total, most) for most in k], k, sampler)
        return grown.draft()

    def _extend(self, grown: Growing, link: Link, until: list[int], k: list[int], sampler: Sampler) -> None:
        """Ask one link until every row has its tokens, or gets no more of them."""
        numbers = self.numbered(link.drafter)
        open_rows = [True] * len(until)
        while True:
            have = [len(tokens) for tokens in grown.tokens]
            going = [own and has < goal for own, has, goal in zip(open_rows, have, until, strict=True)]
            if not any(going):
                return
            missing = [goal - has for goal, has in zip(until, have, strict=True)]
            room = [most - has for most, has in zip(k, have, strict=True)]
            asked = [
                (lack if link.call is None else min(link.call, left)) if goes else 0
                for goes, lack, left in zip(going, missing, room, strict=True)
            ]
            draft = link.drafter.propose(grown.texts, asked, sampler)
            gained = grown.append(draft, numbers, asked)
            open_rows = [own and bool(new) for own, new in zip(going, gained, strict=True)]
