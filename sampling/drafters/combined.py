"""Drafters made of drafters: their members and traits, the draft that grows piece by piece, and the chain.

A member drafts or reviews. It may be used several times (a cascade of three uses its smallest model under the middle
one and beside it), but is started, observed and selected once. In a chain each member drafts after the one before it,
cheaper members for later positions, which are reached less often: the horizontal cascade of Cascade Speculative
Drafting (arXiv 2312.11462, section 3.3). Knows none of its parts.
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
    """Return the traits of drafters together. Their rule is the highest, under which point masses are distributions.

    UserError, by name, for block verification with an expansion, and for a part that reads the target's noise beside
    drawn drafts: the token after a rejection is drawn with that noise, which must not have chosen the rejected one.
    """
    traits = [part.traits for part in parts]
    rule = max((part.rule for part in traits), default=Rule.POINT)
    for part in traits:
        check_blocks(replace(part, rule=rule))
        if rule is not Rule.POINT and part.shared_noise:
            raise UserError(f"{', '.join(part.names)}: shared_noise must be False beside drafters that draw")
    return Traits(
        names=tuple(dict.fromkeys(name for part in traits for name in part.names)),
        rule=rule,
        needs_hidden=states_of(*(part.needs_hidden for part in traits)),
        needs_kv=any(part.needs_kv for part in traits),
    )


class Composite(Drafter):
    """A drafter made of others: `members` follow the rows, also those of a composite among them; its names are theirs,
    each once."""

    members: tuple[Drafter, ...]

    def __init__(self, parts: Sequence[Drafter]) -> None:
        nested = [part.members if isinstance(part, Composite) else (part,) for part in parts]
        self.members = tuple({id(member): member for members in nested for member in members}.values())
        self.traits = joint_traits(self.members)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(session for member in self.members for session in member.sessions)

    @property
    def models(self) -> tuple[LM, ...]:
        return tuple(model for member in self.members for model in member.models)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer. Members get the outermost reviewer, since one may have several."""
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
        """Return the sources of a part's drafts as indices into `traits.names`."""
        return [self.traits.names.index(name) for name in part.traits.names]


class Growing:
    """A draft that grows from pieces; `rows` [B] are the committed tokens, `tokens` [B] the drafted ones."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.calls = rows, list[Call]()
        self.tokens: Rows = [[] for _ in rows]
        self._source: Rows = [[] for _ in rows]
        self._prob: list[list[float]] = [[] for _ in rows]
        self._pieces: list[tuple[Draft, Tensor]] = []  # node where[1] of row where[0] is at depth where[2]
        self._trace: list[Step] = []

    @property
    def texts(self) -> Rows:
        """Return the rows with their drafted tokens."""
        return [row + new for row, new in zip(self.rows, self.tokens, strict=True)]

    def append(self, draft: Draft, numbers: Sequence[int], cut: Sequence[int]) -> list[int]:
        """Add a piece to each row, at most cut[b] tokens; return how many each row gained.

        `numbers[i]` is the number of the piece's source i here. Its calls and trace are added.
        """
        source = torch.zeros_like(draft.tokens) if draft.source is None else draft.source.expand_as(draft.tokens)
        prob = torch.ones(draft.tokens.shape) if draft.draft_prob is None else draft.draft_prob
        gained, where = [], []
        listed = zip(draft.tokens.tolist(), source.tolist(), prob.tolist(), strict=True)
        for row, (tokens, sources, probs) in enumerate(listed):
            present = [node for node, token in enumerate(tokens) if token >= 0][: max(0, cut[row])]
            where += [(row, node, len(self.tokens[row]) + index) for index, node in enumerate(present)]
            self.tokens[row] += [tokens[node] for node in present]
            self._source[row] += [numbers[sources[node]] for node in present]
            self._prob[row] += [probs[node] for node in present]
            gained.append(len(present))
        if where:
            self._pieces.append((draft, torch.tensor(where).T))
        self.calls += draft.calls
        self._trace += [renumbered(step, numbers) for step in draft.trace]
        return gained

    def draft(self) -> Draft:
        """Return the draft. Point masses beside distributions become distributions [B, N, V]; calls are added up by
        model."""
        spent: dict[str, Call] = {}
        for call in self.calls:
            known = spent.get(call.model, Call(call.model, 0, 0.0))
            spent[call.model] = Call(call.model, known.passes + call.passes, known.seconds + call.seconds)
        tokens = padded(self.tokens)
        return Draft(
            tokens=tokens,
            probs=self._probs(tokens.shape[1]),
            draft_prob=padded(self._prob, 1.0, torch.float32),
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
            rows, nodes, depths = where.to(like.device)
            if draft.probs is None:
                probs[rows, depths, draft.tokens.to(like.device)[rows, nodes]] = 1.0
            else:
                probs[rows, depths] = draft.probs[rows, nodes].to(like)
        return probs


def renumbered(step: Step, numbers: Sequence[int]) -> Step:
    """Return a nested round with its sources, at every level, renumbered."""
    inner = tuple(renumbered(nested, numbers) for nested in step.inner)
    return replace(step, source=tuple(numbers[index] for index in step.source), inner=inner)


class Stage(NamedTuple):
    """One part of a chain. `tokens`: how many it adds at least; `call`: how many a call requests, None = all missing
    ones; `over`: how many more than the missing ones a call may bring."""

    drafter: Drafter
    tokens: int
    call: int | None = None
    over: int = 0


class ChainDrafter(Composite):
    """Stages that draft one after the other, each until the chain has the sum of the `tokens` up to it.

    A stage that brings nothing is skipped, and so is one whose tokens the stages before it brought already.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__([stage.drafter for stage in stages])
        self.stages = tuple(stages)
        # A stage may run when all but one of its tokens are there, whatever those before it might bring.
        totals = accumulate(stage.tokens for stage in stages)
        longest = (total + stage.over for total, stage in zip(totals, stages, strict=True) if total)
        self.traits = replace(self.traits, most=max(longest, default=0))

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return chains of at most budget.max_depth[b] tokens; the budget only cuts."""
        grown = Growing(rows)
        for stage, total in zip(self.stages, accumulate(stage.tokens for stage in self.stages), strict=True):
            self._extend(grown, stage, [min(total, most) for most in budget.max_depth], budget.max_depth, sampler)
        return grown.draft()

    def _extend(self, grown: Growing, stage: Stage, until: list[int], most: list[int], sampler: Sampler) -> None:
        """Run one stage until every row has its tokens or gets no more."""
        numbers = self.numbered(stage.drafter)
        active = [True] * len(until)
        while True:
            have = [len(tokens) for tokens in grown.tokens]
            active = [own and has < goal for own, has, goal in zip(active, have, until, strict=True)]
            if not any(active):
                return
            missing = [goal - has for goal, has in zip(until, have, strict=True)]
            if stage.call is not None:
                missing = [min(stage.call, bound - has) for bound, has in zip(most, have, strict=True)]
            wanted = [lack if own else 0 for own, lack in zip(active, missing, strict=True)]
            draft = stage.drafter.propose(grown.texts, Budget(wanted), sampler)
            gained = grown.append(draft, numbers, wanted)
            active = [own and bool(new) for own, new in zip(active, gained, strict=True)]
