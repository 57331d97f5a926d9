"""/help: a page of all commands, or one command with its range and value. Text only; fits 60 columns. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from app.console.completion import Command
from app.console.handlers import PROCESSORS, ConsoleActions, processor_text, processor_usage
from app.settings.table import SETTING_FIELDS
from app.settings.types import did_you_mean, got
from utils.errors import UsageError

WIDTH = 60
_USAGE = 26


def help_page(table: Iterable[Command]) -> str:
    """Every command, by group, in lines of at most 60 columns."""
    lines: list[str] = []
    groups: dict[str, list[Command]] = {}
    for command in table:
        groups.setdefault(command.group, []).append(command)
    for group, commands in groups.items():
        lines += [group, *(_row(command.usage, command.help) for command in commands)]
    return "\n".join([*lines, "//text sends a line that begins with a slash"])


def _row(usage: str, text: str) -> str:
    column = " " * _USAGE
    return textwrap.fill(text, WIDTH, initial_indent=f"  {usage:<{_USAGE - 3}} ", subsequent_indent=column)


def help_of(name: str, console: ConsoleActions, commands: Mapping[str, Command]) -> str:
    """Usage, range and present value of one command or setting; UsageError for an unknown name."""
    command = commands.get("/" + name.removeprefix("/"))
    if command is None and name in SETTING_FIELDS:
        return "\n".join(_wrapped(f"/set {name}=VALUE", *_of_setting(name, console)))
    if command is None:
        names = [known.removeprefix("/") for known in commands] + list(SETTING_FIELDS)
        raise UsageError(f"no help on {got(name)}{did_you_mean(name.removeprefix('/'), names)}")
    more = [f"also {', '.join(command.aliases)}"] if command.aliases else []
    if command.setting:
        more += _of_setting(command.setting, console)
    elif command.name == "/processor":
        more += ["NAME ARGS is one of", *(f"  {processor_usage(name)}" for name in PROCESSORS)]
        more += [f"now {processor_text(console.settings)}"]
    elif command.name in ("/speculative", "/target", "/draft", "/ngram", "/tables"):
        more += [f"lanes now {console.settings.show('compare')}"]
    return "\n".join(_wrapped(command.usage, command.help, *more))


def _of_setting(name: str, console: ConsoleActions) -> list[str]:
    field = SETTING_FIELDS[name]
    values = f"now {console.settings.show(name)}, default {console.defaults.show(name)}"
    return [f"setting {name}: {field.kind.allowed}", field.help, values]


def _wrapped(first: str, *rest: str) -> list[str]:
    lines = [textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  ") for line in dict.fromkeys(rest)]
    return [first, *lines]
