"""Where lines come from: a prompt with history, completion and a status line. Knows no commands and no models."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from app.far_keys import FAR
from app.keys import key_bindings, unblocked


class Reader(Protocol):
    """Gives the user's lines. `read` raises EOFError at the end."""

    def read(self, default: str = "") -> str: ...
    def refresh(self) -> None: ...  # the status line may have changed; called from any thread


def history_path(environ: Any = os.environ) -> Path:
    """Where typed lines are kept between runs."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "speculative-console" / "history"


class PromptReader:
    """A prompt_toolkit prompt with `status` in its bottom line.

    `ascii` and `color` choose how it looks; `note` takes a line that the user should read once; while
    `second` holds, Ctrl-C raises LeaveError.
    """

    def __init__(
        self,
        offer: Callable[[str], Iterable[Any]],
        status: Callable[[], str],
        note: Callable[[str], None],
        *,
        second: Callable[[], bool] = lambda: False,
        ascii: bool = False,
        color: bool = True,
        **session: Any,
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition, to_filter
        from prompt_toolkit.output import ColorDepth, create_output
        from prompt_toolkit.styles import Style

        from app.completer import CommandCompleter

        self._status, self._hint = status, ""
        self._more = ".. " if ascii else "… "
        style = {"bottom-toolbar": "noreverse" + (" fg:ansibrightblack" if color else ""), "prompt": "bold"}
        self.session: PromptSession[str] = PromptSession(
            "> " if ascii else "› ",
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else self._more,
            history=_history(note),
            completer=CommandCompleter(offer),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
            key_bindings=key_bindings(self._show_hint, second),
            bottom_toolbar=self._toolbar,
            style=Style.from_dict(style),
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            enable_open_in_editor=True,
            reserve_space_for_menu=5,
            tempfile_suffix=".txt",
            **{"output": create_output(always_prefer_tty=True), **session},
        )
        self.session.default_buffer.on_text_changed += lambda _: self._show_hint("")
        for window in self.session.layout.find_all_windows():
            window.dont_extend_height = to_filter(True)  # the status line right below the input

    def _show_hint(self, text: str) -> None:
        self._hint = text

    def _toolbar(self) -> str:
        from prompt_toolkit.utils import get_cwidth

        width = self.session.app.output.get_size().columns - 1
        text = self._hint or self._status()
        while get_cwidth(text) > width:
            text = text[:-1]
        return text

    def read(self, default: str = "") -> str:
        """One message; raises EOFError when the user leaves with Ctrl-D."""
        from prompt_toolkit.patch_stdout import patch_stdout

        self._hint = ""
        type_ahead(self.session.app.input, FAR.taken())
        while True:
            try:
                # Where standard output goes to a file, it must not be turned to the terminal.
                with patch_stdout(raw=True) if sys.stdout.isatty() else nullcontext():
                    return unblocked(self.session.prompt(default=default))
            except KeyboardInterrupt:
                default = ""

    def refresh(self) -> None:
        """Redraw the status line; may be called from any thread."""
        if self.session.app.is_running:
            self.session.app.invalidate()


def type_ahead(source: Any, text: str) -> None:
    """Have the next prompt read `text` first, as if it were typed now."""
    from prompt_toolkit.input.typeahead import store_typeahead
    from prompt_toolkit.input.vt100_parser import Vt100Parser

    if text:
        pressed: list[Any] = []
        Vt100Parser(pressed.append).feed_and_flush(text)
        store_typeahead(source, pressed)


def _history(note: Callable[[str], None]) -> Any:
    """The history between runs, or one for this run where it cannot be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class KeptHistory(FileHistory):
        """A file history that gives up quietly when the file can no longer be written."""

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
            except OSError as error:
                note(f"the line was not kept in the history: {error.strerror or error}")

    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "ab"):
            path.chmod(0o600)
        path.read_bytes()[:1]
    except OSError as error:
        note(f"no history between runs: {path}: {error.strerror or error}")
        return InMemoryHistory()
    return KeptHistory(str(path))
