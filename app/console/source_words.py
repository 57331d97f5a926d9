"""Console commands of romsto's Speculative-Decoding (docs/sources/romsto.md). They work, but no list of commands has
them."""

from app.console.setting_commands import Command, say_values, text, value
from app.console.state import ConsoleState
from app.settings.table import SETTING_FIELDS, Field, Settings
from app.settings.types import SWITCH, got
from utils.errors import UsageError, did_you_mean
from utils.logits_processors import ARGUMENTS, PROCESSORS

_NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_JOINED = {name.replace("_", ""): name for name in PROCESSORS}  # topk, topknucleus
# A lane that is switched on is inserted before the first lane that is to its right here, else at the end. The chat
# continues from the last lane.
_TOGGLE_ORDER = ("ar", "ngram", "spec")
_GROUP = "romsto's words"


def _toggle(word: str, lane: str) -> Command:
    def handler(state: ConsoleState, rest: str) -> None:
        lanes = state.settings.compare
        others, present = tuple(other for other in lanes if other != lane), lane in lanes
        wanted = Field(f"/{word}", SWITCH).read(rest, current=present) if rest else not present
        if not wanted and not others:
            raise UsageError(f"{lane} is the last lane and stays on (still {','.join(lanes)})")
        if wanted and not present:
            later = _TOGGLE_ORDER[_TOGGLE_ORDER.index(lane) :]
            index = next((i for i, other in enumerate(lanes) if other in later), len(lanes))
            state.change(compare=(*lanes[:index], lane, *lanes[index:]))
        elif present and not wanted:
            state.change(compare=others)
        say_values(state, ["compare"])

    return Command(f"/{word} [on|off]", f"the lane {lane}, as /compare has it", _GROUP, handler, text)


def _processor_text(settings: Settings) -> str:
    """Return the processor that the settings make, as /processor takes it; the values that are not neutral if it has no
    name."""
    on = {name for name, off in _NEUTRAL.items() if getattr(settings, name) != off}
    if "temperature" not in on:
        return "greedy"
    for name, known in PROCESSORS.items():
        if set(known) == on:
            return " ".join([name, *map(settings.show, known)])
    return ", ".join(f"{name} {settings.show(name)}" for name in _NEUTRAL if name in on)


def _usage(name: str) -> str:
    """Return the usage of a named processor, for example "top_k_nucleus T K P"."""
    return " ".join([name, *(ARGUMENTS[part].letter for part in PROCESSORS[name])])


def _processor(state: ConsoleState, rest: str) -> None:
    if rest:
        name, *values = rest.split()
        name = _JOINED.get(name, name)
        if name == "greedy" and len(values) == 1:  # a temperature, which changes nothing
            SETTING_FIELDS["temperature"].read(values.pop(), current=state.settings.temperature)
        if name not in PROCESSORS:
            usages = ", ".join(map(_usage, PROCESSORS))
            raise UsageError(f"/processor takes one of {usages}; got {got(name)}{did_you_mean(name, PROCESSORS)}")
        parts = PROCESSORS[name]
        if len(values) != len(parts):
            current, count = _processor_text(state.settings), f"takes {len(parts)} values, got {len(values)}"
            raise UsageError(f"/processor {_usage(name)} {count} (still {current})")
        state.change(**{**_NEUTRAL, **dict(zip(parts, values, strict=True))})
    state.say(f"processor = {_processor_text(state.settings)}")


def _ngram_storage(state: ConsoleState, rest: str) -> None:
    """Set the n-gram drafter's n, and whether it looks up contexts of every length (basic) or of one (onelevel)."""
    kind, *more = rest.split() or [""]
    if kind not in ("basic", "onelevel") or len(more) != 1:
        raise UsageError(f"/set_ngramstorage takes basic N or onelevel N, got {got(rest)}")
    state.change(ngram_multi_level=kind == "basic", ngram_n=more[0])
    say_values(state, ["ngram_multi_level", "ngram_n"])


def _cache(state: ConsoleState, rest: str) -> None:
    state.say("the cache is always used: it changes no output")


SOURCE_WORDS = {
    command.name: command
    for command in (
        _toggle("speculative", "spec"),
        _toggle("target", "ar"),
        _toggle("ngram", "ngram"),
        value("chat", _GROUP),
        value("debug", _GROUP),
        value("top_k_filler", _GROUP, name="ngram_filler"),
        value("reset_in_between", _GROUP, name="ngram_reset"),
        Command("/set_ngramstorage basic|onelevel N", "n-grams", _GROUP, _ngram_storage, text),
        Command("/processor [NAME NUMBERS]", f"sampling: {', '.join(PROCESSORS)}", _GROUP, _processor, text),
        Command("/cache", "the cache", _GROUP, _cache, text),
    )
}
