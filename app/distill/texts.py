"""The texts of `distill`: read from files, or written by the target first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UserError
from utils.files import hash_of

if TYPE_CHECKING:
    from app.distill.options import DistillArgs
    from app.lanes.lane import Engine
    from app.settings.layers import Settings
    from training.text.self_text import Text


@dataclass(frozen=True)
class Given:
    """What the user asked for, who hears of the progress and what stops it."""

    settings: Settings
    args: DistillArgs
    progress: Callable[[str, float | None], Any]
    interrupt: Callable[[], bool]


@dataclass(frozen=True)
class Source:
    """The texts to learn from, and what the card says of them."""

    texts: list[Text]
    text: str
    sha256: str

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return sum(len(text.ids) - text.start for text in self.texts)


def texts_for(engine: Engine, given: Given, file: Path) -> Source | None:
    """The texts to learn from; what is written goes to `file`. None if interrupted."""
    from training.text.self_text import read_texts

    args = given.args
    if args.writes:
        if not _write(engine, given, file):
            return None
        files = [str(file)]
        text = "self-written chats" if args.prompts is None else f"the target's answers to {args.prompts.name}"
    else:
        files = list(args.data)
        text = ", ".join(Path(one).name for one in files)
    texts = read_texts(files, engine.target.vocab_size, min(args.longest, engine.context))
    if args.limited and not args.writes:
        texts = _first(texts, args.tokens)
    if len(texts) < 5:
        raise UserError(f"{text}: {len(texts)} sequences are too few to learn from")
    return Source(texts, text, hash_of(files))


def _write(engine: Engine, given: Given, file: Path) -> bool:
    """Let the target write; whether it has come to its end."""
    from app.prompts.questions import read_questions
    from training.text.dialogues import GivenPrompts, OwnChats
    from training.text.dialogues import Source as Chats
    from training.text.self_text import ENDLESS, write_self
    from training.text.synthesize import Writer

    args = given.args
    room = min(args.longest, engine.context)
    source: Chats
    if args.prompts is None:
        source = OwnChats(engine.tokenizer, engine.stop_ids, temperatures=args.temperatures)
    else:
        turns = [question.turns for question in read_questions(args.prompts)]
        source = GivenPrompts(engine.tokenizer, turns, temperatures=args.temperatures, most=room)
    network, seed = engine.target.network, given.settings.seed
    writer = Writer(network, engine.target.vocab_size, engine.stop_ids, source, seed, args.batch)
    tokens = args.tokens if args.prompts is None or args.limited else ENDLESS

    def share(count: int) -> None:
        given.progress(f"writing text, {count:,} tokens", min(1.0, count / tokens) if tokens < ENDLESS else None)

    share(0)
    write_self(writer, file, tokens, share, given.interrupt)
    return not given.interrupt()


def split_texts(source: Source, held: int, args: DistillArgs) -> tuple[list[Text], list[Text]]:
    """(to learn from, held out). Of given prompts none is in both, at whatever temperature it was answered."""
    from training.text.self_text import split

    learned, out = split(source.texts, held)
    if args.prompts is not None:
        prompts = {text.ids[: text.start] for text in out}
        learned = [text for text in learned if text.ids[: text.start] not in prompts]
    if not learned:
        raise UserError(f"{source.text}: too few different prompts to hold some out")
    return learned, out


def _first(texts: list[Text], tokens: int) -> list[Text]:
    """As many of the texts as hold `tokens` answer tokens."""
    count = 0
    for index, text in enumerate(texts):
        if count >= tokens:
            return texts[:index]
        count += len(text.ids) - text.start
    return texts
