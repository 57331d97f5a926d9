"""The real console in a real terminal: nothing that is typed, sent or lost takes the chat with it.

For longer than the suite has time for:
`SURVIVAL_SECONDS=600 SURVIVAL_SEED=1 python -m pytest -n 0 -s tests/app/console/test_survival.py -k random_bytes`
"""

import os
import random
import re
import select
import signal
import socket
import time
from pathlib import Path

import pytest

from app.chat.conversation import Turn
from app.chat.saved import read_chat
from app.console.state import ConsoleState
from tests.support.screen import PASTE_OFF, PASTE_ON, ROOT, Terminal
from tests.support.scripted import Line, Ran, run_lines

SHAPE = {"context": 8192}
QUESTIONS = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")

SECONDS = float(os.environ.get("SURVIVAL_SECONDS", "4"))
SEED = int(os.environ.get("SURVIVAL_SEED", str(time.time_ns() % 1_000_000)))
BETWEEN_INTERRUPTS = 6.0  # seconds; two that the console heeds within 2 s mean to leave, and it may be behind
LOADED = 120.0  # seconds that a busy machine may take to import and load
FIRST = "What is a river?"
# The bytes by which a person ends or stops a program on purpose: Ctrl-C (typed apart), Ctrl-D, Ctrl-S, Ctrl-Z, Ctrl-\.
MEANT = b"\x03\x04\x13\x1a\x1c"
COMMANDS = ("/stats", "/trace", "/help", "/nothing", "/load no.json", "/gamma 99", "/set", "/undo x", "//text")
KEYS = (
    b"\x1b[A",
    b"\x1b[B",
    b"\x1bOC",
    b"\x1b[1;5D",
    b"\x1b[3~",
    b"\x1b[H",
    b"\x1bb",
    b"\x1bd",
    b"\x12",
    b"\x1b\x1b[A",
    b"\x13\x11",
    b"\x18\x05",
    b"\x1b9",
)
STRINGS = (b"\x1b]", b"\x1bP", b"\x1bX", b"\x1b^", b"\x1b_", b"\x9d", b"\x90", b"\xc2\x9d")


def chatting(catalogue: Path, state: Path, **environ: str) -> Terminal:
    """A console in which one question was answered."""
    told = {"XDG_STATE_HOME": str(state), "SPEC_MAX_NEW_TOKENS": "12", "EDITOR": "true", **environ}
    terminal = Terminal("--models", str(catalogue), environ=told, warm="HF_ENDPOINT" not in environ)
    terminal.wait("›", LOADED)
    terminal.enter(FIRST, until=lambda: "same output" in terminal.text and terminal.at_prompt, seconds=LOADED)
    return terminal


def typed(noise: random.Random) -> bytes:
    """Something a person, a paste or a broken connection might send."""

    def some(most: int) -> bytes:
        return bytes(byte for byte in noise.randbytes(noise.randint(1, most)) if byte not in MEANT)

    def numbers() -> bytes:
        return b";".join(str(noise.choice((0, 1, 3, 31, 38, 255, 99999))).encode() for _ in range(noise.randint(0, 4)))

    kind = noise.choices(range(9), (25, 25, 10, 10, 8, 10, 4, 3, 5))[0]
    if kind == 0:
        return some(20)
    if kind == 1:  # reports of the mouse and the cursor, colours, modes: what a terminal sends and what it obeys
        begin = noise.choice((b"\x1b[", b"\x1b[", b"\x1b[<", b"\x1b[?", b"\x9b", b"\xc2\x9b", b"\x1b[M", b"\x1b["))
        return begin + numbers() + noise.choice((b"m", b"M", b"R", b"~", b"H", b"h", b"n", b"c", b"", b"$y", b"u"))
    if kind == 2:
        return noise.choice(STRINGS) + some(12) + noise.choice((b"\x07", b"\x1b\\", b"\x9c", b""))
    if kind == 3:
        return noise.choice(KEYS)
    if kind == 4:
        return noise.choice(("river ", "Wörter ", "文字", "🙂", '"""', "\t", "a" * 90)).encode()
    if kind == 5:
        return b"\r"
    if kind == 6:
        end = noise.choice((PASTE_OFF, PASTE_OFF, PASTE_OFF, ""))
        return PASTE_ON.encode() + b"\x1b[31mred\x1b[m\r\n" + some(30) + end.encode()
    if kind == 7:
        return b"\x1b" * noise.randint(1, 5)
    return f"\x15{noise.choice(COMMANDS)}\r".encode()


