"""The file of `bench --out`: every answer and the facts of the machine; written whole or not at all.

Knows no methods, and no figures over more than one answer (app/bench_figures.py).
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.answers import Answer, compared, parting, results, shown_settings
from app.loops import looping_share
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.bench import Bench
    from app.bench_plan import Item, Variant


def writable(path: Path, flag: str = "--out") -> None:
    """UsageError, before hours of work, if the file of `flag` cannot be written there."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{flag} {path}: the folder {folder} is not there or cannot be written to")
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder: name a file")


def machine(loaded: Any) -> dict[str, Any]:
    """The facts a figure needs beside it to be quoted."""
    import torch
    import transformers

    device = loaded.target.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "gpu": gpu,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": loaded.target.dtype_text,
        "quantization": loaded.target.quantization,
    }


def facts(bench: Bench) -> dict[str, Any]:
    """What was measured, on what machine, when."""
    loaded = bench.engine.loaded
    return {
        "pair": loaded.spec.name,
        "target": loaded.target.name,
        "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_kind,
        "machine": machine(loaded),
        "settings": shown_settings(bench.settings),
        "prompts_file": None if bench.args.prompts is None else str(bench.args.prompts),
        "methods": list(dict.fromkeys(variant.method for variant in bench.variants)),
        "gammas": list(bench.args.gammas),
        "temperatures": list(bench.args.temperatures) or None,
        "repeat": bench.args.repeat,
        "limit": bench.args.limit,
        "ids_file": None if bench.args.ids is None else str(bench.args.ids),
        "turns": bench.args.turns,
        "batch_size": bench.args.batch_size,
        "against": bench.args.against,
        "notes": bench.notes,
        "complete": not bench.interrupted,
        "skipped": bench.skipped,
        "resumed": len(bench.parts) - 1,
        "parts": bench.parts,
    }


def prompt_rows(bench: Bench) -> list[dict[str, Any]]:
    """Of every prompt that was answered all answers, as `run --json` tells them, with gamma and repeat."""
    return [_prompt(bench, item) for item in bench.items if any(item.answers)]


def _prompt(bench: Bench, item: Item) -> dict[str, Any]:
    return {
        "question_id": item.question.question_id,
        "category": item.question.category,
        "turn": item.turn,
        "pair": bench.engine.loaded.spec.name,
        "prompt": item.prompt,
        "settings": shown_settings(bench.settings),
        "results": [
            _result(variant, repeat, row, bench.references[variant.temperature])
            for repeat, row in enumerate(item.answers)
            for variant in bench.variants
            if variant in row
        ],
    }


def _result(variant: Variant, repeat: int, row: dict[Variant, Answer], reference: Variant) -> dict[str, Any]:
    answer = replace(row[variant], method=variant.method)
    plain = row.get(reference) if reference.method == "ar" else None
    parted = None if plain is None or variant == reference else parting(plain, row[variant])
    return {
        **results([answer], plain)[0],
        "gamma": variant.gamma,
        "temperature": variant.temperature,
        "repeat": repeat,
        "looping": round(looping_share(answer.ids), 4),
        "parting": None if parted is None else parted.to_json(),
        **compared([answer] if plain is None or variant == reference else [plain, answer]),
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write all of it or nothing: a file of this name is replaced only by a complete one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
