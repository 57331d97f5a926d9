"""The real program with its real default pair in a real terminal. One process serves many checks, in order."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from app.console.answer import FIRST
from tests.support.screen import ROOT, Terminal
from utils.kernels.build import instruction_set

SAME = "identical by construction" if instruction_set() else "same output"
READY = 240.0  # seconds that loading may take on a busy machine
ANSWER = 180.0
COLOUR = re.compile(r"\x1b\[([0-9]+;)*(3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "SPEC_MAX_NEW_TOKENS": "12"}


@pytest.fixture(scope="module")
def chat(state: dict[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(environ=state)
    yield terminal
    terminal.child.close(force=True)


def answered(terminal: Terminal, text: str) -> str:
    """Send a message and wait for the prompt to come back; what the screen shows then."""
    before = len(re.findall("TTFT", terminal.raw))
    terminal.enter(
        text, until=lambda: terminal.at_prompt and len(re.findall("TTFT", terminal.raw)) > before, seconds=ANSWER
    )
    terminal.quiet(0.1)
    return terminal.text


def import_time() -> float:
    """What any program on these libraries needs before it can show a prompt, on this machine, now."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import prompt_toolkit, rich.console, pydantic, yaml"], check=True)
    return time.monotonic() - begun


def prompt_after(state: dict[str, str]) -> float:
    terminal = Terminal(environ=state)
    terminal.type("x", until="› x", seconds=30)
    seconds = time.monotonic() - terminal.started
    terminal.type("\x03\x04")
    assert terminal.end() == 0
    return seconds


def test_the_prompt_takes_typing_within_a_second(state: dict[str, str]) -> None:
    # How busy the machine is is not the program's doing: on an idle one the first bound holds.
    assert any(prompt_after(state) < max(1.0, 4 * import_time()) for _ in range(3))


def test_ctrl_c_while_loading_keeps_the_message_and_loading_goes_on(chat: Terminal) -> None:
    chat.wait("›", 30)
    chat.enter("What is a river?", until="Ctrl-C: back to the prompt", seconds=30)
    chat.interrupt()
    chat.wait("nothing was done: loading continues", 30)
    chat.wait(lambda: chat.at_prompt and "What is a river?" in chat.lines[chat.screen.cursor.y], 30)
    chat.type("\x03", until="SmolLM2-135M-Instruct", seconds=READY)


def test_three_turns(chat: Terminal) -> None:
    for message in ("What is a river?", "Name one.", "Where is it?"):
        text = answered(chat, message)
        assert SAME in text
        assert "cut at 12 tokens, /continue" in text
    chat.enter("/info", until=lambda: "tokens used" in chat.text and chat.at_prompt)
    assert int(re.findall(r"context +([\d,]+) of 8,192", chat.text)[-1].replace(",", "")) > 90


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/gamma 2", "gamma = 2"),
        ("/gamma 99", "error: gamma must be a whole number from 1 to 64 or auto, got 99 (still 2)"),
        ("/compare draft,spec", "cannot run alone"),
        ("/undo", "taken back"),
        ("/trace", "round"),
        ("/help", "//text sends"),
    ],
)
def test_commands(chat: Terminal, line: str, shown: str) -> None:
    chat.type("\x03")
    before = chat.mark()
    chat.enter(line, until=lambda: shown in re.sub(r"\s+", " ", chat.text) and chat.at_prompt, seconds=20)
    assert "Traceback" not in chat.raw[before:]


def test_ctrl_c_at_the_prompt_clears_the_line_and_hints_on_an_empty_one(chat: Terminal) -> None:
    chat.type("half a line", until="half a line", seconds=10)
    chat.type("\x03", until=lambda: "half a line" not in chat.text and chat.at_prompt, seconds=10)
    chat.type("\x03", until="Ctrl-D or /exit leaves", seconds=10)


def test_a_pasted_prompt_of_40_lines_is_one_message(chat: Terminal) -> None:
    answered(chat, "/clear\rhello")
    chat.paste("\n".join([f"line {number}" for number in range(1, 41)]))
    chat.wait("line 40", 20)
    before = len(re.findall("TTFT", chat.raw))
    chat.enter(until=lambda: chat.at_prompt and len(re.findall("TTFT", chat.raw)) > before, seconds=ANSWER)
    chat.enter("/save /no/such/place.txt", until="nothing was saved", seconds=20)
    chat.enter("/undo", until=lambda: chat.at_prompt is False and "line 40" in chat.text, seconds=20)
    chat.type("\x03")
    chat.quiet()


def test_ctrl_c_in_mid_answer_keeps_it_and_the_next_turn_works(chat: Terminal) -> None:
    # behind other turns the story is over before the screen is read
    chat.enter("/clear", until="conversation cleared", seconds=20)
    chat.enter("/length 800", until="= 800", seconds=10)
    chat.enter(
        "Tell me a long story about a river.",
        until=lambda: bool(re.search(r"[1-9] of 800 tok", chat.text)),
        seconds=ANSWER,
    )
    chat.interrupt()
    chat.wait(lambda: chat.at_prompt and "stopped at" in chat.text, ANSWER)
    assert not chat.screen.cursor.hidden
    chat.enter("/length 12", until="= 12", seconds=10)
    assert SAME in answered(chat, "And then?")


