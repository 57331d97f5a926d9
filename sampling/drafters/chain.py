"""Drafters one behind the other: cheaper ones for later positions, which are less likely to be reached.

The horizontal cascade of Cascade Speculative Drafting (arXiv 2312.11462, section 3.3). Knows none of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sampling.drafters.composite import Composite, Growing
from sampling.types import Draft, Drafter, Rows, Sampler


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