def press(terminal: Terminal, data: bytes) -> None:
    """Type bytes, as far as the terminal takes them."""
    while data and select.select([], [terminal.child.child_fd], [], 2.0)[1]:
        data = data[os.write(terminal.child.child_fd, data[:64]) :]
        terminal.read(0.0)


def unhurt(terminal: Terminal, file: Path) -> None:
    """The console takes commands, and its chat begins as it began."""
    file.unlink(missing_ok=True)
    end = time.monotonic() + 60
    while not file.exists():
        assert terminal.child.isalive(), terminal.raw[-3000:]
        assert time.monotonic() < end, terminal.text
        terminal.quiet(2.2)
        for keys in (b"\x11\x07\x03", b"\r", b"q", b"\x15"):  # out of a search, a paste, a half line, a pager, its help
            press(terminal, keys)
            terminal.quiet()
        press(terminal, f"/save {file}\r".encode())
        terminal.quiet()
    assert read_chat(file).turns[0].user == FIRST
    for wrong in ("Traceback", "Unhandled exception", "Press ENTER", "internal:", "Exception ignored"):
        assert wrong not in terminal.raw, terminal.raw[max(0, terminal.raw.index(wrong) - 1500) :][:3000]


def test_random_bytes_typed_for_a_while_leave_the_console_and_the_chat_alive(catalogue: Path, tmp_path: Path) -> None:
    print(f"seed {SEED}, {SECONDS:g} s")  # noqa: T201
    noise, count = random.Random(SEED), 0
    terminal = chatting(catalogue, tmp_path, PAGER="cat")  # what bytes do to another program is not ours to mend
    first, later = tmp_path / "first.json", tmp_path / "later.json"
    unhurt(terminal, first)
    end, interrupted, checked = time.monotonic() + SECONDS, time.monotonic(), time.monotonic()
    while time.monotonic() < end:
        count += 1
        press(terminal, typed(noise))
        terminal.read(noise.choice((0.0, 0.0, 0.02, 0.1)))
        assert terminal.child.isalive(), (SEED, count, terminal.raw[-3000:])
        if noise.random() < 0.01:
            terminal.resize(noise.choice((30, 60, 100, 140)), noise.choice((8, 24, 40)))
        if time.monotonic() - interrupted > BETWEEN_INTERRUPTS and noise.random() < 0.05:
            press(terminal, b"\x03")
            interrupted = time.monotonic()
        if time.monotonic() - checked > 20:
            unhurt(terminal, later)
            press(terminal, f"/load {first}\r".encode())  # the context is not to be full for ever
            checked = interrupted = time.monotonic()
            print(f"{count} things typed")  # noqa: T201
    unhurt(terminal, later)
    press(terminal, b"\x04")
    assert terminal.end() == 0


# -- signals --------------------------------------------------------------------------------------


def saved(terminal: Terminal, state: Path) -> Path:
    """The file that the last line names."""
    (file,) = (state / "speculative-console" / "chats").iterdir()
    assert "".join(terminal.text.splitlines()).endswith(f"continue with: /load {file}"), terminal.text
    return file


def loaded(catalogue: Path, file: Path) -> list[Turn]:
    """The turns that /load takes from a file."""
    ran = run_lines(catalogue, f"/load {file}")
    assert "error:" not in ran.text
    assert ran.state.chat is not None
    return ran.state.chat.turns


