"""The documents' tables of drafters, sub-commands, flags, settings and slash commands, made from the program's tables.

`python -m app.command_line.reference --check docs/reference.md` fails if the file is stale, `--write` brings it up to
date. A table stands between `<!-- table:flags -->` and `<!-- end:flags -->`.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.command_line.arguments import COMMANDS, OWN_FIELDS
from app.console.slash_commands import TABLE
from app.screen.output import markdown_table
from app.settings.table import FIELDS, SETTING_FIELDS, Field
from app.settings.types import SWITCH
from sampling.drafters.registry import table
from utils.errors import UsageError, UserError
from utils.files import read_text, write_text
from utils.visible import to_stderr


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _default(known: Field) -> str:
    return "" if known.default in (None, "", ()) else known.show(known.default)


def _flag_row(group: str, known: Field) -> list[str]:
    if known.kind is SWITCH:
        return [group, _code(known.flag), "", ("do not " if known.default else "") + known.help]
    return [group, _code(f"{known.flag} {known.kind.metavar}"), _code(_default(known)), known.help]


TABLES: Mapping[str, str] = {
    "drafters": markdown_table(("Drafter", "What it is", "Needs"), [(_code(row[0]), *row[2:]) for row in table()]),
    "subcommands": markdown_table(
        ("Command", "Meaning"), [(_code(known.usage), known.about) for known in COMMANDS.values()]
    ),
    "flags": markdown_table(
        ("Group", "Flag", "Default", "Meaning"),
        [
            *(_flag_row(known.group, known) for known in FIELDS.values()),
            *(_flag_row(_code(name), known) for name, fields in OWN_FIELDS.items() for known in fields.values()),
        ],
    ),
    "settings": markdown_table(
        ("Setting", "Allowed", "Default", "Variable", "Meaning"),
        [
            [_code(known.name), known.kind.allowed, _code(_default(known)), _code(known.variable), known.help]
            for known in SETTING_FIELDS.values()
        ],
    ),
    "commands": markdown_table(
        ("Group", "Command", "Meaning"),
        [[row.group, ", ".join(map(_code, (row.usage, *row.aliases))), row.help] for row in TABLE],
    ),
}
_MARKED = re.compile(rf"<!-- table:({'|'.join(TABLES)}) -->\n.*?<!-- end:\1 -->", re.DOTALL)


def renewed(text: str) -> str:
    """Return the text with its tables brought up to date; UsageError without tables, or for markers without a pair."""
    count = len(_MARKED.findall(text))
    if not count or any(text.count(mark) != count for mark in ("<!-- table:", "<!-- end:")):
        between = "each between <!-- table:NAME --> and <!-- end:NAME -->"
        raise UsageError(f"the file needs tables, {between}; NAME is one of {', '.join(TABLES)}")
    return _MARKED.sub(lambda mark: f"<!-- table:{mark[1]} -->\n{TABLES[mark[1]]}\n<!-- end:{mark[1]} -->", text)


def main(arguments: Sequence[str]) -> int:
    """Return 0 when the files are (or were made) up to date, 1 when --check finds one stale, 2 for a usage error."""
    try:
        if len(arguments) < 2 or arguments[0] not in ("--check", "--write"):
            raise UsageError("usage: python -m app.command_line.reference --check FILE … | --write FILE …")
        for file in map(Path, arguments[1:]):
            text = read_text(file)
            new = renewed(text)
            if new != text and arguments[0] == "--check":
                raise UserError(f"{file} is stale: run python -m app.command_line.reference --write {file}")
            if new != text:
                write_text(file, new)
    except UserError as error:
        to_stderr(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
