"""Screen rows, from which every renderable is made: control characters in text become visible, and text is wrapped.

Text becomes lines, wrapped by rich: by display width, at a space (which is dropped) or, if a word is longer than the
line, inside it. Indentation and line breaks stay. A piece is (text, role). A chunk is some pieces that stay on one row.
A row is a list of rich segments without a line end, never wider than the look. Knows no models and no
events.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from app.screen.palette import Look
from utils.growing_text import NO_TEXT
from utils.visible import visible

Piece = tuple[str, str]  # text and role, a key of the styles in app/screen/palette.py
Line = tuple[Piece, ...]

_CONSOLE = Console()  # rich's wrapping asks for one, which it does not use
_JOINER = "\u200d"  # joins emoji into one, on whose width terminals disagree

Row = list[Segment]


def wrap(pieces: Sequence[Piece], width: int, ascii_only: bool = False) -> list[Line]:
    """Return one or more screen lines of at most `width` (≥ 2) columns. Lines that a line break ended are cached."""
    shown = [(visible(part, ascii_only).replace(_JOINER, ""), role) for part, role in pieces]
    *finished, last = Text.assemble(*shown).split("\n", allow_blank=True)
    wrapped = [part for line in finished for part in _wrapped_once(_line_of(line), width)]
    return wrapped + _wrapped(_line_of(last), width)


def _wrapped(line: Line, width: int) -> list[Line]:
    """Return the screen lines of a line, without the spaces at which it is broken."""
    lines = Text.assemble(*line).wrap(_CONSOLE, width, tab_size=4)
    for part in lines[:-1]:
        part.rstrip()
    return [_line_of(part) for part in lines]


def _line_of(text: Text) -> Line:
    return tuple((text.plain[span.start : span.end], str(span.style)) for span in text.spans)


_wrapped_once = lru_cache(maxsize=2048)(_wrapped)


def width_of(line: Iterable[Piece]) -> int:
    """Return the columns that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def one_line(text: str, look: Look) -> str:
    """Return a token's text with control characters made visible and a symbol for each line break."""
    text = visible(text, look.ascii).replace("\n", look.glyph("newline")).replace("\t", " ")
    return "<end>" if text == NO_TEXT and look.ascii else text


def quoted(text: str, look: Look, columns: int) -> str:
    """Return a token's text in quotes on one line of at most `columns` columns, spaces kept."""
    return f'"{fit(one_line(text, look), min(columns - 2, max(2, look.width - 8)), look)}"'


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


class Chunk(NamedTuple):
    """Some pieces that stay on one row; `before`: the text between them and an earlier chunk on the same row."""

    pieces: tuple[Piece, ...]
    before: str = "  "

    @property
    def width(self) -> int:
        return width_of(self.pieces)


def chunk(text: str, role: str = "plain", before: str = "  ") -> Chunk:
    """Return a chunk of one role."""
    return Chunk(((text, role),), before)


def row_of(line: Iterable[Piece], look: Look) -> Row:
    """Return one row of pieces in the look's styles, with control characters made visible."""
    return [Segment(visible(text, look.ascii), look.style(role)) for text, role in line if text]


def flow(chunks: Sequence[Chunk], look: Look, indent: int = 0) -> list[Row]:
    """Return chunks in rows: a row ends where the next chunk does not fit; further rows are indented.

    A chunk wider than the screen is broken at its own spaces, so no figure is ever cut off.
    """
    indent = indent if indent * 3 <= look.width else 0
    lines: list[list[Piece]] = []
    for item in chunks:
        if lines and width_of(lines[-1]) + cell_len(item.before) + item.width <= look.width:
            lines[-1] += [(item.before, "plain"), *item.pieces]
            continue
        margin = indent if lines else 0
        parts = [item.pieces] if item.width <= look.width - margin else wrap(item.pieces, look.width - margin)
        lines += [[(" " * margin, "plain"), *part] for part in parts]
    return [row_of(line, look) for line in lines]


def beside(left: Sequence[Row], right: Sequence[Row], width: int) -> list[Row]:
    """Return two columns of rows side by side, the right ones beginning at column `width`."""
    return [
        [*row, Segment(" " * (width - Segment.get_line_length(row))), *other]
        for row, other in zip_longest(left, right, fillvalue=Row())
    ]


def fit(text: str, width: int, look: Look) -> str:
    """Return `text` cut to at most `width` columns, with an ellipsis at its end if it was cut."""
    if cell_len(text) <= width:
        return text
    mark = look.glyph("ellipsis")
    return (set_cell_size(text, max(0, width - cell_len(mark))).rstrip() + mark)[: max(0, width)]


def split_height(needs: Sequence[int], height: int) -> list[int]:
    """Return how `height` rows are split: each part gets at most its `needs`, and the others share the rest.

    If there are fewer rows than parts, the last parts get one each.
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


class Lines(Drawn):
    """A renderable of finished rows."""

    def __init__(self, rows: list[Row], look: Look) -> None:
        self._rows, self.look = rows, look

    def rows(self) -> list[Row]:
        return self._rows


def plural(count: int, word: str, ending: str = "s") -> str:
    """Return a count with its noun: "1 token", "2 tokens"."""
    return f"{count:,} {word}{ending * (count != 1)}"


def share(value: float) -> str:
    """Return a figure between 0 and 1 with two digits: .85, 1.00."""
    return f"{value:.2f}".removeprefix("0")


def precise(value: float, more: int = 0) -> str:
    """Return a figure between 0 and 1 with one or two significant digits (.12, .083, .0004, 4e-5) and `more` further
    ones."""
    digits = next((n for n, least in ((2, 0.1), (3, 0.01), (4, 1e-4)) if value >= least), 0)
    small = f"{value:.{more}e}".replace("e-0", "e-")
    return small if value > 1e-12 and not digits else f"{value:.{(digits or 2) + more}f}".removeprefix("0")


def in_short(number: float) -> str:
    """Return a large number in three digits and a unit: 1.54B."""
    rounded = float(f"{number:.3g}")
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    return next((f"{rounded / size:.3g}{unit}" for size, unit in units if rounded >= size), f"{number:.0f}")