@pytest.mark.parametrize("moment", ["prompt", "generating", "loading", "/inspect", "/help all"])
def test_the_end_that_a_signal_makes_leaves_the_chat_in_a_file(catalogue: Path, tmp_path: Path, moment: str) -> None:
    hub = socket.create_server(("127.0.0.1", 0))  # takes a request and never answers it
    address = f"http://127.0.0.1:{hub.getsockname()[1]}"
    hub_of = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"} if moment == "loading" else {}
    terminal = chatting(catalogue, tmp_path, **hub_of)
    begun: dict[str, tuple[str, str]] = {
        "prompt": ("half a line", "half a line"),
        "generating": ("/length 4000\rAnd a lake?\r", r"\d\d+ of 4,?000 tok"),
        "loading": ("/drafter nobody/nothing\r", "Ctrl-C calls it off"),
        "/inspect": ("/inspect\r", "q leave"),
        "/help all": ("/help all\r", r"\n:$"),  # in less
    }
    typed, shown = begun[moment]
    terminal.type(typed, until=lambda: bool(re.search(shown, terminal.text)))
    for _ in range(2):  # the second one changes nothing
        os.kill(terminal.child.pid, signal.SIGTERM)
    assert terminal.end() == 143
    hub.close()
    assert not terminal.screen.cursor.hidden
    first, *more = loaded(catalogue, saved(terminal, tmp_path))
    assert (first.user, len(first.answer)) == (FIRST, 12)
    cut = [("And a lake?", "interrupted")] if moment == "generating" else []
    assert [(turn.user, turn.reason) for turn in more] == cut


def test_a_signal_before_anything_was_said_leaves_nothing_and_says_nothing(catalogue: Path, tmp_path: Path) -> None:
    terminal = Terminal("--models", str(catalogue), environ={"XDG_STATE_HOME": str(tmp_path)}, warm=True)
    terminal.wait("›", LOADED)
    os.kill(terminal.child.pid, signal.SIGTERM)
    assert terminal.end() == 143
    assert not (tmp_path / "speculative-console" / "chats").exists()
    assert "saved" not in terminal.text


@pytest.mark.parametrize("keep", ["on", "off"])
def test_only_files_that_the_questions_list_are_written_and_none_of_the_chat_with_keep_off(
    catalogue: Path, tmp_path: Path, keep: str
) -> None:
    unset = {
        **dict.fromkeys(("SPEC_CACHE_DIR", "HF_HOME"), ""),
        **dict.fromkeys(("XDG_STATE_HOME", "XDG_CACHE_HOME"), "" if keep == "on" else "relative"),  # is ignored
    }
    terminal = chatting(catalogue, tmp_path, **unset, HOME=str(tmp_path), SPEC_KERNELS="torch", SPEC_KEEP=keep)
    terminal.enter("/set keep", until=f"keep = {keep}", seconds=20)
    os.kill(terminal.child.pid, signal.SIGTERM)
    assert terminal.end() == 143
    assert ("the conversation was saved" in terminal.text) == (keep == "on")
    rows = [line.split(" | ")[0] for line in QUESTIONS.splitlines() if line.startswith(("| `~/", "| … `"))]
    listed = [name for row in rows for name in re.findall(r"`(?:~/)?([^`*]+)", row)]
    cache, state = ".cache/speculative-console/", ".local/state/speculative-console/"
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    unlisted = {name for name in written if not name.removeprefix(cache).startswith(tuple(listed))}
    assert {name for name in unlisted if not name.endswith(".lock")} == set()
    assert any(name.startswith(state) for name in written) == (keep == "on")
    assert cache + "costs.json" in written


@pytest.mark.parametrize("more", [[], ["And a lake?"]])
def test_a_terminal_that_goes_away_leaves_the_chat_in_a_file(catalogue: Path, tmp_path: Path, more: list[str]) -> None:
    terminal = chatting(catalogue, tmp_path)
    for message in more:
        terminal.type(f"/length 4000\r{message}\r", until=lambda: bool(re.search(r"\d\d+ of 4,?000", terminal.text)))
    os.close(terminal.child.child_fd)  # the system sends SIGHUP, and there is nothing to write to any more
    assert terminal.child.process.wait(60) == 129
    (file,) = (tmp_path / "speculative-console" / "chats").iterdir()
    assert [turn.user for turn in loaded(catalogue, file)] == [FIRST, *more]


