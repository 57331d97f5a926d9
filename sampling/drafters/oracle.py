"""A simulated drafter: it knows the target's tokens, and drafts them with a chosen acceptance at a chosen cost.

The tokens come from the reference, plain decoding in a separate session, as far ahead as a round drafts. Those passes
are not charged: a round is charged `cost` times their median time for each drafted token. Each draft is the
target's token with probability `alpha`, by a separate coin, else another token; so alpha, gamma and c can be set and
the speed-up watched (Leviathan et al., arXiv 2211.17192, section 3). The drafts are chosen, so the text is plain
decoding's. Knows no text.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from sampling.drafters.registry import DraftRequest, Parts, oracle_of
from sampling.events import Event, Step
from sampling.rows import first_rows
from sampling.types import Budget, Draft, Drafter, DraftTree, Rows, Rule, Sampler, Session, Traits

Plain = Callable[[Rows, Session], Iterable[Event]]  # decodes rows plainly in this session


class Oracle(Drafter):
    """Drafts chains of the target's own tokens for one row.

    Args:
        alpha: the probability that a draft is the target's token.
        cost: c, one-token passes of the target that a drafted token is charged.

    `plain` must be set before an answer; it decodes as the target does.
    """

    traits = Traits(("oracle",), rule=Rule.POINT, one_row=True)
    plain: Plain

    def __init__(self, alpha: float, cost: float) -> None:
        self.alpha, self.cost = alpha, cost

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self._prompt, self._target = prompt, target
        self._reference: Iterator[Event] | None = None
        self._base = 0  # the row's length where the reference begins
        self._tokens: list[int] = []  # that the reference has written
        self._passes: list[float] = []  # seconds of each of its passes

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return a chain of at most budget.max_depth[0] tokens, as far as the target's answer goes."""
        (row,), depth = rows, budget.max_depth[0]
        right = self._next(row, depth)
        if not right:
            return replace(Draft.empty(1), seconds=0.0)
        keys = torch.tensor([[0, len(row) + offset, len(row), 0] for offset in range(len(right))])
        hits = sampler.coin(torch.full((len(right),), self.alpha), keys).tolist()
        tokens = [token if hit else self._other(token, row) for token, hit in zip(right, hits, strict=True)]
        seconds = self.cost * len(tokens) * statistics.median(self._passes)
        return Draft([DraftTree.of(tokens, draft_prob=[self.alpha] * len(tokens))], seconds=seconds)

    def _next(self, row: list[int], depth: int) -> list[int]:
        """Return the target's next tokens after the row, at most `depth`; none after its answer's end."""
        if (known := self._decoded(row, depth)) is None:  # rounding made the lane leave its reference: start again here
            self._reference = None
            known = self._decoded(row, depth)
        return [] if known is None else self._tokens[known : known + depth]

    def _decoded(self, row: list[int], depth: int) -> int | None:
        """Return how many of the reference's tokens the row has, after decoding `depth` more; None if it has others."""
        if self._reference is None:
            session = self._target.fork()
            start = first_rows(self._prompt if session.source else [row], session)
            self._reference, self._base, self._tokens = iter(self.plain(start, session)), len(start[0]), []
        known = len(row) - self._base
        while len(self._tokens) < known + depth and (event := next(self._reference, None)) is not None:
            if isinstance(event, Step):
                self._tokens += event.emitted
                self._passes.append(event.verify_s)
        return known if self._tokens[:known] == row[self._base :] else None

    def _other(self, token: int, row: list[int]) -> int:
        """Return a wrong draft: the row's latest token that is not the target's, else a neighbouring id."""
        return next((other for other in reversed(row) if other != token), token ^ 1)


def build(pair: Parts, request: DraftRequest) -> Oracle:
    """Build the oracle that the lane's name describes."""
    return Oracle(*oracle_of(request.word))
