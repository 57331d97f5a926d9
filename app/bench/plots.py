"""The plots of a benchmark's report: each has the table of figures that it shows and a drawing of that table as SVG, in
one style, with text kept as text. Up to seven rows, each a method at a gamma, have
colours that colour-blind eyes can tell apart.

A plot for which the run measured nothing names a run that would. matplotlib is imported with the first drawing; it
opens no window and uses no global figure. Knows checked figures, no HTML.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from app.bench.summary import SummaryRow, variant_name
from app.settings.types import named
from utils.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDTH, _ROW, _MOST = 9.5, 0.2, 60.0  # inches: a plot's width, a legend's line, a plot's most
# Okabe and Ito's palette (2008) without its yellow, which is lost on white:
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vP*X<>ph"
GREY = "#767676"

_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["sans-serif"],
    "font.size": 9.0,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name with dollar signs is no formula
}
_SILENT = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no metadata, so that equal figures give equal files

ALL = "all prompts"


@dataclass(frozen=True)
class Plot:
    """One plot. `rows`: a name, and a figure for each column of `head`. `missing`: what the run did not measure for
    it, and the run that would; then there may be no `drawing`."""

    title: str
    about: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple[float | None, ...]], ...] = ()
    drawing: str = ""
    missing: str = ""


def _name(row: SummaryRow) -> str:
    return named(variant_name(row.model_dump()))


def _look(rows: Sequence[SummaryRow], row: SummaryRow) -> tuple[str, str]:
    """Return the row's colour, which no other has (grey for plain decoding), and its marker."""
    drafting = [each for each in rows if each.method != "ar"]
    colour = GREY if row.method == "ar" else colours(len(drafting))[drafting.index(row)]
    return colour, MARKERS[rows.index(row) % len(MARKERS)]


def plots(rows: Sequence[SummaryRow]) -> list[Plot]:
    """Return the plots in the order of the page."""
    return [_speedups(rows), _alphas(rows), _gammas(rows)]


def colours(count: int) -> list[str]:
    """Return a colour for each of `count` series, no two the same: the palette, or hues of alternating lightness."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    each = (hsv_to_rgb(index / count, 0.85, (0.85, 0.55)[index % 2]) for index in range(count))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in each]


def svg(draw: Callable[[Figure], None], height: float, name: str = "plot") -> str:
    """Return the drawing of `draw` on a white figure of this height in inches, as an <svg> element.

    Its ids begin with `name`, so that a page can hold several. UserError if matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it writes to stderr about its font cache
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a plot needs matplotlib: pip install -r requirements.txt") from None
    written, style = io.StringIO(), cast(Any, {**_STYLE, "svg.hashsalt": name})
    with warnings.catch_warnings(), rc_context(style):
        warnings.simplefilter("ignore")  # matplotlib's font may lack glyphs that the reader's font has
        figure = Figure(figsize=(_WIDTH, min(height, _MOST)), layout="constrained")
        draw(figure)
        figure.savefig(written, format="svg", metadata=_SILENT)
    drawing = written.getvalue()
    return re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{name}-", drawing[drawing.index("<svg") :])


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside right upper")


