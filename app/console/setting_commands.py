"""A slash command as a row of the table, and the commands that show and change settings: one for a setting, /set and
/reset.

The functions before :class:`Command` read and complete the argument of a command. None of the commands here needs a
loaded pair. Importing this imports no torch.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from app.console.state import ConsoleState
from app.lanes.pairing import has_parts
from app.settings.table import SETTING_FIELDS, Field, Settings
from app.settings.types import SWITCH, SettingKind, enumerated, got
from sampling.drafters.registry import ROWS
from utils.errors import UsageError, raise_first

Read = Callable[[str, str], Any]  # the command's name and the text after it → the argument; may raise UsageError
ValueOffers = Callable[[ConsoleState, str], Iterable[tuple[str, str]]]  # the argument so far → (value, help)


def nothing(name: str, rest: str) -> None:
    """Read no argument: UsageError if there is one."""
    if rest:
        raise UsageError(f"{name} takes no argument, got {got(rest)}")


def text(name: str, rest: str) -> str:
    """Return the argument as it was typed."""
    return rest


def unquoted(name: str, rest: str) -> str:
    """Return the argument without quotation marks around it."""
    return rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "\"'" else rest


def one(kind: SettingKind, default: Any = ...) -> Read:
    """Return the reader of a value of this kind; no argument reads as `default`, if there is one."""

    def read(name: str, rest: str) -> Any:
        return default if default is not ... and not rest else Field(name, kind).read(rest)

    return read


def file(endings: tuple[str, ...]) -> Read:
    """Return the reader of a file name with one of these endings."""

    def read(command: str, rest: str) -> Path:
        name, allowed = unquoted(command, rest), enumerated(endings)
        path = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is, where Path would raise
        raise_first(
            {
                f"{command} needs a file name ending in {allowed}": not name,
                f"{command} needs a plain file name, got {got(name)}": not name.isprintable(),
                f"{command} needs a file ending in {allowed}, got {got(name)}": path.suffix.lower() not in endings,
            }
        )
        return path

    return read


def words(*values: str) -> ValueOffers:
    """Return a completion by a fixed list of words."""
    return lambda state, so_far: [(value, "") for value in values]


def files(endings: tuple[str, ...]) -> ValueOffers:
    """Return a completion by folders and files with these endings; hidden ones only after a dot."""

    def offer(state: ConsoleState, so_far: str) -> list[tuple[str, str]]:
        folder, name = os.path.split(so_far)
        try:
            entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
        except (OSError, ValueError):  # ValueError: the text is no path, since it has a NUL
            return []
        shown = [entry for entry in entries if entry.name.startswith(".") <= name.startswith(".")]
        paths = [(os.path.join(folder, entry.name), entry.is_dir()) for entry in shown]
        return [(f"{path}/" if is_dir else path, "") for path, is_dir in paths if is_dir or path.endswith(endings)]

    return offer


@dataclass(frozen=True)
class Command:
    """One command. `handler` gets the console's state and the argument as `reads` has read it.

    It may raise UserError, which is shown; settings and conversation are then unchanged.
    """

    usage: str  # the name, and the arguments that it may have
    help: str
    group: str
    handler: Callable[[ConsoleState, Any], None]
    reads: Read = nothing
    complete: ValueOffers | None = None
    aliases: tuple[str, ...] = ()
    setting: str = ""  # the setting it changes: /help shows its range and value
    many: bool = False  # takes several words: each is completed by itself
    spaces: bool = False  # takes one argument that may hold spaces, such as a path

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


LANE_HELP = {
    **{word: row.help for word, row in ROWS.items()},
    "ar": "the target alone",
    "spec": "the pair's drafter",
    "draft": "the drafter alone",
    "beam": "the likeliest of several texts",
}


def say_values(state: ConsoleState, names: Iterable[str]) -> None:
    state.say("\n".join(f"{name} = {state.settings.show(name)}" for name in names))


# -- one setting, one command -----------------------------------------------------------------


def value(
    word: str, group: str, name: str = "", after: Callable[[ConsoleState], RenderableType] | None = None
) -> Command:
    """Return the command of a setting: without an argument it toggles a switch or prints the value, with one it sets
    the value; then it prints what `after` returns."""
    known = SETTING_FIELDS[name or word]

    def handler(state: ConsoleState, rest: str) -> None:
        if rest or known.kind is SWITCH:
            state.change(**{known.name: rest or not getattr(state.settings, known.name)})
        say_values(state, [known.name])
        if after is not None and (more := after(state)):
            state.say(more)

    usage = f"/{word} [{known.kind.metavar if len(known.kind.metavar) <= 12 else 'NAME'}]"
    return Command(usage, known.help, group, handler, text, values_of(known.name), setting=known.name)


# -- many settings at once --------------------------------------------------------------------


def show_settings(state: ConsoleState, _: object) -> None:
    lines, group = [], ""
    for known in SETTING_FIELDS.values():
        if known.group != group:
            group = known.group
            lines.append(f"{group}:")
        now, below = state.settings.show(known.name), state.layers.defaults.show(known.name)
        lines.append(f"  {known.name} = {now}" + (f"  (default {below})" if now != below else ""))
    state.page("\n".join(lines))


def set_values(state: ConsoleState, rest: str) -> None:
    """Run /set: all assignments or none, or one NAME VALUE; names alone print their values, nothing prints all."""
    if not rest:
        return show_settings(state, rest)
    try:
        # A list keeps its quotation marks; brackets inside other quotation marks begin no list.
        lists = r"""(?<==)\[[^]]*]|"[^"]*"|'[^']*'"""
        whole = re.sub(lists, lambda found: shlex.quote(found[0]) if found[0][0] == "[" else found[0], rest)
        parts = [word.partition("=") for word in shlex.split(whole)]
    except ValueError:
        raise UsageError(f"/set: a quotation mark is not closed in {got(rest)} (nothing changed)") from None
    if not all(name for name, _, _ in parts):
        raise UsageError(f"/set takes NAME=VALUE without spaces around =, got {got(rest)} (nothing changed)")
    if "=" not in rest and parts[0][0] in SETTING_FIELDS and len(parts) > 1 and parts[1][0] not in SETTING_FIELDS:
        (name, _, _), (given, _, _), *more = parts
        if more:
            raise UsageError(f"/set takes NAME=VALUE pairs, got {got(rest)} (did you mean {name}={given}?)")
        parts = [(name, "=", given)]
    names = [Settings.field(name).name for name, _, _ in parts]
    bare = [name for name, (_, equals, _) in zip(names, parts, strict=True) if not equals]
    if len(bare) == len(names):
        return say_values(state, names)
    if bare:
        raise UsageError(f"/set takes NAME=VALUE pairs, got {got(bare[0])} (nothing changed)")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"/set: {twice} is given twice (still {state.settings.show(twice)})")
    state.change(**dict(zip(names, (value for _, _, value in parts), strict=True)))
    return say_values(state, names)


