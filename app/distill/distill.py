"""`distill`: makes a drafter for a pair's target: text, what the target computes on it, training, report, card.

Every part goes on where it was stopped: in its folder a run of the same settings goes on, another one is named. Says
how far it is on standard error and what came of it on standard output. Knows neither sampling nor learning (training/).
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.distill.draft_head import check_target, draft_head_for, verifier_of
from app.distill.options import DATA_NAMES, TRAINING_NAMES, matters, shown
from app.distill.result import cpu_name, described, in_lines, licence_of, measured
from app.distill.texts import load_target, split_texts, target_facts, texts_for
from app.lanes.lane import PairEngine
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.checkpoint import load_student
from training.draft_heads.features import Examples, StoredExamples, StreamedExamples, extract, load_shard
from training.draft_heads.report import expected, write_report
from training.draft_heads.train import NAME, Training, TrainingJob, teacher_for
from training.text.dialogues import Talk
from utils.errors import UsageError, UserError
from utils.files import first_difference, hash_of, writable_folder, write_json
from utils.loading.fit import fingerprint
from utils.machine import machine
from utils.progress import INTERRUPTED, Progress

RUN, WORK, WRITTEN = "run.json", "work", "written.jsonl"
HELD = 48  # sequences held out
_IN_WORDS = {
    "files": "other files to read",
    "tokenizer": "a target of another tokenizer",
    "weights": "a target of other weights",
}


def check_folder(out: Path) -> None:
    """UsageError if `out` cannot be written to, or holds what no run of distill has put there."""
    writable_folder(out)
    if out.is_dir() and not (out / RUN).is_file() and any(out.iterdir()):
        raise UsageError(f"--out {out} holds other files and no run of distill: name a new or empty folder")


def keep(out: Path, now: Mapping[str, str]) -> None:
    """Note the settings of this run in its folder.

    Those that the kept parts were made with must be the same: of the data always, of the training once there is a
    checkpoint. UsageError names the first that is not.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / RUN
    if file.is_file():
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{file} is damaged: remove {out}, or choose another --out") from None
        trained = (out / NAME).is_file()
        same = {name: value for name, value in now.items() if trained or name not in TRAINING_NAMES}
        name = first_difference({name: before[name] for name in same if name in before}, same)
        if name is not None:
            what = _IN_WORDS.get(name, f"--{name.replace('_', '-')} {before.get(name)}, now {now[name]}")
            raise UsageError(f"{out} holds a run with {what}: give the same flags, or another --out")
    write_json(file, now)


@contextmanager
def progress_line(settings: Settings) -> Iterator[Progress]:
    """A line on standard error: what is being done and how far it is; seldom where that is no terminal."""
    with tqdm(
        total=1,
        bar_format="{desc} {percentage:.0f}%",
        disable=settings.quiet,
        file=sys.stderr,
        mininterval=0.1 if sys.stderr.isatty() else 60,
        miniters=0,
        leave=False,
    ) as bar:

        def show(stage: str, fraction: float | None) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update((fraction or 0.0) - bar.n)

        yield show


