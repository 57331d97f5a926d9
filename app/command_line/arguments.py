"""The command line's grammar: argparse made from the table of settings, and errors in one line.

:func:`read_request` turns words into a :class:`Request`; nothing is loaded, run or (but for --help and --version)
printed here. No torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from app.command_line.subcommands import COMMANDS, OWN_FIELDS, REMOVED
from app.settings.layers import model_options
from app.settings.table import FIELDS, Field, ModelOptions
from app.settings.types import Switch, got, named
from utils.errors import UsageError, did_you_mean
from utils.machine import version

PROGRAM = "infer.py"
_MANY = ("data",)  # flags that take several values


@dataclass(frozen=True)
class Request:
    """A parsed command line. `flags` holds the text of every setting given; `prompt` "-" means stdin.

    The pair for `check` is `options.pair`. `own` are the sub-command's values beside the settings.
    """

    command: str
    options: ModelOptions
    flags: Mapping[str, Any]
    environ: Mapping[str, str]
    prompt: str | None = None
    as_json: bool = False
    own: Any = None


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
        """Help and version, to a stream whose errors count (argparse drops them)."""
        (file or sys.stdout).write(message)


def build_parser(command: str = "chat") -> argparse.ArgumentParser:
    """Return the parser of one sub-command; every value it yields is text, or a bool for a switch."""
    known = COMMANDS[command]
    usages, about = [known.usage], known.about
    if command == "chat":
        rows = "\n".join(f"  {name:<8} {each.about}" for name, each in COMMANDS.items())
        usages, about = (
            [each.usage for each in COMMANDS.values()],
            f"Plain and speculative decoding side by side.\n\n{rows}",
        )
    parser = _Parser(
        prog=PROGRAM,
        usage="\n       ".join(f"python {PROGRAM} {usage}" for usage in usages),
        description=about,
        epilog="Variables preset these: SPEC_GAMMA=8. `run --help`, `bench --help` tell more.",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
        add_help=False,
        allow_abbrev=False,
    )
    _add_own(parser, command)
    sections: dict[str, Any] = {}
    for field in FIELDS.values():
        if field.group not in sections:
            sections[field.group] = parser.add_argument_group(field.group)
        if known.takes(field):
            _add(sections[field.group], field)
    other = parser.add_argument_group("Help")
    other.add_argument("-h", "--help", action="help", help="show this and leave")
    other.add_argument("--version", action="version", version=version(), help="show the version and leave")
    return parser


def _add_own(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "chat":
        parser.add_argument("surplus", nargs="*", help=argparse.SUPPRESS)
        return
    section = parser.add_argument_group(command.capitalize())
    if (word := COMMANDS[command].word) is not None:
        section.add_argument(word.name, nargs=word.nargs, metavar=word.metavar, help=word.help)
    for switch, text in COMMANDS[command].switches.items():
        section.add_argument(f"--{switch}", action="store_true", help=text)
    for known in OWN_FIELDS.get(command, {}).values():
        _add(section, known, **({"nargs": "+"} if known.name in _MANY else {}))


def _add(section: Any, known: Field, **more: Any) -> None:
    """Add one setting by all its flags, of which help shows one; of a switch the form that changes something."""
    text, flags, how = known.help.replace("%", "%%"), dict.fromkeys(known.flags), more
    if isinstance(known.kind, Switch):
        text = f"do not {text}" if known.default else text
        flags = {known.flags[0]: {"const": True}, f"--no-{known.flags[0][2:]}": {"const": False}}
        how = {"action": "store_const"}
    else:
        text += "" if known.default in (None, "", ()) else f" (default {known.show(known.default)})"
        how["metavar"] = (known.kind.metavar, "…") if "nargs" in more else known.kind.metavar
    for flag, value in flags.items():
        shown = text if flag == known.flag else argparse.SUPPRESS
        section.add_argument(flag, dest=known.name, default=argparse.SUPPRESS, help=shown, **how, **(value or {}))


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
        as_json=given.get("json", False),
        own=COMMANDS[command].own(given, arguments),
    )


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
    owners = [name for name in COMMANDS if name != command and flag in _flags(build_parser(name))]
    if owners:
        return f"{command} takes no {flag} ({', '.join(owners)} {'does' if len(owners) == 1 else 'do'})"
    shorts = {f"--{field.short}": f" (did you mean {field.flag}?)" for field in FIELDS.values() if field.short}
    hint = shorts.get(flag) or did_you_mean(flag, _flags(parser)) or " (--help lists them; -- ends the flags)"
    return f"unknown flag {named(flag)}{hint}"


def _removed(word: str) -> str:
    kind = "flag" if word.startswith("-") else "sub-command"
    return f"{word} is no {kind}: use {REMOVED[word]}"


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def _surplus(word: str, explicit: bool) -> str:
    if word in COMMANDS:
        return f"the sub-command comes first: python {PROGRAM} {word} …"
    if explicit:
        return f"chat takes no argument {got(word)} (one answer: python {PROGRAM} run PROMPT)"
    hint = did_you_mean(word, COMMANDS) or f": have {', '.join(COMMANDS)}"
    return f"unknown sub-command {got(word)}{hint}; one answer: python {PROGRAM} run PROMPT"


def _pair_of(words: Sequence[str], flags: Mapping[str, Any]) -> dict[str, str]:
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
