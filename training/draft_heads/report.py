"""What came of a training run: report.json, report.md and plot.svg (loss and held-out acceptance against tokens seen)
in the drafter's folder.

Turns figures into text and expectations; measures nothing and knows no models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.files import write_text
from utils.svg_plots import COLOURS, MARKERS, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


JSON, MARKDOWN, PLOT = "report.json", "report.md", "plot.svg"
GAMMAS = range(1, 9)

Report = dict[str, Any]
"""`target`, `student`, `data`, `settings`, `command`, `date`, `machine`, `licence`, `curve`, `best`, `finished`,
`steps`, `seconds`; `c`, `v` and `expected` where the latency was measured."""

_INCHES = (9.0, 3.6)

Line = tuple[str, list[float]]


def tokens_per_pass(alpha: Sequence[float], gamma: int) -> float:
    """1 + Σ_j ∏_{i≤j} α_i over `gamma` drafts; beyond the positions measured the last alpha is taken.

    With one alpha this is E of Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    product, total = 1.0, 1.0
    for place in range(gamma):
        product *= alpha[min(place, len(alpha) - 1)] if alpha else 0.0
        total += product
    return total


def expected(alpha: Sequence[float], c: float, v: Mapping[int, float]) -> list[dict[str, float]]:
    """Tokens a pass and the speed-up E / (γ·c + v(γ+1)) for γ = 1 … 8, over plain decoding.

    c and v(n) are in one-token passes of the target.
    """
    rows = []
    for gamma in GAMMAS:
        tokens = tokens_per_pass(alpha, gamma)
        rows.append({"gamma": gamma, "tokens_per_pass": tokens, "speedup": tokens / (gamma * c + v[gamma + 1])})
    return rows


def write_report(folder: Path, report: Report) -> None:
    """The three files, each whole or not at all. Raises OSError."""
    write_text(folder / JSON, json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    write_text(folder / MARKDOWN, as_markdown(report))
    write_text(folder / PLOT, curve_svg(report["curve"]))


def as_markdown(report: Report) -> str:
    """The report to be read."""
    best, student = report["best"], report["student"]
    ended = "" if report["finished"] else " (interrupted)"
    lines = [
        f"# {student['kind']} drafter for {report['target']}: training report",
        "",
        f"{report['steps']:,} steps over {report['curve'][-1]['tokens']:,} tokens in "
        f"{minutes(report['seconds'])}{ended}; "
        f"the student kept is that of step {best['step']:,}.",
        "",
        "![loss and held-out acceptance](plot.svg)",
        "",
        "## Held-out acceptance",
        "",
        *alpha_table(best),
        "",
        *_expectations(report),
        "## Curve",
        "",
        *_curve(report["curve"]),
        "",
        "## Settings",
        "",
        *_table(("setting", "value"), [(f"`{name}`", value) for name, value in report["settings"].items()]),
    ]
    return "\n".join(lines) + "\n"


def alpha_table(mark: Mapping[str, Any]) -> list[str]:
    """Acceptance by drafted position, as the lines of a table and what it means."""
    alpha = mark["held"]["alpha"]
    head = ["draft", *(str(place + 1) for place in range(len(alpha)))]
    return [
        *_table(head, [["alpha", *(f"{value:.3f}" for value in alpha)]]),
        "",
        f"Alpha: how often the draft is the target's own greedy choice where all before it were. At temperature 1 the "
        f"first draft is accepted with probability {mark['held']['overlap']:.3f}.",
    ]


def _expectations(report: Report) -> list[str]:
    if "c" not in report:
        return []
    alphas = len(report["best"]["held"]["alpha"])
    rows = [
        (
            f"{row['gamma']}",
            f"{row['tokens_per_pass']:.2f}",
            f"{report['v'][str(row['gamma'] + 1)]:.2f}",
            f"{row['speedup']:.2f}×",
        )
        for row in report["expected"]
    ]
    return [
        "## Expected speed-up (greedy)",
        "",
        f"A drafted token costs c = {report['c']:.3f} one-token passes of the target here; v(n) is a pass over "
        f"n tokens. Expected, not measured; beyond draft {alphas} the last alpha is taken.",
        "",
        *_table(("gamma", "tokens a pass", "v(gamma + 1)", "speed-up"), rows),
        "",
    ]


def _curve(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            f"{mark['step']:,}",
            f"{mark['tokens']:,}",
            minutes(mark["seconds"]),
            f"{mark['loss']:.3f}",
            f"{mark['held']['loss']:.3f}",
            f"{mark['held']['alpha'][0]:.3f}",
            f"{mark['held']['overlap']:.3f}",
            f"{mark['tokens_per_pass']:.3f}",
        )
        for mark in curve
    ]
    head = ("step", "tokens seen", "time", "loss", "held-out loss", "agreement", "overlap", "tokens a pass")
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def curve_svg(curve: Sequence[dict[str, Any]]) -> str:
    """The picture of :class:`training.draft_heads.train.Result`'s curve; two panels side by side."""
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
