"""Drafters made of drafters: their members and traits, the draft that grows piece by piece, and the chain.

Members are what really drafts or reviews. One of them may be used in several places (a cascade of three uses its
smallest model under the middle one and beside it): it is started, observed and selected once. A chain has its
members one behind the other, cheaper ones for later positions, which are less likely to be reached: the horizontal
cascade of Cascade Speculative Drafting (arXiv 2312.11462, section 3.3). Knows none of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.drafters.draft_model import check_blocks
from sampling.events import Call, Step
from sampling.rows import check_rows, padded
from sampling.types import LM, Budget, Draft, Drafter, Rows, Rule, Sampler, Session, Traits, Verdict, states_of
from utils.errors import UserError


def joint_traits(parts: Sequence[Drafter]) -> Traits:
    """What drafters are together. The rule that verifies all is the highest of theirs, so that point masses beside
    drawn drafts are distributions.

    UserError, by name, for blocks beside an expansion, and for a part that looks at the target's noise beside drawn
    drafts: a refusal is answered by a draw with that noise, which must not have chosen what was refused.
    """
    each = [part.traits for part in parts]
    rule = max((one.rule for one in each), default=Rule.POINT)
    for one in each:
        check_blocks(replace(one, rule=rule))
        if rule is not Rule.POINT and one.shared_noise:
            raise UserError(f"{', '.join(one.names)}: shared_noise must be False beside drafters that draw")
    return Traits(
        names=tuple(dict.fromkeys(name for one in each for name in one.names)),
        rule=rule,
        needs_hidden=states_of(*(one.needs_hidden for one in each)),
        needs_kv=any(one.needs_kv for one in each),
    )


class Composite(Drafter):
    """A drafter made of others: `members` follow the rows; its names are theirs, each once.

    A composite that keeps nothing itself gives its members away to the one that it is a part of.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        found = [one for part in parts for one in (part.given_away() if isinstance(part, Composite) else (part,))]
        self.members = tuple({id(member): member for member in found}.values())
        self.traits = joint_traits(self.members)

    def given_away(self) -> tuple[Drafter, ...]:
        """What follows the rows for it in a larger composite."""
        return self.members

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(session for member in self.members for session in member.sessions)

    @property
    def models(self) -> tuple[LM, ...]:
        return tuple(model for member in self.members for model in member.models)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer. A member may have several reviewers: all are given the outermost one."""
        for member in self.members:
            check_rows(member.traits, prompt)
            member.start(prompt, target, verifier)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        for member in self.members:
            member.observe(rows, draft, verdict)

    def select(self, rows: Tensor) -> None:
        for member in self.members:
            member.select(rows)

    def numbered(self, part: Drafter) -> list[int]:
        """What the sources of a part's drafts are here: indices into `traits.names`."""
        return [self.traits.names.index(name) for name in part.traits.names]


