"""The lanes' figures as screen rows (stats lines, accepted by position, an answer over time, notes), and their texts in
panes: side by side or stacked, within a given height.

Seconds and rates are decoding time: they leave the prefill out, and a note says so. The style of a text shows its
kind; without colour marks do: {+x+} for the target's own token, {*x*} for a bonus, {!x!} for a forced token, {#x#} for
words of a lossy lane that differ from plain decoding, [-x-] for a rejected and [~x~] for a discarded draft. Accepted
text is tinted by its source, or without colour marked by a letter, {m:x}. If a text does not fit into its pane, its end
is shown. Knows no events and no token ids; an undefined figure is left out, or "-" in a column.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.segment import Segment

from app.lanes.costs import LaneRecord
from app.screen.palette import Look, letters, tint
from app.screen.rows import (
    Chunk,
    Drawn,
    Line,
    Lines,
    Piece,
    Row,
    beside,
    chunk,
    fit,
    flow,
    plural,
    row_of,
    share,
    split_height,
    width_of,
    wrap,
)
from app.screen.spans import Span
from sampling.drafters.registry import LOSSY, ROWS, is_simulated
from sampling.stats.summary import Stats
from utils.growing_text import NO_TEXT
from utils.remote.pieces import ServerFigures

State = Literal["waiting", "prefill", "running", "done", "stopped"]

TITLES = {
    **{word: row.title for word, row in ROWS.items()},
    "ar": "autoregressive",
    "spec": "speculative",
    "draft": "drafter alone",
    "beam": "beam search",
    LOSSY: "lossy: typical acceptance",
}

RATES_NOTE = "seconds and rates leave prefill out"
_POSITIONS = 12  # draft positions whose acceptance is shown
_DIGITS = "0123456789"
_LEAST = 6  # bars of rounds that must fit into a row; with less room the rates, then the row are left out
_SPANS = 8  # columns of the screen that share one value of the rates


class Round(NamedTuple):
    """A round after the opening one (which drafts nothing): its seconds, emitted tokens, drafts and accepted drafts."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int


def title_of(lane: LaneRecord) -> str:
    """Return the title of a lane's pane."""
    if lane.address:
        return f"server {lane.address}"
    return f"{lane.name} (simulated)" if is_simulated(lane.name) else TITLES.get(lane.name, lane.name)


