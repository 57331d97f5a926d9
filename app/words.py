"""Words of an error line: a refused value or name as it is shown, and the one nearly given. Knows no kinds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
SHOWN = 40


def got(value: object) -> str:
    """The refused value for an error line: numbers bare, text quoted, long ones cut, always one line."""
    text = value if isinstance(value, str) and NUMBER.fullmatch(value) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def named(word: str) -> str:
    """A refused name for an error line: as typed, but cut when long and always one printable line."""
    text = word if word.isprintable() else repr(word)[1:-1]
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name most like `word`, or None when nothing is near; slashes and dashes in front do not count."""
    bare = {name.lstrip("/-"): name for name in sorted(set(names))}
    wanted = word.lstrip("/-").casefold()
    begun = [name for name in bare if len(wanted) > 1 and name.startswith(wanted)]
    close = difflib.get_close_matches(wanted, list(bare), 1, 0.6)
    return next((bare[name] for name in (wanted, *begun, *close) if name in bare), None)


def did_you_mean(word: str, names: Iterable[str], prefix: str = "") -> str:
    """ " (did you mean NAME?)" with a leading space, or nothing."""
    name = nearest(word, names)
    return f" (did you mean {prefix}{name}?)" if name else ""


def plain(value: float) -> str:
    """A number without a needless ".0": 1.0 → 1, 0.9 → 0.9."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
