"""`distill`: text, n-gram tables and a draft head for a pair's target, with report and card; each stage alone, too.

Every part can be resumed: in its folder a run of the same settings continues, a setting that differs is named. Writes
progress to standard error and the result to standard output. Knows neither sampling nor learning (training/).
"""

import hashlib
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.distill.draft_head import (
    Texts,
    build_tables,
    check_target,
    described,
    draft_head_for,
    in_lines,
    keeper_of,
    let_write,
    licence_of,
    load_target,
    measured,
    read,
    source_of,
    split_texts,
    target_facts,
    verifier_of,
)
from app.distill.options import DATA_NAMES, HEAD, STAGES, TABLES, TABLES_NAMES, TEXT, TRAINING_NAMES, matters, shown
from app.lanes.lane import PairEngine
from app.prompts.questions import questions_of
from app.screen.output import target_tokenizer
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.config import BLOCKS
from training.draft_heads.build import start_linear
from training.draft_heads.features import Examples, StoredExamples, StreamedExamples, extract, load_shard
from training.draft_heads.report import expected, write_report
from training.draft_heads.train import NAME, Training, TrainingJob, teacher_for
from training.text.dialogues import Talk
from utils.errors import UsageError, UserError
from utils.files import first_difference, hash_of, separate, writable, write_json
from utils.loading.fit import fingerprint
from utils.machine import cpu_name, machine
from utils.progress import INTERRUPTED, Progress

RUN, WORK = "run.json", "work"
TEXT_FILE, TABLES_FILE = "text.jsonl", "tables.bin"
_IN_WORDS = {
    "files": "other files to read",
    "tokenizer": "a target of another tokenizer",
    "weights": "a target of other weights",
    "turns": "other prompts",
}


def keep(out: Path, now: Mapping[str, str], names: Collection[str]) -> None:
    """Record the settings of this run's stage (`names`, and those without a flag) in its folder.

    A later run must agree with them: on those of the data, but for --tokens; once a checkpoint exists, on all.
    UsageError names the first that differs.
    """
    out.mkdir(parents=True, exist_ok=True)
    flags = {*DATA_NAMES, *TABLES_NAMES, *TRAINING_NAMES}
    now = {name: value for name, value in now.items() if name in names or name not in flags}
    file, before = out / RUN, dict[str, str]()
    if file.is_file():
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{file} is damaged: remove {out}, or choose another --out") from None
        may_change = () if (out / NAME).is_file() else ("tokens", *TABLES_NAMES, *TRAINING_NAMES)
        same = {name: value for name, value in now.items() if name in before and name not in may_change}
        name = first_difference({name: before[name] for name in same}, same)
        if name is not None:
            setting = _IN_WORDS.get(name, f"--{name.replace('_', '-')} {before.get(name)}, now {now[name]}")
            raise UsageError(f"{out} holds a run with {setting}: give the same flags, or another --out")
    write_json(file, before | now)


@contextmanager
def progress_line(settings: Settings) -> Iterator[Progress]:
    """Show stage and progress in a line on standard error, seldom where that is no terminal."""
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
    """Run the stages; return the exit code. UserError for files and models that cannot be read, used or written."""
    out: Path = args.out
    writable(out, folder=True)
    if out.is_dir() and not any((out / name).is_file() for name in (RUN, TABLES_FILE)) and any(out.iterdir()):
        raise UsageError(f"--out {out} holds other files and no run of distill: name a new or empty folder")
    if args.features is not None:
        writable(args.features, "--features", folder=True)
    args.turns = None
    if args.prompts is not None:
        args.turns = [question.turns for question in questions_of(args.prompts, settings.data_dir)]
    with Interrupts() as interrupt:
        if args.stage == TABLES and not args.writes:
            tokenizer, _ = target_tokenizer(settings, options, interrupt)
            separate({"--out": out / TABLES_FILE}, args.data)
            out.mkdir(parents=True, exist_ok=True)
            build_tables(settings, options, args, tokenizer, out / TEXT_FILE, out / TABLES_FILE)
            return 0
        engine = load_target(settings, options, interrupt)
        if engine.encodes:
            raise UserError(f"{engine.loaded.target.name} is an encoder-decoder: distill takes decoder-only targets")
        if args.stage in (None, HEAD):
            check_target(engine, args)
        if args.writes and args.prompts is None:
            Talk(engine.tokenizer).opening()  # raises here if the chat template cannot be used
        try:
            kept = _make(engine, settings, options, args, interrupt)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"cannot write {error.filename or out}: {error.strerror}; all that was kept in {out} is intact, "
                "the same command resumes the run"
            ) from error
    if kept:
        sys.stderr.write(f"interrupted: {kept}, the same command resumes the run\n")
    return INTERRUPTED if kept else 0