def distill(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Make the drafter; the exit code. Raises UserError for what cannot be read, loaded, learned or written."""
    check_folder(args.out)
    for flag, folder in (("--features", args.features), ("--export", args.export)):
        if folder is not None:
            writable_folder(folder, flag)
    with Interrupts() as interrupt:
        engine = load_target(settings, options, interrupt)
        check_target(engine, args)
        if args.writes and args.prompts is None:
            Talk(engine.tokenizer).opening()  # refused now rather than after loading more
        try:
            kept = _make(engine, settings, options, args, interrupt)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"cannot write {error.filename or args.out}: {error.strerror}; what was kept in {args.out} is intact, "
                "the same command goes on from there"
            ) from error
    if kept:
        sys.stderr.write(f"interrupted: {kept}, the same command goes on from there\n")
    return INTERRUPTED if kept else 0


def _make(
    engine: PairEngine, settings: Settings, options: ModelOptions, args: Namespace, interrupt: Callable[[], bool]
) -> str:
    """Runs part after part; each keeps its work in the folder. Returns what is kept if interrupted."""
    out, model = args.out, engine.loaded.target.model
    about: dict[str, Any] = {"target": engine.loaded.target.name, "tokenizer": fingerprint(engine.tokenizer)}
    read = [] if args.writes else list(args.data)
    files = hash_of([*read, *([args.prompts] if args.prompts else [])])
    chosen = {name: shown(args, name) for name in (*DATA_NAMES, *TRAINING_NAMES)} | {"seed": str(settings.seed)}
    weights = engine.loaded.spec.target.weights(options.revision)
    keep(out, {**about, "weights": weights, "files": files, **chosen})
    about["date"] = datetime.now(UTC).date().isoformat()
    written, features = out / WORK / WRITTEN, args.features or out / WORK / "features"
    source = texts_for(engine, settings, args, written, interrupt)
    if source is None:
        return f"{written} is kept"
    with progress_line(settings) as progress:
        learned, held = split_texts(source, HELD, args)
        draft_head = draft_head_for(engine, args, learned, settings.seed)
        network = engine.target.network
        layers = draft_head.target_layers(network.layers)
        parts: list[Examples]
        if args.kind == "eagle":
            parts = [StreamedExamples(network, part, draft_head.config.reads) for part in (learned, held)]
            about["verifier"] = verifier_of(engine)
        else:
            facts = target_facts(engine, options)
            shards = extract(network, facts, source.texts, layers, features, progress, interrupt)
            if interrupt():
                return f"what the target made of the texts so far is kept in {features}"
            examples = [example for file in shards for example in load_shard(file)]
            of = {id(text): example for text, example in zip(source.texts, examples, strict=True)}
            parts = [StoredExamples([of[id(text)] for text in part]) for part in (learned, held)]
        teacher, job = teacher_for(model, draft_head), job_of(settings, options, args)
        training = Training(draft_head, teacher, parts[0], parts[1], layers, job, out)
        if not training.run(about, progress, interrupt):
            return f"the checkpoint of step {training.step:,} is kept in {out}"
        progress("measuring what a draft costs", None)
        costs = measured(engine, out, args.kind, source.texts, interrupt)
    about.pop("verifier", None)
    report = {
        **about,
        "student": described(out, draft_head.config),
        "data": {
            "text": source.text,
            "tokens": source.tokens,
            "sequences": len(learned),
            "held": len(held),
            "sha256": source.sha256,
        },
        "settings": {name: value for name, value in chosen.items() if matters(args, name)},
        "command": args.command,
        "machine": {"cpu": cpu_name(), **machine(engine.loaded)},
        "licence": licence_of(model),
        "curve": training.curve,
        "best": training.best,
        "finished": True,
        "steps": training.step,
        "seconds": training.seconds,
        **costs,
    }
    if costs:
        v = {int(count): cost for count, cost in costs["v"].items()}
        report["expected"] = expected(training.best["held"]["alpha"], costs["c"], v)
    write_report(out, report)
    if args.export is not None:
        from training.draft_heads.export import export_plain

        export_plain(load_student(out, model), args.export, engine.tokenizer)
    given = {"--pair": options.pair, "--models": options.models, "--target": options.target}
    flags = "".join(f"{flag} {shlex.quote(value)} " for flag, value in given.items() if value)
    sys.stdout.write(in_lines(report, out, args.export, flags))
    return ""


def job_of(settings: Settings, options: ModelOptions, args: Namespace) -> TrainingJob:
    """How to train, from the flags."""
    return TrainingJob(
        epochs=args.epochs,
        lr=args.lr,
        batch_tokens=args.batch_tokens,
        law=int(args.law) if args.law.isdecimal() else args.law,
        hard=args.hard_weight,
        steps=args.steps if matters(args, "steps") else 1,
        seed=settings.seed,
        minutes=args.minutes,
        patience=args.patience,
        precise=options.dtype == "float32",
    )
