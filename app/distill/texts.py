"""The text of `distill`: written by the target, or read from files; and n-gram tables of it.

Reports progress and results on standard error. Knows neither sampling nor counting (training/).
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.lanes.lane import PairEngine
from app.lanes.pairing import choose_pair
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from training.draft_heads.features import Keeper
from training.tables.build import Passage, build, read_passages
from training.text.dialogues import GivenPrompts, OwnChats, Source
from training.text.synthesize import ENDLESS, Keep, TextWriter, passages, read_texts, split, write_self, written
from utils.errors import UserError
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
