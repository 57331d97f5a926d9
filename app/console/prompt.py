"""The console's prompt, which reads lines on a terminal: with history, keys, completion and a status line.

A message holds no escape sequences, whether they were pasted or quoted. The caller gives the function that completes;
keys not named here are those of prompt_toolkit's Emacs mode (Ctrl-R, Up, Ctrl-X Ctrl-E). Of the commands it knows
/inspect, which F2 runs, and /exit, which a hint names. Knows no models.
"""

import asyncio
import re
import select
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, get_common_complete_suffix
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching, to_filter
from prompt_toolkit.formatted_text.utils import fragment_list_to_text
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import UIContent, Window
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.styles import Style
from rich.cells import cell_len, set_cell_size

from app.screen.terminal import mark_pastes
from utils.errors import UserError
from utils.files import own_folder
from utils.visible import visible

# Escape sequences (ECMA-48): OSC, DCS, SOS, PM and APC; CSI (Linux sends F1 as ESC [ [ A); sets of characters and keys;
# single controls.
_SEQUENCE = re.compile(
    r"""
    (?: \x1b[\]PX^_] | [\x90\x98\x9d-\x9f] ) [^\x00-\x1f\x7f-\x9f]* (?: \x07 | \x1b\\ | \x9c )
  | (?: \x1b+\[ | \x9b ) (?: \[. | [0-?]*[ -/]*[@-~]? )
  | \x1b+ (?: [()].? | O[A-Za-z] | [ -~] )?
  | [\x80-\x9f]
    """,
    re.VERBOSE,
)
_JOINER = "\u200d"  # of emoji
_NO_TEXT = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8

TabOffers = Callable[[str], Iterable[Completion]]  # the line up to the cursor → its completions

_ENTER, _NEW_LINE = KeyPress(Keys.ControlM, "\r"), KeyPress(Keys.ControlJ, "\n")

QUICK_FAILURE_S = 1.0  # seconds within which a failure of the prompt counts as quick
MAX_QUICK_FAILURES = 10  # quick failures in a row after which the error is raised


def without_escapes(text: str) -> str:
    """Return a text without its escape sequences, those of keys included."""
    return _NO_TEXT.sub("\ufffd", _SEQUENCE.sub("", text))


class CommandCompleter(Completer):
    """Completes an empty line, and a line that begins with a single "/"; messages are not completed."""

    def __init__(self, offer: TabOffers) -> None:
        self._offer = offer

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if document.text and (not line.startswith("/") or line.startswith("//") or "\n" in line):
            return
        yield from self._offer(line)


def complete(buffer: Buffer) -> None:
    """Insert the only completion, or the text that all share; else open the menu or go on in it.

    Completions are worked out at once, not in the background, so that a Tab typed quickly counts as well.
    """
    if buffer.complete_state:
        buffer.complete_next()
        return
    document = buffer.document
    completions = list(buffer.completer.get_completions(document, CompleteEvent(completion_requested=True)))
    if len(completions) == 1:
        buffer.apply_completion(completions[0])
    elif common := get_common_complete_suffix(document, completions):
        buffer.insert_text(common)
    elif completions:
        buffer.start_completion()


