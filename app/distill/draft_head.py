"""The parts of `distill`: its text, written by the target or read from files, and n-gram tables of it; its draft head,
from the flags and the target, with its costs here.

Reports progress and results on standard error. Knows neither sampling nor learning (training/).
"""

import math
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.lanes.lane import PairEngine
from app.lanes.pairing import choose_pair
from app.lanes.warm import warm_up
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.checkpoint import load_student, read_config, target_rotary
from sampling.drafters.draft_heads.config import BLOCKS, DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.gamma.costs import pass_times
from training.draft_heads.build import continued, new_draft_head, shape_for
from training.draft_heads.features import Keeper
from training.draft_heads.report import GAMMAS, Report
from training.tables.build import Passage, build, read_passages
from training.text.dialogues import GivenPrompts, OwnChats, Source
from training.text.synthesize import (
    ENDLESS,
    Keep,
    TextWriter,
    passages,
    read_texts,
    short_list,
    split,
    write_self,
    written,
)
from utils.errors import UsageError, UserError
from utils.files import hash_of
from utils.loading.fit import fingerprint
from utils.machine import keep_memory


@dataclass(frozen=True)
class Texts:
    """The texts to learn from, and their description for the card."""

    texts: list[Passage]
    text: str
    sha256: str

    @property
    def tokens(self) -> int:
        """The number of answer tokens."""
        return sum(len(text.ids) - text.start for text in self.texts)


def load_target(settings: Settings, options: ModelOptions, interrupt: Callable[[], bool]) -> PairEngine:
    """Load the target alone. Here `auto` means none: text and training are the same on any processor."""
    keep_memory()
    quantization = "none" if options.quantization == "auto" else options.quantization
    return load_engine(settings, options.changed(drafter="none", quantization=quantization), interrupt)


def target_facts(engine: PairEngine, options: ModelOptions) -> dict[str, str]:
    """Return the facts of the target that its text and its states depend on, as a user would type them."""
    target = engine.loaded.target
    return {
        "target": target.name,
        "weights": engine.loaded.spec.target.weights(options.revision),
        "quantization": target.quantization,
        "dtype": target.dtype_text,
        "tokenizer": fingerprint(engine.tokenizer),
        **({} if options.activations == "q16" else {"activations": options.activations}),
    }


def let_write(
    engine: PairEngine,
    source: Source,
    file: Path,
    tokens: int | None,
    settings: Settings,
    args: Namespace,
    interrupt: Any,
    keep: Keep | None = None,
) -> int:
    """Let the target write until `file` holds `tokens` tokens (None: as many as the source has); return their number.

    `keep` receives the target's states of each line. UserError if nothing could be written because every prompt fills
    the context.
    """
    writer = TextWriter(engine.target, engine.stop_ids, source, settings.seed, args.batch, keep)
    before, begun = written(file)[0], time.monotonic()
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
        sys.stderr.write(f"{file}: {count:,} tokens, {count - before:,} of them new, {rate:,.0f} tokens/s\n")
    return count


def keeper_of(engine: PairEngine, options: ModelOptions, args: Namespace, file: Path) -> Keeper | None:
    """Return the keeper that writes the target's states of new text to the folder of --features; None without one."""
    if args.features is None:
        return None
    before = read_texts([file], engine.target.vocab_size, _longest(engine, args)) if written(file)[0] else []
    return Keeper(target_facts(engine, options), args.features, len(before), _longest(engine, args))


def _longest(engine: PairEngine, args: Namespace) -> int:
    """Return the tokens of the longest sequence to learn from."""
    return min(int(args.longest), engine.context)


def source_of(engine: PairEngine, settings: Settings, args: Namespace) -> Source:
    """Return the chats that the target writes: its own, or answers to the given prompts."""
    tokenizer, limits = engine.tokenizer, (args.answer_tokens, args.temperatures)
    if args.turns is None:
        return OwnChats(tokenizer, engine.stop_ids, *limits, args.tasks, settings.seed)
    return GivenPrompts(tokenizer, args.turns, *limits, _longest(engine, args))


def read(engine: PairEngine, args: Namespace, file: Path) -> Texts:
    """Read the texts to learn from: those of `file`, which the target has written, or of the given files."""
    text, files = ", ".join(Path(name).name for name in args.data), list(args.data)
    if args.writes:
        prompts = args.prompts if isinstance(args.prompts, str | None) else args.prompts.name
        text = "self-written chats" if prompts is None else f"the target's answers to {prompts}"
        files = [str(file)]
    texts = read_texts(files, engine.target.vocab_size, _longest(engine, args))
    if args.limited and not args.writes:
        before = [0, *accumulate(len(text.ids) - text.start for text in texts)]
        texts = [text for text, count in zip(texts, before, strict=False) if count < args.tokens]
    if len(texts) < 5:
        raise UserError(f"{text}: {len(texts)} sequences are too few to learn from")
    return Texts(texts, text, hash_of(files))


