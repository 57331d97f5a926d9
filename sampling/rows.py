"""What two sequences of ids share. Knows nothing of where they come from."""

from __future__ import annotations

_NEAR = 32  # sequences that part mostly part near their ends


def common_prefix(cached: list[int], row: list[int]) -> int:
    """Length of the common prefix; slices compare fast, and nearly always at once."""
    limit = min(len(cached), len(row))
    if cached[:limit] == row[:limit]:
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
