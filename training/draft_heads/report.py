"""Results of a training run, in the draft head's folder: report.json, plot.svg (loss and held-out acceptance against
tokens seen) and the model card, README.md, to be read.

Turns figures into text and expectations; measures nothing and knows no models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sampling.gamma.acceptance import expected_tokens
from utils.files import write_text
from utils.svg_plots import COLOURS, MARKERS, svg

GAMMAS = range(1, 9)

Report = dict[str, Any]
"""`target`, `student`, `data`, `settings`, `command`, `date`, `machine`, `licence`, `curve`, `best`, `finished`,
`steps`, `seconds`; `c`, `v` and `expected` where the latency was measured."""

_INCHES = (9.0, 3.6)


def tokens_per_pass(alpha: Sequence[float], gamma: int) -> float:
    """1 + Σ_j ∏_{i≤j} α_i over `gamma` drafts; beyond the positions measured the last alpha is taken.

    With one alpha this is E of Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return expected_tokens([alpha[min(place, len(alpha) - 1)] for place in range(gamma)])[-1]


def expected(alpha: Sequence[float], c: float, v: Mapping[int, float]) -> list[dict[str, float]]:
    """Tokens a pass and the speed-up E / (γ·c + v(γ+1)) for γ = 1 … 8, over plain decoding.

    c and v(n) are in one-token passes of the target.
    """
    tokens = {gamma: tokens_per_pass(alpha, gamma) for gamma in GAMMAS}
    return [
        {"gamma": gamma, "tokens_per_pass": each, "speedup": each / (gamma * c + v[gamma + 1])}
        for gamma, each in tokens.items()
    ]


def best_expected(report: Report) -> dict[str, float]:
    """The gamma that the measured costs let hope most of."""
    best: dict[str, float] = max(report["expected"], key=lambda row: row["speedup"])
    return best


def write_report(folder: Path, report: Report) -> None:
    """Write the three files, each whole or not at all. Raises OSError."""
    write_text(folder / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    write_text(folder / "plot.svg", curve_svg(report["curve"]))
    write_text(folder / "README.md", card(report))


def _alpha_table(mark: Mapping[str, Any]) -> str:
    """Acceptance by drafted position, and what it means."""
    alpha = mark["held"]["alpha"]
    head = ["draft", *(str(place + 1) for place in range(len(alpha)))]
    return f"""\
{_table(head, [["alpha", *(f"{value:.3f}" for value in alpha)]])}

Alpha: how often the draft is the target's own greedy choice where all before it were. At temperature 1 the first \
draft is accepted with probability {mark["held"]["overlap"]:.3f}."""


def _expectations(report: Report) -> str:
    if "c" not in report:
        return ""
    rows = [
        (
            f"{row['gamma']}",
            f"{row['tokens_per_pass']:.2f}",
            f"{report['v'][str(row['gamma'] + 1)]:.2f}",
            f"{row['speedup']:.2f}×",
        )
        for row in report["expected"]
    ]
    return f"""\
## Expected speed-up (greedy)

A drafted token costs c = {report["c"]:.3f} one-token passes of the target here; v(n) is a pass over n tokens. \
Expected, not measured; beyond draft {len(report["best"]["held"]["alpha"])} the last alpha is taken.

{_table(("gamma", "tokens a pass", "v(gamma + 1)", "speed-up"), rows)}

"""


def _curve(curve: Sequence[Mapping[str, Any]]) -> str:
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def card(report: Report) -> str:
    """The model card: what the head is, how it does, how it was made."""
    student, data, best = report["student"], report["data"], report["best"]
    settings = [(f"`{name}`", value) for name, value in report["settings"].items()]
    return f"""\
# {student["kind"]} drafter for {report["target"]}

{student["text"]}. Used by `python infer.py --drafter DIR`; it drafts for this target only.

- Target: {report["target"]} (tokenizer {report["tokenizer"]}).
- Data: {data["text"]}: {data["tokens"]:,} answer tokens; {data["sequences"]:,} sequences to learn from, \
{data["held"]:,} held out; SHA-256 {data["sha256"]}.
- Licence of the target: {report["licence"]}.
- Date: {report["date"]}. Machine: {_in_words(report["machine"])}.

## Held-out acceptance

{_alpha_table(best)}

{_expectations(report)}## Recipe

`{report["command"]}`

{report["steps"]:,} steps over {report["curve"][-1]["tokens"]:,} tokens in {minutes(report["seconds"])}, AdamW, cosine \
schedule; the student kept is that of step {best["step"]:,}.

{_table(("setting", "value"), settings)}

## Curve

![loss and held-out acceptance](plot.svg)

{_curve(report["curve"])}
"""


def _in_words(machine: Mapping[str, Any]) -> str:
    name = machine["gpu"] or machine["cpu"] or machine["system"]
    return f"{name}, {machine['cpu_count']} cores, torch {machine['torch']}"


def curve_svg(curve: Sequence[dict[str, Any]]) -> str:
    """The picture of a training's curve; two panels side by side."""
    seen, held = [mark["tokens"] for mark in curve], [mark["held"] for mark in curve]
    losses = {"training": [mark["loss"] for mark in curve], "held out": [one["loss"] for one in held]}
    accepted = {
        f"draft {place + 1}": [one["alpha"][place] for one in held] for place in range(len(held[0]["alpha"]))
    } | {"sampled, draft 1": [one["overlap"] for one in held]}

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        _panel(left, "loss (nats)", seen, losses)
        _panel(right, "held-out acceptance", seen, accepted)
        right.set_ylim(0.0, 1.0)

    return svg(draw, *_INCHES) + "\n"


def _panel(axes: Any, title: str, seen: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    from matplotlib.ticker import EngFormatter

    for index, (name, values) in enumerate(lines.items()):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(seen, values, color=colour, marker=marker, markersize=3, label=name)
    axes.set_title(title, loc="left")
    axes.set_xlabel("tokens seen")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend()
