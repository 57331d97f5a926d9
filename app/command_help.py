"""/help: a page of all commands, or one command with its range and value. Text only; fits 60 columns. No torch."""

from __future__ import annotations

import textwrap

from app.command_actions import PROCESSORS, processor_text, processor_usage
from app.command_table import COMMANDS, TABLE
from app.commands import ConsoleActions
from app.fields import SETTING_FIELDS
from app.words import did_you_mean, got
from utils.errors import UsageError

WIDTH = 60
_USAGE = 26


def help_page() -> str:
    """Every command, by group, in lines of at most 60 columns."""
    lines: list[str] = []
    for group in dict.fromkeys(command.group for command in TABLE):
        lines += [group, *(_row(c.usage, c.help) for c in TABLE if c.group == group)]
    return "\n".join([*lines, "//text sends a line that begins with a slash"])


def _row(usage: str, text: str) -> str:
    column = " " * _USAGE
    return textwrap.fill(text, WIDTH, initial_indent=f"  {usage:<{_USAGE - 3}} ", subsequent_indent=column)


def help_of(name: str, console: ConsoleActions) -> str:
    """Usage, range and present value of one command or setting; UsageError for an unknown name."""
    command = COMMANDS.get("/" + name.removeprefix("/"))
    if command is None and name in SETTING_FIELDS:
        return "\n".join(_wrapped(f"/set {name}=VALUE", *_of_setting(name, console)))
    if command is None:
        names = [known.removeprefix("/") for known in COMMANDS] + list(SETTING_FIELDS)
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
