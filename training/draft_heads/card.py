"""The model card: README.md beside a drafter's weights, from the report of its training. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.draft_heads.report import JSON, Report, alpha_table, minutes
from utils.errors import UserError
from utils.files import write_text

CARD = "README.md"
_MEASURED = "## Measured speed-up"


def write_card(folder: Path, report: Report) -> None:
    """Write the card; a measured speed-up of an earlier card of the same student stays. Raises OSError."""
    file = folder / CARD
    text = card(report)
    if file.is_file():
        before = file.read_text(encoding="utf-8", errors="replace")
        same = text.partition("## Recipe")[0] == before.partition("## Recipe")[0]
        text += _measured_part(before) if same else ""
    write_text(file, text)


def card(report: Report) -> str:
    """The card without a measured speed-up."""
    student, data, machine = report["student"], report["data"], report["machine"]
    lines = [
        f"# {student['kind']} drafter for {report['target']}",
        "",
        f"{student['text']}. Used by `python infer.py --drafter DIR`; it drafts for this target only.",
        "",
        f"- Target: {report['target']} (tokenizer {report['tokenizer']}).",
        f"- Data: {data['text']}: {data['tokens']:,} answer tokens; {data['sequences']:,} sequences to learn from, "
        f"{data['held']:,} held out; SHA-256 {data['sha256']}.",
        f"- Licence of the target: {report['licence']}.",
        f"- Date: {report['date']}. Machine: {machine_text(machine)}.",
        "",
        "## Held-out acceptance",
        "",
        *alpha_table(report["best"]),
        "",
    ]
    if "c" in report:
        best = max(report["expected"], key=lambda row: row["speedup"])
        lines += [
            f"A drafted token costs c = {report['c']:.3f} one-token passes of the target on that machine. Expected "
            f"from these figures: {best['speedup']:.2f}× at gamma {best['gamma']:g}.",
            "",
        ]
    lines += [
        "## Recipe",
        "",
        f"`{report['command']}`",
        "",
        f"{report['steps']:,} steps in {minutes(report['seconds'])}, AdamW, cosine schedule; the student kept is "
        f"that of step {report['best']['step']:,}. "
        + ", ".join(f"{name} {value}" for name, value in report["settings"].items())
        + ".",
        "",
        "The curve is in `report.md` and `plot.svg`.",
    ]
    return "\n".join(lines) + "\n"


def machine_text(machine: Mapping[str, Any]) -> str:
    """The machine in words, from what is known of it."""
    name = machine.get("gpu") or machine.get("cpu") or machine.get("system") or machine.get("device")
    cores = f"{machine['cpu_count']} cores" if machine.get("cpu_count") else ""
    return ", ".join(filter(None, (str(name), cores, f"torch {machine['torch']}" if machine.get("torch") else "")))


def add_measured(folder: Path, bench_json: Path) -> None:
    """Put the figures of a `bench --out` file into the card of `folder`, instead of earlier ones.

    Raises UserError for files that cannot be read, OSError where the card cannot be written.
    """
    file = folder / CARD
    try:
        text = file.read_text(encoding="utf-8")
        told = json.loads(bench_json.read_text(encoding="utf-8"))
        rows = [row for row in told["summary"] if row.get("speedup") is not None]
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{bench_json} is no file of bench --out") from None
    write_text(file, text.replace(_measured_part(text), "").rstrip() + "\n" + _measured(told, rows))


def _measured(told: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = ["", _MEASURED, "", f"{machine_text(told['machine'])}, {told['machine'].get('date', '')[:10]}.", ""]
    lines += [f"- {row['method']} at gamma {row['gamma']}: {row['speedup']:.2f}×" for row in rows]
    return "\n".join(lines) + "\n"


def _measured_part(text: str) -> str:
    begin = text.find(f"\n{_MEASURED}")
    return "" if begin < 0 else text[begin:]


def read_report(folder: Path) -> Report | None:
    """The report written earlier into `folder`; None if there is none that can be read."""
    try:
        found: Report = json.loads((folder / JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found
