"""A conversation as a page: .html and .svg, with the drafts as the console shows them.

The files load nothing, and all of the texts is shown as text: it goes through app/screen/rows.py and rich's own
escaping. Knows no models.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from app.chat.conversation import Turn
from app.chat.saved import Answered
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


def drawing(width: int = WIDTH) -> Console:
    """Return a console that records its output, in full colour whatever the terminal can do."""
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
    """Return the recorded output as a picture that loads nothing."""
    return _NO_XML.sub("\ufffd", console.export_svg(title=title, code_format=_SVG, theme=SVG_EXPORT_THEME))


def html(console: Console) -> str:
    """Return the recorded output as a page that loads nothing."""
    return _NO_XML.sub("\ufffd", console.export_html(code_format=_HTML, theme=SVG_EXPORT_THEME))


def draw(console: Console, turns: Iterable[tuple[Turn, Sequence[Answered]]], settings: Settings) -> None:
    """Draw the conversation as the console shows it: each turn with its decodings, none if they were not saved."""
    look, last = look_of(console, settings), Text()
    for turn, decodings in turns:
        for answered in decodings[:1]:
            rows = heading(answered.models, answered.settings, look).rows()
            line = Text("\n").join(Text.assemble(*((part.text, part.style or "") for part in row)) for row in rows)
            if str(line) != str(last):
                console.print(line)
            last = line
        console.print(question(turn.user, look))
        console.print(Text(visible(turn.text)))
        console.print()
        for answered in decodings:
            console.print(panes(answered.tracks, console, settings))
        if not decodings:
            console.print(Text("the drafts and figures of this answer are not there", style="dim"))
        console.print()
