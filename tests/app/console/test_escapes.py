"""Keys go on, every other escape sequence is taken out, however the reads cut it up."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from app.console.prompt import KeyParser, PromptReader, without_escapes

OBEYED = (Keys.Vt100MouseEvent, Keys.CPRResponse)


def keys(*reads: str, awaited: bool = False) -> list[tuple[str, str]]:
    """What the line editor gets of these reads: (key, text)."""
    pressed: list[Any] = []
    parser = KeyParser(Vt100Parser(pressed.append), lambda: awaited)
    for read in reads:
        parser.feed(read)
    parser.flush()
    return [(getattr(press.key, "value", press.key), press.data) for press in pressed]


def cut(text: str) -> Iterator[Sequence[str]]:
    """A text in all ways to read it in up to three parts."""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            yield text[:first], text[first:second], text[second:]


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ("a\x1b[31mb", "ab"),  # the report of a mouse that was none
        ("a\x1b[31;1;2;3mb", "ab"),
        ("a\x1b[<0;1;2Mb", "ab"),
        ("a\x1b[24;80Rb", "ab"),  # of a cursor nobody asked for
        ("a\x1b[?25l\x1b[2Jb", "ab"),
        ("a\x9b31mb", "ab"),
        ("a\udc9b31mb", "ab"),  # the byte 9b by itself
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;eHg=\x1b\\b", "ab"),
        ("a\udc9d0;title\udc9cb", "ab"),
        ("a\x1bPq#0~\x1b\\b", "ab"),
        ("a\x1b_G1\x1b\\\x1b^p\x1b\\\x1bXs\x1b\\b", "ab"),
        ("a\x1b(B\x1b[mb", "ab"),  # what tput sgr0 sends
        ("a\x1b\x1b\x1b[0mb", "ab"),
        ("a\x1b[201~b", "ab"),  # the end of a paste that never began
        ("a\x1b[\x80" + "31mb", "a31mb"),  # broken off: what is left must not come together anew
        ("a\x1b\x80[31mb", "a[31mb"),
        ("a\x1b]0;never ended", "a0;never ended"),
        ("a\x1b[31", "a"),
        ("a\udce9b", "a\ufffdb"),  # a byte that is no UTF-8
    ],
)
def test_what_is_no_key_is_taken_out_wherever_a_read_ends(typed: str, left: str) -> None:
    for reads in cut(typed):
        assert keys(*reads) == [(letter, letter) for letter in left], reads
    assert without_escapes(typed) == left


@pytest.mark.parametrize(
    ("typed", "pressed"),
    [
        ("\x1b[A", ["up"]),
        ("\x1b[1;5C", ["c-right"]),
        ("\x1b[[A", ["f1"]),
        ("\x1bOP", ["f1"]),
        ("\x1b\x1b[A", ["escape", "up"]),
        ("\x1bd", ["escape", "d"]),
        ("\x1b", ["escape"]),
        ("\x1b_", ["escape", "_"]),
        ("\x1b]\r", ["escape", "]", "c-m"]),
        ("\x03\x1b[3~", ["c-c", "delete"]),
    ],
)
def test_keys_stay_keys(typed: str, pressed: list[str]) -> None:
    for reads in cut(typed):
        assert [key for key, _ in keys(*reads)] == pressed, reads


def test_where_the_cursor_is_goes_on_where_it_was_asked_for() -> None:
    assert keys("\x1b[24;80R", awaited=True) == [("<cursor-position-response>", "\x1b[24;80R")]


def test_a_paste_stays_whole_and_ctrl_c_ends_one_whose_end_was_lost() -> None:
    for reads in cut("\x1b[200~a\x1b[31mb\x9d\rc\x1b[201~d"):
        assert keys(*reads) == [("<bracketed-paste>", "a\x1b[31mb\x9d\rc"), ("d", "d")]
    assert keys("\x1b[200~a\r", "b\x03c") == [("<bracketed-paste>", "a\rb"), ("c-c", "\x03"), ("c", "c")]


def test_no_noise_brings_about_a_report_or_a_paste() -> None:
    pieces = [*"\x1b\x1b\x1b[[;<?1$mMR~OP]_a\\(\r \x07\x80\x9b\x9c\x9d\x03é", "31", "200~", "\x1b[200~", "\x1b[201~"]
    noise, obeyed = random.Random(22), 0
    for _ in range(20_000):
        pressed: list[Any] = []
        inner = Vt100Parser(pressed.append)
        parser, reads = KeyParser(inner), []
        for _ in range(noise.randint(1, 4)):
            reads.append("".join(noise.choices(pieces, k=noise.randint(0, 6))))
            parser.feed(reads[-1])
            if noise.random() < 0.3:
                parser.flush()
        parser.flush()
        assert not any(press.key in OBEYED for press in pressed), reads
        assert inner._in_bracketed_paste == parser._pasting, reads
        alone: list[Any] = []
        Vt100Parser(alone.append).feed_and_flush("".join(reads))
        obeyed += any(press.key in OBEYED for press in alone)
        left = without_escapes("".join(reads))
        assert not set(left) & {"\x1b", *map(chr, range(0x80, 0xA0))}, reads
    assert obeyed > 10  # the negative control: without our parser they come


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
