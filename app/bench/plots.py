"""The plots of a benchmark's report: what each shows as a table of figures, and the drawing made of that table.

A plot for which the run measured nothing says what run would fill it. Knows checked figures (app/bench/results.py), no
HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.bench.results import PARTS, Run, Value, time_split
from app.bench.summary import Key, SummaryRow
from app.settings.types import named
from utils.svg_plots import GREY, MARKERS, colours, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_PART_COLOURS = ("#d55e00", "#0072b2", "#56b4e9", "#999999", "#dddddd")
_WIDTH, _ROW, _MOST = 9.5, 0.2, 60.0  # inches: of a plot, of a line of it, of the highest plot
ALL = "all prompts"


@dataclass(frozen=True)
class Plot:
    """`rows` are a name and a figure for each of `head`; without `drawing` there is only `missing`. `name` tells the
    drawing from the others of a page, as a file's name can."""

    title: str
    about: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    drawing: str = ""
    missing: str = ""
    name: str = ""


@dataclass(frozen=True)
class Variants:
    """The rows of one temperature with the name, colour and mark of each."""

    rows: Sequence[SummaryRow]
    names: Mapping[Key, str]
    prefix: str

    def of(self, row: SummaryRow) -> str:
        return named(self.names[row.key])

    def look(self, row: SummaryRow) -> tuple[str, str]:
        place = [each.key for each in self.rows].index(row.key)
        return _colours(self.rows)[row.key], MARKERS[place % len(MARKERS)]


def _colours(rows: Sequence[SummaryRow]) -> dict[Key, str]:
    """A colour of its own for each method and gamma, grey for plain decoding."""
    drafting = [row.key for row in rows if row.method != "ar"]
    return {row.key: GREY for row in rows} | dict(zip(drafting, colours(len(drafting)), strict=True))


def plots(run: Run, variants: Variants) -> list[Plot]:
    """The plots of one temperature, in the order of the page."""
    return [_speedups(variants), _alphas(variants), *_gammas(variants), _times(run, variants)]


def _drawn(plot: Plot, draw: Callable[[Figure], None], height: float, name: str) -> Plot:
    """The plot with its drawing."""
    return replace(plot, drawing=svg(draw, _WIDTH, min(height, _MOST), name), name=name)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside right upper")


