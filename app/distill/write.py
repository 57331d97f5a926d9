"""`write`: a target's own text as a file of token ids, for `distill --data` and `tables --from` to read.

The target answers user turns that it makes up by kind of task, or given prompts. A stopped run goes on where it was.
Knows neither how text is sampled nor the file's form (training/).
"""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import Namespace

from app.distill.texts import let_write, load_target, target_facts
from app.prompts.datasets import questions_of
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from app.settings.types import plain
from training.text.dialogues import GivenPrompts, OwnChats, Source
from training.text.self_text import begin
from utils.errors import UserError
from utils.files import writable
from utils.progress import INTERRUPTED

_LONGEST = 1024  # tokens of a given prompt with its answer


def write(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Write the text; the exit code. Raises UserError for what cannot be read, loaded, gone on with or written."""
    writable(args.file, "FILE")
    turns = None
    if args.prompts is not None:
        found = questions_of(args.prompts, settings.data_dir, offline=options.offline)
        turns = [list(question.turns) for question in found]
    with Interrupts() as interrupt:
        engine = load_target(settings, options, interrupt)
        tokenizer = engine.tokenizer
        if engine.encodes:
            raise UserError(f"{engine.loaded.target.name} is an encoder-decoder: write takes decoder-only targets")
        how = (args.answer_tokens, args.temperatures)
        if turns is None:
            source: Source = OwnChats(tokenizer, engine.stop_ids, *how, args.kinds, settings.seed)
            given = {"prompts": "none", "kinds": ",".join(args.kinds)}
        else:
            source = GivenPrompts(tokenizer, turns, *how, min(_LONGEST, engine.context))
            said = hashlib.sha256(json.dumps(turns).encode("ascii")).hexdigest()[:16]
            given = {"prompts": said, "kinds": "none"}
        facts = {  # all that the text depends on, as a user would type it; prompts by what they say
            **target_facts(engine, options),
            **given,
            "temperatures": ",".join(map(plain, args.temperatures)),
            "answer tokens": str(args.answer_tokens),
            "seed": str(settings.seed),
        }
        begin(args.file, facts)
        wrote = let_write(engine, source, args.file, args.tokens, settings, interrupt, args.batch)
        if interrupt() and (args.tokens is None or wrote.tokens < args.tokens):
            kept = f"interrupted: {args.file} keeps {wrote.tokens:,} tokens"
            sys.stderr.write(f"{kept}, the same command goes on from there\n")
            return INTERRUPTED
    if not settings.quiet:
        result = f" is finished: it holds {wrote.tokens:,} tokens"
        if wrote.new:
            speed = wrote.new / max(wrote.seconds, 1e-9)
            result = f": {wrote.tokens:,} tokens, {wrote.new:,} of them new, {speed:,.0f} tokens/s"
        sys.stderr.write(f"{args.file}{result}\n")
    return 0
