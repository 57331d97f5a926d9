"""The K matrix of Cascade Speculative Drafting (arXiv 2312.11462, algorithm 1) and its lenience, checked.

Row r is the reviewer (0 = the target, r = drafter r of the list, large to small); column c says how many more tokens
drafter c + 1 adds to what r reviews. Knows no drafters and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from utils.errors import UserError

Matrix = tuple[tuple[int, ...], ...]
MOST = 1000  # tokens of one entry: far beyond any use, but a slip of the pen must not draft for hours


def check_shape(matrix: Any) -> Matrix:
    """`matrix` (rows, or a tensor or array of them) as tuples; UserError unless it is square, of whole numbers from 0
    on, and upper triangular.
    """
    matrix = matrix.tolist() if hasattr(matrix, "tolist") else matrix
    rows = list(matrix) if _is_sequence(matrix) else []
    if not rows or not all(_is_sequence(row) for row in rows):
        raise UserError(f"k_matrix must be rows of whole numbers like [[5,10],[0,10]], got {_shown(matrix)}")
    size = len(rows)
    wrong = next((row for row in rows if len(row) != size), None)
    if wrong is not None:
        raise UserError(f"k_matrix must be square: {size} rows, but one of them has {len(wrong)} numbers")
    for r, row in enumerate(rows):
        for c, entry in enumerate(row):
            if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry <= MOST:
                raise UserError(
                    f"k_matrix must hold whole numbers from 0 to {MOST}, got {_shown(entry)} in row {r + 1}"
                )
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
    """`value` if it is a finite number from 1 on, else UserError. 1 reviews exactly, more lets more drafts pass."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 1
    if not fits:
        raise UserError(f"lenience must be a number, at least 1, got {_shown(value)}")
    return float(value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
