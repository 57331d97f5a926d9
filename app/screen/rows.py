"""Screen rows: what everything drawn is made of, from text made harmless to chunks that wrap only between each other.

Text becomes lines, wrapped by display width at word boundaries. Control characters, escape sequences and direction
overrides never reach the terminal. Wide characters, joined emoji and combining marks keep together. Indentation and
line breaks stay; a line is broken at a space (which goes), between wide characters, or, if a word is longer than the
line, inside it. A piece is (text, role); a row is a list of rich segments without a line end, never wider than the
look. Knows no models, no figures and no events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby, takewhile
from operator import itemgetter
from typing import NamedTuple

from rich.cells import cell_len, get_character_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from app.screen.palette import Look
from utils.growing_text import NO_TEXT

Piece = tuple[str, str]
Line = tuple[Piece, ...]
_Cluster = tuple[str, int, str]  # text, columns, role

TAB = 4
_JOINER = "\u200d"
_PRESENTATION = "\ufe0f"

_CLOSING = frozenset("、。，．：；！？）」』】〉》〕,.:;!?)]}")  # never at the start of a line

_DROPPED = [
    *(0x00AD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, 0xFEFF),
    *range(0x202A, 0x202F),  # direction embeddings and overrides
    *range(0x2060, 0x2070),  # invisible operators, direction isolates
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE0080),  # tags: text that no eye sees
]
_CONTROLS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# Text of one column a character and no clusters: most of what models write, measured by its length.
_SIMPLE = re.compile(
    "[ -~\u00a1-\u00ac\u00ae-\u02ff\u0370-\u0482\u2010-\u2027\u2030-\u203b\u2400-\u2426\u2500-\u25fc]*"
)

Row = list[Segment]


def _table(ascii_only: bool) -> dict[int, str]:
    """What is shown for a character that a terminal would obey, or that is not seen."""
    table = {code: f"\\x{code:02x}" for code in _CONTROLS} | {0x2028: " ", 0x2029: " ", 0xA0: " "}
    table |= dict.fromkeys(_DROPPED, "") | dict.fromkeys(range(0xD800, 0xE000), "?" if ascii_only else "\ufffd")
    for code in (*range(0x09), *range(0x0B, 0x20), 0x7F):
        table[code] = f"^{chr(code ^ 0x40)}" if ascii_only else chr(0x2421 if code == 0x7F else 0x2400 + code)
    return table


_TABLES = {False: _table(False), True: _table(True)}


def visible(text: str, ascii_only: bool = False) -> str:
    """`text` without anything that a terminal would obey: only line breaks and tabs are left.

    Controls become symbols (␛, or ^[ with `ascii_only`); invisible format characters are dropped.
    """
    if not _HOSTILE.search(text):
        return text
    text = text.replace("\r\n", "\n").removesuffix("\r")
    return text.translate(_TABLES[ascii_only])


def hard_lines(pieces: Sequence[Piece], ascii_only: bool = False) -> list[Line]:
    """The pieces cut at line breaks and made harmless; tabs are expanded. At least one line."""
    lines: list[list[Piece]] = [[]]
    for text, role in pieces:
        first, *others = visible(text, ascii_only).split("\n")
        if first:
            lines[-1].append((first, role))
        for part in others:
            lines.append([(part, role)] if part else [])
    return [_untabbed(line) for line in lines]


def _untabbed(line: list[Piece]) -> Line:
    if not any("\t" in text for text, _ in line):
        return tuple(line)
    column, done = 0, []
    for text, role in line:
        before, *others = text.split("\t")
        column += cell_len(before)
        for part in others:
            spaces = TAB - column % TAB
            before += " " * spaces + part
            column += spaces + cell_len(part)
        done.append((before, role))
    return tuple(done)


def wrap(pieces: Sequence[Piece], width: int, ascii_only: bool = False) -> list[Line]:
    """Screen lines of at most `width` (≥ 2) columns. Finished lines are remembered between calls."""
    *finished, last = hard_lines(pieces, ascii_only)
    return [part for line in finished for part in _wrapped_once(line, width)] + [*_wrapped(last, width)]


def _wrapped(line: Line, width: int) -> tuple[Line, ...]:
    text = "".join(part for part, _ in line)
    if len(text) <= width and _SIMPLE.fullmatch(text):
        return (line,)
    clusters = _clusters(line)
    return tuple(_pieces(clusters[start:end]) for start, end in _cuts(clusters, width))


def _clusters(line: Line) -> list[_Cluster]:
    """What the eye sees as one character each; one that spans pieces has the role of the last.

    A zero-width joiner holds emoji together; elsewhere it is dropped, since terminals disagree on it.
    """
    clusters: list[_Cluster] = []
    joined = False
    for text, role in line:
        if not joined and _SIMPLE.fullmatch(text):
            clusters += [(char, 1, role) for char in text]
            continue
        for char in text:
            width = 1 if " " <= char <= "~" else get_character_cell_size(char)
            if char == _JOINER:
                joined = bool(clusters) and clusters[-1][1] == 2
                continue
            if not joined and width:
                clusters.append((char, width, role))
                continue
            if not clusters:
                continue  # a mark with nothing to stand on
            before, columns, _ = clusters[-1]
            whole = before + (_JOINER if joined and width else "") + char
            clusters[-1] = (whole, cell_len(whole) if char == _PRESENTATION else columns, role)
            joined = joined and not width
    return clusters


def _cuts(clusters: list[_Cluster], width: int) -> list[tuple[int, int]]:
    """Where to cut a line: [start, end) of each screen line."""
    cuts: list[tuple[int, int]] = []
    start, size = 0, len(clusters)
    while start < size or not cuts:
        end, following = _line_end(clusters, start, width, indented=not cuts)
        cuts.append((start, end))
        start = max(following, start + 1)
    return cuts


def _line_end(clusters: list[_Cluster], start: int, width: int, *, indented: bool) -> tuple[int, int]:
    """(end of the screen line that begins at `start`, start of the next one)."""
    size, columns, index, chance = len(clusters), 0, start, start
    indent = start
    while indented and indent < size and clusters[indent][0] == " ":
        indent += 1
    while index < size and columns + clusters[index][1] <= width:
        columns += clusters[index][1]
        index += 1
        if index < size and index > indent and _may_break(clusters[index - 1], clusters[index]):
            chance = index
    if index == size:
        return size, size
    end = following = chance if chance > start else max(index, start + 1)
    while end > max(start, indent) and clusters[end - 1][0] == " ":
        end -= 1
    while following < size and clusters[following][0] == " ":
        following += 1
    return end, following


def _may_break(left: _Cluster, right: _Cluster) -> bool:
    """Whether a line may end between two clusters: before a space, or beside a wide one."""
    return right[0] == " " or (2 in (left[1], right[1]) and right[0] not in _CLOSING)


def _pieces(clusters: list[_Cluster]) -> Line:
    runs = groupby(clusters, key=itemgetter(2))
    return tuple(("".join(text for text, _, _ in run), role) for role, run in runs)


_wrapped_once = lru_cache(maxsize=2048)(_wrapped)


def width_of(line: Iterable[Piece]) -> int:
    """Columns of a line."""
    return sum(cell_len(text) for text, _ in line)


def one_line(text: str, look: Look) -> str:
    """A token's text made harmless, with a symbol for each line break."""
    text = visible(text, look.ascii).replace("\n", look.glyph("newline")).replace("\t", " ")
    return "<end>" if text == NO_TEXT and look.ascii else text


def quoted(text: str, look: Look, columns: int) -> str:
    """A token's text in quotes on one line of so many columns at most, spaces kept."""
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


class Chunks(Drawn):
    """Chunks as rows of their own."""

    def __init__(self, chunks: Sequence[Chunk], look: Look, indent: int = 0) -> None:
        self.chunks, self.look, self.indent = chunks, look, indent

    def rows(self) -> list[Row]:
        return flow(self.chunks, self.look, self.indent)


class Chunk(NamedTuple):
    """Some pieces that stay on one row, and what parts them from the chunk before on the same row."""

    pieces: tuple[Piece, ...]
    before: str = "  "

    @property
    def width(self) -> int:
        return width_of(self.pieces)


def chunk(text: str, role: str = "plain", before: str = "  ") -> Chunk:
    """A chunk of one role."""
    return Chunk(((text, role),), before)


def row_of(line: Iterable[Piece], look: Look) -> Row:
    """One row of pieces in the look's styles, made harmless."""
    return [Segment(visible(text, look.ascii), look.style(role)) for text, role in line if text]


def flow(chunks: Sequence[Chunk], look: Look, indent: int = 0) -> list[Row]:
    """Rows of chunks: a row ends where the next chunk does not fit; further rows are indented.

    A chunk wider than the screen is broken at its own spaces, so no figure is ever cut off.
    """
    indent = indent if indent * 3 <= look.width else 0
    lines: list[list[Piece]] = []
    for item in chunks:
        if lines and width_of(lines[-1]) + cell_len(item.before) + item.width <= look.width:
            lines[-1] += [(item.before, "plain"), *item.pieces]
            continue
        margin = indent if lines else 0
        whole = item.width <= look.width - margin
        parts = [item.pieces] if whole else wrap(item.pieces, look.width - margin)
        lines += [[(" " * margin, "plain"), *part] for part in parts]
    return [row_of(line, look) for line in lines]


def fit(text: str, width: int, look: Look) -> str:
    """`text` on at most `width` columns, an ellipsis at its end where it was cut."""
    if cell_len(text) <= width:
        return text
    mark = look.glyph("ellipsis")
    ends = takewhile(lambda end: cell_len(text[:end] + mark) <= width, range(1, len(text) + 1))
    return (text[: max(ends, default=0)].rstrip() + mark)[: max(0, width)]


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


class Lines(Drawn):
    """Rows that were drawn already."""

    def __init__(self, rows: list[Row], look: Look) -> None:
        self._rows, self.look = rows, look

    def rows(self) -> list[Row]:
        return self._rows


def plural(count: int, word: str, ending: str = "s") -> str:
    """A count with its noun: "1 token", "2 tokens"."""
    return f"{count:,} {word}{ending * (count != 1)}"


def share(value: float) -> str:
    """A figure between 0 and 1 with two digits: .85, 1.00."""
    return f"{value:.2f}".removeprefix("0")
