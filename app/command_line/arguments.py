"""The command line: the table of sub-commands, the grammar made from it and the table of settings, and errors in one
line.

A new sub-command is one row here, with its flags, and a module that runs it. :func:`read_request` turns words into a
:class:`Request`; nothing is loaded, run or (but for --help and --version) printed here. The modules that run a command
are not imported, nor is torch.
"""

import argparse
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from app.distill.options import DISTILL_FIELDS, distill_args
from app.measure.elsewhere import CHECK_FIELDS, check_args
from app.prompts.questions import PROMPT_FIELDS
from app.settings.table import (
    CASCADE,
    FIELDS,
    MODELS,
    NGRAM,
    Field,
    ModelOptions,
    SettingValues,
    arguments,
    by_name,
    model_options,
)
from app.settings.types import (
    LANE_NAMES,
    METHOD_NAMES,
    SWITCH,
    TEXTS,
    Choice,
    Number,
    NumberList,
    Text,
    Whole,
    WholeList,
    got,
    named,
)
from utils.errors import UsageError, did_you_mean
from utils.files import check_outputs
from utils.machine import version

_LOOKS = ("color", "ascii", "quiet", "verbose")


class Word(NamedTuple):
    """The positional argument of a sub-command: argparse's `nargs`, and the name of its value."""

    name: str
    nargs: str
    metavar: str
    help: str


@dataclass(frozen=True)
class SubCommand:
    """One sub-command.

    `run` is "module:function", called with settings, options and the command's own values (:func:`own_values`); if it
    is empty, app/command_line/main.py runs the command. `fields`: its own flags; `own` makes their values, if that
    takes more than reading each. `needs`: the value that must be given, and its meaning for the error. `level` chooses
    the common flags: "looks" those of _LOOKS, "catalogue" --models too, "models" also the others of models, "all" every
    one. `also` adds settings or groups of them, `without` removes some.
    """

    usage: str
    about: str
    run: str = ""
    fields: Mapping[str, Field] = field(default_factory=dict)
    own: Callable[[SettingValues, Sequence[str]], Namespace] | None = None
    level: Literal["all", "models", "catalogue", "looks"] = "all"
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    word: Word | None = None
    needs: tuple[str, str] | None = None

    def takes(self, known: Field) -> bool:
        """Return whether it takes a common flag."""
        if known.name in self.without:
            return False
        if self.level == "all" or known.name in (*_LOOKS, *self.also) or known.group in self.also:
            return True
        return known.group == MODELS if self.level == "models" else self.level == "catalogue" and known.name == "models"


_FILE = Text("FILE", "a file", optional=True)
_BENCH = by_name(
    *(PROMPT_FIELDS[name] for name in ("prompts", "ids", "turns")),
    Field("methods", LANE_NAMES, (), "lanes to time (default: those of --compare)"),
    Field("gammas", WholeList(1, 64, "auto"), (1, 2, 4, 8), "gammas to time; auto is one"),
    Field("repeat", Whole(1, 1000), 3, "times each prompt is answered"),
    PROMPT_FIELDS["limit"],
    Field("out", _FILE, None, "write every figure to this JSON file; resumes a stopped run"),
    Field("report", _FILE, None, "write tables and plots to this HTML file"),
    Field("from", _FILE, None, "measure nothing: make the page of this file of --out"),
    Field("check_identity", SWITCH, False, "compare every output with plain decoding and transformers"),
)


def bench_args(given: SettingValues, _: Sequence[str] = ()) -> Namespace:
    """Return the values or defaults; UsageError in one line. `source`: that of --from. Empty `methods` stand for those
    of --compare."""
    args = arguments(_BENCH, given)
    args.source = vars(args).pop("from")
    if args.source is not None:
        if args.report is None:
            raise UsageError("--from needs --report: the page to write")
        check_outputs({"--report": args.report}, [args.source])
    return args