def reset(state: ConsoleState, rest: str) -> None:
    names, before = [Settings.field(name).name for name in rest.split()], state.settings
    state.take(state.layers.without_console_changes(*names))
    changed = [name for name in SETTING_FIELDS if getattr(before, name) != getattr(state.settings, name)]
    if names or changed:
        say_values(state, names or changed)
    else:
        state.say("every setting already has its default")


# -- what Tab offers --------------------------------------------------------------------------


def values_of(name: str) -> ValueOffers:
    """Return a completion by the values of a setting; in a comma list of lanes or drafters by those that are not in it
    yet and that the loaded pair can run.
    """

    def offer(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
        known = SETTING_FIELDS[name].kind.choices
        if name not in ("compare", "cascade"):
            off = () if SETTING_FIELDS[name].off is None else ("off",)
            return [(choice, f"now {state.settings.show(name)}") for choice in (*known, *off)]
        *done, _ = so_far.split(",")
        every = known if name == "compare" else dict.fromkeys((*known, *state.layers.defaults.cascade))
        lanes = [lane for lane in every if lane not in done and can_run(state, lane)]
        return [(",".join([*done, lane]), LANE_HELP.get(lane, "of the pair")) for lane in lanes]

    return offer


def can_run(state: ConsoleState, word: str) -> bool:
    """Return whether the loaded pair has the parts that this lane or drafter needs; True if none is loaded."""
    engine = state.pairs.engine
    row = "model" if word == "draft" else word
    return engine is None or row not in ROWS or has_parts(engine.loaded.spec, row, state.settings.cascade)


def assignments(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """Complete an assignment: NAME= by every setting, then NAME=VALUE."""
    name, equals, begun = so_far.partition("=")
    if not equals or name not in SETTING_FIELDS:
        return [(f"{known.name}=", f"{known.kind.metavar}: {known.help}") for known in SETTING_FIELDS.values()]
    return [(f"{name}={choice}", note) for choice, note in values_of(name)(state, begun)]


def setting_names(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """Complete the name of a setting, shown with its default."""
    return [(name, f"default {state.layers.defaults.show(name)}") for name in SETTING_FIELDS]
