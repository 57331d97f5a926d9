"""A finished answer as the Markdown it may be: headings, lists, tables and code, drawn by rich.

Nothing in the text reaches the terminal but as text, and line breaks stay where the model put them. Knows no panes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from app.screen.rows import visible
from app.screen.thinking import text_parts, thoughts
from app.settings.table import Settings
from utils.catalogue.templates import Thinking

if TYPE_CHECKING:
    from markdown_it.token import Token

_PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "softbreak", "hardbreak"}


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
