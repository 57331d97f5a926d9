"""`write`: a target's own text as a file of token ids, for `distill --data` and `tables --from` to read.

The target answers user turns that it makes up by kind of task, or given prompts. A stopped run goes on where it was.
Knows neither how text is sampled nor the file's form (training/). Importing it is cheap: no torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.distill.progress import Progress
from app.settings.types import plain
from utils.errors import UserError
from utils.files import writable
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.distill.options import WriteArgs
    from app.lanes.lane import Engine
    from app.settings.layers import ModelOptions, Settings
    from training.text.dialogues import Source


_LONGEST = 1024  # tokens of a given prompt with its answer


def write(settings: Settings, options: ModelOptions, args: WriteArgs) -> int:
    """Write the text; the exit code. Raises UserError for what cannot be read, loaded, gone on with or written."""
    from app.prompts.datasets import questions_of
    from app.screen.output import load_engine
    from app.screen.terminal import Interrupts

    writable(args.file, "FILE")
    turns = None
    if args.prompts is not None:
        found = questions_of(args.prompts, settings.data_dir, offline=options.offline)
        turns = [list(question.turns) for question in found]
    with Interrupts() as interrupt:
        engine = load_engine(settings, options.changed(drafter="none"), interrupt)
        return _write(engine, settings, args, turns, interrupt)


def _write(
    engine: Engine, settings: Settings, args: WriteArgs, turns: list[list[str]] | None, interrupt: Callable[[], bool]
) -> int:
    from training.text.self_text import ENDLESS, begin, write_self
    from training.text.synthesize import Writer

    if engine.encodes:
        raise UserError(f"{engine.loaded.target.name} is an encoder-decoder: write takes decoder-only targets")
    source = _source(engine, settings, args, turns)
    begin(args.file, _settings(engine, settings, args, turns))
    network, size = engine.target.network, engine.target.vocab_size
    writer = Writer(network, size, engine.stop_ids, source, settings.seed, args.batch)
    told = _Told(Progress(sys.stderr, quiet=settings.quiet), args.tokens)
    try:
        count = write_self(writer, args.file, args.tokens or ENDLESS, told, interrupt)
    finally:
        told.progress.close()
    if interrupt() and count < (args.tokens or ENDLESS):
        kept = f"interrupted: {args.file} keeps {count:,} tokens"
        sys.stderr.write(f"{kept}, the same command goes on from there\n")
        return INTERRUPTED
    if not settings.quiet:
        sys.stderr.write(f"{args.file}{told.result(count)}\n")
    return 0


def _source(engine: Engine, settings: Settings, args: WriteArgs, turns: list[list[str]] | None) -> Source:
    from training.text.dialogues import GivenPrompts, OwnChats

    tokenizer, answer, temperatures = engine.tokenizer, args.answer_tokens, args.temperatures
    if turns is None:
        return OwnChats(tokenizer, engine.stop_ids, answer, temperatures, args.kinds, settings.seed)
    return GivenPrompts(tokenizer, turns, answer, temperatures, min(_LONGEST, engine.context))


def _settings(engine: Engine, settings: Settings, args: WriteArgs, turns: list[list[str]] | None) -> dict[str, str]:
    """All that the text depends on, as a user would type it; prompts by what they say."""
    from utils.loading.fit import fingerprint

    target = engine.loaded.target
    said = "none" if turns is None else hashlib.sha256(json.dumps(turns).encode("ascii")).hexdigest()[:16]
    return {
        "target": target.name,
        "quantization": target.quantization,
        "dtype": target.dtype_text,
        "tokenizer": fingerprint(engine.tokenizer),
        "prompts": said,
        "kinds": ",".join(args.kinds) if turns is None else "none",
        "temperatures": ",".join(map(plain, args.temperatures)),
        "answer tokens": str(args.answer_tokens),
        "seed": str(settings.seed),
    }


class _Told:
    """Hears the tokens in the file so far: those found in it first."""

    def __init__(self, progress: Progress, wanted: int | None) -> None:
        self.progress, self._wanted = progress, wanted
        self._found: int | None = None
        self._begun = time.monotonic()

    def __call__(self, count: int) -> None:
        if self._found is None:
            self._found, self._begun = count, time.monotonic()
        share = min(1.0, count / self._wanted) if self._wanted else None
        self.progress(f"writing text, {count:,} tokens{self._speed(count)}", share)

    def result(self, count: int) -> str:
        """What follows the file's name: whether it was there already, how much is new and how fast it came."""
        new = count - (count if self._found is None else self._found)
        if not new:
            return f" is finished: it holds {count:,} tokens"
        return f": {count:,} tokens, {new:,} of them new{self._speed(count)}"

    def _speed(self, count: int) -> str:
        """Nothing before anything has been written."""
        new = count - (self._found or 0)
        return f", {new / max(time.monotonic() - self._begun, 1e-9):,.0f} tokens/s" if new else ""