COMMANDS: Mapping[str, SubCommand] = {
    "chat": SubCommand("[chat] [options]", "talk in the terminal (without a terminal: as run)"),
    "run": SubCommand(
        "run [PROMPT|-] [--json] [options]",
        "answer one prompt; - or a pipe is one prompt",
        fields=by_name(
            Field("json", SWITCH, False, "every figure, as one JSON object"),
            Field("logprobs", Whole(0, 20), None, "with --json: log-probabilities, and the N likeliest of each token"),
            Field("samples", Whole(2, 64), None, "answer N times as one batch, and show the answers as a tree"),
        ),
        word=Word("prompt", "*", "PROMPT", "the prompt; - reads it from a pipe"),
    ),
    "bench": SubCommand(
        "bench [--prompts F.jsonl|--from F.json] [options]",
        "time many prompts, methods and gammas; tables and plots",
        "app.bench.run:run_bench",
        _BENCH,
        bench_args,
    ),
    "record": SubCommand(
        "record [--prompts F.jsonl] --out F.jsonl [options]",
        "record what a target answers, for simulate",
        "app.simulate.run:run_record",
        by_name(
            *PROMPT_FIELDS.values(),
            Field("out", _FILE, None, "the recording, .jsonl"),
            Field("costs", SWITCH, False, "also record the time of passes over 1 to 17 tokens here"),
            Field("best", Whole(1, 64), 3, "the target's likeliest ids to record at each token"),
        ),
        without=("record",),
        needs=("out", "--out: the file to write"),
    ),
    "simulate": SubCommand(
        "simulate FILE [--drafter D] [--gammas 1,2,4] [options]",
        "try drafters against a recorded target",
        "app.simulate.run:run_simulate",
        by_name(
            Field(
                "methods", METHOD_NAMES, ("spec",), "drafters to try, as the lanes of bench; spec: that of --drafter"
            ),
            Field("gammas", WholeList(1, 64), (1, 2, 4, 8), "gammas to try"),
            Field("t_draft", Number(0, 1e6), None, "seconds of a drafted token (default: measured here)"),
            Field(
                "t_verify",
                NumberList(0, 1e6, without_low=True),
                (),
                "seconds of a pass over 1, 2, … tokens (default: as recorded)",
            ),
            Field("prompts", _FILE, None, "the prompts of a recording that torch printed, row by row"),
            Field(
                "prompt_tokens",
                Whole(0, 1_000_000),
                help="tokens of each prompt in such rows; 0: rows, or a map's values, are answers alone",
            ),
            Field(
                "arch", Choice(("auto", "causal", "seq2seq")), "auto", "the recorded model's kind, where no model tells"
            ),
            Field("end_id", Whole(0, 10_000_000), None, "id that ends an answer, where the recording tells none"),
            Field("limit", Whole(1), None, "play the first N answers"),
            Field("out", Text("F.json", "a file", optional=True), None, "write every figure to this JSON file"),
        ),
        level="models",
        also=("system", "chat", "template", NGRAM, CASCADE),
        word=Word("file", "?", "FILE", "recorded answers: of record, as torch prints tensors, or a JSON map of ids"),
        needs=("file", "a file: the recording to play (infer.py record makes one)"),
    ),
    "distill": SubCommand(
        "distill --out DIR [--stage S] [--student KIND] [options]",
        "text, n-gram tables and a trained drafter for a target",
        "app.distill.distill:distill",
        DISTILL_FIELDS,
        distill_args,
        "models",
        ("seed", "data_dir"),
        needs=("out", "--out: the folder to write"),
    ),
    "replay": SubCommand(
        "replay FILE [--speed X] [options]",
        "show a session log again, without any model",
        "app.replay.player:replay",
        by_name(
            Field("speed", Number(0, 1_000_000), 1.0, "times its own speed; 0: at once"),
            Field("answer", Whole(1), None, "only this answer, counted from 1"),
            Field("inspect", SWITCH, False, "walk over the last answer token by token"),
            Field("page", Text("FILE.html", "a file", optional=True), None, "write one interactive page instead"),
        ),
        level="looks",
        also=("view", "palette", "debug", "slow"),
        word=Word("file", "?", "FILE", "what --log has written"),
        needs=("file", "a file that --log has written"),
    ),
    "demo": SubCommand(
        "demo [N] [--recorded] [options]",
        "a guided tour in six steps; --recorded needs no model",
        "app.console.demo:run_demo",
        by_name(Field("recorded", SWITCH, False, "play what was recorded with the default pair")),
        word=Word("step", "?", "N", "only this step"),
    ),
    "pairs": SubCommand("pairs [options]", "list the catalogue", "app.measure.check:list_pairs", level="catalogue"),
    "check": SubCommand(
        "check [NAME|TARGET DRAFTER] [--plan|--for P] [options]",
        "say whether a pair fits and its speed-up, or why not",
        "app.measure.check:check_pair",
        CHECK_FIELDS,
        check_args,
        "models",
        (NGRAM, CASCADE),
        word=Word("name", "*", "NAME", "a pair of the catalogue; or two words, a target and what drafts for it"),
    ),
}
OWN_FIELDS: Mapping[str, Mapping[str, Field]] = {name: row.fields for name, row in COMMANDS.items() if row.fields}

