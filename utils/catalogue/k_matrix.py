"""The K matrix of Cascade Speculative Drafting (arXiv 2312.11462, algorithm 1) and its lenience, checked.

Row r is the reviewer (0 = the target, r = drafter r of the list, large to small); column c is the number of tokens that
drafter c + 1 adds to the draft that r reviews. Knows no drafters and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from utils.errors import UserError, number, shown

Matrix = tuple[tuple[int, ...], ...]
MOST = 1000  # tokens of one entry, far beyond any use, so that a typing error does not draft for hours


def check_shape(matrix: Any) -> Matrix:
    """`matrix` (rows, or a tensor or array of them) as tuples; UserError unless it is square, of whole numbers from 0
    on, and upper triangular.
    """
    matrix = matrix.tolist() if hasattr(matrix, "tolist") else matrix
    rows = list(matrix) if _is_sequence(matrix) else []
    if not rows or not all(_is_sequence(row) for row in rows):
        raise UserError(f"k_matrix must be rows of whole numbers like [[5,10],[0,10]], got {shown(matrix)}")
    size = len(rows)
    wrong = next((row for row in rows if len(row) != size), None)
    if wrong is not None:
        raise UserError(f"k_matrix must be square: {size} rows, but one of them has {len(wrong)} numbers")
    for r, row in enumerate(rows):
        for c, entry in enumerate(row):
            if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry <= MOST:
                raise UserError(f"k_matrix must hold whole numbers from 0 to {MOST}, got {shown(entry)} in row {r + 1}")
            if c < r and entry:
                raise UserError(
                    f"k_matrix must be upper triangular: row {r + 1}, column {c + 1} must be 0, got {entry}"
                )
    return tuple(tuple(row) for row in rows)


def check_fit(matrix: Any, drafters: int) -> Matrix:
    """:func:`check_shape`, and as many rows as there are drafters."""
    checked = check_shape(matrix)
    if len(checked) != drafters:
        raise UserError(f"k_matrix must have a row for each of the {drafters} drafters, got {len(checked)}")
    return checked


def check_lenience(value: float) -> float:
    """`value` if it is a finite number from 1 on, else UserError. 1 reviews exactly, more accepts more drafts."""
    return number("lenience", value, lambda lenience: lenience >= 1, "a number, at least 1")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
