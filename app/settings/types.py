"""Types of setting: how a value is read from text, its allowed values, how it is shown and completed.

A :class:`SettingKind` is a pydantic type with words for errors. It turns a user's text (or a value of a configuration
file) into a plain Python value, or raises :class:`RefusedError` with the words that follow "must be"; the error line
also shows the refused value. Facts of a loaded pair (which models it has, whether rows of a K matrix and drafters
agree) are checked elsewhere. Knows no flags, no torch.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field as Limits,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from sampling.drafters import registry
from utils.catalogue.specs import Matrix, check_shape, unknown_member
from utils.errors import UsageError, UserError, did_you_mean
from utils.remote.server import BAN, is_server
from utils.visible import visible

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
SHOWN = 40  # characters to which a refused value, or the list of a setting's words, is limited

# The names that --compare takes besides server, URLs and oracle:…: ways to answer, plain decoding (ar) included.
LANES = ("ar", "spec", "draft", *registry.LANES, "beam", registry.LOSSY)
# The lanes that draft, of which --methods of simulate tries several; spec is the pair's own drafter.
METHODS = ("spec", *(lane for lane in registry.LANES if lane != "oracle"))
SEED_LIMIT = 2**63 - 1

NONE = "(none)"
# K matrices of Cascade Speculative Drafting's published runs, offered on Tab:
PUBLISHED = ("[[5,10],[0,10]]", "[[13,10],[0,10]]", "[[5,14,10],[0,1,10],[0,0,10]]")
_SWITCH = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def got(value: object) -> str:
    """Return the refused value for an error line: numbers bare, text quoted, long ones cut, always one line."""
    return _cut(value if isinstance(value, str) and NUMBER.fullmatch(value) else repr(value))


def named(word: str) -> str:
    """Return a refused name for an error line: as typed, but cut when long and always one printable line."""
    return _cut(" ".join(visible(word).split()))


def plain(value: float | str) -> str:
    """Return a number without a needless ".0": 1.0 → 1, 0.9 → 0.9; a word as it is."""
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def enumerated(words: Iterable[str], joint: str = "or") -> str:
    """Return "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} {joint} {last}" if first else last


class RefusedError(ValueError):
    """A value that a :class:`SettingKind` does not take; the text names the allowed values."""


@dataclass(frozen=True)
class SettingKind:
    """A pydantic type, the words that follow "must be", and how its values are named, completed and shown.

    `outside`: the words for a number out of range. If a validator of the type raises RefusedError, its words are used.
    """

    type: Any
    allowed: str
    metavar: str  # short: N, X, on|off, a|b
    choices: tuple[str, ...] = ()  # values to offer on Tab
    show: Callable[[Any], str] = str
    outside: str = ""

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type)

    def read(self, value: object) -> Any:
        """Return the checked value of a text or a Python value; RefusedError if the kind does not take it."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as refused:
            first = refused.errors(include_url=False, include_input=False)[0]
        why = first.get("ctx", {}).get("error")
        if isinstance(why, RefusedError):
            raise why
        raise RefusedError((first["type"].startswith(("greater", "less")) and self.outside) or self.allowed)


def _digits(value: Any) -> Any:
    """Return text of a whole number as that number; anything else unchanged."""
    return int(value) if isinstance(value, str) and len(value) <= SHOWN and _WHOLE.fullmatch(value) else value


class Whole(SettingKind):
    """A whole number from `low` to `high` (no upper end when None), or the one `word` that stands for a number."""

    def __init__(self, low: int, high: int | None = None, word: str = "") -> None:
        # Counts may become tensors, so they must fit into 64 bits.
        most = SEED_LIMIT if high is None else high
        number: Any = Annotated[int, Strict(), Limits(ge=low, le=most), BeforeValidator(_digits)]
        words = f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}"
        if word:
            super().__init__(Literal[word] | number, f"{words} or {word}", f"N|{word}", (word,))
        else:
            super().__init__(number, words, "N")


# A seed for the noise; `random` draws one now, so that the run can be repeated.
SEED = SettingKind(
    Annotated[Whole(0).type, BeforeValidator(lambda value: secrets.randbelow(2**31) if value == "random" else value)],
    f"a whole number from 0 to {SEED_LIMIT} or random",
    "N|random",
    ("random",),
)


def _decimal(value: Any) -> Any:
    """Return text of a number as that number, infinity for one that is too large for a float; ValueError for nan."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        return float(value)
    if value != value:
        raise ValueError
    return math.inf if isinstance(value, int) and abs(value) > 1e300 else value