# -- ends without a terminal ----------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "speculative-console" / "chats"


def last_line(ran: Ran) -> str:
    return ran.text.splitlines()[-1]


def end_with(number: int) -> Line:
    def kill(state: ConsoleState) -> None:
        signal.raise_signal(number)

    return kill


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_each_signal_has_its_exit_code_and_no_line_is_read_after_it(
    catalogue: Path, chats: Path, number: signal.Signals
) -> None:
    ran = run_lines(catalogue, FIRST, end_with(number), "never read")
    assert chats.is_dir(), ran.text
    (file,) = chats.iterdir()
    assert (ran.code, last_line(ran)) == (128 + number, f"the conversation was saved, continue with: /load {file}")
    assert "never read" not in ran.text
    assert chats.stat().st_mode & 0o077 == 0
    assert [turn.user for turn in loaded(catalogue, file)] == [FIRST]


def test_an_error_that_nobody_expected_leaves_the_chat_in_a_file(catalogue: Path, chats: Path) -> None:
    def break_down(state: ConsoleState) -> None:
        raise ArithmeticError("nobody expected this")

    ran = run_lines(catalogue, FIRST, break_down, "never read")
    (file,) = chats.iterdir()
    assert (ran.code, ran.text.splitlines()[-2]) == (1, "error: internal: ArithmeticError: nobody expected this")
    assert last_line(ran).endswith(f"/load {file}")
    assert [turn.user for turn in loaded(catalogue, file)] == [FIRST]


def test_where_the_state_folder_cannot_be_written_the_reason_is_said(
    catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    ran = run_lines(catalogue, FIRST, end_with(signal.SIGTERM))
    assert ran.code == 143
    assert last_line(ran).startswith("error: the conversation could not be saved: ")


# -- a prompt that fails --------------------------------------------------------------------------


def broken_by(folder: Path, *lines: str) -> dict[str, str]:
    """The environment of a console in which these lines of Python run first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_what_the_prompt_raises_is_one_line_and_the_text_comes_back(catalogue: Path, tmp_path: Path) -> None:
    terminal = chatting(catalogue, tmp_path / "state")
    # prompt_toolkit takes it for a report of the mouse
    terminal.type(
        "The red \x1b[31m", until=lambda: terminal.text.count("› The red") == 2 and terminal.at_prompt, seconds=20
    )
    assert "error: the prompt did not understand these keys (ValueError: " in terminal.text
    assert "Traceback" not in terminal.raw
    assert "Press ENTER" not in terminal.raw
    terminal.enter("river?", until=lambda: terminal.at_prompt and terminal.text.count("same output") == 2)
    os.kill(terminal.child.pid, signal.SIGTERM)
    assert terminal.end() == 143
    assert [turn.user for turn in loaded(catalogue, saved(terminal, tmp_path / "state"))] == [FIRST, "The red river?"]


def test_a_prompt_that_fails_again_and_again_ends_with_the_chat_in_a_file(catalogue: Path, tmp_path: Path) -> None:
    hopeless = (
        "from prompt_toolkit import PromptSession",
        "works = [PromptSession.prompt]",
        "def prompt(self, **more):",
        "    if works: return works.pop()(self, **more)",
        "    raise ArithmeticError('no prompt')",
        "PromptSession.prompt = prompt",
    )
    state = tmp_path / "state"
    terminal = Terminal(
        "--models",
        str(catalogue),
        environ={
            "XDG_STATE_HOME": str(state),
            "SPEC_MAX_NEW_TOKENS": "12",
            **broken_by(tmp_path / "code", *hopeless),
        },
        warm=True,
    )
    terminal.wait("›", LOADED)
    terminal.enter(FIRST)
    assert terminal.end() == 1
    assert terminal.raw.count("ArithmeticError: no prompt") == 10
    assert "Traceback" not in terminal.raw
    assert loaded(catalogue, saved(terminal, state))[0].user == FIRST
