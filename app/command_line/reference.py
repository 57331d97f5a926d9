"""The README's tables of flags, settings and commands, made from the tables the program itself runs on.

`python -m app.command_line.reference --check README.md` fails when the file is stale, `--write README.md` mends it,
with no argument the tables are shown. A table stands between `<!-- table:flags -->` and `<!-- end:flags -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from app.command_line.arguments import ALIASES
from app.command_line.subcommands import COMMANDS, OWN_FIELDS
from app.console.slash_commands import TABLE
from app.settings.table import FIELDS, SETTING_FIELDS, Field
from app.settings.types import Switch
from utils.errors import UsageError, UserError
from utils.files import write_text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _default(known: Field) -> str:
    return "" if known.default in (None, "", ()) else known.show(known.default)


def _flag_row(group: str, known: Field) -> list[str]:
    if isinstance(known.kind, Switch):
        return [group, _code(known.flag), "", ("do not " if known.default else "") + known.help]
    return [group, _code(f"{known.flag} {known.kind.metavar}"), _code(_default(known)), known.help]


def flags() -> str:
    """Every flag, by group."""
    rows = [_flag_row(known.group, known) for known in FIELDS.values()]
    rows += [["Models", _code(flag), "", f"the same as `--quantization {meant}`"] for flag, meant in ALIASES.items()]
    for command, fields in OWN_FIELDS.items():
        rows += [_flag_row(f"`{command}`", known) for known in fields.values()]
    for command, known in COMMANDS.items():
        rows += [[f"`{command}`", f"`--{switch}`", "", text] for switch, text in known.switches.items()]
    order = list(dict.fromkeys(row[0] for row in rows))
    return _table(("Group", "Flag", "Default", "Meaning"), sorted(rows, key=lambda row: order.index(row[0])))


def settings() -> str:
    """Everything /set changes, with its range."""
    rows = [
        [_code(known.name), known.kind.allowed, _code(_default(known)), _code(known.variable), known.help]
        for known in SETTING_FIELDS.values()
    ]
    return _table(("Setting", "Allowed", "Default", "Variable", "Meaning"), rows)


def commands() -> str:
    """Every console command, by group."""
    rows = []
    for command in TABLE:
        names = ", ".join(map(_code, (command.usage, *command.aliases)))
        rows.append([command.group, names, command.help])
    return _table(("Group", "Command", "Meaning"), rows)


TABLES: Mapping[str, Callable[[], str]] = {"flags": flags, "settings": settings, "commands": commands}


def renewed(text: str) -> str:
    """The text with every table brought up to date; UsageError when a pair of markers is missing or doubled."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table:{name} -->", f"<!-- end:{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise UsageError(f"the file needs {begin} and behind it {end}, each once")
        between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        table = f"{begin}\n{make()}\n{end}"
        text = between.sub(lambda _, table=table: table, text)  # type: ignore[misc]
    return text


def main(arguments: Sequence[str]) -> int:
    """0 when the file is (or was made) up to date, 1 when --check finds it stale, 2 for a usage error."""
    if not arguments:
        sys.stdout.write("\n\n".join(make() for make in TABLES.values()) + "\n")
        return 0
    try:
        if len(arguments) != 2 or arguments[0] not in ("--check", "--write"):
            raise UsageError("usage: python -m app.command_line.reference [--check FILE | --write FILE]")
        file = Path(arguments[1])
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from error
        new = renewed(text)
        if arguments[0] == "--write" and new != text:
            write_text(file, new)
        elif new != text:
            raise UserError(f"{file} is stale: run python -m app.command_line.reference --write {file}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
