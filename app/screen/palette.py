"""How the screen looks: its size, what may be drawn, and the style of each role.

A role is a word (accepted, rejected, target, faint …); no meaning needs colour: without it marks, letters or figures
carry it. A tint of "accepted", or a letter without colour, shows which source proposed an accepted token; `/trace` says
it in words. Knows no text and no layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from rich.style import Style

from sampling.events import GRAMMAR

# The roles of accepted text by the source that proposed it, in the order of the lane's source names.
TINTS = ("accepted", "accepted 2", "accepted 3", "accepted 4", "accepted 5")

FORCED = "accepted grammar"  # the role of accepted text that a grammar forced

# The roles of a token in /heat, from the target's surest tokens to its least sure ones.
HEAT = ("plain", "heat 1", "heat 2", "heat 3", "heat 4")

# The tints of a palette are distinct from each other, on black and on white, and but for the first of "default" from
# the greens of terminals; those of "cb" also for colour-blind eyes.
PALETTES: dict[str, dict[str, str]] = {
    "default": {
        "accepted": "green",
        "accepted 2": "color(37)",
        "accepted 3": "color(108)",
        "accepted 4": "color(106)",
        "accepted 5": "color(35)",
        FORCED: "color(173)",
        "rejected": "strike red",
        "differs": "red",
        "discarded": "dim italic",
        "target": "bold bright_blue",
        "bonus": "bold bright_magenta",
        "accent": "green",
        "good": "bold green",
    },
    # For colour-blind eyes: blue against orange; what the target wrote is bold, and underlined unless it is a bonus.
    "cb": {
        "accepted": "color(39)",
        "accepted 2": "color(66)",
        "accepted 3": "color(25)",
        "accepted 4": "color(99)",
        "accepted 5": "color(117)",
        FORCED: "color(136)",
        "rejected": "strike color(208)",
        "differs": "color(208)",
        "discarded": "dim italic",
        "target": "bold underline",
        "bonus": "bold",
        "accent": "color(39)",
        "good": "bold color(39)",
    },
}
_COMMON = {
    "plain": "",
    "strong": "bold",
    "faint": "dim",
    "cut": "dim strike",
    "cursor": "dim",
    "here": "bold reverse",
    "question": "bold magenta",
    "forced": "bold magenta",
    "heat 1": "color(136)",
    "heat 2": "color(172)",
    "heat 3": "underline color(166)",
    "heat 4": "bold underline color(160)",
    "bad": "bold yellow",
    "alarm": "bold reverse red",
    "alarm line": "bold red",
}

UNICODE = {
    "corners": "┌┐└┘",
    "edges": "─│",
    "ellipsis": "…",
    "cursor": "▌",
    "bar": "━",
    "rest": "─",
    "arrow": "←",
    "prompt": "›",
    "newline": "↵",
    "alpha": "α",
    "gamma": "γ",
    "times": "×",
    "levels": "▁▂▃▄▅▆▇█",
    "none": "·",
}
ASCII = {
    "corners": "++++",
    "edges": "-|",
    "ellipsis": "...",
    "cursor": "_",
    "bar": "=",
    "rest": "-",
    "arrow": "<-",
    "prompt": ">",
    "newline": "\\n",
    "alpha": "alpha",
    "gamma": "gamma",
    "times": "x",
    "levels": "",
    "none": ".",
}
_WORDS = ("alpha", "gamma", "times", "levels")  # those of ASCII are taken without colour, too


def tint(source: int, name: str = "") -> str:
    """Return the role of accepted text from the lane's source of this number and name; after the last tint they
    repeat."""
    return FORCED if name == GRAMMAR else TINTS[source % len(TINTS)]


def letters(names: Sequence[str]) -> tuple[str, ...]:
    """Return a mark for each name of a lane's sources: its first letter that is still free, else a digit. Those of up
    to ten names all differ."""
    taken: list[str] = []
    for number, name in enumerate(names):
        free = (letter for letter in name.lower() if letter.isascii() and letter.isalpha() and letter not in taken)
        taken.append(next(free, str(number % 10)))
    return tuple(taken)


@cache
def _style(palette: str, role: str) -> Style:
    table = {**_COMMON, **PALETTES.get(palette, PALETTES["default"])}
    bare = role.removeprefix("dim ")
    return Style.parse(table[bare]) + Style(dim=True) if bare != role else Style.parse(table[role])


@dataclass(frozen=True, slots=True)
class Look:
    """The screen: `width` columns, `height` rows (None: as many as it takes) and what may be drawn on it.

    Without `color` no style at all is used, marks and words carry the meaning; with `ascii` everything
    that is not the model's or the user's text is ASCII. `palette` is a key of PALETTES.
    """

    width: int = 80
    height: int | None = None
    color: bool = True
    ascii: bool = False
    palette: str = "default"

    @property
    def fancy(self) -> bool:
        """Whether figures are drawn with bars and Greek letters rather than in plain words."""
        return self.color and not self.ascii

    def style(self, role: str) -> Style | None:
        """Return the style of a role; None without colour."""
        return _style(self.palette, role) if self.color else None

    def glyph(self, name: str) -> str:
        """Return the characters drawn for `name`. Without colour Greek letters are words and level bars are missing."""
        return (ASCII if self.ascii or (name in _WORDS and not self.color) else UNICODE)[name]

    def sized(self, *, width: int | None = None, height: int | None = None) -> "Look":
        """Return the same look with another width (None: the same one) and height (None: unlimited)."""
        return replace(self, width=self.width if width is None else width, height=height)
