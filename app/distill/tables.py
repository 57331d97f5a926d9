"""The tables' stage of `distill`: static n-gram tables for a pair's target, from its own text or from files.

Says what came of it on standard error. Knows neither counting nor the file's format (training/).
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.lanes.pairing import choose_pair
from app.settings.table import ModelOptions, Settings
from training.tables.build import Passage, build, read_passages
from training.text.self_text import passages
from utils.loading.fit import fingerprint


def build_tables(
    settings: Settings, options: ModelOptions, args: Namespace, tokenizer: Any, text: Path, out: Path
) -> None:
    """Build the file `out` of the passages in `text`, or in the files of --data. UserError for what cannot be read."""
    begun, size = time.monotonic(), int(max(tokenizer.get_vocab().values())) + 1
    facts = build(
        passages(text) if args.writes else _read(args.data, tokenizer, size),
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


def _read(files: Sequence[str], tokenizer: Any, size: int) -> list[Passage]:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [passage for file in files for passage in read_passages(file, encode, size)]
