"""Rows of ids: common prefixes, first tokens, rows of unequal length as a tensor; and numbers from the host to a device
and back, with few waits of the host. Knows no models."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from sampling.types import Rows, Session, Traits
from utils.errors import UserError

_NEAR = 32  # last tokens, which are searched first: sequences mostly differ near their ends


Item = TypeVar("Item")


def common_prefix(cached: list[int], row: list[int]) -> int:
    """Return the length of the common prefix; one comparison nearly always suffices.

    A row that has only grown is compared without a copy of it, which would touch every number in it.
    """
    known = len(cached)
    if known <= len(row):
        cached += row[known:]
        grown = cached == row
        del cached[known:]
        if grown:
            return known
    limit = min(known, len(row))
    # Compare the last tokens first: if they differ, the whole rows need not be compared.
    if cached[limit - 1 : limit] == row[limit - 1 : limit] and cached[:limit] == row[:limit]:
        return limit
    near = max(0, limit - _NEAR)
    start = near if cached[:near] == row[:near] else 0
    return next(index for index in range(start, limit) if cached[index] != row[index])


def first_rows(prompt: Rows, session: Session) -> Rows:
    """Return the beginning of the rows of an answer: the prompt, or the session's `initial` if it has a `source`.

    ValueError if that source is another prompt.
    """
    if session.source is None:
        return prompt
    if session.source != prompt:
        raise ValueError("the session was opened for another prompt")
    return session.initial


def check_rows(traits: Traits, prompt: Rows) -> None:
    """Raise UserError, with the drafter's name, for several rows if it drafts for one only."""
    if len(prompt) > 1 and traits.one_row:
        raise UserError(f"{', '.join(traits.names)} drafts for one prompt at a time, got {len(prompt)}")


def lead(prompt: Rows, session: Session) -> Rows:
    """Return the tokens that a drafter sees before each row: [], or the prompts if an encoder reads them."""
    return [] if session.source is None else [list(row) for row in prompt]


def prepended(leads: Rows, rows: Rows) -> Rows:
    """Return the rows with the tokens before them."""
    return [before + row for before, row in zip(leads, rows, strict=True)] if leads else rows


def parted(items: Sequence[Item], rows: Sequence[int]) -> list[Item]:
    """Return the items of these rows, reordered, repeated or dropped; repeated rows get copies."""
    return [deepcopy(items[row]) if row in rows[:index] else items[row] for index, row in enumerate(rows)]


def few(values: Sequence[Any], dtype: DTypeLike = np.int64) -> Tensor:
    """Return a few values as a tensor of their shape [N] or [N, M]: with cold caches numpy takes a third of the time of
    `torch.tensor`."""
    return torch.from_numpy(np.array(values, dtype))


def padded(
    rows: Sequence[Sequence[float]], fill: float = -1, width: int | None = None, dtype: DTypeLike = np.int64
) -> Tensor:
    """Return rows of at most `width` values (None: the longest row's) as [B, width], padded with `fill`."""
    width = max(map(len, rows)) if width is None else width
    return few([[*row, *[fill] * (width - len(row))] for row in rows], dtype).view(len(rows), width)


def put(values: Tensor | Sequence[Any], device: torch.device | None) -> Tensor:
    """Return host values of any shape as a tensor on `device`, for whose arrival the host does not wait."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def fetched(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors, of any shape, on the host as float64, by one transfer."""
    flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
