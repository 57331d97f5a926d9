"""The texts to learn from: written by the target, or read from files."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from app.lanes.lane import PairEngine
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from training.draft_heads.features import Keeper
from training.text.dialogues import GivenPrompts, OwnChats, Source
from training.text.self_text import ENDLESS, TextIds, read_texts, split, write_self, written
from training.text.synthesize import Keep, TextWriter
from utils.errors import UserError
from utils.files import hash_of
from utils.loading.fit import fingerprint
from utils.machine import keep_memory


@dataclass(frozen=True)
class Texts:
    """The texts to learn from, and what the card says of them."""

    texts: list[TextIds]
    text: str
    sha256: str

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return sum(len(text.ids) - text.start for text in self.texts)


class Wrote(NamedTuple):
    """Tokens that the file holds now, new ones among them, and the seconds that these took."""

    tokens: int
    new: int
    seconds: float


def load_target(settings: Settings, options: ModelOptions, interrupt: Callable[[], bool]) -> PairEngine:
    """The target alone. Here `auto` means none: what is written and learned stays what it was on any processor."""
    keep_memory()
    quantization = "none" if options.quantization == "auto" else options.quantization
    return load_engine(settings, options.changed(drafter="none", quantization=quantization), interrupt)


def target_facts(engine: PairEngine, options: ModelOptions) -> dict[str, str]:
    """What of the target its text and its states depend on, as a user would type it."""
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
    interrupt: Callable[[], bool],
    batch: int = 32,
    keep: Keep | None = None,
) -> Wrote:
    """Let the target write until `file` holds so many tokens (None: as many as the source has).

    `keep` receives the target's states of each line.
    UserError if it has none, since no prompt leaves room for an answer.
    """
    network, size = engine.target.network, engine.target.vocab_size
    writer = TextWriter(network, size, engine.stop_ids, source, settings.seed, batch, keep)
    found, begun = written(file)[0], time.monotonic()
    with tqdm(
        desc="writing text",
        total=tokens,
        initial=found,
        unit="token",
        disable=settings.quiet or found >= (tokens or ENDLESS),
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 60,
        leave=False,
    ) as bar:
        count = write_self(writer, file, tokens or ENDLESS, lambda count: bar.update(count - bar.n), interrupt)
    if not (count or source.endless or interrupt()):
        raise UserError(f"every prompt has {source.longest} tokens or more: there is no room for an answer")
    return Wrote(count, count - found, time.monotonic() - begun)


def keeper_of(engine: PairEngine, options: ModelOptions, args: Namespace, file: Path) -> Keeper | None:
    """Keeps the target's states of new text in the folder of --features; None without one."""
    if args.features is None:
        return None
    before = read_texts([file], engine.target.vocab_size, _longest(engine, args)) if written(file)[0] else []
    return Keeper(target_facts(engine, options), args.features, len(before), _longest(engine, args))


def _longest(engine: PairEngine, args: Namespace) -> int:
    """Tokens of the longest sequence learned from."""
    return min(int(args.longest), engine.context)


def source_of(engine: PairEngine, settings: Settings, args: Namespace) -> Source:
    """The chats that the target writes: its own, or answers to the given prompts."""
    tokenizer, how = engine.tokenizer, (args.answer_tokens, args.temperatures)
    if args.turns is None:
        return OwnChats(tokenizer, engine.stop_ids, *how, args.tasks, settings.seed)
    return GivenPrompts(tokenizer, args.turns, *how, _longest(engine, args))


def read(engine: PairEngine, args: Namespace, file: Path) -> Texts:
    """The texts to learn from: of `file`, which the target has written, or of the given files."""
    text, files = ", ".join(Path(name).name for name in args.data), list(args.data)
    if args.writes:
        text = "self-written chats" if args.prompts is None else f"the target's answers to {_name(args.prompts)}"
        files = [str(file)]
    texts = read_texts(files, engine.target.vocab_size, _longest(engine, args))
    if args.limited and not args.writes:
        texts = _first(texts, args.tokens)
    if len(texts) < 5:
        raise UserError(f"{text}: {len(texts)} sequences are too few to learn from")
    return Texts(texts, text, hash_of(files))


def _name(prompts: Path | str) -> str:
    return prompts if isinstance(prompts, str) else prompts.name


def split_texts(source: Texts, held: int, args: Namespace) -> tuple[list[TextIds], list[TextIds]]:
    """(to learn from, held out). Of given prompts none is in both, at whatever temperature it was answered."""
    learned, out = split(source.texts, held)
    if args.prompts is not None:
        prompts = {text.ids[: text.start] for text in out}
        learned = [text for text in learned if text.ids[: text.start] not in prompts]
    if not learned:
        raise UserError(f"{source.text}: too few different prompts to hold some out")
    return learned, out


def _first(texts: list[TextIds], tokens: int) -> list[TextIds]:
    """As many of the texts as hold `tokens` answer tokens."""
    before = [0, *accumulate(len(text.ids) - text.start for text in texts)]
    return [text for text, count in zip(texts, before, strict=False) if count < tokens]
