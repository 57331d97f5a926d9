"""`tables`: builds static n-gram tables for a pair's target, from files or from what the target writes itself.

Says how far it is and what came of it on standard error. Knows neither counting nor the file's
format (training/).
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from app.distill.options import SELF
from app.distill.texts import let_write, load_target, target_facts
from app.lanes.pairing import choose_pair
from app.screen.output import target_tokenizer
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from training.tables.build import Passage, build, read_passages
from training.text.dialogues import OwnChats
from training.text.self_text import begin, passages
from utils.errors import UsageError
from utils.files import beside, separate, writable
from utils.loading.fit import fingerprint
from utils.progress import INTERRUPTED


def build_tables(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Build the tables; the exit code. Raises UserError for what cannot be read, loaded or written."""
    begun = time.monotonic()
    writable(args.out, makes_folder=True)
    separate({"--out": args.out}, [] if args.sources == (SELF,) else args.sources)
    with Interrupts() as interrupt:
        if args.sources == (SELF,):
            written = beside(args.out, f"{args.out.name}.self.jsonl")  # it stays, so that a stopped run goes on
            if written is None:
                raise UsageError(
                    f"--out {args.out}: --from self keeps its text beside it, where no file can be: name another"
                )
            engine = load_target(settings, options, interrupt)
            source = OwnChats(engine.tokenizer, engine.stop_ids)
            begin(written, {**target_facts(engine, options), "seed": str(settings.seed)}, unnoted=True)
            if let_write(engine, source, written, args.tokens, settings, interrupt).tokens < args.tokens:
                sys.stderr.write(f"interrupted: {written} is kept, the same command goes on from there\n")
                return INTERRUPTED
            tokenizer, texts = engine.tokenizer, passages(written)
        else:
            tokenizer, _ = target_tokenizer(settings, options, interrupt)
            texts = _read(args.sources, tokenizer)
    facts = build(
        texts,
        args.out,
        vocab_size=_size(tokenizer),
        fingerprint=fingerprint(tokenizer),
        source=f"{choose_pair(options).target.name}: " + ", ".join(Path(one).name for one in args.sources),
        max_n=args.max_n,
        max_mb=args.max_mb,
        choices=args.choices,
    )
    if not settings.quiet:
        kept, found = sum(facts["contexts"]), sum(facts["contexts_found"])
        sys.stderr.write(
            f"{args.out}: {facts['bytes'] / 1e6:.1f} MB, {kept:,} of {found:,} entries for contexts of at most "
            f"{facts['max_n']} tokens from {facts['tokens']:,} tokens in {facts['passages']:,} passages, "
            f"{time.monotonic() - begun:.0f} s\n"
        )
    return 0


def _size(tokenizer: Any) -> int:
    """Ids of the vocabulary."""
    return int(max(tokenizer.get_vocab().values())) + 1


def _read(sources: tuple[str, ...], tokenizer: Any) -> list[Passage]:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [passage for source in sources for passage in read_passages(source, encode, _size(tokenizer))]