def split_texts(source: Texts, held: int, args: Namespace) -> tuple[list[Passage], list[Passage]]:
    """Return (to learn from, held out). No given prompt is in both, at whatever temperature it was answered."""
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
    """Build the file `out` of the passages in `text`, or in the files of --data. UserError for an unreadable file."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    begun, size = time.monotonic(), int(max(tokenizer.get_vocab().values())) + 1
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
        sys.stderr.write(
            f"{out}: {facts['bytes'] / 1e6:.1f} MB, {kept:,} of {counted:,} entries for contexts of at most "
            f"{facts['max_n']} tokens from {facts['tokens']:,} tokens in {facts['passages']:,} passages, "
            f"{time.monotonic() - begun:.0f} s\n"
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
    if args.published and width != model.config.get_text_config().hidden_size:
        raise UsageError(
            f"--hidden {width}: --student {args.student} has the target's width, whose embedding it shares"
        )
    if args.linear_start == "on" and width != model.config.get_text_config().hidden_size:
        raise UsageError(f"--linear-start on: a head of width {width} cannot begin as a map of the target's states")


def config_for(engine: PairEngine, args: Namespace, listed: int) -> DraftHeadConfig:
    """Return the shape, with `listed` ids in its reduced vocabulary. UsageError for numbers that do not go together."""
    model = engine.loaded.target.model
    plain = shape_for(model, args.kind)
    keys = None
    if args.heads is not None:
        width = args.hidden or plain.hidden_size
        if width % args.heads or (width // args.heads) % 2:
            raise UsageError(f"--heads {args.heads} does not divide the width {width} into heads of even size")
        keys = math.gcd(args.heads, plain.num_key_value_heads)
    return shape_for(
        model,
        args.kind,
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_attention_heads=args.heads,
        num_key_value_heads=keys,
        short_list=0 if listed >= engine.loaded.target.vocab_size else listed,
        shared_head=args.head == "shared",
        block_size=args.lag,
        recency=args.recency == "on",
        drafts=args.block - (args.kind == "dflash") if args.kind in BLOCKS else None,
    )


def verifier_of(engine: PairEngine) -> dict[str, Any]:
    """Describe the target as *speculators* does: its hub id or its folder; no name for one from a single file."""
    spec, model = engine.loaded.spec.target, engine.loaded.target.model
    folder = None if spec.path is None else str(Path(spec.path).expanduser().absolute())
    names = getattr(model.config, "architectures", None) or [type(model).__name__]
    return {"name_or_path": spec.id or folder, "architectures": list(names), "layers": engine.target.network.layers}


def draft_head_for(engine: PairEngine, args: Namespace, learned: Sequence[Passage], seed: int) -> DraftHead:
    """Return a new draft head, whose head may start as the target's; with --start a trained one to train further.

    UsageError if that is of another shape than the flags.
    """
    model, device = engine.loaded.target.model, engine.loaded.target.device
    seen = max(len(text.ids) for text in learned)  # longer contexts cannot be learned
    if args.start is None:
        listed: list[int] = []
        if 0 < args.short_list < engine.loaded.target.vocab_size:
            listed = short_list(learned, args.short_list, sorted(engine.stop_ids))
        # The published format knows no window.
        config = replace(config_for(engine, args, len(listed)), window=0 if args.published else seen)
        return new_draft_head(config, model, listed, seed).to(device)
    old = load_student(args.start, model, fingerprint(engine.tokenizer))
    wanted = config_for(engine, args, old.config.short_list if args.short_list else 0)
    for name in _SHAPE:
        theirs, ours = getattr(old.config, name), getattr(wanted, name)
        if theirs != ours:
            raise UsageError(f"--start {args.start}: its {name} is {theirs}, the flags say {ours}")
    if args.kind == "eagle" and not old.config.wide:
        raise UsageError(f"--start {args.start}: it is an EAGLE-1 or 2 head, --student eagle3 trains EAGLE-3")
    changed = replace(
        old.config,
        window=max(old.config.window, seen) if old.config.window else 0,  # 0: it has learned to use the whole text
        block_size=wanted.block_size,
        recency=wanted.recency,
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
    """Measure `c`, `v` (n → cost of a pass over n tokens, in one-token passes) and `plain_ms`; empty without drafts."""
    other = PairEngine(replace(engine.loaded, drafter_kind=kind, draft_head=folder))
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
    """Return the licence that the target's own card names, if it lies beside its weights; else where to look."""
    file = Path(str(getattr(model, "name_or_path", "") or "."), "README.md")
    head = file.read_text(encoding="utf-8", errors="replace")[:4000] if file.is_file() else ""
    match = re.search(r"\A---\n(?:.*\n)*?license:\s*(\S+)", head)
    return match[1] if match else "see the target's own card"


def in_lines(report: Report, out: Path, flags: str) -> str:
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
    lines.append(f"{out}: weights, {tables}report.json, README.md (the card); {out / 'work'} may be removed")
    lines.append(f"use it: python infer.py {flags}--drafter {out}")
    return "\n".join(lines) + "\n"
