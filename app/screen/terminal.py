"""The terminal while the program works: typed keys are not echoed and wait for the next reader, Ctrl-C sets a flag, and
frames are redrawn in place. And a viewer: content that keys walk through, redrawn after each key, until one ends it.

Knows no models and no prompt; the content draws itself and names its keys.
"""

import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import StringIO
from itertools import zip_longest
from types import FrameType
from typing import Any, Protocol, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from app.screen.palette import Look
from app.screen.rows import Drawn, Lines, Row, chunk, flow
from app.settings.table import Settings
from utils.visible import visible

Handler = Callable[[int, FrameType | None], Any] | int | None  # of a signal
_CTRL_D, _CTRL_Z = b"\x04", b"\x1a"
_NAP = 0.05  # seconds between two looks at the keyboard
BELOW = 3  # rows of the screen that the command line, the next prompt and its bottom line take


try:
    import termios
except ImportError:  # no POSIX terminal
    termios = None  # type: ignore[assignment]


SECOND_WITHIN = 2.0  # seconds in which a second Ctrl-C leaves the program
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\")
_MARKED, _UNMARKED = "\x1b[?2004h", "\x1b[?2004l"  # whether pastes come between ESC[200~ and ESC[201~
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # around one update: a terminal that knows them shows it as a whole


@contextmanager
def _keys(echo: bool) -> Iterator[None]:
    """Turn echo, line editing and Ctrl-Z on or off for the terminal of standard input, and restore them afterwards.

    A program that is suspended leaves its modes to the shell, has its frames overwritten and its clocks go on: so
    Ctrl-Z waits, as other keys do, for the prompt.
    """
    try:
        if termios is None or not sys.stdin.isatty():
            raise OSError
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError):  # no terminal, or no standard input at all
        yield
        return
    now, lines = termios.tcgetattr(descriptor), termios.ECHO | termios.ICANON
    now[0] = now[0] | termios.ICRNL if echo else now[0] & ~(termios.ICRNL | termios.INLCR)
    now[3] = now[3] | lines if echo else now[3] & ~lines
    now[6][termios.VSUSP] = _CTRL_Z if echo else bytes([os.fpathconf(descriptor, "PC_VDISABLE")])
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    mark_pastes(not echo)
    try:
        yield
    finally:
        mark_pastes(echo)
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def mark_pastes(on: bool) -> None:
    """Have the terminal mark pastes, or not: the reader can then keep the lines of a paste together."""
    if sys.stdout is not None and sys.stdout.isatty():
        with suppress(OSError):
            sys.stdout.write(_MARKED if on else _UNMARKED)
            sys.stdout.flush()


def quiet_keys() -> AbstractContextManager[None]:
    """Return a context in which typed keys are not echoed; they wait, as typed, for the next reader."""
    return _keys(echo=False)


def await_enter(stop: Callable[[], bool]) -> bool:
    """Wait for Enter, inside :func:`quiet_keys`; False after Ctrl-C or Ctrl-D. True at once if there is no keyboard.

    Keys typed before the call do not count.
    """
    typed = await_key(stop)
    while typed and not {*typed} & {*b"\r\n"}:
        typed = await_key(stop, forget=False)
    return bool(typed)


def await_key(stop: Callable[[], bool], seconds: float = math.inf, *, forget: bool = True) -> bytes:
    """Return the keys typed next, inside :func:`quiet_keys`; b"" after Ctrl-C, Ctrl-D or these seconds. Without a
    keyboard return Enter at once. `forget`: keys typed before the call do not count.
    """
    if termios is None or sys.stdin is None or not sys.stdin.isatty():
        return b"" if stop() else b"\n"
    descriptor = sys.stdin.fileno()
    if forget:
        termios.tcflush(descriptor, termios.TCIFLUSH)
    end = time.monotonic() + seconds
    while not stop() and time.monotonic() < end:
        if select.select([descriptor], [], [], _NAP)[0]:
            typed = os.read(descriptor, 1024)
            return typed if {*typed} & {*b"\r\n"} or _CTRL_D not in typed else b""
    return b""