class Number(SettingKind):
    """A finite number between `low` and `high`, without an end that `without_low` or `without_high` excludes. A value
    nearer to 0 than `least` counts as 0. `word` stands for a value that is no number."""

    def __init__(
        self,
        low: float,
        high: float,
        word: str = "",
        *,
        without_low: bool = False,
        without_high: bool = False,
        least: float = 0.0,
    ) -> None:
        limits: dict[str, Any] = {"gt" if without_low else "ge": low, "lt" if without_high else "le": high}
        rounded = AfterValidator(lambda value: 0.0 if abs(value) < least else value + 0.0)  # -0.0 becomes 0.0
        outside = f"from {plain(low)} to {plain(high)}"
        if without_low or without_high:
            begin = f"above {plain(low)}" if without_low else f"at least {plain(low)}"
            outside = f"{begin} and {'below' if without_high else 'at most'} {plain(high)}"
        allowed = f"a number{',' if outside.startswith('at') else ''} {outside}"
        kind: Any = Annotated[float, Strict(), Limits(**limits), rounded, BeforeValidator(_decimal)]
        if word:
            super().__init__(Literal[word] | kind, f"{allowed} or {word}", f"X|{word}", (word,), plain)
        else:
            super().__init__(kind, allowed, "X", show=plain, outside=outside)


class Choice(SettingKind):
    """One of a few words. `suggests`: an error names the nearest one."""

    def __init__(self, choices: tuple[str, ...], suggests: bool = False) -> None:
        words, every = enumerated(choices), "|".join(choices)

        def known(value: str) -> str:
            if value not in choices:
                raise RefusedError(words + (did_you_mean(value, choices) if suggests else ""))
            return value

        kind = Annotated[str, Strict(), AfterValidator(known)]
        super().__init__(kind, words, every if len(every) <= SHOWN else "NAME", choices)


# On or off; also yes/no, true/false, 1/0.
SWITCH = SettingKind(
    Annotated[
        bool,
        Strict(),
        BeforeValidator(lambda value: _SWITCH.get(value.lower()) if isinstance(value, str) else value),
    ],
    "on or off",
    "on|off",
    ("on", "off"),
    lambda value: "on" if value else "off",
)


class Text(SettingKind):
    """Any text; with `optional` an absent value is None and empty text is refused; `pattern` narrows it."""

    def __init__(
        self,
        metavar: str = "TEXT",
        allowed: str = "text",
        choices: tuple[str, ...] = (),
        *,
        optional: bool = False,
        pattern: str = "",
    ) -> None:
        pattern = pattern or (r"(?s:.*\S.*)" if optional else r"(?s:.*)")
        kind = Annotated[str, StringConstraints(strict=True, pattern=f"^(?:{pattern})$")]
        super().__init__(kind | None if optional else kind, allowed, metavar, choices, lambda value: str(value or NONE))


def _parts(value: Any) -> Any:
    """Return the parts of a comma list; of a sequence its members."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    return [part.strip() if isinstance(part, str) else part for part in parts]


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError
    return values


def _joined(values: Iterable[str | float]) -> str:
    return ",".join(map(plain, values))


class _List(SettingKind):
    """A comma list (or a sequence) of one or more things of type `each`, in the order given."""

    def __init__(
        self,
        each: Any,
        allowed: str,
        choices: tuple[str, ...] = (),
        *,
        once: bool = True,
    ) -> None:
        kind: Any = Annotated[tuple[each, ...], BeforeValidator(_parts), Limits(min_length=1)]
        if once:
            kind, allowed = Annotated[kind, AfterValidator(_once)], f"{allowed}, each once"
        super().__init__(kind, f"a comma list of {allowed}", "LIST", choices, _joined)


# A comma list of different lanes that draft.
METHOD_NAMES = _List(Literal[METHODS], ", ".join(METHODS), METHODS)


def _lane(name: str) -> str:
    """Return the name of a lane, with any acceptance and cost of an oracle in their usual form; a server's is its
    URL."""
    if name in LANES or is_server(name):
        return name
    if not name.startswith("oracle:"):
        raise ValueError
    try:
        return str(registry.oracle_of(name))
    except UsageError:
        raise RefusedError(f"a comma list of lanes, of which an oracle is {registry.ORACLE}") from None


# A comma list of different lanes.
LANE_NAMES = _List(Annotated[str, Strict(), AfterValidator(_lane)], f"{', '.join(LANES)}, server, URL", LANES)


class WholeList(_List):
    """A comma list of different whole numbers from `low` to `high`; `word` may be among them."""

    def __init__(self, low: int, high: int, word: str = "") -> None:
        each = Whole(low, high, word)
        super().__init__(each.type, each.allowed.replace("a whole number", "whole numbers"))


class NumberList(_List):
    """A comma list of numbers between `low` and `high`, which may repeat."""

    def __init__(self, low: float, high: float, *, without_low: bool = False) -> None:
        each = Number(low, high, without_low=without_low)
        super().__init__(each.type, f"numbers {each.outside}", once=False)


_DRAFTERS = f"a comma list of {', '.join(registry.MEMBERS)} or names of the pair's models, each once, large to small"


def _drafters(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(name and name.isprintable() and "," not in name for name in names):
        raise ValueError
    if (meant := next(filter(None, (unknown_member(name, registry.MEMBERS) for name in names)), None)) is not None:
        raise RefusedError(f"{_DRAFTERS} (did you mean {meant}?)")
    return _once(names)


# A comma list (or a sequence) of drafters: words, or names of models that the pair brings. Empty: the pair's.
DRAFTER_NAMES = SettingKind(
    Annotated[
        tuple[str, ...],
        AfterValidator(_drafters),
        BeforeValidator(lambda value: () if value in ("", NONE, (), []) else _parts(value) or None),
    ],
    _DRAFTERS,
    "LIST",
    registry.MEMBERS,
    lambda names: ",".join(names) or NONE,
)


def unescaped(text: str) -> str:
    """Return the text with its escapes (\\n, \\t, a backslash before a quote or a backslash) read."""
    return re.sub(r"\\([nt\\'\"])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), text)


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a JSON list or of a sequence, each once; any other text is a single one, its escapes read by
    :func:`unescaped`."""
    if value in ("", NONE):
        return ()
    if isinstance(value, str):
        with suppress(ValueError):
            listed = json.loads(value)
            value = listed if isinstance(listed, list) and all(isinstance(text, str) for text in listed) else value
    if isinstance(value, str):
        return (unescaped(value),)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError
    return tuple(dict.fromkeys(value))