# The replacement of each removed sub-command or flag.
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
    "--temperatures": "bench --temperature, a run for each",
    "--batch-size": "bench without it; Engine of docs/library.md answers batches",
    "--t-other": "simulate without it: the rest of a round is measured, or 0 beside --t-verify",
    "--v": "check --plan of a pair, which measures v, or --target-params",
    "--drafter-bytes": "--target-bytes, which holds for drafters too",
}


PROGRAM = "infer.py"


@dataclass(frozen=True)
class Request:
    """A parsed command line. `flags` holds every common flag that was given, by name, as text (a switch as a bool, the
    texts of --stop as a tuple); `prompt` "-" means stdin.

    `options` has the words of `check`: `pair`, or `target` and `drafter`. `own`: the values of the sub-command's flags.
    """

    command: str
    options: ModelOptions
    flags: SettingValues
    environ: Mapping[str, str]
    prompt: str | None
    own: Namespace


class _Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        lacking = re.fullmatch(r"argument (\S+): expected .*argument.*", message)
        surplus = re.fullmatch(r"argument (\S+): ignored explicit argument (.*)", message)
        if lacking:
            every = (known for table in (FIELDS, *OWN_FIELDS.values()) for known in table.values())
            allowed = next((f": {known.kind.allowed}" for known in every if lacking[1] in known.flags), "")
            raise UsageError(f"{lacking[1]} needs a value{allowed}")
        raise UsageError(f"{surplus[1]} takes no value, got {surplus[2]}" if surplus else message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help or version; errors in writing are raised (argparse ignores them)."""
        (file or sys.stdout).write(message)


class _Help(argparse.Action):
    """Shows the help of a sub-command, with `all` its rare flags too."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        build_parser(self.dest, rare=values == "all").print_help()
        parser.exit()


def build_parser(command: str = "chat", rare: bool = False) -> argparse.ArgumentParser:
    """Return the parser of one sub-command, which returns texts (a list where a flag or argument takes several) and a
    bool for a switch. `rare`: its help lists the rare flags, too."""
    known = COMMANDS[command]
    usages, about = [known.usage], known.about
    if command == "chat":
        rows = (f"  {name:<8} {each.about}" for name, each in COMMANDS.items())
        usages = [each.usage for each in COMMANDS.values()]
        about = "\n".join(["Plain and speculative decoding side by side.", "", *rows])
    parser = _Parser(
        prog=PROGRAM,
        usage="\n       ".join(f"python {PROGRAM} {usage}" for usage in usages),
        description=about,
        epilog="Variables preset these: SPEC_GAMMA=8. `run --help`, `bench --help` tell more.",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
        add_help=False,
        allow_abbrev=False,
    )
    if command == "chat":
        parser.add_argument("surplus", nargs="*", help=argparse.SUPPRESS)
    else:
        section = parser.add_argument_group(command.capitalize())
        if (word := known.word) is not None:
            section.add_argument(word.name, nargs=word.nargs, metavar=word.metavar, help=word.help)
        for own in known.fields.values():
            _add(section, own, True, **({"nargs": "+"} if own.name == "data" else {}))  # --data takes several files
    sections = {
        group: parser.add_argument_group(group) for group in dict.fromkeys(row.group for row in FIELDS.values())
    }
    for row in filter(known.takes, FIELDS.values()):
        _add(sections[row.group], row, shown=rare or not row.rare)
    other = parser.add_argument_group("Help")
    other.add_argument(
        "-h",
        "--help",
        dest=command,
        default=argparse.SUPPRESS,
        action=_Help,
        nargs="?",
        metavar="all",
        help="show this and leave; all: the rare flags too",
    )
    other.add_argument("--version", action="version", version=version(), help="show the version and leave")
    return parser


class _AddText(argparse.Action):
    """Adds a text, its escapes read, to those that the same flag has given before."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        texts = FIELDS[self.dest].read(values, label=option_string or "")
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *texts))


def _add(section: argparse._ArgumentGroup, known: Field, shown: bool = True, **more: Any) -> None:
    """Add all flags of one setting. If `shown`, help shows one of them: of a switch the form that changes the
    default."""
    text, flags, how = known.help.replace("%", "%%"), dict.fromkeys(known.flags), more
    if known.kind is SWITCH:
        text = f"do not {text}" if known.default else text
        flags = {known.flags[0]: {"const": True}, f"--no-{known.flags[0][2:]}": {"const": False}}
        how = {"action": "store_const"}
    else:
        text += "" if known.default in (None, "", ()) else f" (default {known.show(known.default)})"
        how |= {"action": _AddText} if known.kind is TEXTS else {}
        how["metavar"] = (known.kind.metavar, "…") if "nargs" in more else known.kind.metavar
    for flag, value in flags.items():
        words = text if shown and flag == known.flag else argparse.SUPPRESS
        section.add_argument(flag, dest=known.name, default=argparse.SUPPRESS, help=words, **how, **(value or {}))


def read_request(arguments: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Parse a command line; UsageError in one line, SystemExit after --help and --version."""
    explicit = bool(arguments) and arguments[0] in COMMANDS
    command = arguments[0] if explicit else "chat"
    if not explicit and arguments and arguments[0] in REMOVED:
        raise UsageError(_removed(arguments[0]))
    words = list(arguments[1:] if explicit else arguments)
    end = words.index("--") if "--" in words else len(words)
    parser = build_parser(command)
    values, unknown = parser.parse_known_intermixed_args(words[:end])
    given = vars(values)
    flags = {name: given[name] for name in FIELDS if name in given}
    if unknown:
        raise UsageError(_unknown(next((w for w in unknown if w.startswith("-")), unknown[0]), command, parser))
    _add_words(given, words[end + 1 :], command)
    if given.get("surplus"):
        raise UsageError(_surplus(given["surplus"][0], explicit))
    flags |= _pair_of(given.get("name") or [], flags)
    return Request(
        command=command,
        options=model_options(environ, flags),
        flags=flags,
        environ=environ,
        prompt=" ".join(given["prompt"]) if given.get("prompt") else None,
        own=own_values(command, given, arguments),
    )


def own_values(command: str, given: SettingValues, words: Sequence[str]) -> Namespace:
    """Return the values of a sub-command's own flags and of its positional argument. UsageError in one line."""
    known = COMMANDS[command]
    if known.needs is not None and not given.get(known.needs[0]):
        raise UsageError(f"{command} needs {known.needs[1]}")
    if known.own is not None:
        return known.own(given, words)
    file = given.get("file")
    return arguments(known.fields, given, step=given.get("step"), file=file and Path(os.path.expanduser(file)))


def _add_words(given: dict[str, Any], words: Sequence[str], command: str) -> None:
    """Add the words after "--", which are never flags, to those before it."""
    word = COMMANDS[command].word
    name, several = ("surplus", True) if word is None else (word.name, word.nargs == "*")
    before = given.get(name)
    every = [*([before] if isinstance(before, str) else before or []), *words]
    if not several and len(every) > 1:
        raise UsageError(f"{command} takes no further argument {got(every[1])}")
    if words:
        given[name] = every if several else every[0]


def _unknown(word: str, command: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{command} takes no further argument {got(word)}"
    flag = word.partition("=")[0]
    if flag in REMOVED:
        return _removed(flag)
    if owners := [name for name in COMMANDS if name != command and flag in _flags(build_parser(name))]:
        return f"{command} takes no {flag} ({', '.join(owners)} {'does' if len(owners) == 1 else 'do'})"
    shorts = {f"--{field.short}": f" (did you mean {field.flag}?)" for field in FIELDS.values() if field.short}
    hint = shorts.get(flag) or did_you_mean(flag, _flags(parser)) or " (--help all lists them; -- ends the flags)"
    return f"unknown flag {named(flag)}{hint}"


def _removed(word: str) -> str:
    return f"{word} is no {'flag' if word.startswith('-') else 'sub-command'}: use {REMOVED[word]}"


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def _surplus(word: str, explicit: bool) -> str:
    if word in COMMANDS:
        return f"the sub-command comes first: python {PROGRAM} {word} …"
    if explicit:
        return f"chat takes no argument {got(word)} (one answer: python {PROGRAM} run PROMPT)"
    hint = did_you_mean(word, COMMANDS) or f": have {', '.join(COMMANDS)}"
    return f"unknown sub-command {got(word)}{hint}; one answer: python {PROGRAM} run PROMPT"


def _pair_of(words: Sequence[str], flags: SettingValues) -> dict[str, str]:
    """Return the flags that the words of `check` stand for: --pair, or --target and --drafter."""
    if len(words) > 2:
        raise UsageError(f"check takes no further argument {got(words[2])}")
    options = dict(zip(("target", "drafter") if len(words) == 2 else ("pair",), words, strict=False))
    for name, word in options.items():
        if flags.get(name, word) != word or (len(words) == 2 and "pair" in flags):
            flag = name if name in flags else "pair"
            shown = " ".join(map(named, words))
            raise UsageError(f"check {shown} and --{flag} {flags[flag]} contradict each other: give one")
    return options
