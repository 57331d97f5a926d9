"""What the console's commands do: each function makes, or is, the `apply` of one command.

Knows the console only as :class:`ConsoleActions`; the table is in app/console/slash_commands.py. No torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from app.bench.options import BENCH_FIELDS
from app.prompts.datasets import NAMED
from app.settings.layers import Settings
from app.settings.table import SETTING_FIELDS, Field, setting
from app.settings.types import Kind, Switch, Whole, did_you_mean, got
from utils.errors import UsageError

SAVED = (".json", ".txt", ".md", ".html", ".svg")
LOADED = (".json",)
STATS = ("last", "session", "json")
PLOTS = ("gamma", "positions")
PROCESSORS: Mapping[str, tuple[str, ...]] = {
    "greedy": (),
    "multinomial": ("temperature",),
    "top_k": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "top_k_nucleus": ("temperature", "top_k", "top_p"),
    "min_p": ("temperature", "min_p"),
}
_NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_LETTERS = {"temperature": "T", "top_k": "K", "top_p": "P", "min_p": "P"}
# A lane that a toggle adds comes before those right of it here, so that the lane that carries the chat on stays last.
_TOGGLE_ORDER = ("ar", "draft", "ngram", "tables", "spec")
LANE_WORDS = {"spec": "speculative", "ar": "target", "draft": "draft", "ngram": "ngram", "tables": "tables"}


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


Apply = Callable[[ConsoleActions, list[str], str], None]


def _say_values(console: ConsoleActions, names: Iterable[str]) -> None:
    console.say("\n".join(f"{name} = {console.settings.show(name)}" for name in names))


def _argument(label: str, kind: Kind, text: str, still: object = ...) -> Any:
    return Field(label, kind, None, "", "").read(text, still=still)


def value_of(name: str) -> Apply:
    def apply(console: ConsoleActions, args: list[str], rest: str) -> None:
        if rest:
            console.change(**{name: rest})
        _say_values(console, [name])

    return apply


def gamma(console: ConsoleActions, args: list[str], rest: str) -> None:
    """/gamma: the value, and what `auto` knows so far."""
    value_of("gamma")(console, args, rest)
    learned = console.paces() if console.settings.gamma == "auto" else ""
    if learned:
        console.say(learned)


def toggle_of(name: str) -> Apply:
    def apply(console: ConsoleActions, args: list[str], rest: str) -> None:
        console.change(**{name: rest or not getattr(console.settings, name)})
        _say_values(console, [name])

    return apply


def lane_toggle(lane: str) -> Apply:
    def apply(console: ConsoleActions, args: list[str], rest: str) -> None:
        lanes = console.settings.compare
        present = lane in lanes
        wanted = _argument(f"/{LANE_WORDS[lane]}", Switch(), rest, present) if rest else not present
        if present and not wanted and len(lanes) == 1:
            raise UsageError(f"{lane} is the last lane and stays on (still {','.join(lanes)})")
        if wanted and not present:
            behind = _TOGGLE_ORDER[_TOGGLE_ORDER.index(lane) :]
            place = next((i for i, other in enumerate(lanes) if other in behind), len(lanes))
            console.change(compare=(*lanes[:place], lane, *lanes[place:]))
        elif present and not wanted:
            console.change(compare=tuple(other for other in lanes if other != lane))
        _say_values(console, ["compare"])

    return apply


def without_argument(act: Callable[[ConsoleActions], None], name: str) -> Apply:
    def apply(console: ConsoleActions, args: list[str], rest: str) -> None:
        if rest:
            raise UsageError(f"{name} takes no argument, got {got(rest)}")
        act(console)

    return apply


def show_settings(console: ConsoleActions) -> None:
    lines = []
    for group in dict.fromkeys(field.group for field in SETTING_FIELDS.values()):
        lines.append(f"{group}:")
        for field in (f for f in SETTING_FIELDS.values() if f.group == group):
            value, below = console.settings.show(field.name), console.defaults.show(field.name)
            lines.append(f"  {field.name} = {value}" + (f"  (default {below})" if value != below else ""))
    console.say("\n".join(lines))


def set_values(console: ConsoleActions, args: list[str], rest: str) -> None:
    """/set: all the pairs or none; names alone print their values, nothing at all prints every setting."""
    if not rest:
        return show_settings(console)
    try:
        words = shlex.split(rest)
    except ValueError:
        raise UsageError(f"/set: a quotation mark is not closed in {got(rest)} (nothing changed)") from None
    pairs = [(setting(name).name, equals, value) for name, equals, value in (word.partition("=") for word in words)]
    names = [name for name, _, _ in pairs]
    if not any(equals for _, equals, _ in pairs):
        return _say_values(console, names)
    if not all(equals for _, equals, _ in pairs):
        bare = next(name for name, equals, _ in pairs if not equals)
        raise UsageError(f"/set takes NAME=VALUE pairs, got {got(bare)} (nothing changed)")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"/set: {twice} is given twice (still {console.settings.show(twice)})")
    console.change(**{name: value for name, _, value in pairs})
    return _say_values(console, names)


def reset(console: ConsoleActions, args: list[str], rest: str) -> None:
    names = [setting(name).name for name in args]
    before = console.settings
    console.reset(*names)
    changed = [name for name in SETTING_FIELDS if getattr(before, name) != getattr(console.settings, name)]
    if names or changed:
        _say_values(console, names or changed)
    else:
        console.say("every setting already has its default")


def processor_text(settings: Settings) -> str:
    """The processor the settings amount to, as /processor takes it, or all four values when it has no name."""
    on = {name for name, off in _NEUTRAL.items() if getattr(settings, name) != off}
    show = {name: SETTING_FIELDS[name].show(getattr(settings, name)) for name in _NEUTRAL}
    if "temperature" not in on:
        return "greedy"
    for name, parts in PROCESSORS.items():
        if set(parts) == on:
            return " ".join([name, *(show[part] for part in parts)])
    return ", ".join(f"{name} {show[name]}" for name in _NEUTRAL if name in on)


def processor(console: ConsoleActions, args: list[str], rest: str) -> None:
    if args:
        name, *values = args
        if name not in PROCESSORS:
            usages = ", ".join(map(processor_usage, PROCESSORS))
            raise UsageError(f"/processor takes one of {usages}; got {got(name)}{did_you_mean(name, PROCESSORS)}")
        if len(values) != len(PROCESSORS[name]):
            still = processor_text(console.settings)
            count = f"takes {len(PROCESSORS[name])} values, got {len(values)}"
            raise UsageError(f"/processor {processor_usage(name)} {count} (still {still})")
        console.change(**{**_NEUTRAL, **dict(zip(PROCESSORS[name], values, strict=True))})
    console.say(f"processor = {processor_text(console.settings)}")


def processor_usage(name: str) -> str:
    """For example "top_k_nucleus T K P"."""
    return " ".join([name, *(_LETTERS[part] for part in PROCESSORS[name])])


def pair(console: ConsoleActions, args: list[str], rest: str) -> None:
    if rest and rest not in console.pair_names():
        hint = did_you_mean(rest, console.pair_names()) or " (/pair lists them)"
        raise UsageError(f"unknown pair {got(rest)}{hint}")
    console.load_pair(rest or None)


def drafter(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.load_drafter(_unquoted(rest) or None)


def system(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.system("" if rest == "clear" else rest or None)


def edit(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.edit(rest)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def save(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.save(_path("/save", rest, SAVED))


def load(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.load(_path("/load", rest, LOADED))


def _path(command: str, rest: str, endings: tuple[str, ...]) -> Path:
    """The file that a command names; UsageError unless it has one of these endings."""
    name, allowed = _unquoted(rest), " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
    if not name:
        raise UsageError(f"{command} needs a file name ending in {allowed}")
    if not name.isprintable():
        raise UsageError(f"{command} needs a plain file name, got {got(name)}")
    path = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is, where Path would raise
    if path.suffix.lower() not in endings:
        raise UsageError(f"{command} needs a file ending in {allowed}, got {got(name)}")
    return path


def prompts(console: ConsoleActions, args: list[str], rest: str) -> None:
    name = _unquoted(rest)
    if not name:
        raise UsageError(f"/prompts needs a .jsonl or .txt file, or one of {', '.join(NAMED)}")
    console.prompts(name)


def bench(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.bench(_argument("/bench", BENCH_FIELDS["gammas"].kind, rest) if rest else ())


def stats(console: ConsoleActions, args: list[str], rest: str) -> None:
    which = rest or "last"
    if which not in STATS:
        raise UsageError(f"/stats must be last, session or json, got {got(which)}")
    console.stats(which)


def trace(console: ConsoleActions, args: list[str], rest: str) -> None:
    console.trace(_argument("/trace", Whole(1, 1_000_000), rest) if rest else None)


def plot(console: ConsoleActions, args: list[str], rest: str) -> None:
    if rest not in PLOTS:
        raise UsageError(f"/plot must be gamma or positions, got {got(rest)}")
    console.plot(rest)
