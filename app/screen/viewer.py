"""Something to look into with keys: rows that are drawn again after each of them, in place, until a key ends it.

What is drawn and what the keys do is the content's; the viewer knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any, Protocol

from rich.console import Console

from app.screen.palette import Look
from app.screen.rows import Drawn, Lines, Row, chunk, flow

Action = Callable[[], Any]  # None: go on; anything else ends the viewer, which gives it back


class Content(Protocol):
    """`keys`: prompt_toolkit's name of a key → what it does. `help`: the keys in words, shown below the rows."""

    help: str

    @property
    def keys(self) -> Mapping[str, Action]: ...
    def rows(self, look: Look) -> list[Row]: ...  # at most look.height


class Scroll:
    """The part of rows that fits a height, moved by keys."""

    def __init__(self) -> None:
        self.top = 0
        self._page = 1

    def part(self, rows: list[Row], look: Look) -> list[Row]:
        """At most `look.height` of the rows; where some are left out the last one says how many."""
        height = look.height
        if height is None or len(rows) <= height:
            self.top = 0
            return rows
        self._page = max(1, height - 1)
        self.top = max(0, min(self.top, len(rows) - self._page))
        left = len(rows) - self.top - self._page
        told = chunk(f"{self.top} rows above, {left} below", "faint")
        return [*rows[self.top : self.top + self._page], *flow([told], look)[:1]]

    def by(self, rows: int) -> None:
        """Move by so many rows."""
        self.top = max(0, self.top + rows)

    @property
    def keys(self) -> dict[str, Action]:
        return {
            "up": lambda: self.by(-1),
            "down": lambda: self.by(1),
            "pageup": lambda: self.by(-self._page),
            "pagedown": lambda: self.by(self._page),
        }


def drawn(content: Content, look: Look) -> list[Row]:
    """The rows and the words for its keys, within the look's height."""
    below = flow([chunk(content.help, "faint")], look)
    height = None if look.height is None else max(1, look.height - len(below))
    return [*content.rows(look.sized(height=height)), *below]


def view(content: Content, look_now: Callable[[], Look], **more: Any) -> Any:
    """Show the content until a key ends it; what that key gave, None for q, Escape and Ctrl-C.

    `more` are the arguments of prompt_toolkit's Application that a test gives: input and output.
    """
    from prompt_toolkit import Application
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.layout import FormattedTextControl, Layout, Window
    from prompt_toolkit.output import ColorDepth

    keys = KeyBindings()

    def bind(key: str, action: Action) -> None:
        @keys.add(*key.split())
        def _(event: KeyPressEvent) -> None:
            result = action()
            if result is not None:
                event.app.exit(result=result)

    @keys.add("q")
    @keys.add("escape", eager=True)
    @keys.add("c-c")
    @keys.add("c-d")
    def _(event: KeyPressEvent) -> None:
        event.app.exit()

    for key, action in content.keys.items():
        bind(key, action)

    def look() -> Look:
        size = app.output.get_size()
        return look_now().sized(width=size.columns, height=size.rows - 1)

    def text() -> ANSI:
        return ANSI(painted(Lines(drawn(content, look()), look())))

    app: Application[Any] = Application(
        Layout(Window(FormattedTextControl(text, focusable=True, show_cursor=False), always_hide_cursor=True)),
        key_bindings=keys,
        erase_when_done=True,
        color_depth=None if look_now().color else ColorDepth.DEPTH_1_BIT,
        **more,
    )
    app.ttimeoutlen = 0.05
    app.renderer.cpr_not_supported_callback = None
    return app.run(handle_sigint=False, set_exception_handler=False)


def painted(content: Drawn) -> str:
    """The rows as text for a terminal, styles as escape sequences."""
    look, file = content.look, StringIO()
    color: Any = {"color_system": "256" if look.color else None, "no_color": not look.color}
    console = Console(file=file, width=look.width, force_terminal=look.color, highlight=False, markup=False, **color)
    console.print(content, soft_wrap=True, end="")
    return file.getvalue().removesuffix("\n")
