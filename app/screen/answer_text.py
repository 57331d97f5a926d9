"""A finished answer as it is printed: as the Markdown it may be, drawn by rich, and a model's thinking in it.

The thinking stands between the template's marks: `show` has it dim, `fold` puts a line in its place, `hide` leaves it
out. Ids and text of the answer stay as they are; nothing in the text reaches the terminal but as text, and line breaks
stay where the model put them. Knows no models and no templates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from app.screen.rows import plural, visible
from app.screen.spans import Span
from app.settings.table import Settings
from utils.catalogue.templates import Thinking

if TYPE_CHECKING:
    from markdown_it.token import Token

SHOW, FOLD, HIDE = "show", "fold", "hide"
_PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "softbreak", "hardbreak"}


class Thought(NamedTuple):
    """A stretch of a text, its marks included; `closed`: its end was written; `words` without the marks."""

    start: int
    end: int
    closed: bool
    words: int

    @property
    def line(self) -> str:
        """The line in its place."""
        count = plural(self.words, "word")
        return f"[thought, {count}: /thinking show]" if self.closed else f"[thinking, {count} so far]"


def thoughts(text: str, marks: Thinking, mode: str, before: str = "") -> list[Thought]:
    """The thinking in `text`, which follows `before` in the answer; in `hide` the line breaks after it belong to it."""
    said = (marks.open if marks.begun else "") + before
    inside, result, at = said.rfind(marks.open) > said.rfind(marks.close), list[Thought](), 0
    while inside or marks.open in text[at:]:
        start = at if inside else text.index(marks.open, at)
        close, inside = text.find(marks.close, start), False
        at = len(text) if close < 0 else close + len(marks.close)
        words = len(text[start:at].removeprefix(marks.open).removesuffix(marks.close).split())
        if mode == HIDE:
            at = len(text) - len(text[at:].lstrip("\n"))
        result.append(Thought(start, at, close >= 0, words))
    return result


def text_parts(text: str, stretches: Sequence[Thought], mode: str) -> Iterator[tuple[str, bool]]:
    """The text as `mode` shows it, in parts; each with whether it is thinking."""
    at = 0
    for thought in stretches:
        yield text[at : thought.start], False
        if mode != HIDE:
            yield text[thought.start : thought.end] if mode == SHOW else thought.line, True
        at = thought.end
    yield text[at:], False


def span_parts(spans: Sequence[Span], stretches: Sequence[Thought], mode: str) -> tuple[Span, ...]:
    """The spans of a text as `mode` shows them."""
    parts, folded = list[Span](), set[Thought]()
    for span, at in _cut(spans, [bound for thought in stretches for bound in (thought.start, thought.end)]):
        around = (each for each in stretches if each.start <= at < each.end or (at == each.end and not each.closed))
        if (thought := next(around, None)) is None:
            parts.append(span)
        elif mode == SHOW:
            parts.append(replace(span, dim=True))
        elif mode == FOLD and thought not in folded:
            folded.add(thought)
            parts.append(Span(thought.line, "plain", dim=True))
    return tuple(parts)


def _cut(spans: Sequence[Span], bounds: Sequence[int]) -> Iterator[tuple[Span, int]]:
    """The spans cut at these characters of their committed text, and where each begins in it."""
    at = 0
    for span in spans:
        length = len(span.text) if span.committed else 0
        inner = sorted({bound - at for bound in bounds if at < bound < at + length})
        for start, end in pairwise([0, *inner, len(span.text)]):
            yield replace(span, text=span.text[start:end]), at + start
        at += length


def rendered(text: str) -> RenderableType | None:
    """The text drawn as Markdown; None where it has none."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown  # slow to import, and most answers come without

    drawn = Markdown(visible(text), code_theme="ansi_dark", hyperlinks=False)
    # As rich parses it, but what looks like HTML is text, which rich would leave out.
    drawn.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(drawn.markup)
    tokens = list(_every(drawn.parsed))
    if {token.type for token in tokens} <= _PLAIN:
        return None
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
    return drawn


def answer_text(text: str, settings: Settings, *, live: bool, marks: Thinking | None = None) -> RenderableType:
    """The answer as it is printed: on a terminal drawn as Markdown if it has any, else as it is; the thinking between
    `marks` dim, in a line or left out."""
    if marks is not None and (found := thoughts(text, marks, settings.thinking)):
        parts = text_parts(text, found, settings.thinking)
        return Group(
            *(
                Text(visible(part), style="dim") if dim else answer_text(part.strip("\n"), settings, live=live)
                for part, dim in parts
                if part.strip()
            )
        )
    drawn = rendered(text) if live and settings.render and not settings.ascii else None
    return drawn or Text(visible(text))


def _every(tokens: Iterable[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from token.children or ()