def _lines(figure: Figure, axes: Axes, names: Sequence[str], words: str) -> None:
    """Give each name a line, from the top; `words`: the label of the horizontal axis."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(words)
    axes.yaxis.grid(False)
    _legend(figure, axes)


# -- speed-up by category -----------------------------------------------------------------------


def _speedups(every: Sequence[SummaryRow]) -> Plot:
    title, about = "Speed-up by category", "Over plain decoding (ar) in the same run; the median of the repeats."
    if not (rows := [row for row in every if row.speedup is not None]):
        return Plot(title, about, missing="No method has a speed-up: bench --methods ar,spec measures one.")
    measured = [
        {name: each.speedup for name, each in row.categories.items() if each.speedup is not None} for row in rows
    ]
    categories = sorted({name for speedups in measured for name in speedups})
    missing = "" if categories else "The prompts have no categories: bench with its own prompts, or a file with them."
    table = tuple(
        (_name(row), (row.speedup, *map(speedups.get, categories)))
        for row, speedups in zip(rows, measured, strict=True)
    )

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (row, (name, values)) in enumerate(zip(rows, table, strict=True)):
            shift = (index + 0.5) / len(rows) * 0.8 - 0.4
            known = [(value, line + shift) for line, value in enumerate(values) if value is not None]
            colour, marker = _look(every, row)
            axes.plot(*zip(*known, strict=True), marker, color=colour, markersize=5, label=name)
            axes.hlines(shift, *_ends(row), color=colour, linewidth=1.2)
        axes.axvline(1.0, color=GREY, linewidth=1)
        axes.set_xlim(left=0)
        _lines(
            figure,
            axes,
            [named(category) for category in (ALL, *categories)],
            "speed-up (the line at 1 is plain decoding; bars: least and most of the repeats)",
        )

    height = max(1.2 + (1 + len(categories)) * max(0.32, 0.09 * len(rows)), 0.7 + _ROW * len(rows))
    return Plot(title, about, (ALL, *categories), table, svg(draw, height, "speedups"), missing)


# -- alpha by position --------------------------------------------------------------------------


def _alphas(every: Sequence[SummaryRow]) -> Plot:
    title, about = "Acceptance by draft position", "Accepted at position j / examined at j."
    if not (rows := [row for row in every if any(alpha is not None for alpha in row.alpha_per_position)]):
        return Plot(title, about, missing="Nothing was drafted: bench --methods ar,spec drafts.")
    deepest = max(j for row in rows for j, alpha in enumerate(row.alpha_per_position, 1) if alpha is not None)
    table = tuple((_name(row), (*row.alpha_per_position, *[None] * deepest)[:deepest]) for row in rows)

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for row, (name, values) in zip(rows, table, strict=True):
            colour, marker = _look(every, row)
            known = [(j, alpha) for j, alpha in enumerate(values, 1) if alpha is not None]
            axes.plot(*zip(*known, strict=True), marker=marker, color=colour, markersize=4, linewidth=1, label=name)
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("draft position")
        axes.set_ylabel("alpha")
        _legend(figure, axes)

    height = max(3.2, 0.7 + _ROW * len(rows))
    return Plot(title, about, tuple(map(str, range(1, deepest + 1))), table, svg(draw, height, "alpha"))


# -- gamma sweep --------------------------------------------------------------------------------


def _gammas(every: Sequence[SummaryRow]) -> Plot:
    title = "Gamma: measured and expected speed-up"
    about = (
        "Expected: S = E / (gamma·c + v), E = (1 − alpha^(gamma+1)) / (1 − alpha), with alpha, c and v as measured in "
        "these runs. It is left out where a drafter often drafts fewer than gamma tokens, which the formula does not "
        "describe."
    )
    swept: dict[str, dict[int, SummaryRow]] = {}  # by method and gamma
    for row in every:
        if isinstance(row.gamma, int) and row.speedup is not None:
            swept.setdefault(row.method, {})[row.gamma] = row
    swept = {method: dict(sorted(rows.items())) for method, rows in swept.items() if len(rows) > 1}
    if not swept:
        return Plot(
            title,
            about,
            missing="No method was timed at several gammas beside plain decoding: "
            "bench --methods ar,spec --gammas 1,2,4,8.",
        )
    table = tuple(
        (_name(row), (row.speedup, *_ends(row), row.expected_speedup))
        for rows in swept.values()
        for row in rows.values()
    )

    def draw(figure: Figure) -> None:
        columns = min(3, len(swept))
        grid = list(figure.subplots(-(-len(swept) // columns), columns, sharey=True, squeeze=False).flat)
        for axes in grid[len(swept) :]:
            axes.set_axis_off()
        for axes, (method, rows) in zip(grid, swept.items(), strict=False):
            _panel(axes, rows, every)
            axes.set_title(named(method))
        grid[0].set_ylim(bottom=0)  # for all panels, which share the axis; its top fits the highest of them

    head = ("measured", "least", "most", "expected")
    return Plot(title, about, head, table, svg(draw, 3.1 * -(-len(swept) // 3), "gamma"))


def _ends(row: SummaryRow) -> tuple[float, float]:
    """Return the smallest and the largest speed-up of the repeats."""
    each = row.speedup_per_repeat or [row.speedup or 0.0]
    return min(each), max(each)


def _panel(axes: Axes, rows: Mapping[int, SummaryRow], every: Sequence[SummaryRow]) -> None:
    first = next(iter(rows.values()))
    colour, marker = _look(every, first)
    for gamma, row in rows.items():
        axes.vlines(gamma, *_ends(row), color=colour, linewidth=1)
    axes.plot([*rows], [row.speedup or 0.0 for row in rows.values()], marker=marker, color=colour, label="measured")
    if known := [(gamma, row.expected_speedup) for gamma, row in rows.items() if row.expected_speedup is not None]:
        axes.plot(*zip(*known, strict=True), "--", marker="x", color="black", linewidth=1, label="expected")
    auto = next((row for row in every if (row.method, row.gamma) == (first.method, "auto")), None)
    if auto is not None and auto.speedup is not None:
        axes.axhline(auto.speedup, linestyle=":", color=colour, label="gamma auto")
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set_xticks([*rows])
    axes.set_xlabel("gamma")
    axes.legend(loc="lower center", fontsize=7)
