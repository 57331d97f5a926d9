"""What Tab offers: commands, and behind a command its values, from the same table as everything else.

:func:`completions` is plain data; app/console/repl.py makes a prompt_toolkit completer of it. Touches the disk only to
list the folder of a path that is being typed. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from app.console.handlers import LOADED, PROCESSORS, SAVED, ConsoleActions, processor_usage
from app.prompts.datasets import NAMED
from app.settings.table import SETTING_FIELDS
from app.settings.types import LANES, MATCHED
from utils.catalogue.specs import BEHIND

if TYPE_CHECKING:
    from app.console.handlers import Apply


_TRAINED = {
    "plain": "a small model trained for the target",
    "glide": "reads the target's keys and values",
    "feature": "reads the target's last hidden state",
}
_CASCADES = {
    "cascade": "drafters that review each other's drafts",
    "chain": "the cascade's drafters, one behind the other",
}
_BEHIND = {name: f"tables, and {kind} where they are unsure" for name, kind in BEHIND.items()}
LANE_HELP = {
    "ar": "the target alone",
    "spec": "the pair's drafter",
    "draft": "the drafter alone",
    "ngram": "drafts from n-grams",
    "tables": "matches, then n-gram tables",
    "static": "n-gram tables alone",
    "match": "matches in the conversation alone",
    "maxgram": "the longest match, then bigrams",
    **_TRAINED,
    **_BEHIND,
    **{name: f"matches, and {kind} where they are unsure" for name, kind in MATCHED.items()},
    **_CASCADES,
    "beam": "the likeliest of several texts",
}
DRAFTER_HELP = {
    "ngram": "n-gram store",
    "tables": "n-gram tables",
    "maxgram": "the longest match, then bigrams",
    **{kind: f"the pair's {kind} drafter" for kind in ("plain", "glide", "feature")},
    **_BEHIND,
    **_CASCADES,
    "none": "no drafter",
}
MEMBER_HELP = {
    "model": "the pair's drafter model",
    **{name: DRAFTER_HELP[name] for name in ("plain", "glide", "feature", "tables", "ngram", "maxgram")},
}


def choices(*values: str) -> Complete:
    """A fixed list of words."""
    return lambda console, word: [(value, "") for value in values]


def setting_values(name: str) -> Complete:
    """The values that the kind of a setting lists."""

    def complete(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
        return [(value, f"now {console.settings.show(name)}") for value in SETTING_FIELDS[name].kind.choices]

    return {"compare": lane_list, "cascade": drafter_list}.get(name, complete)


def lane_list(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """The next lane of a comma list; none twice."""
    done = word.split(",")[:-1]
    return [(",".join([*done, lane]), LANE_HELP[lane]) for lane in LANES if lane not in done]


def drafter_list(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """The next drafter of a comma list: a word, or a model that the pair's cascade names; none twice."""
    done = word.split(",")[:-1]
    names = dict.fromkeys((*SETTING_FIELDS["cascade"].kind.choices, *console.defaults.cascade))
    return [(",".join([*done, name]), MEMBER_HELP.get(name, "of the pair")) for name in names if name not in done]


def pairs(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """The pairs of the catalogue."""
    return [(name, "") for name in console.pair_names()]


def drafters(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """The drafters with a name of their own, then folders."""
    folders = [(name, note) for name, note in paths(console, word) if name.endswith("/")] if word else []
    return [*DRAFTER_HELP.items(), *folders]


def assignments(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """NAME= of every setting, then NAME=VALUE."""
    name, equals, value = word.partition("=")
    if not equals or name not in SETTING_FIELDS:
        return [(f"{f.name}=", f"{f.kind.metavar}: {f.help}") for f in SETTING_FIELDS.values()]
    return [(f"{name}={text}", note) for text, note in setting_values(name)(console, value)]


def setting_names(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """Every setting, with its default."""
    return [(f.name, f"default {console.defaults.show(f.name)}") for f in SETTING_FIELDS.values()]


def processors(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """The named processors, with what they take."""
    return [(name, processor_usage(name)) for name in PROCESSORS]


def prompt_sets(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """The data sets with a name, then folders and prompt files."""
    return [*((name, "data set") for name in NAMED), *_files(word, (".jsonl", ".txt"))]


def paths(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """Folders and savable files beginning with what is typed."""
    return _files(word, SAVED)


def _files(word: str, endings: tuple[str, ...]) -> list[tuple[str, str]]:
    """Folders and files with these endings; hidden ones only behind a dot."""
    folder, name = os.path.split(word)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except (OSError, ValueError):  # ValueError: no path at all, such as one with a null in it
        return []
    shown = [entry for entry in entries if entry.name.startswith(".") <= name.startswith(".")]
    found = [(os.path.join(folder, entry.name), entry.is_dir()) for entry in shown]
    return [(f"{path}/" if is_dir else path, "") for path, is_dir in found if is_dir or path.endswith(endings)]


def chats(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """Folders and files that can be loaded."""
    return _files(word, LOADED)


class Completion(NamedTuple):
    """`text` replaces the line from column `start` up to the cursor."""

    text: str
    start: int
    help: str


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
