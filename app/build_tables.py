"""`tables`: builds static n-gram tables for a pair's target, from files or from what the target writes itself.

Says how far it is and what came of it on standard error. Knows neither counting nor the file's
format (training/). Importing it is cheap: no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.fields import Field
from app.kinds import Number, Text, Whole
from utils.errors import UsageError
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.settings import ModelOptions, Settings
    from training.ngram_counts import Passage

SELF = "self"
_PATH = Text(metavar="FILE", allowed="a file", optional=True)
TABLES_FIELDS = {
    "from": Field("from", Text("self|FILES", "self or files"), None, "text to count: .jsonl, .txt, or self", "tables"),
    "out": Field("out", _PATH, None, "the tables' file", "tables"),
    "max_n": Field("max_n", Whole(1, 16), 5, "tokens of the longest context", "tables"),
    "max_mb": Field("max_mb", Number(0, 4000, without_low=True), 10.0, "largest file, in million bytes", "tables"),
    "choices": Field("choices", Whole(1, 8), 3, "most next tokens of a context: trees draft siblings", "tables"),
    "tokens": Field("tokens", Whole(1), 200_000, "answer tokens that self writes", "tables"),
}


@dataclass(frozen=True)
class TablesArgs:
    """What `tables` takes beside the settings. `sources` is ("self",) or files."""

    sources: tuple[str, ...] = ()
    out: Path | None = None
    max_n: int = 5
    max_mb: float = 10.0
    choices: int = 3
    tokens: int = 200_000


def tables_args(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> TablesArgs:
    """The arguments read from their texts; UsageError in one line."""
    plain = {name: given[name] for name in TABLES_FIELDS if name in given and name != "from"}
    values = {name: TABLES_FIELDS[name].read(text, label=f"--{name.replace('_', '-')}") for name, text in plain.items()}
    sources = tuple(given.get("from") or ())
    if not sources:
        raise UsageError("tables needs --from: self, or files to count")
    if SELF in sources and len(sources) > 1:
        raise UsageError(f"--from takes self or files, not both, got {' '.join(sources)}")
    if not values.get("out"):
        raise UsageError("tables needs --out: the file to write")
    return TablesArgs(**{**values, "sources": sources, "out": Path(values["out"]).expanduser()})


def build_tables(settings: Settings, options: ModelOptions, args: TablesArgs) -> int:
    """Build the tables; the exit code. Raises UserError for what cannot be read, loaded or written."""
    from app.terminal import Interrupts

    with Interrupts() as interrupt:
        return _build(settings, options, args, interrupt)


def _build(settings: Settings, options: ModelOptions, args: TablesArgs, interrupt: Callable[[], bool]) -> int:
    from app.pairing import choose_pair
    from training.tables import build
    from utils.fit import fingerprint

    assert args.out is not None
    begun = time.monotonic()
    written = args.out.with_name(args.out.name + ".self.jsonl")
    if args.sources == (SELF,):
        tokenizer, vocab_size, complete = _write_self(settings, options, args, written, interrupt)
        if not complete:
            sys.stderr.write(f"interrupted: {written} is kept, the same command goes on from there\n")
            return INTERRUPTED
        from training.self_text import passages

        texts: list[Passage] = passages(written)
    else:
        tokenizer, vocab_size = target_tokenizer(settings, options, interrupt)
        texts = _read(args.sources, tokenizer, vocab_size)
    target = choose_pair(options).target.name
    source = f"{target}: " + ", ".join(Path(one).name for one in args.sources)
    facts = build(
        texts,
        args.out,
        vocab_size=vocab_size,
        fingerprint=fingerprint(tokenizer),
        source=source,
        max_n=args.max_n,
        max_mb=args.max_mb,
        choices=args.choices,
    )
    if not settings.quiet:
        sys.stderr.write(_told(args.out, facts, time.monotonic() - begun))
    return 0


def _told(out: Path, facts: dict[str, Any], seconds: float) -> str:
    kept, found = sum(facts["contexts"]), sum(facts["contexts_found"])
    return (
        f"{out}: {facts['bytes'] / 1e6:.1f} MB, {kept:,} of {found:,} entries for contexts of at most "
        f"{facts['max_n']} tokens from {facts['tokens']:,} tokens in {facts['passages']:,} passages, {seconds:.0f} s\n"
    )


def _read(sources: tuple[str, ...], tokenizer: Any, vocab_size: int) -> list[Passage]:
    from training.tables import read_passages

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [passage for source in sources for passage in read_passages(source, encode, vocab_size)]


def target_tokenizer(settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]) -> tuple[Any, int]:
    """The target's tokenizer and how many ids it has; the weights are not loaded."""
    from app.oneshot import LoadProgress
    from app.pairing import choose_pair, load_options
    from utils.building import load_tokenizer
    from utils.errors import UserError
    from utils.quiet import quiet_environment, quiet_libraries
    from utils.sources import model_folder

    quiet_environment()
    quiet_libraries()
    target = choose_pair(options).target
    progress = LoadProgress(sys.stderr, quiet=settings.quiet)
    try:
        folder = model_folder(target, load_options(options), progress, cancelled)
        tokenizer = load_tokenizer(folder, load_options(options))
    finally:
        progress.close()
    if tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer files: they are needed")
    return tokenizer, max(tokenizer.get_vocab().values()) + 1


def _write_self(
    settings: Settings, options: ModelOptions, args: TablesArgs, file: Path, interrupt: Callable[[], bool]
) -> tuple[Any, int, bool]:
    """Let the target write; its tokenizer, its vocabulary's size, and whether there is enough text."""
    from app.oneshot import LoadProgress, load_engine
    from training.dialogues import OwnChats
    from training.self_text import write_self
    from training.synthesize import Writer

    engine = load_engine(settings, options.changed(drafter="none"), interrupt)
    source = OwnChats(engine.tokenizer, engine.stop_ids)
    writer = Writer(engine.target.network, engine.target.vocab_size, engine.stop_ids, source, settings.seed)
    progress = LoadProgress(sys.stderr, quiet=settings.quiet)
    try:
        count = write_self(
            writer, file, args.tokens, lambda done: progress("writing text", min(1.0, done / args.tokens)), interrupt
        )
    finally:
        progress.close()
    return engine.tokenizer, max(engine.tokenizer.get_vocab().values()) + 1, count >= args.tokens