class Interrupts:
    """A context in which Ctrl-C sets `stopped`; a second Ctrl-C within 2 s ends the program with exit code 130.

    Once the context has ended that way, further ones are ignored. Outside the main thread Ctrl-C keeps its meaning.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._last = -SECOND_WITHIN
        self._leave = False
        self._before: Handler = None

    def __call__(self) -> bool:
        return self.stopped

    def __enter__(self) -> Self:
        with suppress(ValueError):  # no signals outside the main thread
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN if self._leave else self._before)

    def _on_signal(self, *_: object) -> None:
        now = time.monotonic()
        self._leave = self._leave or (self.stopped and now - self._last < SECOND_WITHIN)
        self.stopped, self._last = True, now
        if self._leave:
            raise SystemExit(130)


class InPlace:
    """Lines at the bottom of the screen that are redrawn in place, only where they changed.

    A context: the cursor is hidden inside and is always shown again. Never higher than the screen. After a change of
    width the old lines, which the terminal may have wrapped, are erased and all lines drawn again.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lines: list[str] = []
        self._width = console.size.width

    def __enter__(self) -> Self:
        self._write(_HIDE)
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._write(_SHOW)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed ends the answer by a signal, and loses nothing of it
            self.console.file.write(text)
            self.console.file.flush()

    def draw(self, content: RenderableType) -> None:
        """Show `content` in place of what was shown."""
        width, height = self.console.size
        with self.console.capture() as capture:
            self.console.print(content)
        lines = capture.get().split("\n")
        lines = (lines[:-1] if not lines[-1] else lines)[: max(1, height - 1)]
        out = [_BEGIN]
        if width != self._width:
            out.append(self._erase(width))
            self._width, self._lines = width, []
        elif self._lines:
            out.append(f"\x1b[{len(self._lines)}A\r")
        for before, line in zip_longest(self._lines[: len(lines)], lines):
            # After a full line the cursor is still on the last column: erasing there would remove a character.
            filled = line if _cells(line) >= width else f"{line}\x1b[K"
            out.append("\n" if line == before else f"{filled}\n")
        out += ["\x1b[J" if len(lines) < len(self._lines) else "", _END]
        self._lines = lines
        self._write("".join(out))

    def _erase(self, width: int) -> str:
        """Return the codes that erase the frame from its first row on; `width` tells how its lines may have wrapped."""
        rows = sum(max(1, -(-_cells(line) // max(1, width))) for line in self._lines)
        # The first line by itself: some terminals keep a screen in the scrollback that is erased from its very top.
        return f"\x1b[{rows}A\r\x1b[2K\n\x1b[J\x1b[A" if rows else ""

    def clear(self) -> None:
        """Erase the frame."""
        self._write(self._erase(self.console.size.width))
        self._lines, self._width = [], self.console.size.width


def _cells(line: str) -> int:
    return cell_len(_ESCAPES.sub("", line))


class Screen(Console):
    """A console that raises BrokenPipeError for a closed pipe (rich would end the program with 1) and uses COLUMNS and
    LINES only if they are sizes. It prints text literally: no markup, no emoji names, no coloured numbers, and control
    characters made visible, so that the terminal obeys none.
    """

    def __init__(self, **how: Any) -> None:
        wrong = {name for name in ("COLUMNS", "LINES") if size_in(os.environ, name) is None}
        environ = {name: value for name, value in os.environ.items() if name not in wrong}
        super().__init__(highlight=False, markup=False, emoji=False, **how, _environ=environ)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(visible(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(visible(part.text), part.style)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    @property
    def size(self) -> ConsoleDimensions:
        """The screen's own size under TERM=dumb too, where rich takes 80 columns."""
        if not self.is_dumb_terminal:
            return super().size
        width, height = shutil.get_terminal_size((80, 25))
        return ConsoleDimensions(width, height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self.width, self.height = new_size


def size_in(environ: Mapping[str, str], name: str = "COLUMNS") -> int | None:
    """Return the columns of the screen (or its LINES) by the environment; None if it names no size."""
    text = environ.get(name, "")
    return int(text) or None if text.isascii() and text.isdigit() and len(text) < 6 else None


def make_console(settings: Settings, **where: Any) -> Console:
    """Return a console on the screen or another file; --color outranks NO_COLOR and FORCE_COLOR, which rich reads."""
    return Screen(
        color_system={"always": "256", "never": None}.get(settings.color, "auto"),
        no_color={"always": False, "never": True}.get(settings.color),
        **where,
    )


def page(console: Console, content: RenderableType) -> bool:
    """Show content higher than the screen in the user's pager. Return False, with nothing shown, if it fits or there is
    no pager.

    `less` ends by itself if all fits, keeps colours, and leaves the text on the screen.
    """
    with console.capture() as capture:
        console.print(content)
    text = capture.get()
    pager = shlex.split(os.environ.get("PAGER") or "less")
    if text.count("\n") <= console.size.height - BELOW or not pager or shutil.which(pager[0]) is None:
        return False
    with _keys(echo=True):  # the pager starts with the terminal's usual modes
        subprocess.run(pager, input=text.encode(), env={"LESS": "RFX", **os.environ}, check=False)
    return True


def is_live(console: Console) -> bool:
    """Return whether there is a terminal that can be drawn on."""
    return sys.stdout.isatty() and not console.is_dumb_terminal


Action = Callable[[], Any]  # a key's action; if it returns anything but None, the viewer ends and returns that


class Content(Protocol):
    """A viewer's content. `keys`: actions by prompt_toolkit's names of keys. `help`: the keys in words, shown below."""

    help: str

    @property
    def keys(self) -> Mapping[str, Action]: ...
    def rows(self, look: Look) -> list[Row]: ...  # at most look.height


def drawn(content: Content, look: Look) -> list[Row]:
    """Return the content's rows and the words for its keys, within the look's height."""
    below = flow([chunk(content.help, "faint")], look)
    return [*content.rows(look.sized(height=look.height and max(1, look.height - len(below)))), *below]


def view(content: Content, look_now: Callable[[], Look], **more: Any) -> Any:
    """Show the content until a key ends it; return the result of that key's action, None after q, Escape, Ctrl-C and
    Ctrl-D.

    `more`: arguments of prompt_toolkit's Application (tests give input and output).
    """
    from prompt_toolkit import Application
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.layout import FormattedTextControl, Layout, Window
    from prompt_toolkit.output import ColorDepth

    keys = KeyBindings()

    def pressed(action: Action, event: KeyPressEvent) -> None:
        if (result := action()) is not None:
            event.app.exit(result=result)

    @keys.add("q")
    @keys.add("escape", eager=True)
    @keys.add("c-c")
    @keys.add("c-d")
    def _(event: KeyPressEvent) -> None:
        event.app.exit()

    for key, action in content.keys.items():
        keys.add(*key.split())(partial(pressed, action))

    def text() -> ANSI:
        size = app.output.get_size()
        look = look_now().sized(width=size.columns, height=size.rows - 1)
        return ANSI(painted(Lines(drawn(content, look), look)))

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
    """Return the rows as text for a terminal, styles as escape sequences."""
    look, file = content.look, StringIO()
    console = Screen(
        file=file,
        width=look.width,
        force_terminal=look.color,
        color_system="256" if look.color else None,
        no_color=not look.color,
    )
    console.print(content, soft_wrap=True, end="")
    return file.getvalue().removesuffix("\n")
