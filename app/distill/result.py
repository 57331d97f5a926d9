"""What came of `distill`: the new draft head in words, what it costs on this machine, a few lines for the screen.

The latency is that of the drafter's own calls inside the decode loop, beside plain decoding in the same run.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from app.lanes.lane import Lane, PairEngine
from app.lanes.pass_times import measure_costs
from app.settings.table import Settings
from sampling.drafters.draft_heads.checkpoint import read_config
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.events import Step
from training.draft_heads.report import GAMMAS, Report, best_expected
from training.text.self_text import TextIds

_GAMMA, _TOKENS, _PROMPTS, _REPEATS = 4, 24, 4, 11  # of the latency's measurement


def described(folder: Path, shape: DraftHeadConfig) -> dict[str, Any]:
    """The draft head in `folder`: kind, size, and a line of text."""
    config = asdict(shape) | read_config(folder)
    layers, ids = config["num_hidden_layers"], config["short_list"]
    head = f"a head of {ids:,} ids" if ids else "a head of all ids"
    own = " (the target's rows)" if config["shared_head"] else ""
    text = (
        f"{layers} layer{'' if layers == 1 else 's'} of width {config['hidden_size']}, {head}{own}, "
        f"{config['bytes'] / 1e6:.1f} MB"
    )
    names = ("kind", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "short_list")
    return {name: config[name] for name in (*names, "bytes", "crc32")} | {"text": text}


def measured(
    engine: PairEngine, folder: Path, kind: str, texts: Sequence[TextIds], interrupt: Callable[[], bool]
) -> dict[str, Any]:
    """`c`, `v` (n → cost of a pass over n tokens, in one-token passes) and `plain_ms`, measured here.

    Nothing where the texts or the context leave no room, or when interrupted.
    """
    prompts = [list(text.ids[: max(1, text.start or 16)]) for text in texts]
    prompts = [ids for ids in prompts if len(ids) + _TOKENS < engine.context][:_PROMPTS]
    other = PairEngine(replace(engine.loaded, drafter_kind=kind, draft_head=folder))
    settings = Settings(max_new_tokens=_TOKENS, gamma=_GAMMA, quiet=True)
    alone, lane = other.lane("ar", settings), other.lane("spec", settings)
    plain: list[float] = []
    drafting: list[float] = []
    for number, prompt in enumerate([*prompts[:1], *prompts]):  # the first one twice: it warms up
        passes = [step.verify_s for step in _rounds(alone, prompt, interrupt)]
        steps = _rounds(lane, prompt, interrupt)
        if number:
            plain += passes
            drafting += [step.draft_s / len(step.drafted) for step in steps if step.drafted]
    if interrupt() or not plain or not drafting:
        return {}
    costs = measure_costs(engine.target, range(1, GAMMAS[-1] + 2), context=128, repeats=_REPEATS)
    costs = {count: min(costs[more] for more in costs if more >= count) for count in costs}  # disturbances only add
    return {
        "c": statistics.median(drafting) / statistics.median(plain),
        "v": {str(count): seconds / costs[1] for count, seconds in costs.items()},
        "plain_ms": 1e3 * statistics.median(plain),
    }


def _rounds(lane: Lane, prompt: list[int], interrupt: Callable[[], bool]) -> list[Step]:
    """The rounds of one answer behind the one that reads the prompt."""
    return [event for event in lane.run(prompt, interrupt=interrupt) if isinstance(event, Step)][1:]


def licence_of(model: Any) -> str:
    """The licence that the target's own card names, where it lies beside its weights; else where to look."""
    file = Path(str(getattr(model, "name_or_path", "") or "."), "README.md")
    head = file.read_text(encoding="utf-8", errors="replace")[:4000] if file.is_file() else ""
    found = re.search(r"\A---\n(?:.*\n)*?license:\s*(\S+)", head)
    return found[1] if found else "see the target's own card"


def in_lines(report: Report, out: Path, export: Path | None, flags: str) -> str:
    """What came of it, in a few lines."""
    held = report["best"]["held"]
    alphas = " ".join(f"{alpha:.2f}" for alpha in held["alpha"])
    lines = [
        f"{report['student']['kind']} drafter for {report['target']}: {report['student']['text']}",
        f"held out: agreement {held['alpha'][0]:.3f}, alpha by position {alphas}, "
        f"{held['overlap']:.3f} at temperature 1",
    ]
    if "c" in report:
        best = best_expected(report)
        lines.append(
            f"a drafted token costs c = {report['c']:.3f} of a one-token pass of the target "
            f"({report['plain_ms']:.1f} ms); expected {best['speedup']:.2f}x at gamma {best['gamma']}"
        )
    tables = "tables.bin, " if (out / "tables.bin").is_file() else ""
    lines.append(f"{out}: weights, {tables}report.json, plot.svg, README.md (the card); {out / 'work'} may be removed")
    if export is not None:
        lines.append(f"{export}: the same as an ordinary transformers model")
    lines.append(f"use it: python infer.py {flags}--drafter {out}")
    return "\n".join(lines) + "\n"