def _lines(figure: Figure, axes: Axes, names: Sequence[str], words: str) -> None:
    """One line a name, from the top; `words` say what grows to the right."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(words)
    axes.yaxis.grid(False)
    _legend(figure, axes)


# -- the first screen ---------------------------------------------------------------------------


def rates(rows: Sequence[SummaryRow], names: Mapping[Key, str]) -> Plot:
    """Tokens a second of every method of the run, as bars."""
    title, about = "Tokens a second", "Means over the repeats, without the prefill; lines: their standard deviation."
    found = [(row, row.predicted_per_second.mean) for row in rows]
    table = tuple(
        (named(names[row.key]), (mean, row.predicted_per_second.spread)) for row, mean in found if mean is not None
    )
    if not table:
        return Plot(title, about, missing="The file tells no tokens a second: what it has is below.")

    def draw(figure: Figure) -> None:
        axes, looks = figure.subplots(), _colours(rows)
        for place, (row, mean) in enumerate((row, mean) for row, mean in found if mean is not None):
            axes.barh(place, mean, 0.7, color=looks[row.key])
            if spread := row.predicted_per_second.spread:
                axes.hlines(place, max(0.0, mean - spread), mean + spread, color="black", linewidth=1)
            axes.annotate(
                f"{mean:.1f}", (mean + (spread or 0.0), place), (4, 0), textcoords="offset points", va="center"
            )
        axes.margins(x=0.08)
        axes.set_xlim(left=0)
        _lines(figure, axes, [name for name, _ in table], "tokens a second")

    return _drawn(Plot(title, about, ("mean", "spread"), table), draw, 1.0 + 0.28 * len(table), "rates")


# -- speed-up by category -----------------------------------------------------------------------


def _speedups(variants: Variants) -> Plot:
    title, about = "Speed-up by category", "Over plain decoding (ar) in the same run; the median of the repeats."
    rows = [row for row in variants.rows if row.speedup is not None]
    if not rows:
        return Plot(title, about, missing="No method was compared with plain decoding: bench --methods ar,spec does.")
    categories = sorted({name for row in rows for name, one in row.categories.items() if one.speedup is not None})
    missing = "" if categories else "The prompts have no categories: bench with its own prompts, or a file with them."
    table = tuple((variants.of(row), (row.speedup, *(_category(row, name) for name in categories))) for row in rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = [ALL, *categories]
        for index, (row, (name, values)) in enumerate(zip(rows, table, strict=True)):
            shift = (index + 0.5) / len(rows) * 0.8 - 0.4
            known = [(value, place + shift) for place, value in enumerate(values) if value is not None]
            colour, marker = variants.look(row)
            axes.plot(*zip(*known, strict=True), marker, color=colour, markersize=5, label=name)
            axes.hlines(shift, *_ends(row), color=colour, linewidth=1.2)
        axes.axvline(1.0, color=GREY, linewidth=1)
        axes.set_xlim(left=0)
        words = "speed-up (the line at 1 is plain decoding; bars: least and most of the repeats)"
        _lines(figure, axes, [named(place) for place in places], words)

    height = max(1.2 + (1 + len(categories)) * max(0.32, 0.09 * len(rows)), 0.7 + _ROW * len(rows))
    plot = Plot(title, about, (ALL, *categories), table, missing=missing)
    return _drawn(plot, draw, height, f"{variants.prefix}speedups")


def _category(row: SummaryRow, name: str) -> Value:
    return row.categories[name].speedup if name in row.categories else None


# -- alpha by position --------------------------------------------------------------------------


def _alphas(variants: Variants) -> Plot:
    title, about = "Acceptance by draft position", "Accepted at position j / examined at j."
    rows = [row for row in variants.rows if any(alpha is not None for alpha in row.alpha_per_position)]
    if not rows:
        return Plot(title, about, missing="Nothing was drafted: bench --methods ar,spec drafts.")
    deepest = max(j for row in rows for j, alpha in enumerate(row.alpha_per_position, 1) if alpha is not None)
    table = tuple((variants.of(row), _padded(row.alpha_per_position, deepest)) for row in rows)

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for row, (name, values) in zip(rows, table, strict=True):
            colour, marker = variants.look(row)
            known = [(j, alpha) for j, alpha in enumerate(values, 1) if alpha is not None]
            axes.plot(*zip(*known, strict=True), marker=marker, color=colour, markersize=4, linewidth=1, label=name)
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("draft position")
        axes.set_ylabel("alpha")
        _legend(figure, axes)

    head = tuple(map(str, range(1, deepest + 1)))
    return _drawn(Plot(title, about, head, table), draw, max(3.2, 0.7 + _ROW * len(rows)), f"{variants.prefix}alpha")


def _padded(values: Sequence[Value], length: int) -> tuple[Value, ...]:
    return tuple(values[:length]) + (None,) * (length - len(values))


# -- gamma sweep --------------------------------------------------------------------------------


def _gammas(variants: Variants) -> list[Plot]:
    """The sweep of fixed gammas, the rounds of `gamma auto`, or what run would fill them."""
    sweep, *others = _sweep(variants), _tokens(variants), _rounds(variants)
    return [plot for plot in (sweep, *others) if plot.drawing] or [sweep]


def _rounds(variants: Variants) -> Plot:
    title = "Gamma auto: what a round drafts and what it keeps"
    about = "The share of rounds that drafted, and that accepted, so many tokens; of a tree all nodes count as drafted."
    rows = [row for row in variants.rows if row.gamma == "auto" and any(row.draft_histogram)]
    if not rows:
        return Plot(title, about)
    most = max(len(counts) for row in rows for counts in (row.draft_histogram, row.acceptance_histogram))
    table = tuple(
        (f"{variants.of(row)} {what}", _padded(_shares(counts), most))
        for row in rows
        for what, counts in (("drafted", row.draft_histogram), ("accepted", row.acceptance_histogram))
    )

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        columns = min(3, len(rows))
        grid = list(figure.subplots(-(-len(rows) // columns), columns, sharey=True, squeeze=False).flat)
        for axes in grid[len(rows) :]:
            axes.set_axis_off()
        for axes, row in zip(grid, rows, strict=False):
            for what, counts, shift, colour in (
                ("drafted", row.draft_histogram, -0.2, GREY),
                ("accepted", row.acceptance_histogram, 0.2, variants.look(row)[0]),
            ):
                shares = [share or 0.0 for share in _shares(counts)]
                axes.bar([place + shift for place in range(len(shares))], shares, 0.4, color=colour, label=what)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(variants.of(row))
            axes.set_xlabel("tokens a round")
            axes.legend(fontsize=7)
        grid[0].set_ylabel("share of rounds")

    plot = Plot(title, about, tuple(map(str, range(most))), table)
    return _drawn(plot, draw, 3.1 * -(-len(rows) // 3), f"{variants.prefix}rounds")


def _shares(counts: Sequence[int]) -> list[Value]:
    return [round(count / sum(counts), 4) for count in counts] if sum(counts) else []


def _sweep(variants: Variants) -> Plot:
    title = "Gamma: measured and expected speed-up"
    about = (
        "Expected: S = E / (gamma·c + v), E = (1 − alpha^(gamma+1)) / (1 − alpha), with alpha, c and v as measured in "
        "these runs. It is left out where a drafter often drafts fewer than gamma tokens, which the formula does not "
        "describe."
    )
    swept = _swept(row for row in variants.rows if row.speedup is not None)
    if not swept:
        needed = (
            "No method was timed at several gammas beside plain decoding: bench --methods ar,spec --gammas 1,2,4,8."
        )
        return Plot(title, about, missing=needed)
    rows = [row for method in swept.values() for row in method]
    table = tuple((variants.of(row), (row.speedup, *_ends(row), row.expected_speedup)) for row in rows)

    def draw(figure: Figure) -> None:
        columns = min(3, len(swept))
        grid = list(figure.subplots(-(-len(swept) // columns), columns, sharey=True, squeeze=False).flat)
        for axes in grid[len(swept) :]:
            axes.set_axis_off()
        for axes, (method, rows) in zip(grid, swept.items(), strict=False):
            _panel(axes, rows, variants)
            axes.set_title(named(method))
        grid[0].set_ylim(bottom=0)  # all panels share it, and it keeps the top that the drawn ones need

    height = 3.1 * -(-len(swept) // 3)
    head = ("measured", "least", "most", "expected")
    return _drawn(Plot(title, about, head, table), draw, height, f"{variants.prefix}gamma")


def _tokens(variants: Variants) -> Plot:
    title, about = "Tokens a pass by gamma (TAR)", "Tokens said over passes of the target, its own tokens included."
    swept = _swept(row for row in variants.rows if row.tokens_per_pass is not None)
    if not swept:
        return Plot(title, about)
    table = tuple((variants.of(row), (row.tokens_per_pass,)) for rows in swept.values() for row in rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for method, rows in swept.items():
            colour, marker = variants.look(rows[0])
            tokens = [row.tokens_per_pass or 0.0 for row in rows]
            axes.plot(list(map(_gamma, rows)), tokens, marker=marker, color=colour, markersize=4, label=named(method))
        axes.set_xticks(sorted({_gamma(row) for rows in swept.values() for row in rows}))
        axes.set_ylim(bottom=1)
        axes.set_xlabel("gamma")
        axes.set_ylabel("tokens a pass")
        _legend(figure, axes)

    return _drawn(Plot(title, about, ("tokens a pass",), table), draw, 3.2, f"{variants.prefix}tokens")


def _swept(rows: Iterable[SummaryRow]) -> dict[str, list[SummaryRow]]:
    """The rows of each method that has several fixed gammas, in their order."""
    found: dict[str, list[SummaryRow]] = {}
    for row in rows:
        if isinstance(row.gamma, int):
            found.setdefault(row.method, []).append(row)
    return {method: sorted(each, key=_gamma) for method, each in found.items() if len(each) > 1}


def _gamma(row: SummaryRow) -> int:
    return row.gamma if isinstance(row.gamma, int) else 0


def _ends(row: SummaryRow) -> tuple[float, float]:
    """The least and the most of the repeats."""
    each = row.speedup_per_repeat or [row.speedup or 0.0]
    return min(each), max(each)


def _panel(axes: Axes, rows: Sequence[SummaryRow], variants: Variants) -> None:
    colour, marker = variants.look(rows[0])
    gammas = [_gamma(row) for row in rows]
    for row in rows:
        axes.vlines(_gamma(row), *_ends(row), color=colour, linewidth=1)
    axes.plot(gammas, [row.speedup or 0.0 for row in rows], marker=marker, color=colour, label="measured")
    known = [(_gamma(row), row.expected_speedup) for row in rows if row.expected_speedup is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "--", marker="x", color="black", linewidth=1, label="expected")
    auto = next((row for row in variants.rows if (row.method, row.gamma) == (rows[0].method, "auto")), None)
    if auto is not None and auto.speedup is not None:
        axes.axhline(auto.speedup, linestyle=":", color=colour, label="gamma auto")
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set_xticks(gammas)
    axes.set_xlabel("gamma")
    axes.legend(loc="lower center", fontsize=7)


# -- time split ---------------------------------------------------------------------------------


def _times(run: Run, variants: Variants) -> Plot:
    title = "Where the time goes"
    about = "Milliseconds a token after the first one, over all answers; rest: what the loop itself takes."
    found = [(row, split) for row in variants.rows if (split := time_split(run, row.key)) is not None]
    if not found:
        needed = "The file holds no answers with their times: bench --out writes them."
        return Plot(title, about, missing=needed)
    table = tuple((variants.of(row), split) for row, split in found)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        left = [0.0] * len(table)
        for place, (part, colour) in enumerate(zip(PARTS, _PART_COLOURS, strict=True)):
            widths = [split[place] or 0.0 for _, split in table]
            if any(widths):
                axes.barh(
                    range(len(table)), widths, 0.7, left, color=colour, edgecolor="white", linewidth=0.5, label=part
                )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        _lines(figure, axes, [name for name, _ in table], "milliseconds a token")

    return _drawn(Plot(title, about, PARTS, table), draw, 1.0 + 0.28 * len(table), f"{variants.prefix}time")