# Texts, each once. In a single one \n is a line break. Empty: none.
TEXTS = SettingKind(
    Annotated[Any, AfterValidator(_texts)],
    'a text, or several as a JSON list: ["a","b"]',
    "TEXT",
    (),
    lambda texts: json.dumps(list(texts), ensure_ascii=False) if texts else NONE,
)


_BIASED = r"""\s*([0-9]+|'(?:[^'\\]|\\.)+'|"(?:[^"\\]|\\.)+")\s*=\s*([^\s,]+)\s*(?:,|$)"""
_AMOUNT = Number(BAN, 100)


def _biases(value: Any) -> tuple[tuple[int | str, float], ...]:
    """Return (id or text of tokens, bias) pairs from a setting's text, a mapping, or pairs."""
    if isinstance(value, str):
        if value in ("", NONE):
            return ()
        if value.lstrip().startswith("{"):
            return _biases(json.loads(value))
        if not re.fullmatch(f"(?:{_BIASED})+", value):
            raise ValueError
        pairs = re.findall(_BIASED, value)
        value = [(int(word) if word.isdigit() else unescaped(word[1:-1]), amount) for word, amount in pairs]
    elif isinstance(value, dict):
        value = [(int(key) if str(key).isdecimal() else key, amount) for key, amount in value.items()]
    with suppress(TypeError):
        if all((isinstance(key, str) and key) or (type(key) is int and 0 <= key < SEED_LIMIT) for key, _ in value):
            return tuple({key: _AMOUNT.read(amount) for key, amount in value}.items())
    raise ValueError


def _bias_text(bias: tuple[tuple[int | str, float], ...]) -> str:
    marks = str.maketrans({"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"})
    shown = ((f"'{key.translate(marks)}'" if isinstance(key, str) else key, amount) for key, amount in bias)
    return ",".join(f"{key}={plain(amount)}" for key, amount in shown) or NONE


# Biases by token. Empty: none.
BIAS = SettingKind(
    Annotated[Any, AfterValidator(_biases)],
    "ids or texts in quotes with numbers from -100 to 100: 12=-100,' the'=1.5",
    "BIASES",
    (),
    _bias_text,
)


def _matrix(value: Any) -> Matrix:
    """Return a K matrix from JSON text or rows of numbers; see utils/catalogue/specs.py."""
    if value in ("", NONE, (), []):
        return ()
    try:
        return check_shape(json.loads(value) if isinstance(value, str) else value)
    except RecursionError:
        raise ValueError from None
    except UserError as error:
        why = str(error).partition(", got ")[0]  # `Field.read` adds the value
        raise RefusedError(re.sub(r"^k_matrix must (be|hold) ", "", why)) from None


# A K matrix as JSON text or as rows of numbers. Empty: the pair's.
K_MATRIX = SettingKind(
    Annotated[Any, AfterValidator(_matrix)],
    "rows of whole numbers like [[5,10],[0,10]], upper triangular",
    "ROWS",
    PUBLISHED,
    lambda value: json.dumps(value, separators=(",", ":")) if value else NONE,
)
