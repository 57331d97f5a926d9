"""The lanes' texts in panes: side by side or stacked, within a given height.

Every word shows what became of it: by style, or without colour by marks, {+x+} for the target's own
token, {*x*} for a bonus and [-x-] for a rejected one. Accepted text is tinted by who proposed it, or without colour
marked by a letter, {m:x}. Where the text is longer than the pane its end is shown. Knows no events, no ids and no
figures but those in :class:`app.screen.figures.PaneData`.
"""

import re
from collections.abc import Sequence
from typing import Literal

from rich.cells import cell_len
from rich.segment import Segment

from app.screen.figures import PaneData, rate, title_of
from app.screen.palette import Look, letters, tint
from app.screen.rows import Drawn, Line, Piece, Row, fit, row_of, shared, width_of, wrap
from app.screen.spans import Span
from utils.growing_text import NO_TEXT

Layout = Literal["auto", "side", "stack", "trace"]

SIDE_FROM = 80  # columns from which two panes stand side by side by themselves
_MARKS = {"target": ("{+", "+}"), "bonus": ("{*", "*}"), "rejected": ("[-", "-]"), "discarded": ("[~", "~]")}
_WORDS = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


def _off_record(text: str, look: Look) -> str:
    """Rejected and discarded text: line breaks become symbols, so that it cannot move the answer."""
    text = re.sub(r"\r?\n", lambda _: look.glyph("newline"), text)
    return text.replace(NO_TEXT, "<end>") if look.ascii else text


def _marked(text: str, role: str, marks: tuple[str, str], look: Look) -> list[Piece]:
    """Text between its marks, white space outside of them; every line is marked by itself."""
    before, after = marks
    if not text.strip():
        committed = role not in ("rejected", "discarded")
        if committed and "\n" not in text:
            return [(text, role)]  # a mark around a mere space would be torn apart at the line's end
        shown = f"{before}{_off_record(text, look)}{after}"
        return [(shown, role), (text, role)] if committed else [(shown, role)]
    pieces: list[Piece] = []
    for index, line in enumerate(text.split("\n")):
        head, core, tail = _WORDS.fullmatch(line).groups()  # type: ignore[union-attr]
        marked = f"{before}{core}{after}" if core else ""
        pieces += [("\n" if index else "", role), (head, role), (marked, role), (tail, role)]
    return [(part, kind) for part, kind in pieces if part]


def pieces_of(
    spans: Sequence[Span], look: Look, *, show_discarded: bool = False, names: Sequence[str] = ()
) -> list[Piece]:
    """Spans → pieces in the look's manner: styled by kind, or, without colour, marked; accepted text of several `names`
    by its source too."""
    pieces: list[Piece] = []
    tinted, letter = len(names) > 1, letters(names)
    for span in spans:
        if span.kind == "discarded" and not show_discarded:
            continue
        first, text = len(pieces), span.text if span.committed else _off_record(span.text, look)
        by_source = tinted and span.kind == "accepted"
        if by_source and not look.color and span.source < len(names):
            pieces += _marked(text, span.kind, (f"{{{letter[span.source]}:", "}"), look)
        elif span.kind not in _MARKS:
            pieces.append((text, tint(span.source) if by_source else span.kind))
        elif look.color:
            pieces += _struck(text, span.kind)
        else:
            pieces += _marked(text, span.kind, _MARKS[span.kind], look)
        if span.dim:
            pieces[first:] = [(text, f"dim {role}") for text, role in pieces[first:]]
    return pieces


def _struck(text: str, role: str) -> list[Piece]:
    """Styled text whose leading spaces stay bare, so that no line runs through or under them."""
    core = text.lstrip(" ")
    spaces = len(text) - len(core)
    return [(" " * spaces, "plain"), (core, role)] if spaces and core else [(text, role)]