def _make(
    engine: PairEngine, settings: Settings, options: ModelOptions, args: Namespace, interrupt: Callable[[], bool]
) -> str:
    """Run stage after stage; each keeps its work in the folder. If interrupted, return words for the kept work."""
    out, text = args.out, args.out / TEXT_FILE
    about: dict[str, Any] = {"target": engine.loaded.target.name, "tokenizer": fingerprint(engine.tokenizer)}
    chosen = {name: shown(args, name) for name in (*DATA_NAMES, *TABLES_NAMES, *TRAINING_NAMES)}
    chosen["seed"] = str(settings.seed)
    data_hash = hash_of([] if args.writes else args.data)
    turns = hashlib.sha256(json.dumps(args.turns).encode("ascii")).hexdigest()[:16]
    names = {TEXT: (), TABLES: TABLES_NAMES, HEAD: TRAINING_NAMES}
    staged = [name for stage in ([args.stage] if args.stage else STAGES) for name in names[stage]]
    keep(out, {**target_facts(engine, options), "files": data_hash, "turns": turns, **chosen}, (*DATA_NAMES, *staged))
    if args.writes:
        tokens = args.tokens if args.prompts is None or args.limited else None
        source, keeper = source_of(engine, settings, args), keeper_of(engine, options, args, text)
        count = let_write(engine, source, text, tokens, settings, args, interrupt, keeper)
        if interrupt() and (tokens is None or count < tokens):
            return f"{text} keeps {count:,} tokens"
    if args.stage == TABLES or (args.stage is None and not (out / NAME).is_file()):
        build_tables(settings, options, args, engine.tokenizer, text, out / TABLES_FILE)
    if args.stage in (TEXT, TABLES):
        return ""
    about["date"] = datetime.now(UTC).date().isoformat()
    return _head(engine, settings, options, args, about, read(engine, args, text), chosen, interrupt)


def _head(
    engine: PairEngine,
    settings: Settings,
    options: ModelOptions,
    args: Namespace,
    about: dict[str, Any],
    source: Texts,
    chosen: Mapping[str, str],
    interrupt: Callable[[], bool],
) -> str:
    """Train the draft head and write report and card. If interrupted, return words for the kept work."""
    out, model = args.out, engine.loaded.target.model
    features = args.features or out / WORK / "features"
    with progress_line(settings) as progress:
        learned, held = split_texts(source, args.held, args)
        draft_head = draft_head_for(engine, args, learned, settings.seed)
        network = engine.target.network
        layers = draft_head.target_layers(network.layers)
        parts: list[Examples]
        if args.kind == "eagle":
            parts = [StreamedExamples(network, part, draft_head.config.reads) for part in (learned, held)]
        else:
            facts = target_facts(engine, options)
            reads = draft_head.config.reads
            shards = extract(network, facts, source.texts, layers, features, progress, interrupt, reads)
            if interrupt():
                return f"the target's outputs on the texts so far are kept in {features}"
            examples = [example for file in shards for example in load_shard(file, reads)]
            of = {id(text): example for text, example in zip(source.texts, examples, strict=True)}
            parts = [StoredExamples([of[id(text)] for text in part]) for part in (learned, held)]
        if args.published:
            about["verifier"] = verifier_of(engine)
        teacher, job = teacher_for(model, draft_head), job_of(settings, options, args)
        if args.linear_start == "on" and args.start is None and not (out / NAME).is_file():
            progress("fitting the linear map", None)
            start_linear(draft_head, parts[0])
        if args.bits == "4":
            about["bits"] = 4
        training = Training(draft_head, teacher, parts[0], parts[1], layers, job, out)
        if not training.run(about, progress, interrupt):
            return f"the checkpoint of step {training.step:,} is kept in {out}"
        progress("measuring the cost of a draft", None)
        costs = measured(engine, out, args.kind)
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
    given = {"--pair": options.pair, "--models": options.models, "--target": options.target}
    flags = "".join(f"{flag} {shlex.quote(value)} " for flag, value in given.items() if value)
    sys.stdout.write(in_lines(report, out, flags))
    return ""


def job_of(settings: Settings, options: ModelOptions, args: Namespace) -> TrainingJob:
    """Return the hyperparameters, from the flags."""
    return TrainingJob(
        epochs=args.epochs,
        lr=args.lr,
        batch_tokens=args.batch_tokens,
        steps=args.steps if matters(args, "steps") else 1,
        seed=settings.seed,
        minutes=args.minutes,
        patience=args.patience,
        precise=options.dtype == "float32",
        **({"anchors": args.anchors, "evaluations": 5} if args.kind in BLOCKS else {}),  # costs several steps each
    )
