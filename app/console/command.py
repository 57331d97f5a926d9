"""A slash command as a row of the table: how its argument is read, what Tab offers behind it, what it does.

Touches the disk only to list the folder of a path that is being typed. No screen, no models, no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.settings.table import Field
from app.settings.types import Kind, got, one_of
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.console.state import ConsoleState


Read = Callable[[str, str], Any]  # the command's name and the text behind it → the argument; UsageError
Offer = Callable[["ConsoleState", str], Iterable[tuple[str, str]]]  # the argument so far → (value, help)


def nothing(name: str, rest: str) -> None:
    """No argument."""
    if rest:
        raise UsageError(f"{name} takes no argument, got {got(rest)}")


def text(name: str, rest: str) -> str:
    """The argument as it was typed."""
    return rest


def unquoted(name: str, rest: str) -> str:
    """The argument without the quotation marks around it."""
    return rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "\"'" else rest


def one(kind: Kind, default: Any = ...) -> Read:
    """A value of this kind; `default` where nothing is given."""

    def read(name: str, rest: str) -> Any:
        return default if default is not ... and not rest else Field(name, kind, None, "", "").read(rest)

    return read


def file(endings: tuple[str, ...]) -> Read:
    """A file with one of these endings."""

    def read(command: str, rest: str) -> Path:
        name, allowed = unquoted(command, rest), one_of(endings)
        if not name:
            raise UsageError(f"{command} needs a file name ending in {allowed}")
        if not name.isprintable():
            raise UsageError(f"{command} needs a plain file name, got {got(name)}")
        path = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is, where Path would raise
        if path.suffix.lower() not in endings:
            raise UsageError(f"{command} needs a file ending in {allowed}, got {got(name)}")
        return path

    return read


def words(*values: str) -> Offer:
    """A fixed list of words."""
    return lambda state, so_far: [(value, "") for value in values]


def files(endings: tuple[str, ...]) -> Offer:
    """Folders and files with these endings; hidden ones only behind a dot."""

    def offer(state: ConsoleState, so_far: str) -> list[tuple[str, str]]:
        folder, name = os.path.split(so_far)
        try:
            entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
        except (OSError, ValueError):  # ValueError: no path at all, such as one with a null in it
            return []
        shown = [entry for entry in entries if entry.name.startswith(".") <= name.startswith(".")]
        found = [(os.path.join(folder, entry.name), entry.is_dir()) for entry in shown]
        return [(f"{path}/" if is_dir else path, "") for path, is_dir in found if is_dir or path.endswith(endings)]

    return offer


@dataclass(frozen=True)
class Command:
    """One command. `handler` gets the console's state and the argument as `reads` understood it.

    It may raise UserError: that is shown, and nothing has changed.
    """

    usage: str  # the name, and what may stand behind it
    help: str
    group: str
    handler: Callable[[ConsoleState, Any], None]
    reads: Read = nothing
    complete: Offer | None = None
    aliases: tuple[str, ...] = ()
    setting: str = ""  # the setting it changes: /help shows its range and value
    many: bool = False  # takes several words: each is completed by itself
    spaces: bool = False  # takes one argument that may hold spaces, such as a path

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]