class Pane(Drawn):
    """One lane's text under its title. `height` rows in all (None: as many as the text takes)."""

    def __init__(
        self,
        data: PaneData,
        look: Look,
        *,
        height: int | None = None,
        show_discarded: bool = False,
    ) -> None:
        self.data, self.look, self.height = data, look, height
        drafts = data.drafting or any(span.kind != "plain" for span in data.spans)
        self._frame = "accent" if drafts else "faint"
        self._corners, self._edges = look.glyph("corners"), look.glyph("edges")
        pieces = pieces_of(data.spans, look, show_discarded=show_discarded, names=data.names)
        if data.state == "running":
            pieces.append((look.glyph("cursor"), "cursor"))
        self.lines = wrap(pieces, look.width - 4, look.ascii)

    @property
    def needed(self) -> int:
        """Rows for the whole text."""
        return len(self.lines) + 2

    def rows(self) -> list[Row]:
        height = self.needed if self.height is None else self.height
        if height <= 0:
            return []
        border = height >= 3
        text = [row_of(line, self.look) for line in self._tail(height - (2 if border else 1))]
        if not border:
            return [row_of(self._heading(self.look.width), self.look), *text]
        return [self._top(), *(self._side(row) for row in text), self._bottom()]

    def _tail(self, height: int) -> list[Line]:
        lines = self.lines
        if len(lines) > height:
            above = len(lines) - height + 1
            marker = fit(f"{self.look.glyph('ellipsis')} {above} lines above", self.look.width - 4, self.look)
            lines = [((marker, "faint"),), *lines[above:]] if height > 1 else lines[len(lines) - height :]
        return [*lines, *[()] * (height - len(lines))]

    def _heading(self, width: int) -> list[Piece]:
        """Title and status as far as they fit; a status is shown whole or not at all."""
        title = fit(title_of(self.data.title), width, self.look)
        status = f" {self.data.status}"
        room = width - cell_len(title)
        return [(title, self._frame), *([(status, "faint")] if cell_len(status) <= room else [])]

    def _top(self) -> Row:
        heading = self._heading(self.look.width - 5)
        rest = self._edges[0] * (self.look.width - 4 - width_of(heading))
        start, end = (self._corners[0] + " ", self._frame), (f" {rest}{self._corners[1]}", self._frame)
        return row_of([start, *heading, end], self.look)

    def _bottom(self) -> Row:
        speed = self.data.stats.predicted_per_second if self.data.stats else None
        figure = f" {rate(speed)} " if speed is not None else ""
        figure = figure if len(figure) <= self.look.width - 4 else ""
        rest = self._edges[0] * (self.look.width - 3 - len(figure))
        parts = (self._corners[2] + rest, figure, self._edges[0] + self._corners[3])
        return row_of([(part, self._frame) for part in parts], self.look)

    def _side(self, text: Row) -> Row:
        edge, frame = self._edges[1], self.look.style(self._frame)
        used = Segment.get_line_length(text)
        return [Segment(edge + " ", frame), *text, Segment(" " * (self.look.width - 3 - used)), Segment(edge, frame)]


class SideBySide(Drawn):
    """All lanes: in rows of two from 80 columns on (or as `layout` asks), else one under the other.

    The panes of a row are equally high, and all together are never higher than `look.height`.
    """

    def __init__(
        self, panes: Sequence[PaneData], look: Look, layout: Layout = "auto", *, show_discarded: bool = False
    ) -> None:
        self.look = look
        columns = 2 if layout == "side" or (look.width >= SIDE_FROM and layout != "stack") else 1
        self.groups: list[list[Pane]] = []
        for start in range(0, len(panes), columns):
            group = panes[start : start + columns]
            widths = [look.width] if len(group) == 1 else [(look.width - 1) // 2, look.width // 2]
            pairs = zip(group, widths, strict=True)
            self.groups.append([Pane(data, look.sized(width=w), show_discarded=show_discarded) for data, w in pairs])

    @property
    def needed(self) -> int:
        """Rows for all texts in full."""
        return sum(self._needs())

    @property
    def least(self) -> int:
        """Rows to leave to the texts: four lines in borders each, fewer on a low screen or for short texts."""
        height = self.look.height
        most = 6 if height is None else min(6, max(2, height // (2 * max(1, len(self.groups)))))
        return sum(min(need, most) for need in self._needs())

    def _needs(self) -> list[int]:
        return [max(pane.needed for pane in group) for group in self.groups]

    def rows(self) -> list[Row]:
        return self.within(self.look.height)

    def within(self, height: int | None) -> list[Row]:
        """The rows, at most `height` of them (None: all)."""
        needs = self._needs()
        heights = needs if height is None else shared(needs, height)
        rows: list[Row] = []
        for group, high in zip(self.groups, heights, strict=True):
            for pane in group:
                pane.height = high
            columns = [pane.rows() for pane in group]
            if len(columns) == 2:
                width = group[0].look.width + 1
                rows += [beside(left, right, width) for left, right in zip(*columns, strict=True)]
            else:
                rows += columns[0]
        return rows


def beside(left: Row, right: Row, width: int) -> Row:
    """Two rows, the right one beginning at column `width`."""
    return [*left, Segment(" " * (width - Segment.get_line_length(left))), *right]