def sound(terminal: Terminal) -> None:
    """No pieces of older frames: borders are whole, and the cursor shows."""
    for line in terminal.lines:
        assert line.count("┌") == line.count("┐"), line
        assert line.count("└") == line.count("┘"), line
        assert not line.startswith("│") or line.endswith("│"), line
    assert not terminal.screen.cursor.hidden


def test_resizing_while_streaming_leaves_a_sound_screen(chat: Terminal) -> None:
    chat.enter("/clear")
    chat.enter("/length 60", until="= 60", seconds=10)
    chat.enter("Tell me a long story about a river.")
    for columns, rows in ((60, 30), (140, 20), (40, 24), (80, 10), (100, 40)):
        before = len(chat.raw)
        chat.resize(columns, rows)
        chat.wait(lambda before=before: len(chat.raw) > before + 200 or chat.at_prompt, ANSWER)  # type: ignore[misc]
    chat.wait(lambda: chat.at_prompt and SAME in " ".join(chat.text.split()), ANSWER)
    chat.quiet()
    sound(chat)


def test_what_is_typed_while_the_program_starts_is_sent(state: dict[str, str]) -> None:
    terminal = Terminal(environ=state)
    terminal.enter("/slow 10\r/exit")
    assert (terminal.end(), "slow = 10" in terminal.raw) == (0, True)


def test_ctrl_z_puts_nothing_into_the_line(chat: Terminal) -> None:
    chat.enter("/slow 1", until="slow = 1", seconds=20)
    answered(chat, "What is ice?\r\x1a")
    chat.type("\x1ax", until="› x", seconds=20)
    chat.type("\x03")


def test_type_ahead_is_not_lost(chat: Terminal) -> None:
    chat.enter("/slow 20", until="slow = 20", seconds=20)
    chat.enter("What is snow?", until=lambda: FIRST in chat.raw, seconds=ANSWER)
    chat.wait(lambda: bool(re.search(r"[1-9](/| of )[0-9]+ tok", chat.text)), ANSWER)
    chat.type("typed early", until=lambda: "› typed early" in chat.text, seconds=ANSWER)
    sound(chat)
    chat.type("\x03")
    chat.quiet()


def test_history_is_kept_and_ctrl_d_leaves(chat: Terminal, state: dict[str, str]) -> None:
    chat.type("\x1b[A", until="› What is snow?", seconds=10)
    chat.type("\x03")
    chat.quiet()
    chat.type("\x04")
    assert chat.end() == 0
    assert not chat.screen.cursor.hidden
    history = Path(state["XDG_STATE_HOME"]) / "speculative-console" / "history"
    assert "What is snow?" in history.read_text(encoding="utf-8")
    assert history.stat().st_mode & 0o077 == 0


def test_no_color_has_no_styles_and_a_second_ctrl_c_leaves_with_130(state: dict[str, str]) -> None:
    terminal = Terminal(columns=60, environ={**state, "NO_COLOR": "1", "SPEC_MAX_NEW_TOKENS": "300"})
    terminal.wait("SmolLM2", READY)
    before = terminal.mark()
    terminal.enter(
        "Tell me a story.", until=lambda: bool(re.search(r"[4-9] of 300 tok", terminal.text)), seconds=ANSWER
    )
    drawn = terminal.raw[before:].partition("\x1b[?25l")[2]
    assert "autoregressive" in drawn
    assert not COLOUR.search(drawn)
    assert terminal.screen.cursor.hidden
    terminal.signal()
    terminal.signal()  # while the first one is being heeded
    time.sleep(0.2)
    terminal.interrupt()  # or soon afterwards, at the prompt
    for _ in range(40):  # and again and again while it leaves: neither a traceback nor another exit code
        if terminal.child.isalive():
            terminal.signal()
            terminal.read()
    assert terminal.end() == 130
    assert "Traceback" not in terminal.raw
    assert not terminal.screen.cursor.hidden


def test_output_to_a_file_holds_the_answer_and_no_escapes(state: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    command = f"{sys.executable} {ROOT / 'infer.py'} --max-new-tokens 6 > {out}"
    environ: Any = {**os.environ, **state, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    child = pexpect.spawn("/bin/sh", ["-c", command], env=environ, encoding="utf-8")
    child.expect("›", timeout=30)
    child.send("What is rain?\r")
    deadline = time.monotonic() + READY
    while SAME not in (out.read_text(encoding="utf-8") if out.exists() else ""):
        assert time.monotonic() < deadline, out.read_text(encoding="utf-8")
        with pytest.raises(pexpect.TIMEOUT):
            child.expect("never", timeout=0.2)
    child.send("\x04")
    child.expect(pexpect.EOF, timeout=30)
    text = out.read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "autoregressive" in text
