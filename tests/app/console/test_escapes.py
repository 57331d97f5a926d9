"""No message holds an escape sequence, and Ctrl-C tears no prompt."""

import asyncio
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pyte
import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output

from app.console.prompt import PromptReader, without_escapes
from tests.support.screen import PASTE_OFF, PASTE_ON


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ("a\x1b[31mb", "ab"),
        ("a\x1b[<0;1;2Mb", "ab"),
        ("a\x1b[?25l\x1b[2Jb", "ab"),
        ("a\x9b31mb", "ab"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;eHg=\x1b\\b", "ab"),
        ("a\x1bPq#0~\x1b\\b", "ab"),
        ("a\x1b_G1\x1b\\\x1b^p\x1b\\\x1bXs\x1b\\b", "ab"),
        ("a\x1b(B\x1b[mb", "ab"),  # of tput sgr0
        ("a\x1b\x1b\x1b[0mb", "ab"),
        ("a\x1b[Ab\x1bOP\x1b[[A", "ab"),  # keys
        ("a\x1b]0;never ended", "a0;never ended"),
        ("a\x1b[31", "a"),
        ("a\udce9b", "a\ufffdb"),  # a byte that is no UTF-8
    ],
)
def test_escape_sequences_are_taken_out_of_a_text(typed: str, left: str) -> None:
    assert without_escapes(typed) == left


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`typed(text)`: what a prompt makes of it; `typed.reader` is the prompt."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    told: list[Exception] = []
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        reader = PromptReader(
            lambda _: (),
            lambda: "",
            lambda _: None,
            told.append,
            input=pipe,
            output=DummyOutput(),
        )

        def read(text: str) -> str:
            pipe.send_text(text)
            patience = threading.Timer(30, reader.leave)  # EOFError
            patience.start()
            try:
                return reader.read()
            finally:
                patience.cancel()

        read.reader, read.told = reader, told  # type: ignore[attr-defined]
        yield read


def test_pasted_and_quoted_sequences_are_not_in_the_message(typed: Any) -> None:
    assert typed("\x1b[200~a\x1b[31mb\x1b[Ac\x1b]0;t\r\nd\x1bce\x9b1m\x1b[201~\r") == "abc0;t\nde"
    assert typed("a\x11\x1bxb\r") == "ab"  # Ctrl-Q quotes the escape
    assert typed.told == []


def test_a_search_that_was_still_open_when_its_prompt_ended_does_not_take_the_next_keys(
    typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR", "true")
    assert typed("first\x18\x05\x12") == "first"  # Ctrl-R while the editor, which sends the text, is at work
    assert typed("second\r") == "second"


def test_enter_takes_what_a_search_found(typed: Any) -> None:
    assert typed("found\r") == "found"
    assert typed("\x12fou\r\r") == "found"


@pytest.mark.parametrize(
    ("place", "name", "read"),
    [
        (asyncio.BaseEventLoop, "__init__", "one"),
        (asyncio.SelectorEventLoop, "_add_reader", "one"),  # its pipe to itself
        (Application, "_pre_run", "one"),
        (Application, "cancel_and_wait_for_background_tasks", "two"),  # behind Enter: it stops what was sent
        (asyncio.SelectorEventLoop, "close", "two"),
    ],
)
def test_ctrl_c_while_the_prompt_is_made_or_ends_tears_nothing(
    typed: Any, monkeypatch: pytest.MonkeyPatch, place: type, name: str, read: str
) -> None:
    usual, torn, presses = getattr(place, name), [], [signal.SIGINT]

    def pressed(*given: Any, **named: Any) -> Any:
        if presses:
            signal.raise_signal(presses.pop())
        return usual(*given, **named)

    monkeypatch.setattr(place, name, pressed)
    monkeypatch.setattr(sys, "unraisablehook", torn.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert typed("one\rtwo\r") == read
        gc.collect()
    assert (presses, torn, [str(one.message) for one in warned], typed.told) == ([], [], [], [])


def test_the_status_may_be_refreshed_while_the_prompt_ends(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(app: Any) -> None:
        raise RuntimeError("no running event loop")  # as prompt_toolkit says it where the loop goes in between

    monkeypatch.setattr(Application, "invalidate", ended)
    typed.reader.refresh()


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """`drawn(text)`: the screen of 60 columns and 12 rows while the prompt stands with this text typed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def draw(text: str) -> list[str]:
        screen = pyte.Screen(60, 12)
        written, stream = StringIO(), pyte.Stream(screen)
        output = Vt100_Output(written, lambda: Size(rows=12, columns=60), term="xterm-256color")
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=output):
            reader = PromptReader(
                lambda _: (), lambda: "status", lambda _: None, lambda _: None, input=pipe, output=output
            )
            shown: list[str] = []

            def leave() -> None:
                shown.append(written.getvalue())
                reader.leave()

            pipe.send_text(text)
            threading.Timer(1.0, leave).start()
            with pytest.raises(EOFError):
                reader.read()
        stream.feed(shown[0])
        return [line.rstrip() for line in screen.display]

    return draw


@pytest.mark.parametrize("words", [20, 300])
def test_a_long_line_stays_in_view_where_the_cursor_is_below_it(drawn: Callable[[str], list[str]], words: int) -> None:
    """A paste with a line break at its end, and Alt-Enter after a long line."""
    line = f"{'word ' * words}END"
    for typed in (f"{PASTE_ON}{line}\n{PASTE_OFF}", f"{PASTE_ON}{line}{PASTE_OFF}\x1b\r"):
        lines = drawn(typed)
        at = next(number for number, line in enumerate(lines) if line.endswith("END"))
        assert lines[at + 1] == "…"
        assert at == min((2 + 5 * words) // 60, 10)
        assert all(lines[:at])


def test_emoji_that_are_joined_leave_no_hole(drawn: Callable[[str], list[str]]) -> None:
    assert drawn("a 👨\u200d👩\u200d👧 b")[0] == "› a 👨👩👧 b"
    assert drawn("a 👨\u200d👩\u200d👧 b" + 7 * "\x1b[D" + "x")[0] == "› a x👨👩👧 b"


def test_joined_emoji_stay_joined_in_the_message(typed: Any) -> None:
    assert typed("a 👨\u200d👩\u200d👧 b\r") == "a 👨\u200d👩\u200d👧 b"
