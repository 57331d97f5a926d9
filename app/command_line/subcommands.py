"""The table of sub-commands: usage, help, the flags of each and the function that runs it. README and --help use it.

A new sub-command is one row here and a module with its fields. Nothing that runs is imported: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from app.bench.options import BENCH_FIELDS, bench_args
from app.distill.options import DISTILL_FIELDS, distill_args
from app.measure.options import CHECK_FIELDS, check_args
from app.replay.options import REPLAY_FIELDS, demo_args, replay_args
from app.settings.table import CASCADE, MODELS, NGRAM, Field
from app.simulate.options import RECORD_FIELDS, SIMULATE_FIELDS, record_args, simulate_args

_LOOKS = ("color", "ascii", "quiet", "verbose")
Takes = Literal["all", "models", "catalogue", "looks"]


class Word(NamedTuple):
    """The positional argument of a sub-command: argparse's `nargs`, and the name of its value."""

    name: str
    nargs: str
    metavar: str
    help: str


def _nothing(given: Mapping[str, Any], arguments: Sequence[str]) -> None:
    return None


@dataclass(frozen=True)
class SubCommand:
    """One sub-command.

    `run` is "module:function", called with settings, options and the result of `own` on the given words and flags; if
    it is empty app/command_line/main.py runs the command. `level` chooses the common flags: all, those of the models,
    those of the catalogue's listing, or those of looks alone; `also` adds settings or groups of them, `without` removes
    some.
    """

    usage: str
    about: str
    run: str = ""
    fields: Mapping[str, Field] = field(default_factory=dict)
    own: Callable[[Mapping[str, Any], Sequence[str]], Any] = _nothing
    level: Takes = "all"
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    word: Word | None = None
    switches: Mapping[str, str] = field(default_factory=dict)

    def takes(self, known: Field) -> bool:
        """Return whether it takes a common flag."""
        if known.name in self.without:
            return False
        if self.level == "all" or known.name in (*_LOOKS, *self.also) or known.group in self.also:
            return True
        return known.group == MODELS if self.level == "models" else self.level == "catalogue" and known.name == "models"


_PROMPT = Word("prompt", "*", "PROMPT", "the prompt; - reads it from a pipe")
_FILE = Word("file", "?", "FILE", "recorded answers: of record, as torch prints tensors, or a JSON map of ids")
_PAIR = Word("name", "*", "NAME", "a pair of the catalogue; or two words, a target and what drafts for it")
COMMANDS: Mapping[str, SubCommand] = {
    "chat": SubCommand("[chat] [options]", "talk in the terminal (without a terminal: as run)"),
    "run": SubCommand(
        "run [PROMPT|-] [--json] [options]",
        "answer one prompt; - or a pipe is one prompt",
        word=_PROMPT,
        switches={"json": "every figure, as one JSON object"},
    ),
    "bench": SubCommand(
        "bench [--prompts F.jsonl|--from F.json] [options]",
        "time many prompts, methods and gammas; tables and plots",
        "app.bench.run:run_bench",
        BENCH_FIELDS,
        bench_args,
    ),
    "record": SubCommand(
        "record [--prompts F.jsonl] --out F.jsonl [options]",
        "record what a target answers, for simulate",
        "app.simulate.record_target:run_record",
        RECORD_FIELDS,
        record_args,
        without=("record",),
    ),
    "simulate": SubCommand(
        "simulate FILE [--drafter D] [--gammas 1,2,4] [options]",
        "try drafters against a recorded target",
        "app.simulate.run:run_simulate",
        SIMULATE_FIELDS,
        simulate_args,
        "models",
        ("system", "chat", "template", NGRAM, CASCADE),
        word=_FILE,
    ),
    "distill": SubCommand(
        "distill --out DIR [--stage S] [--student KIND] [options]",
        "text, n-gram tables and a trained drafter for a target",
        "app.distill.distill:distill",
        DISTILL_FIELDS,
        distill_args,
        "models",
        ("seed", "data_dir"),
    ),
    "replay": SubCommand(
        "replay FILE [--speed X] [options]",
        "show a session log again, without any model",
        "app.replay.player:replay",
        REPLAY_FIELDS,
        replay_args,
        "looks",
        ("view", "drafts", "palette", "debug", "slow"),
        word=Word("file", "?", "FILE", "what --log has written"),
    ),
    "demo": SubCommand(
        "demo [N] [--recorded] [options]",
        "a guided tour in six steps; --recorded needs no model",
        "app.console.demo:run_demo",
        own=demo_args,
        word=Word("step", "?", "N", "only this step"),
        switches={"recorded": "play what was recorded with the default pair"},
    ),
    "pairs": SubCommand("pairs [options]", "list the catalogue", "app.measure.check:list_pairs", level="catalogue"),
    "check": SubCommand(
        "check [NAME|TARGET DRAFTER] [--plan|--for P] [options]",
        "say whether a pair fits and its speed-up, or why not",
        "app.measure.check:check_pair",
        fields=CHECK_FIELDS,
        own=check_args,
        level="models",
        also=(NGRAM, CASCADE),
        word=_PAIR,
        switches={
            "speed": "also time passes over 1 to 16 tokens",
            "plan": "instead: the speed-up to expect over gamma and alpha, of the pair or of given costs",
            "json": "with --plan: every figure, as one JSON object",
        },
    ),
}
OWN_FIELDS: Mapping[str, Mapping[str, Field]] = {name: row.fields for name, row in COMMANDS.items() if row.fields}

REMOVED: Mapping[str, str] = {
    "plan": "check --plan",
    "latency": "benchmarks/latency.py",
    "write": "distill --stage text",
    "tables": "distill --stage tables --data FILES",
    "report": "bench --from FILE --report PAGE",
    "selftest": "python -m pytest -m device --device cuda",
    "--against": "benchmarks/against.py",
    "--html": "/save FILE.html in the console",
    "--svg": "bench --report PAGE, whose plots are SVG",
    "--export": "distill --student eagle3 or dflash, whose heads other programs read",
    "--tp-size": "torchrun --nproc-per-node N",
    "--load-in-8bit": "--quantization int8",
    "--load-in-4bit": "--quantization nf4",
    "--drafts": "the command without it, rejected drafts stay in the text",
    "--init-layers": "distill --start DIR, a trained drafter",
    "--law": "distill without it, the whole distribution is learned",
    "--hard-weight": "distill without it, the whole distribution is learned",
    "--batch-size": "bench without it; Engine of docs/library.md answers batches",
    "--t-other": "simulate without it: the rest of a round is measured, or 0 beside --t-verify",
    "--v": "check --plan of a pair, which measures v, or --target-params",
    "--drafter-bytes": "--target-bytes, which holds for drafters too",
}
"""The replacement of each removed sub-command or flag."""
