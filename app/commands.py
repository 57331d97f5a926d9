"""The console's commands: what a typed line means, and what each command does to the console.

:func:`dispatch` runs a line against any :class:`ConsoleActions`; it returns the text to send to the model, if
the line was a message. The table itself is in app/command_table.py. Knows no screen, no models and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from app.settings import Settings
from app.words import did_you_mean, named
from utils.errors import UsageError, UserError


class ConsoleActions(Protocol):
    """What commands ask of the console. Any of these may raise UserError: it is shown and nothing changes.

    Text given to `say` and `fail` is literal (no markup), may hold several lines and holds no prefix.
    """

    @property
    def settings(self) -> Settings: ...  # all layers
    @property
    def defaults(self) -> Settings: ...  # without what the console changed
    def change(self, **changes: Any) -> None: ...  # all or nothing, see Layers.with_set; does not speak
    def reset(self, *names: str) -> None: ...  # see Layers.without_set: these settings, or all; does not speak
    def say(self, what: Any) -> None: ...  # text or a rich renderable
    def fail(self, text: str) -> None: ...  # one line of error; the console adds "error: "
    def pair_names(self) -> list[str]: ...
    def load_pair(self, name: str | None) -> None: ...  # None: say which is loaded and which there are
    def load_drafter(self, name: str | None) -> None: ...  # None: say which is loaded
    def info(self) -> None: ...
    def paces(self) -> str: ...  # what `gamma auto` has learned, lane by lane; "" before it has
    def system(self, text: str | None) -> None: ...  # None: show it; "": none from now on
    def clear(self) -> None: ...
    def undo(self) -> None: ...
    def regen(self) -> None: ...
    def continue_(self) -> None: ...
    def copy(self) -> None: ...
    def edit(self, text: str) -> None: ...  # replace the last message; "": put it into the input line
    def prompts(self, name: str) -> None: ...  # ask all of a file or data set, one after another
    def bench(self, gammas: Sequence[int | str]) -> None: ...  # time the lanes; without any: at the setting's gamma
    def save(self, path: Path) -> None: ...  # the ending is .json, .txt, .md, .html or .svg
    def load(self, path: Path) -> None: ...  # the ending is .json
    def stats(self, which: str) -> None: ...  # "last", "session" or "json"
    def trace(self, rounds: int | None) -> None: ...  # the last answer round by round; None: all rounds
    def plot(self, which: str) -> None: ...  # "gamma" or "positions"
    def exit(self) -> None: ...


class Completion(NamedTuple):
    """`text` replaces the line from column `start` up to the cursor."""

    text: str
    start: int
    help: str


Apply = Callable[[ConsoleActions, list[str], str], None]
Complete = Callable[[ConsoleActions, str], Iterable[tuple[str, str]]]  # the argument so far → (value, help)


@dataclass(frozen=True)
class Command:
    """One command. `apply` gets the console, the words behind the name, and the same as one stripped text."""

    name: str
    usage: str
    help: str
    group: str
    apply: Apply
    aliases: tuple[str, ...] = ()
    complete: Complete | None = None
    setting: str = ""  # the setting it changes: /help shows its range and value
    many: bool = False  # takes several words: each is completed by itself
    spaces: bool = False  # takes one argument that may hold spaces, such as a path


@dataclass(frozen=True)
class Message:
    """Text for the model."""

    text: str


@dataclass(frozen=True)
class Invocation:
    """A command and its arguments: split at white space, and as typed."""

    command: Command
    args: list[str]
    rest: str


def parse(line: str) -> Message | Invocation:
    """A message, or a command when the line starts with one "/"; "//text" is the message "/text".

    UsageError for a first word that is no command: such a line is never sent by itself.
    """
    from app.command_table import COMMANDS

    text = line.strip()
    if text.startswith("//"):
        return Message(text[1:])
    if not text.startswith("/"):
        return Message(text)
    word, *tail = text.split(maxsplit=1)
    command = COMMANDS.get(word)
    if command is None:
        raise UsageError(_unknown(word, COMMANDS))
    rest = tail[0] if tail else ""
    return Invocation(command, rest.split(), rest)


def _unknown(word: str, names: Iterable[str]) -> str:
    shown = named(word)
    if word == "/":
        return "unknown command / (/help lists the commands)"
    if "/" in word[1:]:
        return f"unknown command {shown} (to send it as a message start with //)"
    hint = did_you_mean(word, names)
    return f"unknown command {shown}{hint or ' (/help lists the commands; // sends a literal slash)'}"


def dispatch(line: str, console: ConsoleActions) -> str | None:
    """Run a line: the text to send when it is a message, None when it was blank, a command or an error.

    Errors that a user can mend go to `console.fail`; nothing else is caught.
    """
    try:
        parsed = parse(line)
        if isinstance(parsed, Message):
            return parsed.text or None
        parsed.command.apply(console, parsed.args, parsed.rest)
    except UserError as error:
        console.fail(str(error))
    return None