class Growing:
    """A draft that grows from pieces, row by row; `rows` are the committed tokens [B], `tokens` what has grown."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.calls = rows, list[Call]()
        self.tokens: Rows = [[] for _ in rows]
        self._source: Rows = [[] for _ in rows]
        self._raw: list[list[float]] = [[] for _ in rows]
        self._pieces: list[tuple[Draft, Tensor]] = []  # node where[1] of row where[0] stands at depth where[2]
        self._trace: list[Step] = []

    @property
    def texts(self) -> Rows:
        """The rows with what has grown behind them."""
        return [row + new for row, new in zip(self.rows, self.tokens, strict=True)]

    def append(self, draft: Draft, numbers: Sequence[int], cut: Sequence[int]) -> list[int]:
        """Add a piece behind each row, at most cut[b] tokens; how many each row gained.

        `numbers[i]` is what the piece's source i is called here. Its calls and trace are taken over.
        """
        source = torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)
        raw = torch.ones(draft.tokens.shape) if draft.draft_prob is None else draft.draft_prob
        gained, where = [], []
        listed = zip(draft.tokens.tolist(), source.tolist(), raw.tolist(), strict=True)
        for place, (tokens, whose, chances) in enumerate(listed):
            present = [node for node, token in enumerate(tokens) if token >= 0][: max(0, cut[place])]
            where += [(place, node, len(self.tokens[place]) + at) for at, node in enumerate(present)]
            self.tokens[place] += [tokens[node] for node in present]
            self._source[place] += [numbers[whose[node]] for node in present]
            self._raw[place] += [chances[node] for node in present]
            gained.append(len(present))
        if where:
            self._pieces.append((draft, torch.tensor(where).T))
        self.calls += draft.calls
        self._trace += [renumbered(step, numbers) for step in draft.trace]
        return gained

    def draft(self) -> Draft:
        """What has grown; distributions and point masses together become distributions, [B, N, V]. Calls of one model
        are added up."""
        spent: dict[str, Call] = {}
        for call in self.calls:
            known = spent.get(call.model, Call(call.model, 0, 0.0))
            spent[call.model] = Call(call.model, known.passes + call.passes, known.seconds + call.seconds)
        tokens = padded(self.tokens)
        return Draft(
            tokens=tokens,
            probs=self._probs(tokens.shape[1]),
            draft_prob=padded(self._raw, 1.0, torch.float32),
            source=padded(self._source, 0),
            calls=tuple(spent.values()),
            trace=tuple(self._trace),
        )

    def _probs(self, width: int) -> Tensor | None:
        like = next((draft.probs for draft, _ in self._pieces if draft.probs is not None), None)
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
    inner = tuple(renumbered(one, numbers) for one in step.inner)
    return replace(step, source=tuple(numbers[index] for index in step.source), inner=inner)


class Stage(NamedTuple):
    """One part of a chain. `tokens`: how many it adds, at least; `call`: how many it is asked for at a time, None
    for as many as are missing; `over`: how many more than missing a call may bring."""

    drafter: Drafter
    tokens: int
    call: int | None = None
    over: int = 0


class ChainDrafter(Composite):
    """Each stage drafts behind the ones before it until the chain holds the sum of their `tokens` and its own.

    A stage that brings nothing is passed over, and so is one whose tokens the stages before it brought already.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__([stage.drafter for stage in stages])
        self.stages = tuple(stages)
        # A stage may be asked when all but one of its tokens are there, whatever those before it might bring.
        totals = accumulate(stage.tokens for stage in stages)
        longest = (total + stage.over for total, stage in zip(totals, stages, strict=True) if total)
        self.traits = replace(self.traits, most=max(longest, default=0))

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Chains of at most budget.max_depth[b] tokens; the budget only cuts."""
        grown = Growing(rows)
        for stage, total in zip(self.stages, accumulate(stage.tokens for stage in self.stages), strict=True):
            self._extend(grown, stage, [min(total, most) for most in budget.max_depth], budget.max_depth, sampler)
        return grown.draft()

    def _extend(self, grown: Growing, stage: Stage, until: list[int], most: list[int], sampler: Sampler) -> None:
        """Ask one stage until every row has its tokens, or gets no more of them."""
        numbers = self.numbered(stage.drafter)
        going = [True] * len(until)
        while True:
            have = [len(tokens) for tokens in grown.tokens]
            going = [own and has < goal for own, has, goal in zip(going, have, until, strict=True)]
            if not any(going):
                return
            missing = [goal - has for goal, has in zip(until, have, strict=True)]
            if stage.call is not None:
                missing = [min(stage.call, bound - has) for bound, has in zip(most, have, strict=True)]
            asked = [lack if goes else 0 for goes, lack in zip(going, missing, strict=True)]
            draft = stage.drafter.propose(grown.texts, Budget(asked), sampler)
            gained = grown.append(draft, numbers, asked)
            going = [own and bool(new) for own, new in zip(going, gained, strict=True)]
