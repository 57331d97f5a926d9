"""What two sequences of ids share. Knows nothing of where they come from."""

from __future__ import annotations


def common_prefix(cached: list[int], row: list[int]) -> int:
    """Length of the common prefix; slices compare fast, and nearly always at once."""
    limit = min(len(cached), len(row))
    if cached[:limit] == row[:limit]:
        return limit
    low, high = 0, limit  # cached[:low] matches, cached[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cached[:middle] == row[:middle] else (low, middle)
    return low
