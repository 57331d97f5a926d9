"""An answer over time, on one row: what each round accepted, and how fast the lanes were.

Each round is one bar as high as the tokens it accepted. Rates are tokens over seconds of the lane's own clock, in equal
spans of time that all lanes share, so that a slower lane's line is longer. Both leave the prefill out. Without level
bars digits stand in their place. Knows no text and no layout but its own row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from app.screen.palette import Look
from app.screen.rows import Piece, Row, row_of, width_of

_DIGITS = "0123456789"
_LEAST = 6  # rounds that have room, or the rates are left out
_SPANS = 8  # columns of the screen for each span of the rates


class Round(NamedTuple):
    """A round after the opening one: its seconds, the tokens it brought, and of its drafts those accepted."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int


Line = tuple[str, Sequence[Round]]  # a lane's name and its rounds


def rates(rounds: Sequence[Round], span: float) -> list[float]:
    """Tokens a second in each span of time, the last of which may be shorter; a round's tokens come evenly in it."""
    total = sum(each.seconds for each in rounds)
    tokens = [0.0] * math.ceil(total / span - 1e-9)
    start = 0.0
    for each in rounds:
        end = start + each.seconds
        for index in range(int(start / span), min(len(tokens), int(end / span) + 1)):
            overlap = min(end, (index + 1) * span) - max(start, index * span)
            tokens[index] += each.tokens * overlap / each.seconds if each.seconds else 0.0
        start = end
    return [count / min(span, total - index * span) for index, count in enumerate(tokens)]


def bars_key(look: Look) -> str:
    """The meaning of a bar, or of a digit in its place."""
    levels = look.glyph("levels")
    if not levels:
        return "a digit a round: accepted drafts"
    return f"a bar a round: {levels[0]} 0, {levels[-1]} {len(levels) - 1} or more"


def timeline(drafting: Line, plain: Line | None, look: Look) -> list[Row]:
    """The row of a drafting lane, beside plain decoding where that runs; none where there is no room or no round."""
    name, rounds = drafting
    head = f"{name} accepted "
    speeds = _speeds(rounds, plain, look)
    room = look.width - len(head) - width_of(speeds)
    if room < _LEAST:
        speeds, room = [], look.width - len(head)
    if not rounds or room < _LEAST:
        return []
    levels = look.glyph("levels") or _DIGITS
    bars = "".join(
        levels[min(each.accepted, len(levels) - 1)] if each.drafted else look.glyph("none") for each in rounds
    )
    if len(bars) > room:
        bars = look.glyph("ellipsis") + bars[len(look.glyph("ellipsis")) - room :]
    return [row_of([(head, "faint"), (bars, "accent"), *speeds], look)]


def _speeds(rounds: Sequence[Round], plain: Line | None, look: Look) -> list[Piece]:
    """The rates of the lane and of plain decoding, to one scale of time and one of height."""
    lines = [("tok/s", rounds, "accent"), *([] if plain is None else [(*plain, "plain")])]
    longest = max(sum(each.seconds for each in some) for _, some, _ in lines)
    if not longest:
        return []
    span = longest / max(1, look.width // _SPANS)
    values = [rates(some, span) for _, some, _ in lines]
    most = max(max(some, default=0.0) for some in values)
    levels = look.glyph("levels") or _DIGITS
    pieces: list[Piece] = []
    for (name, _, role), some in zip(lines, values, strict=True):
        line = "".join(levels[round(value / most * (len(levels) - 1))] for value in some)
        pieces += [(f"  {name} ", "faint"), (line, role)]
    return [*pieces, (f"  {levels[-1]} {most:.0f}", "faint")]
