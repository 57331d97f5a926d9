"""The commands that look at settings and change them: by name, by /set and /reset, lane by lane, as a processor.

They need no loaded pair. No torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from app.console.about import learned_gamma
from app.console.command import Command, Offer, text, words
from app.settings.table import SETTING_FIELDS, Field, Settings
from app.settings.types import Switch, did_you_mean, got
from sampling.drafters.registry import ROWS
from utils.errors import UsageError
from utils.logits_processors import PROCESSORS

if TYPE_CHECKING:
    from app.console.state import ConsoleState

_NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# A lane that a toggle adds comes before those right of it here, so that the lane that carries the chat on stays last.
_TOGGLE_ORDER = ("ar", "draft", "ngram", "tables", "spec")

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


def value(word: str, group: str, name: str = "", after: Callable[[ConsoleState], str] | None = None) -> Command:
    """The command of a setting: it turns a switch over, prints any other value, or changes it; then says `after`."""
    known = SETTING_FIELDS[name or word]
    turns = isinstance(known.kind, Switch)

    def handler(state: ConsoleState, rest: str) -> None:
        if rest or turns:
            state.change(**{known.name: rest or not getattr(state.settings, known.name)})
        say_values(state, [known.name])
        if after is not None and (more := after(state)):
            state.say(more)

    argument = known.kind.metavar if len(known.kind.metavar) <= 12 else "NAME"
    usage, offer = f"/{word} [{argument}]", values_of(known.name)
    return Command(usage, known.help, group, handler, text, offer, setting=known.name)


def gamma_learned(state: ConsoleState) -> str:
    """What `gamma auto` knows so far."""
    engine, settings = state.pairs.engine, state.settings
    return learned_gamma(engine, settings) if settings.gamma == "auto" and engine is not None else ""


def lane(name: str, word: str, group: str) -> Command:
    """The toggle of a lane."""

    def handler(state: ConsoleState, rest: str) -> None:
        lanes = state.settings.compare
        others = tuple(other for other in lanes if other != name)
        present = name in lanes
        wanted = Field(f"/{word}", Switch(), None, "", "").read(rest, still=present) if rest else not present
        if not wanted and present and not others:
            raise UsageError(f"{name} is the last lane and stays on (still {','.join(lanes)})")
        if wanted and not present:
            behind = _TOGGLE_ORDER[_TOGGLE_ORDER.index(name) :]
            place = next((i for i, other in enumerate(lanes) if other in behind), len(lanes))
            state.change(compare=(*lanes[:place], name, *lanes[place:]))
        elif present and not wanted:
            state.change(compare=others)
        say_values(state, ["compare"])

    return Command(
        f"/{word} [on|off]",
        f"lane {name}: {LANE_HELP[name]}",
        group,
        handler,
        text,
        words("on", "off"),
        more=lambda state: [f"lanes now {state.settings.show('compare')}"],
    )


# -- many settings at once --------------------------------------------------------------------


def show_settings(state: ConsoleState, _: object) -> None:
    lines, group = [], ""
    for known in SETTING_FIELDS.values():
        if known.group != group:
            group = known.group
            lines.append(f"{group}:")
        now, below = state.settings.show(known.name), state.layers.defaults.show(known.name)
        lines.append(f"  {known.name} = {now}" + (f"  (default {below})" if now != below else ""))
    state.say("\n".join(lines))


def set_values(state: ConsoleState, rest: str) -> None:
    """/set: all the pairs or none; names alone print their values, nothing at all prints every setting."""
    if not rest:
        return show_settings(state, rest)
    try:
        parts = [word.partition("=") for word in shlex.split(rest)]
    except ValueError:
        raise UsageError(f"/set: a quotation mark is not closed in {got(rest)} (nothing changed)") from None
    if not all(name for name, _, _ in parts):
        raise UsageError(f"/set takes NAME=VALUE without spaces around =, got {got(rest)} (nothing changed)")
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
    state.take(state.layers.without_set(*names))
    changed = [name for name in SETTING_FIELDS if getattr(before, name) != getattr(state.settings, name)]
    if names or changed:
        say_values(state, names or changed)
    else:
        state.say("every setting already has its default")


def processor_text(settings: Settings) -> str:
    """The processor the settings amount to, as /processor takes it, or all four values when it has no name."""
    on = {name for name, off in _NEUTRAL.items() if getattr(settings, name) != off}
    if "temperature" not in on:
        return "greedy"
    for name, known in PROCESSORS.items():
        if set(known.takes) == on:
            return " ".join([name, *map(settings.show, known.takes)])
    return ", ".join(f"{name} {settings.show(name)}" for name in _NEUTRAL if name in on)


def cache(state: ConsoleState, rest: str) -> None:
    state.say("the cache is always used: it changes no output")


def ngram_storage(state: ConsoleState, rest: str) -> None:
    """Contexts of every length (basic) or of one only (onelevel), and n: the settings of the n-gram drafter."""
    kind, *more = rest.split() or [""]
    if kind not in ("basic", "onelevel") or len(more) != 1:
        raise UsageError(f"/set_ngramstorage takes basic N or onelevel N, got {got(rest)}")
    state.change(ngram_multi_level=kind == "basic", ngram_n=more[0])
    say_values(state, ["ngram_multi_level", "ngram_n"])


_JOINED = {name.replace("_", ""): name for name in PROCESSORS}  # topk, topknucleus


def processor(state: ConsoleState, rest: str) -> None:
    if rest:
        name, *values = rest.split()
        name = _JOINED.get(name, name)
        if name == "greedy" and len(values) == 1:  # a temperature, which changes nothing
            SETTING_FIELDS["temperature"].read(values.pop(), still=state.settings.temperature)
        if name not in PROCESSORS:
            usages = ", ".join(known.usage(one) for one, known in PROCESSORS.items())
            raise UsageError(f"/processor takes one of {usages}; got {got(name)}{did_you_mean(name, PROCESSORS)}")
        parts = PROCESSORS[name].takes
        if len(values) != len(parts):
            still, count = processor_text(state.settings), f"takes {len(parts)} values, got {len(values)}"
            raise UsageError(f"/processor {PROCESSORS[name].usage(name)} {count} (still {still})")
        state.change(**{**_NEUTRAL, **dict(zip(parts, values, strict=True))})
    state.say(f"processor = {processor_text(state.settings)}")


def processor_help(state: ConsoleState) -> list[str]:
    usages = (f"  {known.usage(name)}" for name, known in PROCESSORS.items())
    return ["NAME ARGS is one of", *usages, f"now {processor_text(state.settings)}"]


# -- what Tab offers --------------------------------------------------------------------------


def values_of(name: str) -> Offer:
    """The values that the kind of a setting lists; of a comma list of lanes or drafters the next one, none twice."""

    def offer(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
        known = SETTING_FIELDS[name].kind.choices
        if name not in ("compare", "cascade"):
            return [(choice, f"now {state.settings.show(name)}") for choice in known]
        *done, _ = so_far.split(",")
        every = known if name == "compare" else dict.fromkeys((*known, *state.layers.defaults.cascade))
        return [(",".join([*done, one]), LANE_HELP.get(one, "of the pair")) for one in every if one not in done]

    return offer


def assignments(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """NAME= of every setting, then NAME=VALUE."""
    name, equals, begun = so_far.partition("=")
    if not equals or name not in SETTING_FIELDS:
        return [(f"{known.name}=", f"{known.kind.metavar}: {known.help}") for known in SETTING_FIELDS.values()]
    return [(f"{name}={choice}", note) for choice, note in values_of(name)(state, begun)]


def setting_names(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """Every setting, with its default."""
    return [(name, f"default {state.layers.defaults.show(name)}") for name in SETTING_FIELDS]


def processors(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """The named processors, with what they take."""
    return [(name, known.usage(name)) for name, known in PROCESSORS.items()]
