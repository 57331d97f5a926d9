"""A conversation as a page to look at: .html, .svg and .md, with the drafts as the console shows them.

The files load nothing from anywhere, and whatever the texts hold is text: it goes through app/screen/rows.py and
rich's own escaping, or, in Markdown, into fences that it cannot close. Knows no models.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from app.chat.answered import Answered
from app.chat.conversation import Turn
from app.screen.live import look_of, panes
from app.screen.rows import visible
from app.screen.view import heading, question
from app.settings.table import Settings

WIDTH = 100
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FONTS = "'Fira Code',Menlo,'DejaVu Sans Mono',Consolas,monospace"

_HTML = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Conversation</title>
<style>
{{stylesheet}}
body {{{{ color: {{foreground}}; background-color: {{background}}; }}}}
pre {{{{ font-family: {_FONTS}; line-height: 1.25; }}}}
code span {{{{ unicode-bidi: isolate; }}}}
</style>
</head>
<body>
<pre><code style="font-family:inherit">{{code}}</code></pre>
</body>
</html>
"""
_SVG = f"""\
<svg class="rich-terminal" viewBox="0 0 {{width}} {{height}}" xmlns="http://www.w3.org/2000/svg">
<style>
.{{unique_id}}-matrix {{{{
    font-family: {_FONTS}; font-size: {{char_height}}px; line-height: {{line_height}}px;
    font-variant-east-asian: full-width;
}}}}
.{{unique_id}}-title {{{{ font-size: 18px; font-weight: bold; font-family: arial; }}}}
{{styles}}
</style>
<defs>
<clipPath id="{{unique_id}}-clip-terminal">
<rect x="0" y="0" width="{{terminal_width}}" height="{{terminal_height}}" />
</clipPath>
{{lines}}
</defs>
{{chrome}}
<g transform="translate({{terminal_x}}, {{terminal_y}})" clip-path="url(#{{unique_id}}-clip-terminal)">
{{backgrounds}}
<g class="{{unique_id}}-matrix">
{{matrix}}
</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Shown:
    """A turn to be shown; `answered` is empty where its figures are not there."""

    turn: Turn
    answered: Sequence[Answered] = ()


def drawing(width: int = WIDTH) -> Console:
    """A screen that remembers what was drawn on it, in full colour whatever the terminal can do."""
    return Console(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def svg(console: Console, title: str = "python infer.py") -> str:
    """What was drawn, as a picture that is complete in itself."""
    return _NO_XML.sub("\ufffd", console.export_svg(title=title, code_format=_SVG, theme=SVG_EXPORT_THEME))


def html(console: Console) -> str:
    """What was drawn, as a page that is complete in itself."""
    return _NO_XML.sub("\ufffd", console.export_html(code_format=_HTML, theme=SVG_EXPORT_THEME))


def draw(console: Console, turns: Iterable[Shown], settings: Settings) -> None:
    """The conversation as the console shows it."""
    told = Text()
    for shown in turns:
        for line in _headings(shown, console, settings):
            if str(line) != str(told):
                console.print(line)
            told = line
        console.print(question(shown.turn.user, look_of(console, settings)))
        console.print(Text(visible(shown.turn.text)))
        console.print()
        for part in _parts(shown, console, settings):
            console.print(part)
        console.print()


def _headings(shown: Shown, console: Console, settings: Settings) -> list[Text]:
    look = look_of(console, settings)
    rows = [heading(one.models, one.settings, look).rows() for one in shown.answered[:1]]
    return [
        Text("\n").join(Text.assemble(*((part.text, part.style or "") for part in row)) for row in lines)
        for lines in rows
    ]


def _parts(shown: Shown, console: Console, settings: Settings) -> list[RenderableType]:
    kept = settings.changed(drafts="all")  # a page keeps what the screen may leave out
    drawn: list[RenderableType] = [panes(answered.tracks, console, kept) for answered in shown.answered]
    return drawn or [Text("the drafts and figures of this answer are not there", style="dim")]


def markdown(turns: Sequence[Shown], settings: Settings, system: str) -> str:
    """The conversation as Markdown; every text, drafts and figures included, stands in a fence of its own."""
    parts = ["# Conversation", *(["## System prompt", fenced(system)] if system else [])]
    for number, shown in enumerate(turns, start=1):
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, no_color=True, markup=False, emoji=False)
        for part in [*_headings(shown, console, settings), *_parts(shown, console, settings)]:
            console.print(part)
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        parts += [f"## {number}. Message", fenced(shown.turn.user), "### Answer", fenced(shown.turn.text)]
        parts += ["### Drafts and figures", fenced(drawn)]
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    """`text` as a block that it cannot leave: the fence is longer than any run of backticks in it."""
    shown = visible(text).rstrip("\n")
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"
