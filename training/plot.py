"""A training curve as an SVG picture: loss and held-out acceptance against tokens seen. Knows only the curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from utils.plots import COLOURS, MARKERS, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = (9.0, 3.6)

Line = tuple[str, list[float]]


def curve_svg(curve: Sequence[dict[str, Any]]) -> str:
    """The picture of :class:`training.job.Result`'s curve; two panels side by side."""
    seen = [mark["tokens"] for mark in curve]
    held = [mark["held"] for mark in curve]
    losses: list[Line] = [("training", [mark["loss"] for mark in curve]), ("held out", [one["loss"] for one in held])]
    depth = len(held[0]["alpha"]) if held else 0
    accepted: list[Line] = [(f"draft {place + 1}", [one["alpha"][place] for one in held]) for place in range(depth)]
    accepted.append(("sampled, draft 1", [one["overlap"] for one in held]))

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _panel(left, "loss (nats)", seen, losses)
        _panel(right, "held-out acceptance", seen, accepted)
        right.set_ylim(0.0, 1.0)

    return svg(draw, *_INCHES) + "\n"


def _panel(axes: Axes, title: str, seen: Sequence[float], lines: Sequence[Line]) -> None:
    from matplotlib.ticker import EngFormatter

    for index, (name, values) in enumerate(lines):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(seen, values, color=colour, marker=marker, markersize=3, label=name)
    axes.set_title(title, loc="left")
    axes.set_xlabel("tokens seen")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend()
