"""`distill`: text, n-gram tables and a draft head for a pair's target, with report and card; each stage alone, too.

The target writes the text, or files have it; flags and target give the shape of the draft head. A run with the same
settings continues in its folder; another value of a setting on which the kept work depends is an error that names it
(:func:`keep`). Writes progress to standard error and the result to standard output. Does not know how text is sampled
or a head is trained (training/).
"""

import hashlib
import json
import math
import re
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.distill.options import DATA_NAMES, HEAD, TABLES, TABLES_NAMES, TEXT, TRAINING_NAMES, matters, shown
from app.lanes.lane import PairEngine
from app.lanes.pairing import choose_pair
from app.lanes.warm import warm_up
from app.prompts.questions import questions_of
from app.screen.output import load_engine, load_progress, target_tokenizer
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.checkpoint import load_student, read_config, target_rotary
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.gamma.costs import pass_times
from training.draft_heads.build import continued, new_draft_head, shape_for, start_linear
from training.draft_heads.features import Examples, StoredExamples, StreamedExamples, extract, load_shard
from training.draft_heads.report import GAMMAS, ReportData, expected, write_report
from training.draft_heads.train import NAME, Training, TrainingJob, teacher_for
from training.tables.build import Passage, build, read_passages
from training.text.dialogues import GivenPrompts, OwnChats, PromptSource, Talk
from training.text.synthesize import (
    ENDLESS,
    TextWriter,
    passages,
    read_texts,
    short_list,
    split,
    write_self,
    written,
)
from utils.catalogue.heads import BLOCK_KINDS
from utils.errors import UsageError, UserError, raise_first
from utils.files import check_outputs, first_difference, hash_of, writable, write_json
from utils.loading.fit import fingerprint
from utils.machine import cpu_name, keep_memory, machine
from utils.progress import INTERRUPTED, Progress
from utils.visible import to_stderr, visible

RUN, WORK = "run.json", "work"
TEXT_FILE, TABLES_FILE = "text.jsonl", "tables.bin"
_IN_WORDS = {
    "files": "other files to read",
    "tokenizer": "a target of another tokenizer",
    "weights": "a target of other weights",
    "turns": "other prompts",
}


@dataclass(frozen=True)
class Texts:
    """The texts to learn from, and their description for the card."""

    texts: list[Passage]
    text: str
    sha256: str


def keep(out: Path, now: Mapping[str, str], names: Collection[str]) -> None:
    """Record the settings of this run's stage (`names`, and those without a flag) in its folder.

    A later run must have the same target, seed and settings of the data, except --tokens; once a checkpoint exists, all
    settings. UsageError names the first that differs; UserError for a damaged record.
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
        if (name := first_difference({name: before[name] for name in same}, same)) is not None:
            setting = _IN_WORDS.get(name, f"--{name.replace('_', '-')} {before.get(name)}, now {now[name]}")
            raise UsageError(f"{out} holds a run with {setting}: give the same flags, or another --out")
    write_json(file, before | now)


def distill(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Run the stages; return the exit code. UserError for files and models that cannot be read, used or written."""
    out: Path = args.out
    writable(out, folder=True)
    if out.is_dir() and not any((out / name).is_file() for name in (RUN, TABLES_FILE)) and any(out.iterdir()):
        raise UsageError(f"--out {out} holds other files and no run of distill: name a new or empty folder")
    if args.features is not None:
        writable(args.features, "--features", folder=True)
    args.turns = (
        None if args.prompts is None else [question.turns for question in questions_of(args.prompts, settings.data_dir)]
    )
    with Interrupts() as interrupt:
        if args.stage == TABLES and not args.writes:
            tokenizer = target_tokenizer(settings, options, interrupt)
            out.mkdir(parents=True, exist_ok=True)
            check_outputs({"--out": out / TABLES_FILE}, args.data)
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
        to_stderr(f"interrupted: {kept}, the same command resumes the run")
    return INTERRUPTED if kept else 0


