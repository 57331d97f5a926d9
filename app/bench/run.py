"""`bench`: run the benchmark (app/bench/measurement.py), the identity check, or make the page of an earlier run."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from app.bench.identity import check_identity
from app.bench.journal import open_journal
from app.bench.measurement import Bench
from app.bench.report import report_of
from app.prompts.datasets import selected
from app.replay.log_writer import log_writer_of
from app.screen.output import load_engine
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from utils.errors import UsageError
from utils.files import separate, writable


def run_bench(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Run the benchmark (or the identity check), or make the page of an earlier one; return the exit code."""
    if args.source is not None:
        return report_of(args.source, settings, args)
    _check_flags(settings, args)
    questions = selected(args, settings.data_dir)
    written = {"--out": args.out, "--report": args.report}
    for flag, path in written.items():
        if path is not None:
            writable(path, flag)
    prompts = args.prompts if isinstance(args.prompts, Path) else None  # else the name of a data set
    separate({**written, "--log": settings.record}, [prompts, args.ids])
    journal = open_journal(settings, options, args, questions)
    try:
        with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as recorder:
            engine = load_engine(settings, options, interrupt)
            bench = Bench(engine, settings, args, questions, interrupt, journal)
            bench.recorder = recorder
            if args.check_identity:
                return check_identity(bench, options)
            bench.run()
        return bench.show()
    finally:
        if journal is not None:
            journal.close()


def _check_flags(settings: Settings, args: Namespace) -> None:
    """UsageError, before any work, for flags that exclude each other."""
    references, nothing = "has its own references and the one --temperature", "writes no page and no log"
    excluded: dict[str, Any] = {"temperatures": (args.temperatures, references), "report": (args.report, nothing)}
    for flag, (given, why) in {**excluded, "log": (settings.record, nothing)}.items():
        if args.check_identity and given:
            raise UsageError(f"--check-identity {why}: leave --{flag} out")
