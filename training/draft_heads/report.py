"""Results of a training run, in the draft head's folder: report.json, and the model card, README.md, to be read.

Turns figures into text and expectations; measures nothing and knows no models.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sampling.gamma.acceptance import expected_tokens
from utils.files import write_text
from utils.visible import visible

GAMMAS = range(1, 9)

# `target`, `tokenizer`, `student`, `data`, `settings`, `command`, `date`, `machine`, `licence`, `curve`, `best`,
# `finished`, `steps`, `seconds`; `c`, `v`, `plain_ms` and `expected` if the latency was measured.
ReportData = dict[str, Any]


def tokens_per_pass(alpha: Sequence[float], gamma: int) -> float:
    """Return 1 + Σ_j ∏_{i≤j} α_i over `gamma` drafts; beyond the positions measured the last alpha is taken.

    With one alpha this is E of Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return expected_tokens([alpha[min(depth, len(alpha) - 1)] for depth in range(gamma)])[-1]


def expected(alpha: Sequence[float], c: float, v: Mapping[int, float]) -> list[dict[str, float]]:
    """Return tokens a pass and the speed-up E / (γ·c + v(γ+1)) for γ = 1 … 8, over plain decoding.

    c and v(n) are in one-token passes of the target.
    """
    tokens = {gamma: tokens_per_pass(alpha, gamma) for gamma in GAMMAS}
    return [
        {"gamma": gamma, "tokens_per_pass": each, "speedup": each / (gamma * c + v[gamma + 1])}
        for gamma, each in tokens.items()
    ]


def write_report(folder: Path, report: ReportData) -> None:
    """Write the two files, each whole or not at all. Raises OSError."""
    write_text(folder / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    write_text(folder / "README.md", visible(card(report)))


def _expectations(report: ReportData) -> str:
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def card(report: ReportData) -> str:
    """Return the model card: the head, its figures and its recipe."""
    student, data, best, machine = (report[key] for key in ("student", "data", "best", "machine"))
    settings = [(f"`{name}`", value) for name, value in report["settings"].items()]
    alpha, overlap = best["held"]["alpha"], best["held"]["overlap"]
    positions = [str(position + 1) for position in range(len(alpha))]
    curve = [
        (
            f"{evaluation['step']:,}",
            f"{evaluation['tokens']:,}",
            _minutes(evaluation["seconds"]),
            f"{evaluation['loss']:.3f}",
            f"{evaluation['held']['loss']:.3f}",
            f"{evaluation['held']['alpha'][0]:.3f}",
            f"{evaluation['held']['overlap']:.3f}",
            f"{evaluation['tokens_per_pass']:.3f}",
        )
        for evaluation in report["curve"]
    ]
    heads = ("step", "tokens seen", "time", "loss", "held-out loss", "agreement", "overlap", "tokens a pass")
    return f"""\
# {student["kind"]} drafter for {report["target"]}

{student["text"]}. Used by `python infer.py --drafter DIR`; it drafts for this target only.

- Target: {report["target"]} (tokenizer {report["tokenizer"]}).
- Data: {data["text"]}: {data["tokens"]:,} answer tokens; {data["sequences"]:,} sequences to learn from, \
{data["held"]:,} held out; SHA-256 {data["sha256"]}.
- Licence of the target: {report["licence"]}.
- Date: {report["date"]}. Machine: {machine["gpu"] or machine["cpu"]}, {machine["cpu_count"]} cores, \
torch {machine["torch"]}.

## Held-out acceptance

{_table(["draft", *positions], [["alpha", *(f"{value:.3f}" for value in alpha)]])}

Alpha: how often the draft is the target's own greedy choice where all before it were. At temperature 1 the first \
draft is accepted with probability {overlap:.3f}.

{_expectations(report)}## Recipe

`{report["command"]}`

{report["steps"]:,} steps over {report["curve"][-1]["tokens"]:,} tokens in {_minutes(report["seconds"])}, AdamW, \
cosine schedule; the student kept is that of step {best["step"]:,}.

{_table(("setting", "value"), settings)}

## Curve

{_table(heads, curve)}
"""