@dataclass(frozen=True, slots=True)
class PaneData:
    """One lane as it stands.

    `progress` is shown while waiting or reading the prompt ("reading 256 / 3,000 tokens"). `gamma`: under `gamma auto`
    the mean drafts a round. `resting`: c (the cost of a draft, in plain passes) and alpha (None if nothing was
    drafted), if `gamma auto` stopped drafting because drafts do not pay. `seen`: earlier answers have this text, and
    most accepted drafts were copied from them. `rounds`: those after the opening one.
    """

    lane: LaneRecord
    spans: Sequence[Span] = ()
    stats: Stats | None = None
    state: State = "waiting"
    progress: str = ""
    gamma: float | None = None
    resting: tuple[float, float | None] | None = None
    seen: bool = False
    rounds: Sequence[Round] = ()

    @property
    def label(self) -> str:
        """The lane's short name, before its figures."""
        return self.lane.address or ("AR" if self.lane.name == "ar" else self.lane.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the lane's sources, which `Span.source` indexes."""
        return self.lane.terms.sources

    @property
    def tokens(self) -> int:
        """Tokens emitted so far."""
        return self.stats.predicted_n if self.stats else 0

    @property
    def drafting(self) -> bool:
        """Whether anything was drafted."""
        return bool(self.stats and self.stats.draft_n)

    @property
    def drafts_or_searches(self) -> bool:
        """Whether it has figures of drafts, of a beam search, or from a server's report."""
        return self.drafting or bool(self.stats and (self.stats.beams or reported(self.stats.report)))

    @property
    def status(self) -> str:
        """The lane's state and progress, in a few words."""
        settings, amount = self.lane.settings, counted(self.stats)
        if self.state in ("waiting", "prefill"):
            return self.progress or ("waiting" if self.state == "waiting" else "reading prompt")
        if self.state == "running" and settings.times_slower > 1:
            return f"{self.tokens}/{settings.max_new_tokens} {unit(self.stats)}, slow {settings.times_slower:g}"
        if self.state == "running":
            tokens = f"{self.tokens} of {settings.max_new_tokens} tok" if unit(self.stats) == "tok" else amount
            return tokens if self.gamma is None else f"{tokens}, gamma {self.gamma:.1f}"
        cut = self.state == "done" and self.stats is not None and self.stats.stop_reason == "length"
        return f"cut at {amount}" if cut else f"{self.state}, {amount}"


def note(pane: PaneData, *, can_continue: bool = True) -> str:
    """Return why an answer is incomplete ("cut at 128 tokens, /continue") or ""; `can_continue`: the user can
    type /continue."""
    stats = pane.stats
    amount = plural(pane.tokens, "token" if stats is None or stats.counts_tokens else "piece")
    problem = stats.report.problem if stats is not None and stats.report is not None else ""
    if pane.state == "stopped" or (stats and stats.stop_reason == "interrupted"):
        return f"stopped at {amount}{problem and f': {problem}'}"
    if stats is None or stats.stop_reason != "length":
        return problem
    full = pane.tokens < pane.lane.settings.max_new_tokens and not stats.pieces
    more = ", the context is full" if full else ", /continue" if can_continue and not stats.pieces else ""
    return f"cut at {amount}{more}"


def unit(stats: Stats | None) -> str:
    """Return the unit of an answer's length: "tok", or "pieces" of text if a server did not report its tokens."""
    return "tok" if stats is None or stats.counts_tokens else "pieces"


def counted(stats: Stats | None) -> str:
    """Return an answer's length: "3 tok", "1 piece"."""
    tokens = 0 if stats is None else stats.predicted_n
    return f"{tokens} tok" if unit(stats) == "tok" else plural(tokens, "piece")


def rate(value: float | None) -> str:
    """Return a rate in tokens a second; "- tok/s" if undefined."""
    return "- tok/s" if value is None else f"{value:.1f} tok/s"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def _cells(stats: Stats) -> tuple[str, str, str, str]:
    return (
        counted(stats),
        f"{stats.predicted_ms / 1000:.2f} s",
        rate(stats.predicted_per_second),
        _milliseconds(stats.ttft_ms),
    )


def details(pane: PaneData, look: Look, first: str = "  ") -> list[Chunk]:
    """Return the figures of a lane's drafts or beam search, or a server's report, as chunks after `first`."""
    role = "faint" if look.fancy else "plain"
    return [chunk(text, role, first if not i else "  ") for i, text in enumerate(_outcome(pane, look))]


def _outcome(pane: PaneData, look: Look) -> list[str]:
    stats = pane.stats
    if stats is not None and (texts := reported(stats.report)):
        return texts
    if stats is None or not (stats.beams or stats.draft_n):
        return []
    passes = plural(stats.target_passes, "pass", "es")
    if stats.beams:
        return [plural(stats.beams, "beam"), passes]
    texts = [f"accepted {stats.draft_n_accepted}/{stats.draft_n} ({stats.draft_n_accepted / stats.draft_n:.0%})"]
    if stats.alpha is not None:
        texts.append(f"{look.glyph('alpha')} {share(stats.alpha)}")
    if stats.tokens_per_pass is not None:
        per_pass = f"{stats.tokens_per_pass:.2f} tok/pass"
        texts += [f"{per_pass} over {passes}"] if look.fancy else [per_pass, passes]
    return [*texts, *(["seen before"] if pane.seen else [])]


def reported(report: ServerFigures | None) -> list[str]:
    """Return a server's figures of its drafts, its rate and its loading time; empty if it reports none."""
    if report is None:
        return []
    texts = []
    if report.drafted == 0:
        texts.append("drafted nothing")
    elif report.accepted is not None:
        of_drafted = f"/{report.drafted:.0f} ({report.accepted / report.drafted:.0%})" if report.drafted else ""
        texts.append(f"accepted {report.accepted:.0f}{of_drafted}")
        if passes := report.passes:
            texts.append(f"{1 + report.accepted / passes:.2f} tok/pass over {plural(int(passes), 'pass', 'es')}")
    texts += [rate(report.rate)] if report.rate else []
    texts += [f"{report.load_s:.1f} s for loading"] if round(report.load_s or 0, 1) else []
    return ["by the server:", *texts] if texts else []


def reported_line(report: ServerFigures | None) -> str:
    """Return :func:`reported` in one line; "" if it is empty."""
    return ", ".join(reported(report)).replace(":,", ":", 1)


def stats_lines(panes: Sequence[PaneData], look: Look) -> Lines:
    """Return one line of figures a lane, in columns.

    Without colour a line also has the lane's :func:`details`.
    """
    cells = [_cells(pane.stats) if pane.stats else None for pane in panes]
    widths = [max((len(row[i]) for row in cells if row), default=0) for i in range(4)]
    label = max((len(pane.label) for pane in panes), default=0)
    rows: list[Row] = []
    for pane, row in zip(panes, cells, strict=True):
        chunks = [chunk(pane.label.ljust(label), "faint" if look.fancy else "plain")]
        if row is None or not pane.tokens:
            chunks.append(chunk(pane.status, "faint"))
        else:
            tokens, seconds, speed, first = (text.rjust(width) for text, width in zip(row, widths, strict=True))
            role = "strong" if pane.drafting and look.color else "plain"
            chunks += [chunk(text, role) for text in (tokens, seconds, speed, f"TTFT {first}")]
            chunks += [] if look.color else details(pane, look, " | ")
        rows += flow(chunks, look, label + 2)
    return Lines(rows, look)


def positions(stats: Stats | None, look: Look, whose: str = "") -> list[Chunk]:
    """Return the acceptance by draft position: accepted at j / examined at j, for the first _POSITIONS examined.
    `whose`: the lane's name, if others draft too."""
    known = [(j, alpha) for j, alpha in enumerate(stats.alpha_per_position if stats else (), 1) if alpha is not None]
    levels = look.glyph("levels")
    chunks = [chunk(f"{whose} accepted by position".lstrip(), "faint")] if known else []
    for j, alpha in known[:_POSITIONS]:
        level = levels[round(alpha * (len(levels) - 1))] if levels else ""
        chunks.append(Chunk(((f"{j} ", "faint"), (level, "accent"), (f"{alpha:.2f}", "faint"))))
    if len(known) > _POSITIONS:
        chunks.append(chunk(f"{look.glyph('ellipsis')} to {known[-1][0]}", "faint"))
    return chunks


# -- an answer over time, on one row ---------------------------------------------------------------

TimeLine = tuple[str, Sequence[Round]]  # a lane's name and its rounds


def rates(rounds: Sequence[Round], span: float) -> list[float]:
    """Return the tokens a second in each `span` of seconds; a round's tokens are spread evenly over its time."""
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
    """Return the meaning of a round's bar, or of the digit that replaces it, and of the mark for no drafts."""
    levels, none = look.glyph("levels"), look.glyph("none")
    return (
        f"a bar a round: {levels[0]} 0, {levels[-1]} {len(levels) - 1} or more, {none} none drafted"
        if levels
        else f"a digit a round: accepted drafts, 9: 9 or more, {none} none drafted"
    )


def timeline(drafting: TimeLine, plain: TimeLine | None, look: Look) -> list[Row]:
    """Return the row of a drafting lane's rounds, with its and plain decoding's rates; empty without room or rounds."""
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


def _speeds(rounds: Sequence[Round], plain: TimeLine | None, look: Look) -> list[Piece]:
    """Return the rates of the lane and of plain decoding, on one scale of time and one of height."""
    lines = [("tok/s", rounds, "accent"), *([] if plain is None else [(*plain, "plain")])]
    if not (longest := max(sum(each.seconds for each in series) for _, series, _ in lines)):
        return []
    span = longest / max(1, look.width // _SPANS)
    values = [rates(series, span) for _, series, _ in lines]
    peak = max(max(line, default=0.0) for line in values)
    levels = look.glyph("levels") or _DIGITS
    pieces: list[Piece] = []
    for (name, _, role), line in zip(lines, values, strict=True):
        heights = (round(value / peak * (len(levels) - 1)) for value in line)
        pieces += [(f"  {name} ", "faint"), ("".join(levels[height] for height in heights), role)]
    return [*pieces, (f"  peak {peak:.0f}", "faint")]


# -- the texts in panes -----------------------------------------------------------------------------

Layout = Literal["auto", "side", "stack", "trace"]

SIDE_FROM = 80  # columns from which the layout "auto" puts two panes side by side
_MARKS = {
    **{"target": ("{+", "+}"), "bonus": ("{*", "*}"), "rejected": ("[-", "-]"), "discarded": ("[~", "~]")},
    **{"forced": ("{!", "!}"), "differs": ("{#", "#}")},
}
_WORDS = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


def _on_one_line(text: str, look: Look) -> str:
    """Return text with a symbol for each line break: drafts that are not accepted must not add lines to the answer."""
    text = re.sub(r"\r?\n", lambda _: look.glyph("newline"), text)
    return text.replace(NO_TEXT, "<end>") if look.ascii else text


def _marked(text: str, role: str, marks: tuple[str, str], look: Look) -> list[Piece]:
    """Return text between its marks, with white space outside of them; every line has its own marks."""
    before, after = marks
    if not text.strip():
        committed = role not in ("rejected", "discarded")
        if committed and "\n" not in text:
            return [(text, role)]  # wrapping could break marks around a lone space
        shown = f"{before}{_on_one_line(text, look)}{after}"
        return [(shown, role), (text, role)] if committed else [(shown, role)]
    pieces: list[Piece] = []
    for index, line in enumerate(text.split("\n")):
        head, core, tail = _WORDS.fullmatch(line).groups()  # type: ignore[union-attr]
        marked = f"{before}{core}{after}" if core else ""
        pieces += [(part, role) for part in ("\n" if index else "", head, marked, tail) if part]
    return pieces


def pieces_of(
    spans: Sequence[Span], look: Look, *, show_discarded: bool = False, names: Sequence[str] = ()
) -> list[Piece]:
    """Return spans as pieces, styled (without colour: marked) by kind; accepted text of several `names` by source."""
    pieces: list[Piece] = []
    tinted, letter = len(names) > 1, letters(names)
    for span in spans:
        if span.kind == "discarded" and not show_discarded:
            continue
        first, text = len(pieces), span.text if span.committed else _on_one_line(span.text, look)
        by_source = tinted and span.kind == "accepted"
        if by_source and not look.color and span.source < len(names):
            pieces += _marked(text, span.kind, (f"{{{letter[span.source]}:", "}"), look)
        elif span.kind not in _MARKS:
            pieces.append((text, tint(span.source, "".join(names[span.source :][:1])) if by_source else span.kind))
        else:
            pieces += _styled(text, span.kind) if look.color else _marked(text, span.kind, _MARKS[span.kind], look)
        if span.dim:
            pieces[first:] = [(text, f"dim {role}") for text, role in pieces[first:]]
    return pieces


def _styled(text: str, role: str) -> list[Piece]:
    """Return text in a style but for its leading spaces, so that they are not struck through or underlined."""
    spaces = len(text) - len(text.lstrip(" "))
    return [(text[:spaces], "plain"), (text[spaces:], role)] if 0 < spaces < len(text) else [(text, role)]


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
        drafts = data.drafting or any(span.kind not in ("plain", "forced") for span in data.spans)
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
        if height >= 3:
            text = (row_of(line, self.look) for line in self._tail(height - 2))
            return [self._top(), *(self._side(row) for row in text), self._bottom()]
        lines = [self._heading(self.look.width), *self._tail(height - 1)] if height > 0 else []
        return [row_of(line, self.look) for line in lines]

    def _tail(self, height: int) -> list[Line]:
        lines = self.lines
        if len(lines) > height:
            above = len(lines) - height + 1
            marker = fit(f"{self.look.glyph('ellipsis')} {above} lines above", self.look.width - 4, self.look)
            lines = [((marker, "faint"),), *lines[above:]] if height > 1 else lines[len(lines) - height :]
        return [*lines, *[()] * (height - len(lines))]

    def _heading(self, width: int) -> list[Piece]:
        """Return the title as far as it fits, and the status if it fits whole."""
        title = fit(title_of(self.data.lane), width, self.look)
        status = f" {self.data.status}"
        return [(title, self._frame), *([(status, "faint")] if cell_len(title + status) <= width else [])]

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
            self.groups.append(
                [
                    Pane(data, look.sized(width=width), show_discarded=show_discarded)
                    for data, width in zip(group, widths, strict=True)
                ]
            )
        self.needs = [max(pane.needed for pane in group) for group in self.groups]  # rows for the whole texts

    @property
    def least(self) -> int:
        """The least rows for panes: a frame and four lines of text a group, fewer on low screens or for short texts."""
        height = self.look.height
        most = 6 if height is None else min(6, max(2, height // (2 * max(1, len(self.groups)))))
        return sum(min(need, most) for need in self.needs)

    def rows(self) -> list[Row]:
        return self.within(self.look.height)

    def within(self, height: int | None) -> list[Row]:
        """Return the rows, at most `height` of them (None: all)."""
        heights = self.needs if height is None else split_height(self.needs, height)
        rows: list[Row] = []
        for group, high in zip(self.groups, heights, strict=True):
            for pane in group:
                pane.height = high
            left, *right = (pane.rows() for pane in group)
            rows += beside(left, right[0], group[0].look.width + 1) if right else left
        return rows