class SplitJoinedEmoji(Processor):
    """Show the parts of a joined emoji side by side, because terminals disagree on its width."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        fragments: Any = transformation_input.fragments
        text = fragment_list_to_text(fragments)
        kept = [index for index, char in enumerate(text) if char != _JOINER]
        return Transformation(
            [(style, part.replace(_JOINER, ""), *more) for style, part, *more in fragments],
            source_to_display=lambda index: bisect_left(kept, index) + max(0, index - len(text)),
            display_to_source=lambda index: kept[index] if index < len(kept) else len(text) + index - len(kept),
        )


def fill_up(window: Window) -> None:
    """Let a window show the end of a long line above the cursor's line: prompt_toolkit shows only lines that fit as a
    whole there, and leaves rows empty."""
    scroll = window._scroll_when_linewrapping

    def filling(ui_content: UIContent, width: int, height: int) -> None:
        scroll(ui_content, width, height)

        def high(line: int) -> int:
            return ui_content.get_height_for_line(line, width, window.get_line_prefix)

        top = window.vertical_scroll
        empty = height - sum(map(high, range(top, ui_content.line_count)))
        if top and empty > 0 and not window.vertical_scroll_2:
            window.vertical_scroll, window.vertical_scroll_2 = top - 1, high(top - 1) - empty

    window._scroll_when_linewrapping = filling  # type: ignore[method-assign]


class LeaveError(Exception):
    """Ctrl-C for the second time: leave at once."""


def key_bindings(
    hint: Callable[[str], None],
    is_second_interrupt: Callable[[], bool],
    prefill: Callable[[], str] = lambda: "",
) -> KeyBindings:
    """Return the prompt's keys: Enter sends, Alt-Enter and Ctrl-J begin a line, Ctrl-C clears, Ctrl-Z suspends, Tab
    completes, F2 in an empty line runs /inspect. `hint` shows a line until the text changes.

    `is_second_interrupt` returns whether an earlier Ctrl-C has just stopped an answer: then this one leaves. `prefill`
    returns the text that the console put into the line: typing "/" replaces it. A line that is cleared or replaced
    stays in the history.
    """
    keys = KeyBindings()
    keys.add("c-z")(lambda event: event.app.suspend_to_background())

    @keys.add("enter", filter=~is_searching)  # in a search Enter takes the line that was found
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # Enter takes a chosen completion; it must not also run it
            hint("Enter runs it")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(without_escapes(event.data.replace("\r\n", "\n").replace("\r", "\n")))

    @keys.add("/", filter=Condition(lambda: bool(prefill()) and get_app().current_buffer.text == prefill()))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.reset(append_to_history=True)
        event.current_buffer.insert_text("/")

    @keys.add("f2", filter=Condition(lambda: not get_app().current_buffer.text))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.text = "/inspect"
        event.current_buffer.validate_and_handle()

    @keys.add("tab")
    def _(event: KeyPressEvent) -> None:
        complete(event.current_buffer)

    @keys.add("c-c", filter=~is_searching)
    @keys.add("<sigint>", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        if is_second_interrupt():
            event.app.exit(exception=LeaveError())
            return
        was_empty = not event.current_buffer.text
        event.current_buffer.reset(append_to_history=True)
        if was_empty:
            hint("Ctrl-D or /exit leaves")

    return keys


class HungUpError(Exception):
    """The terminal was closed."""


state_folder = partial(own_folder, "XDG_STATE_HOME", ".local/state")  # of files that outlive the console


class PromptReader:
    """Reads lines by a prompt_toolkit prompt with `status` in its bottom line.

    `ascii` and `color` choose how it looks; if `keep()` is true at the start, the lines go into a file for later runs,
    each while `keep()` is still true; `note` shows a line to the user; `tell` shows an error of the prompt. Ctrl-C
    raises LeaveError if `is_second_interrupt()`.
    """

    def __init__(
        self,
        offer: TabOffers,
        status: Callable[[], str],
        note: Callable[[str], None],
        tell: Callable[[Exception], None],
        *,
        is_second_interrupt: Callable[[], bool] = lambda: False,
        keep: Callable[[], bool] = lambda: True,
        ascii: bool = False,
        color: bool = True,
        **session: Any,
    ) -> None:
        self._status, self._hint, self._tell, self._is_second_interrupt = status, "", tell, is_second_interrupt
        self._prefill = ""  # the text that the line began with
        self._failed = 0  # quick failures in a row
        self._left = False  # `leave` was called
        self._pressed = False  # Ctrl-C came while the prompt was not reading
        more = ".. " if ascii else "… "
        self.session: PromptSession[str] = PromptSession(
            "> " if ascii else "› ",
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else more,
            history=_history(note, keep),
            completer=CommandCompleter(offer),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
            key_bindings=key_bindings(self._show_hint, is_second_interrupt, lambda: self._prefill),
            bottom_toolbar=self._toolbar,
            style=Style.from_dict(
                {"bottom-toolbar": "noreverse" + (" fg:ansibrightblack" if color else ""), "prompt": "bold"}
            ),
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            enable_open_in_editor=True,
            reserve_space_for_menu=5,
            tempfile_suffix=".txt",
            input_processors=[SplitJoinedEmoji()],
            **{"output": create_output(always_prefer_tty=True), **session},
        )
        self.session.default_buffer.on_text_changed += lambda _: self._show_hint("")
        for window in self.session.layout.find_all_windows():
            window.dont_extend_height = to_filter(True)  # so that the status line is right below the input
            fill_up(window)
        self.session.app.renderer.cpr_not_supported_callback = None  # it prints a warning
        source = self.session.app.input
        self._read, self._keys_were_pending = source.read_keys, False  # whether keys came before the prompt was shown
        self._message_sent = False  # a line was sent before: such keys may have been typed during its answer
        if hasattr(source, "vt100_parser"):
            source.read_keys = self._read_keys  # type: ignore[method-assign]

    def _show_hint(self, text: str) -> None:
        self._hint = text

    def _toolbar(self) -> str:
        width, text = self.session.app.output.get_size().columns - 1, visible(self._hint or self._status())
        return text if cell_len(text) <= width else set_cell_size(text, width)

    def read(self, default: str = "") -> str:
        """Return one message. Raises EOFError if the user leaves with Ctrl-D, HungUpError if the terminal was closed.

        Another error of the prompt is shown, and the prompt comes back with its text; after MAX_QUICK_FAILURES in a row
        the error is raised.
        """
        self._hint = ""
        while True:
            begun = time.monotonic()
            try:
                text = self._prompted(default)
                self._failed, self._message_sent = 0, True
                return text
            except KeyboardInterrupt:
                default = ""
            except (EOFError, LeaveError, HungUpError):
                raise
            except Exception as error:
                default = self.session.default_buffer.text
                self._failed = self._failed + 1 if time.monotonic() - begun < QUICK_FAILURE_S else 1
                if self._failed >= MAX_QUICK_FAILURES:
                    raise
                why = f"the prompt did not understand these keys ({type(error).__name__}: {error}), its text is back"
                self._tell(UserError(why))

    def _prompted(self, default: str) -> str:
        from prompt_toolkit.patch_stdout import patch_stdout

        self._prefill, source = default, self.session.app.input
        self._keys_were_pending = hasattr(source, "vt100_parser") and bool(
            select.select([source.fileno()], [], [], 0)[0]
        )
        try:
            # patch_stdout would send standard output to the terminal even if it goes to a file.
            with patch_stdout(raw=True) if sys.stdout.isatty() else nullcontext(), self._interrupts():
                text = self.session.prompt(
                    default=default, pre_run=self._on_prompt_start, set_exception_handler=False, handle_sigint=False
                )
                mark_pastes(True)
        except EOFError:
            if self.session.app.input.closed and not self._left:
                raise HungUpError from None
            raise
        return without_escapes(text)  # a quoted key or an editor may have put some into it

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """A context around the event loop in which Ctrl-C is a key: an exception would leave a broken loop, whose
        traceback comes later. The prompt gets a Ctrl-C that comes before it is shown."""
        app, self._pressed = self.session.app, False

        def pressed(*_: object) -> None:
            if (loop := app.loop) is not None and app.future is not None and not app.future.done():
                loop.call_soon_threadsafe(app.key_processor.send_sigint)
            else:
                self._pressed = True

        try:
            before = signal.signal(signal.SIGINT, pressed)
        except ValueError:  # no signals outside the main thread
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self._pressed:
            raise LeaveError if self._is_second_interrupt() else KeyboardInterrupt

    def _on_prompt_start(self) -> None:
        """Let an error in the event loop end this prompt; otherwise a traceback would wait for Enter. Then handle a
        Ctrl-C or a :meth:`leave` that came before."""
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self._end(context.get("exception") or RuntimeError(context["message"]))
        )
        # A search that was open when the last prompt ended would still get the keys.
        self.session.app.layout.focus(self.session.default_buffer)
        if self._pressed:
            self._pressed = False
            asyncio.get_running_loop().call_soon(self.session.app.key_processor.send_sigint)
        if self._left:
            self._end(EOFError())

    def _read_keys(self) -> list[KeyPress]:
        """Return the keys that the terminal has for the prompt; those typed before it was shown as :meth:`_one_message`
        returns them.

        Ctrl-C ends a paste whose end the terminal did not send; otherwise all later keys would be text of the paste.
        """
        source: Any = self.session.app.input
        keys = pressed = self._read()
        parser = source.vt100_parser
        if parser._in_bracketed_paste and "\x03" in parser._paste_buffer:
            parser._paste_buffer, key, rest = parser._paste_buffer.partition("\x03")
            parser.feed(f"\x1b[201~{key}{rest}")
            keys = pressed = keys + self._read()
        if not (self._keys_were_pending and keys):
            return keys
        self._keys_were_pending = False
        while pressed and not source.closed:
            pressed = self._read()
            keys = keys + pressed
        return self._one_message(keys)

    def _one_message(self, keys: list[KeyPress]) -> list[KeyPress]:
        """Return keys that came before the prompt was shown; they replace a text that the console put into the line.

        Several lines count as one paste and wait for Enter. But if all end in Enter, and one is a command or no message
        was sent yet, they count as typed. While the program starts the terminal makes Enter Ctrl-J.
        """
        lines: list[list[KeyPress]] = [[]]
        for key in keys:
            lines.append([]) if key in (_ENTER, _NEW_LINE) else lines[-1].append(key)
        texts = [text for line in lines if (text := "".join(key.data for key in line if is_text(key)).strip())]
        buffer = self.session.default_buffer
        if texts and buffer.text and buffer.text == self._prefill:
            buffer.reset(append_to_history=True)
        typed = not self._message_sent or any(text.startswith("/") for text in texts)
        # The terminal's report of its cursor, a key without text, may follow the last line's end.
        ended = not any(is_text(key) for key in lines[-1])
        if len(texts) < 2 or (typed and ended):
            return keys if self._message_sent else [_ENTER if key == _NEW_LINE else key for key in keys]
        joined = [key for line in (lines[:-1] if ended else lines) for key in (*line, _NEW_LINE)][:-1]
        return joined + lines[-1] if ended else joined

    def _end(self, reason: BaseException) -> None:
        app = self.session.app
        if app.future is not None and not app.future.done():
            app.exit(exception=reason)

    def leave(self) -> None:
        """End the prompt with EOFError, now or when it begins. For a signal handler."""
        self._left = True
        if (loop := self.session.app.loop) is not None:
            loop.call_soon_threadsafe(self._end, EOFError())

    def refresh(self) -> None:
        """Redraw the status line; may be called from any thread."""
        with suppress(RuntimeError, AttributeError):  # the prompt may end, and its event loop with it, at any moment
            self.session.app.invalidate()


def is_text(key: KeyPress) -> bool:
    """Return whether the key puts text into the line."""
    return len(key.key) == 1 or key.key is Keys.BracketedPaste


class _History(FileHistory):
    """A file history that notes when a line cannot be written."""

    def __init__(self, path: str, note: Callable[[str], None], keep: Callable[[], bool]) -> None:
        super().__init__(path)
        self._note, self._keep = note, keep

    def store_string(self, string: str) -> None:
        if not self._keep():
            return
        try:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
        except OSError as error:
            self._note(f"the line was not kept in the history: {error.strerror or error}")


def _history(note: Callable[[str], None], keep: Callable[[], bool]) -> History:
    """Return the history in a file, or one for this run alone if it cannot or must not be kept in a file."""
    path = state_folder() / "history"
    if not keep():
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "ab"):
            if path.is_file():
                path.chmod(0o600)
        path.read_bytes()[:1]
    except OSError as error:
        note(f"no history between runs: {path}: {error.strerror or error}")
        return InMemoryHistory()
    return _History(str(path), note, keep)
