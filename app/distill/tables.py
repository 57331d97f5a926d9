"""`tables`: builds static n-gram tables for a pair's target, from files or from what the target writes itself.

Says how far it is and what came of it on standard error. Knows neither counting nor the file's
format (training/). Importing it is cheap: no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.distill.options import SELF
from app.screen.output import target_tokenizer
from utils.errors import UsageError
from utils.files import beside, writable
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.distill.options import TablesArgs
    from app.settings.layers import ModelOptions, Settings
    from training.tables.build import Passage


def build_tables(settings: Settings, options: ModelOptions, args: TablesArgs) -> int:
    """Build the tables; the exit code. Raises UserError for what cannot be read, loaded or written."""
    from app.screen.terminal import Interrupts

    with Interrupts() as interrupt:
        return _build(settings, options, args, interrupt)


def _build(settings: Settings, options: ModelOptions, args: TablesArgs, interrupt: Callable[[], bool]) -> int:
    from app.lanes.pairing import choose_pair
    from training.tables.build import build
    from utils.loading.fit import fingerprint

    assert args.out is not None
    begun = time.monotonic()
    writable(args.out, makes_folder=True)
    if args.sources == (SELF,):
        written = _text_beside(args.out)
        tokenizer, vocab_size, complete = _write_self(settings, options, args, written, interrupt)
        if not complete:
            sys.stderr.write(f"interrupted: {written} is kept, the same command goes on from there\n")
            return INTERRUPTED
        from training.text.self_text import passages

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


def _text_beside(out: Path) -> Path:
    """The file of what the target writes; it stays, so that a stopped run goes on."""
    written = beside(out, f"{out.name}.self.jsonl")
    if written is None:
        raise UsageError(f"--out {out}: --from self keeps its text beside it, where no file can be: name another")
    return written


def _told(out: Path, facts: dict[str, Any], seconds: float) -> str:
    kept, found = sum(facts["contexts"]), sum(facts["contexts_found"])
    return (
        f"{out}: {facts['bytes'] / 1e6:.1f} MB, {kept:,} of {found:,} entries for contexts of at most "
        f"{facts['max_n']} tokens from {facts['tokens']:,} tokens in {facts['passages']:,} passages, {seconds:.0f} s\n"
    )


def _read(sources: tuple[str, ...], tokenizer: Any, vocab_size: int) -> list[Passage]:
    from training.tables.build import read_passages

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [passage for source in sources for passage in read_passages(source, encode, vocab_size)]


def _write_self(
    settings: Settings, options: ModelOptions, args: TablesArgs, file: Path, interrupt: Callable[[], bool]
) -> tuple[Any, int, bool]:
    """Let the target write; its tokenizer, its vocabulary's size, and whether there is enough text."""
    from app.screen.output import LoadProgress, load_engine
    from training.text.dialogues import OwnChats
    from training.text.self_text import write_self
    from training.text.synthesize import Writer

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