def _make(
    engine: PairEngine, settings: Settings, options: ModelOptions, args: Namespace, interrupt: Callable[[], bool]
) -> str:
    """Run stage after stage, each of which keeps its work in the folder. Return "", or after an interrupt a text that
    names the kept work."""
    out, text = args.out, args.out / TEXT_FILE
    facts, date = target_facts(engine, options), datetime.now(UTC).date().isoformat()
    about: dict[str, Any] = {"target": facts["target"], "tokenizer": facts["tokenizer"], "date": date}
    names = (*DATA_NAMES, *TABLES_NAMES, *TRAINING_NAMES)
    chosen = {**{name: shown(args, name) for name in names}, "seed": str(settings.seed)}
    read_from = {
        "files": hash_of([] if args.writes else args.data),
        "turns": hashlib.sha256(json.dumps(args.turns).encode("ascii")).hexdigest()[:16],
    }
    staged = {TEXT: (), TABLES: TABLES_NAMES, HEAD: TRAINING_NAMES, None: (*TABLES_NAMES, *TRAINING_NAMES)}[args.stage]
    keep(out, {**facts, **read_from, **chosen}, (*DATA_NAMES, *staged))
    if args.writes:
        tokens = args.tokens if args.prompts is None or args.limited else None
        count = write_texts(engine, text, tokens, settings, args, interrupt)
        if interrupt() and (tokens is None or count < tokens):
            return f"{text} keeps {count:,} tokens"
    if args.stage == TABLES or (args.stage is None and not (out / NAME).is_file()):
        build_tables(settings, options, args, engine.tokenizer, text, out / TABLES_FILE)
    if args.stage in (TEXT, TABLES):
        return ""
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
    """Train the draft head and write report and card. Return "", or after an interrupt a text that names the
    kept work."""
    out, model = args.out, engine.loaded.target.model
    with load_progress(sys.stderr, quiet=settings.quiet) as progress:
        learned, held = split_texts(source, args.held, args)
        draft_head = draft_head_for(engine, args, learned, settings.seed)
        layers = draft_head.target_layers(engine.target.network.layers)
        features = args.features or out / WORK / "features"
        parts = _examples(engine, options, args, draft_head, source, (learned, held), features, progress, interrupt)
        if parts is None:
            return f"the target's outputs on the texts so far are kept in {features}"
        job = job_of(settings, options, args)
        teacher = teacher_for(model, draft_head, precise=job.precise)
        if args.linear_start == "on" and args.start is None and not (out / NAME).is_file():
            progress("fitting the linear map")
            start_linear(draft_head, parts[0])
        about |= {"bits": 4} if args.bits == "4" else {}
        training = Training(draft_head, teacher, parts[0], parts[1], layers, job, out)
        if not training.run(about | ({"verifier": verifier_of(engine)} if args.published else {}), progress, interrupt):
            return f"the checkpoint of step {training.step:,} is kept in {out}"
        progress("measuring the cost of a draft")
        costs = measured(engine, out, args.kind)
    report = {
        **about,
        "student": described(out, draft_head.config),
        "data": {
            "text": source.text,
            "tokens": sum(len(text.ids) - text.start for text in source.texts),
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
        report["expected"] = expected(
            training.best["held"]["alpha"], costs["c"], {int(count): cost for count, cost in costs["v"].items()}
        )
    write_report(out, report)
    given = {"--pair": options.pair, "--models": options.models, "--target": options.target}
    flags = "".join(f"{flag} {shlex.quote(value)} " for flag, value in given.items() if value)
    sys.stdout.write(visible(in_lines(report, out, flags)))
    return ""


def _examples(
    engine: PairEngine,
    options: ModelOptions,
    args: Namespace,
    draft_head: DraftHead,
    source: Texts,
    parts: Sequence[list[Passage]],
    features: Path,
    progress: Progress,
    interrupt: Callable[[], bool],
) -> list[Examples] | None:
    """Return the examples of each part of the texts. The target's outputs on them are kept in the folder `features`;
    an eagle3 head's are not, and are computed again for each batch. None if interrupted."""
    network = engine.target.network
    # The last state is kept anyway, and a feature head reads it from there.
    reads = tuple(state for state in draft_head.config.reads if args.kind != "feature" or state != -1)
    if args.kind == "eagle":
        return [StreamedExamples(network, part, reads) for part in parts]
    facts, layers = target_facts(engine, options), draft_head.target_layers(network.layers)
    shards = extract(network, facts, source.texts, layers, features, progress, interrupt, reads)
    if interrupt():
        return None
    examples = [example for file in shards for example in load_shard(file, reads)]
    by_text = {id(text): example for text, example in zip(source.texts, examples, strict=True)}
    return [StoredExamples([by_text[id(text)] for text in part]) for part in parts]


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
        # Few evaluations: each takes as long as several steps.
        **({"anchors": args.anchors, "evaluations": 5} if args.kind in BLOCK_KINDS else {}),
    )


# -- the parts of the stages ------------------------------------------------------------------------


def load_target(settings: Settings, options: ModelOptions, interrupt: Callable[[], bool]) -> PairEngine:
    """Load the target alone. `--quantization auto` means none here, so that text and training are the same on any
    processor."""
    keep_memory()
    quantization = "none" if options.quantization == "auto" else options.quantization
    return load_engine(settings, options.changed(drafter="none", quantization=quantization), interrupt)


def target_facts(engine: PairEngine, options: ModelOptions) -> dict[str, str]:
    """Return the facts of the target that its text and its states depend on, as texts."""
    target = engine.loaded.target
    return {
        "target": target.name,
        "weights": engine.loaded.spec.target.weights(options.revision),
        "quantization": target.quantization,
        "dtype": target.dtype_text,
        "tokenizer": fingerprint(engine.tokenizer),
        **({} if target.activations in ("", "q16") else {"activations": target.activations}),
    }


def write_texts(
    engine: PairEngine,
    file: Path,
    tokens: int | None,
    settings: Settings,
    args: Namespace,
    interrupt: Any,
) -> int:
    """Let the target write chats, or answers to the given prompts, until `file` holds `tokens` answer tokens (None:
    until every prompt has its answers); return their number.

    UserError if nothing could be written because every prompt fills the context.
    """
    tokenizer, limits = engine.tokenizer, (args.answer_tokens, args.temperatures)
    before, begun = written(file)[0], time.monotonic()
    source: PromptSource = (
        OwnChats(tokenizer, engine.stop_ids, *limits, args.tasks, settings.seed)
        if args.turns is None
        else GivenPrompts(tokenizer, args.turns, *limits, min(args.longest, engine.context))
    )
    writer = TextWriter(engine.target, engine.stop_ids, source, settings.seed, args.batch)
    with tqdm(
        desc="writing text",
        total=tokens,
        initial=before,
        unit="token",
        disable=settings.quiet or before >= (tokens or ENDLESS),
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 60,
        leave=False,
    ) as bar:
        count = write_self(writer, file, tokens or ENDLESS, lambda count: bar.update(count - bar.n), interrupt)
    if not (count or source.endless or interrupt()):
        raise UserError(f"every prompt has {source.longest} tokens or more: there is no room for an answer")
    if count > before and not settings.quiet:
        rate = (count - before) / max(time.monotonic() - begun, 1e-9)
        to_stderr(f"{file}: {count:,} tokens, {count - before:,} of them new, {rate:,.0f} tokens/s")
    return count


def read(engine: PairEngine, args: Namespace, file: Path) -> Texts:
    """Read the texts to learn from: those of `file`, which the target has written, or of the given files."""
    text, files = ", ".join(Path(name).name for name in args.data), list(args.data)
    if args.writes:
        prompts = args.prompts if isinstance(args.prompts, str | None) else args.prompts.name
        text = "self-written chats" if prompts is None else f"the target's answers to {prompts}"
        files = [str(file)]
    texts = read_texts(files, engine.target.vocab_size, min(args.longest, engine.context))
    if args.limited and not args.writes:
        before = [0, *accumulate(len(text.ids) - text.start for text in texts)]
        texts = [text for text, count in zip(texts, before, strict=False) if count < args.tokens]
    if len(texts) < 5:
        raise UserError(f"{text}: {len(texts)} sequences are too few to learn from")
    return Texts(texts, text, hash_of(files))


def split_texts(source: Texts, held: int, args: Namespace) -> tuple[list[Passage], list[Passage]]:
    """Return (texts to learn from, texts held out). No prompt of --prompts is in both, whatever its answers'
    temperatures."""
    learned, out = split(source.texts, held)
    if args.prompts is not None:
        prompts = {tuple(text.ids[: text.start]) for text in out}
        learned = [text for text in learned if tuple(text.ids[: text.start]) not in prompts]
    if not learned:
        raise UserError(f"{source.text}: too few different prompts to hold some out")
    return learned, out


def build_tables(
    settings: Settings, options: ModelOptions, args: Namespace, tokenizer: Any, text: Path, out: Path
) -> None:
    """Build tables from the passages in `text`, or in the files of --data, into the file `out`. UserError for an
    unreadable file."""
    begun, size = time.monotonic(), int(max(tokenizer.get_vocab().values())) + 1

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    facts = build(
        passages(text) if args.writes else [each for file in args.data for each in read_passages(file, encode, size)],
        out,
        vocab_size=size,
        fingerprint=fingerprint(tokenizer),
        source=f"{choose_pair(options).target.name}: " + ", ".join(Path(name).name for name in args.data),
        max_n=args.max_n,
        max_mb=args.max_mb,
        choices=args.choices,
    )
    if not settings.quiet:
        kept, counted = sum(facts["contexts"]), sum(facts["contexts_found"])
        to_stderr(
            f"{out}: {facts['bytes'] / 1e6:.1f} MB, {kept:,} of {counted:,} entries for contexts of at most "
            f"{facts['max_n']} tokens from {facts['tokens']:,} tokens in {facts['passages']:,} passages, "
            f"{time.monotonic() - begun:.0f} s"
        )


_SHAPE = ("kind", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "short_list")


def check_target(engine: PairEngine, args: Namespace) -> None:
    """Refuse, before any work, a target that no draft head of this kind can be made for, or an impossible shape."""
    model, name = engine.loaded.target.model, engine.loaded.target.name
    if args.student == "glide" and target_rotary(model) is None:
        raise UserError(
            f"{name} has no rotary keys that a glide drafter could read: --student plain or feature needs none"
        )
    width = config_for(engine, args, args.short_list).hidden_size
    other = width != model.config.get_text_config().hidden_size
    raise_first(
        {
            f"--hidden {width}: --student {args.student} has the target's width, whose embedding it shares": (
                args.published and other
            ),
            f"--linear-start on: a head of width {width} cannot begin as a map of the target's states": (
                args.linear_start == "on" and other
            ),
        }
    )


def config_for(engine: PairEngine, args: Namespace, listed: int) -> DraftHeadConfig:
    """Return the draft head's shape, with `listed` ids in its short list. UsageError for numbers that do not fit
    together."""
    model = engine.loaded.target.model
    plain, several = shape_for(model, args.kind), args.reads == "several"
    keys = None
    if args.heads is not None:
        width = args.hidden or plain.hidden_size
        if width % args.heads or (width // args.heads) % 2:
            raise UsageError(f"--heads {args.heads} does not divide the width {width} into heads of even size")
        keys = math.gcd(args.heads, plain.num_key_value_heads)
    return shape_for(
        model,
        args.kind,
        several,
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_attention_heads=args.heads,
        num_key_value_heads=keys,
        short_list=0 if listed >= engine.loaded.target.vocab_size else listed,
        shared_head=args.head == "shared",
        block_size=args.lag,
        recency=args.recency == "on",
        drafts=args.block - (args.kind != "dspark") if args.kind in BLOCK_KINDS else None,
    )


def verifier_of(engine: PairEngine) -> dict[str, Any]:
    """Describe the target as *speculators* does: its hub id or its folder; no name for one from a single file."""
    spec, model = engine.loaded.spec.target, engine.loaded.target.model
    folder = None if spec.path is None else str(Path(spec.path).expanduser().absolute())
    return {
        "name_or_path": spec.id or folder,
        "architectures": list(getattr(model.config, "architectures", None) or [type(model).__name__]),
        "layers": engine.target.network.layers,
    }


def draft_head_for(engine: PairEngine, args: Namespace, learned: Sequence[Passage], seed: int) -> DraftHead:
    """Return a new draft head; with --start a trained one to train further.

    UsageError if that has another shape than the flags say.
    """
    model, device = engine.loaded.target.model, engine.loaded.target.device
    seen = max(len(text.ids) for text in learned)  # longer contexts cannot be learned
    if args.start is None:
        listed = (
            short_list(learned, args.short_list, sorted(engine.stop_ids))
            if 0 < args.short_list < engine.loaded.target.vocab_size
            else []
        )
        # The published format has no field for a window.
        config = replace(config_for(engine, args, len(listed)), window=0 if args.published else seen)
        return new_draft_head(config, model, listed, seed).to(device)
    old = load_student(args.start, model, fingerprint(engine.tokenizer))
    wanted = config_for(engine, args, old.config.short_list if args.short_list else 0)
    shapes = ((name, getattr(old.config, name), getattr(wanted, name)) for name in _SHAPE)
    raise_first(
        {
            **{
                f"--start {args.start}: its {name} is {theirs}, the flags say {ours}": theirs != ours
                for name, theirs, ours in shapes
            },
            f"--start {args.start}: it is an EAGLE-1 or 2 head, --student eagle3 trains EAGLE-3": (
                args.kind == "eagle" and not old.config.wide
            ),
        }
    )
    changed = replace(
        old.config,
        window=max(old.config.window, seen) if old.config.window else 0,  # 0: no limit, it reads the whole text
        block_size=wanted.block_size,
        recency=wanted.recency,
        reads=old.config.reads or wanted.reads,
    )
    return continued(old, changed, device)


# -- the trained head -----------------------------------------------------------------------------


def described(folder: Path, shape: DraftHeadConfig) -> dict[str, Any]:
    """Return kind, size and a line of text about the draft head in `folder`."""
    config = asdict(shape) | read_config(folder)
    layers, ids = config["num_hidden_layers"], config["short_list"]
    head = f"a head of {ids:,} ids" if ids else "a head of all ids"
    shared = " (the target's rows)" if config["shared_head"] else ""
    text = (
        f"{layers} layer{'' if layers == 1 else 's'} of width {config['hidden_size']}, {head}{shared}, "
        f"{config['bytes'] / 1e6:.1f} MB"
    )
    return {name: config[name] for name in (*_SHAPE, "bytes", "crc32")} | {"text": text}


def measured(engine: PairEngine, folder: Path, kind: str) -> dict[str, Any]:
    """Measure the costs of a drafted token (`c`) and of a pass over n tokens (`v`, by n), both in one-token passes of
    the target, and the milliseconds of such a pass (`plain_ms`); empty if nothing was drafted."""
    other = PairEngine(replace(engine.loaded, drafter_word=kind, draft_head=folder))
    warm_up(other)
    costs = other.measured
    if costs is None or costs.drafted is None:
        return {}
    seconds = pass_times(costs.passes)
    return {
        "c": costs.drafted / costs.plain,
        "v": {str(n): seconds(n) / costs.plain for n in range(1, GAMMAS[-1] + 2)},
        "plain_ms": 1e3 * costs.plain,
    }


def licence_of(model: Any) -> str:
    """Return the licence that the target's own card names, if that lies beside its weights; else a text that refers to
    the card."""
    file = Path(str(getattr(model, "name_or_path", "") or "."), "README.md")
    head = file.read_text(encoding="utf-8", errors="replace")[:4000] if file.is_file() else ""
    match = re.search(r"\A---\n(?:.*\n)*?license:\s*(\S+)", head)
    return match[1] if match else "see the target's own card"


def in_lines(report: ReportData, out: Path, flags: str) -> str:
    """Return the result in a few lines."""
    held = report["best"]["held"]
    alphas = " ".join(f"{alpha:.2f}" for alpha in held["alpha"])
    lines = [
        f"{report['student']['kind']} drafter for {report['target']}: {report['student']['text']}",
        f"held out: agreement {held['alpha'][0]:.3f}, alpha by position {alphas}, "
        f"{held['overlap']:.3f} at temperature 1",
    ]
    if "c" in report:
        best = max(report["expected"], key=lambda row: row["speedup"])
        lines.append(
            f"a drafted token costs c = {report['c']:.3f} of a one-token pass of the target "
            f"({report['plain_ms']:.1f} ms); expected {best['speedup']:.2f}x at gamma {best['gamma']}"
        )
    tables = "tables.bin, " if (out / "tables.bin").is_file() else ""
    return "\n".join(
        [
            *lines,
            f"{out}: weights, {tables}report.json, README.md (the card); {out / 'work'} may be removed",
            f"use it: python infer.py {flags}--drafter {out}",
            "",
        ]
    )
