"""The documents' tables of drafters, sub-commands, flags, settings and slash commands, made from the tables the program
itself runs on.

`python -m app.command_line.reference --check README.md docs/reference.md` fails when a file is stale, `--write` mends
it. A table stands between `<!-- table:flags -->` and `<!-- end:flags -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.command_line.subcommands import COMMANDS, OWN_FIELDS
from app.console.slash_commands import TABLE
from app.screen.output import markdown_table
from app.settings.table import FIELDS, SETTING_FIELDS, Field
from app.settings.types import Switch
from sampling.drafters.registry import table
from utils.errors import UsageError, UserError
from utils.files import write_text


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _default(known: Field) -> str:
    return "" if known.default in (None, "", ()) else known.show(known.default)


def _flag_row(group: str, known: Field) -> list[str]:
    if isinstance(known.kind, Switch):
        return [group, _code(known.flag), "", ("do not " if known.default else "") + known.help]
    return [group, _code(f"{known.flag} {known.kind.metavar}"), _code(_default(known)), known.help]


def drafters() -> str:
    """Every way of drafting that has a word."""
    return markdown_table(("Drafter", "What it is", "Needs"), [(_code(row[0]), *row[2:]) for row in table()])


def subcommands() -> str:
    """Every sub-command of infer.py."""
    return markdown_table(("Command", "Meaning"), [(_code(known.usage), known.about) for known in COMMANDS.values()])


def flags() -> str:
    """Every flag, by group."""
    rows = [_flag_row(known.group, known) for known in FIELDS.values()]
    for command, fields in OWN_FIELDS.items():
        rows += [_flag_row(f"`{command}`", known) for known in fields.values()]
    for command, known in COMMANDS.items():
        rows += [[f"`{command}`", f"`--{switch}`", "", text] for switch, text in known.switches.items()]
    order = list(dict.fromkeys(row[0] for row in rows))
    return markdown_table(("Group", "Flag", "Default", "Meaning"), sorted(rows, key=lambda row: order.index(row[0])))


def settings() -> str:
    """Everything /set changes, with its range."""
    rows = [
        [_code(known.name), known.kind.allowed, _code(_default(known)), _code(known.variable), known.help]
        for known in SETTING_FIELDS.values()
    ]
    return markdown_table(("Setting", "Allowed", "Default", "Variable", "Meaning"), rows)


def commands() -> str:
    """Every console command, by group."""
    rows = [[one.group, ", ".join(map(_code, (one.usage, *one.aliases))), one.help] for one in TABLE]
    return markdown_table(("Group", "Command", "Meaning"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "drafters": drafters,
    "subcommands": subcommands,
    "flags": flags,
    "settings": settings,
    "commands": commands,
}
_PLACE = re.compile(rf"<!-- table:({'|'.join(TABLES)}) -->\n.*?<!-- end:\1 -->", re.DOTALL)


def renewed(text: str) -> str:
    """The text with its tables brought up to date; UsageError where it has none, or markers that do not pair."""
    places = len(_PLACE.findall(text))
    if not places or any(text.count(mark) != places for mark in ("<!-- table:", "<!-- end:")):
        between = "each between <!-- table:NAME --> and <!-- end:NAME -->"
        raise UsageError(f"the file needs tables, {between}; NAME is one of {', '.join(TABLES)}")
    return _PLACE.sub(lambda place: f"<!-- table:{place[1]} -->\n{TABLES[place[1]]()}\n<!-- end:{place[1]} -->", text)


def main(arguments: Sequence[str]) -> int:
    """0 when the files are (or were made) up to date, 1 when --check finds one stale, 2 for a usage error."""
    try:
        if len(arguments) < 2 or arguments[0] not in ("--check", "--write"):
            raise UsageError("usage: python -m app.command_line.reference --check FILE … | --write FILE …")
        for file in map(Path, arguments[1:]):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"cannot read {file}: {error}") from error
            new = renewed(text)
            if new != text and arguments[0] == "--check":
                raise UserError(f"{file} is stale: run python -m app.command_line.reference --write {file}")
            if new != text:
                write_text(file, new)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
