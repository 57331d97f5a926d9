"""What two sequences of ids share, where a row begins, and who follows several. Knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

from sampling.types import Rows
from utils.errors import UserError


class Copyable(Protocol):
    """Something that can be copied."""

    def copy(self) -> Self: ...


Copied = TypeVar("Copied", bound=Copyable)

_NEAR = 32  # sequences that part mostly part near their ends


def common_prefix(cached: list[int], row: list[int]) -> int:
    """Length of the common prefix; slices compare fast, and nearly always at once."""
    limit = min(len(cached), len(row))
    short, long = (cached, row) if limit == len(cached) else (row, cached)
    # Where the last tokens differ no whole row need be compared in vain.
    if short[limit - 1 :] == long[limit - 1 : limit] and short == long[:limit]:
        return limit
    high, back = limit, _NEAR  # cached[:high] does not match
    low = max(0, limit - back)
    while low and cached[:low] != row[:low]:
        high, back = low, 4 * back
        low = max(0, limit - back)
    while high - low > 1:  # cached[:low] matches
        middle = (low + high) // 2
        low, high = (middle, high) if cached[low:middle] == row[low:middle] else (low, middle)
    return low


def first_rows(prompt: Rows, session: Any) -> Rows:
    """What the rows of an answer to `prompt` begin with: the prompt itself; where a session reads it elsewhere (it has
    a `source` then), the session's `initial`.

    ValueError for such a session of another prompt.
    """
    source = getattr(session, "source", None)
    if source is None:
        return prompt
    if source != prompt:
        raise ValueError("the session was opened for another prompt")
    initial: Rows = session.initial
    return initial


def check_rows(drafter: Any, prompt: Rows) -> None:
    """UserError, by its name, for several rows and a drafter that follows one (its attribute `one_row` is True)."""
    if len(prompt) > 1 and getattr(drafter, "one_row", False):
        raise UserError(f"{', '.join(drafter.names)} drafts for one prompt at a time, got {len(prompt)}")


def lead(prompt: Rows, session: Any) -> Rows:
    """What stands before each row that a drafter is shown: nothing, or the prompt where rows do not hold it."""
    apart = getattr(session, "source", None) is not None
    return [list(row) if apart else [] for row in prompt]


def ids_of(session: Any) -> int:
    """How many ids a target's session has: nothing beyond them may be drafted. No bound where there is no session."""
    size: int = getattr(session, "vocab_size", 1 << 62)
    return size


def takes_trees(session: Any) -> bool:
    """Whether drafts may be trees, as a target's session says of itself; where there is none to say so they may."""
    return bool(getattr(session, "takes_trees", True))


def behind(leads: Rows, rows: Rows) -> Rows:
    """The rows with what stands before them."""
    return [before + row if before else row for before, row in zip(leads, rows, strict=True)]


def parted(items: Sequence[Copied], rows: Sequence[int]) -> list[Copied]:
    """The items of these rows, reordered, repeated or dropped: those of repeated rows part ways, as copies."""
    taken: set[int] = set()
    chosen = []
    for row in rows:
        chosen.append(items[row].copy() if row in taken else items[row])
        taken.add(row)
    return chosen
