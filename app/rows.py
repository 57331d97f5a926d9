"""Screen rows: the common base of everything drawn, and fields that wrap only between each other.

A row is a list of rich segments without a line end, never wider than the look. Knows no models, no
figures and no events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from app.palette import Look
from app.wrap import Line, Piece, wrap

Row = list[Segment]


class Drawn:
    """A renderable made of rows. Subclasses give `rows()`; its length is the height."""

    look: Look

    def rows(self) -> list[Row]:
        """The rows, each at most `look.width` columns wide."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for row in self.rows():
            yield from row
            yield Segment.line()


class Field(NamedTuple):
    """Some pieces that stay on one row, and what parts them from the field before on the same row."""

    pieces: tuple[Piece, ...]
    before: str = "  "

    @property
    def width(self) -> int:
        return sum(cell_len(text) for text, _ in self.pieces)


def field(text: str, role: str = "plain", before: str = "  ") -> Field:
    """A field of one role."""
    return Field(((text, role),), before)


def row_of(line: Iterable[Piece], look: Look) -> Row:
    """One row of pieces in the look's styles."""
    return [Segment(text, look.style(role)) for text, role in line if text]


def width_of(line: Iterable[Piece]) -> int:
    """Columns of a line."""
    return sum(cell_len(text) for text, _ in line)


def flow(fields: Sequence[Field], look: Look, indent: int = 0) -> list[Row]:
    """Rows of fields: a row ends where the next field does not fit; further rows are indented.

    A field wider than the screen is broken at its own spaces, so no figure is ever cut off.
    """
    indent = indent if indent * 3 <= look.width else 0
    lines: list[list[Piece]] = []
    column = 0
    for item in fields:
        room = look.width - column - cell_len(item.before)
        if lines and item.width <= room:
            lines[-1] += [(item.before, "plain"), *item.pieces]
            column = width_of(lines[-1])
            continue
        margin = indent if lines else 0
        parts: list[Line] = (
            [item.pieces] if item.width <= look.width - margin else wrap(item.pieces, look.width - margin)
        )
        lines += [[(" " * margin, "plain"), *part] for part in parts]
        column = width_of(lines[-1])
    return [row_of(line, look) for line in lines]


def fit(text: str, width: int, look: Look) -> str:
    """`text` on at most `width` columns, an ellipsis at its end where it was cut."""
    if cell_len(text) <= width:
        return text
    mark = look.glyph("ellipsis")
    kept = ""
    for char in text:
        if cell_len(kept + char + mark) > width:
            break
        kept += char
    return (kept.rstrip() + mark)[: max(0, width)]


def shared(needs: Sequence[int], height: int) -> list[int]:
    """Heights of at most `needs` that sum to at most `height`: who needs little leaves the rest to others.

    If there is not one row each, the last ones get it.
    """
    heights = [0] * len(needs)
    for index in reversed(range(len(needs))):
        heights[index] = min(1, height - sum(heights))
    left = max(0, height - sum(heights))
    while left and any(have < need for have, need in zip(heights, needs, strict=True)):
        for index in sorted(range(len(needs)), key=lambda i: heights[i]):
            if left and heights[index] < needs[index]:
                heights[index] += 1
                left -= 1
    return heights
