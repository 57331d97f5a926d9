"""What two sequences of ids share, where a row begins, and rows of unequal length as a tensor. Knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor

from sampling.types import Rows, Session, Traits
from utils.errors import UserError

_NEAR = 32  # sequences that part mostly part near their ends


Item = TypeVar("Item")


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


def first_rows(prompt: Rows, session: Session) -> Rows:
    """What the rows of an answer to `prompt` begin with: the prompt itself; where a session reads it elsewhere (its
    `source`), the session's `initial`.

    ValueError for such a session of another prompt.
    """
    if session.source is None:
        return prompt
    if session.source != prompt:
        raise ValueError("the session was opened for another prompt")
    return session.initial


def check_rows(traits: Traits, prompt: Rows) -> None:
    """UserError, by its name, for several rows and a drafter that follows one."""
    if len(prompt) > 1 and traits.one_row:
        raise UserError(f"{', '.join(traits.names)} drafts for one prompt at a time, got {len(prompt)}")


def lead(prompt: Rows, session: Session) -> Rows:
    """What stands before each row that a drafter is shown: nothing, or the prompt where rows do not hold it."""
    return [[] if session.source is None else list(row) for row in prompt]


def behind(leads: Rows, rows: Rows) -> Rows:
    """The rows with what stands before them."""
    return [before + row if before else row for before, row in zip(leads, rows, strict=True)]


def parted(items: Sequence[Item], rows: Sequence[int]) -> list[Item]:
    """The items of these rows, reordered, repeated or dropped: those of repeated rows part ways, as copies."""
    return [deepcopy(items[row]) if row in rows[:place] else items[row] for place, row in enumerate(rows)]


def padded(rows: Sequence[Sequence[float]], fill: float = -1, dtype: torch.dtype = torch.long) -> Tensor:
    """[B, N] of rows of at most N values, `fill` behind their ends."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype).view(len(rows), width)
