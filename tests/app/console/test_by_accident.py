"""Nothing is deleted, replaced or sent to the model by accident, and an error names its cause."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.chat.saved import read_chat
from app.console.slash_commands import completions
from app.console.state import ConsoleState
from tests.support.screen import PASTE_OFF, PASTE_ON, Terminal
from tests.support.scripted import catalogue_of, run_lines
from tests.support.tiny import tiny_pair

LOADED = 60.0  # seconds that a busy machine may take to import and load
FIRST = "What is a river?"


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accident")
    return catalogue_of(
        folder, {name: tiny_pair(folder / name, stop=False, context=2048) for name in ("tiny", "tiny-ngram")}
    )


@pytest.fixture
def console(catalogue: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens a console in a terminal; it is closed after the test, whatever came of that."""
    opened: list[Terminal] = []

    def open_console(columns: int = 100, replies: bool = True, **environ: str) -> Terminal:
        told = {"XDG_STATE_HOME": str(tmp_path), "SPEC_MAX_NEW_TOKENS": "12", **environ}
        opened.append(Terminal("--models", str(catalogue), columns=columns, environ=told, warm=True))
        if not replies:
            opened[-1].screen.reply = lambda text: None
        opened[-1].wait("›", LOADED)
        return opened[-1]

    yield open_console
    for terminal in opened:
        terminal.child.close(force=True)


def test_keys_and_pastes_delete_and_send_nothing_by_accident(console: Callable[..., Terminal]) -> None:
    terminal = console()

    def entered(text: str, shown: str) -> str:
        """The screen from the line on, once it shows something and the prompt is back."""
        before = terminal.mark()
        terminal.enter(text, until=lambda: shown in terminal.raw[before:] and terminal.at_prompt, seconds=LOADED)
        return terminal.raw[before:]

    def line() -> str:
        terminal.quiet(0.2)
        return terminal.text[terminal.text.rindex("›") :].rpartition("\n")[0].rstrip()  # without the status line

    entered(FIRST, "same output")
    entered("Another one?", "same output")
    for key, shown in (("/", "forget the conversation"), ("\t", "› /clear"), ("\r", "Enter runs it")):
        terminal.type(key, until=shown, seconds=20)
    assert line() == "› /clear"
    assert "conversation cleared" not in terminal.raw
    entered("", "conversation cleared (/undo brings it back)")
    entered("/undo", "2 turns back")

    entered("/undo", "taken back")
    assert line() == "› Another one?"
    assert "TTFT" not in entered("/undo", "taken back")
    assert line() == f"› {FIRST}"
    assert "no message yet" in entered("/undo", "error:")
    terminal.type("\x1b[A\x1b[A")  # /undo is the last line, the replaced one comes before it
    assert line() == f"› {FIRST}"
    terminal.type("\x03")

    entered("/slow 10", "slow = 10")
    right = "\x1b[C"  # a key that is no text, as the terminal's report of its cursor is none
    for pasted in (
        "one\rtwo\rthree\r",
        f"one\rtwo\rthree\r{right}",
        f"{PASTE_ON}one\rtwo\rthree{PASTE_OFF}",
    ):
        before = terminal.mark()
        terminal.enter(
            "A slow answer",
            until=lambda before=before: "shown slowly" in terminal.raw[before:],  # type: ignore[misc]
            seconds=LOADED,
        )
        terminal.type(
            pasted,
            until=lambda before=before: "TTFT" in terminal.raw[before:] and "… three" in terminal.text,  # type: ignore[misc]
            seconds=LOADED,
        )
        assert line() == "› one\n… two\n… three"
        terminal.type("\x03")
    marks = re.findall(r"\x1b\[\?2004[hl]", terminal.raw)
    terminal.type("\x03\x04")
    assert terminal.end() == 0
    assert marks[-1].endswith("h")
    assert re.findall(r"\x1b\[\?2004[hl]", terminal.raw)[-1].endswith("l")  # as the terminal was


def test_ctrl_c_ends_a_paste_whose_end_did_not_come(console: Callable[..., Terminal]) -> None:
    terminal = console()
    terminal.type(f"{PASTE_ON}one\rtwo\r")
    terminal.quiet(0.2)
    terminal.type("\x03")
    terminal.enter("/gamma 3", until="gamma = 3", seconds=20)
    terminal.type("\x1b[A\x1b[A", until="… two", seconds=20)  # the pasted lines are in the history, before the command
    terminal.type("\x03\x04")
    assert terminal.end() == 0


def test_a_dumb_terminal_shows_whole_lines(console: Callable[..., Terminal]) -> None:
    terminal = console(columns=60, TERM="dumb")
    terminal.enter(FIRST, until=lambda: "same output" in terminal.text, seconds=LOADED)
    rows = [row for row in terminal.lines if row.startswith(("┌", "│", "└"))]
    assert rows
    assert {row[-1] for row in rows} <= {"┐", "│", "┘"}
    terminal.type("\x04")
    assert terminal.end() == 0


def test_save_replaces_no_file_that_it_did_not_write_before_it_said_so(catalogue: Path, tmp_path: Path) -> None:
    new, notes = tmp_path / "new.json", tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    held: list[str] = []

    def look(state: ConsoleState) -> None:
        held.append(notes.read_text(encoding="utf-8"))

    save = f"/save {notes}"
    ran = run_lines(catalogue, "hi", f"/save {new}", "more", f"/save {new}", save, look, save, look, width=400)
    assert held[0] == "mine"
    assert "[user]\nhi" in held[1]
    assert [error for error in ran.errors if "is there already" in error] == ran.errors
    assert len(read_chat(new).turns) == 2


def test_load_says_what_it_replaces_and_clear_can_be_taken_back(
    catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_lines(
        catalogue,
        "one",
        "/save chat.json",
        "two",
        "/load chat.json",
        "/clear",
        "/clear",
        "/temperature 1",
        "/undo",
        "/continue",
    )
    assert "loaded 1 turn from chat.json in place of 2 before" in ran.text
    assert ran.errors == []
    assert [turn.user for turn in ran.state.said().turns] == ["one"]
    # Its prompts were another system prompt's.
    assert run_lines(catalogue, "one", "/clear", "/system Be brief.", "/undo").errors == ["error: no message yet"]


def test_tab_offers_only_what_the_pair_can_run(catalogue: Path) -> None:
    offered: dict[str, list[str]] = {}

    def look(state: ConsoleState) -> None:
        for line in ("/compare ", "/set compare=", "/drafter "):
            offered[line] = [found.text.removeprefix("compare=") for found in completions(line, state)]
        assert all(
            state.engine().lane(word, state.settings) for word in (*offered["/compare "], *offered["/set compare="])
        )

    assert run_lines(catalogue, "/pair tiny-ngram", look, "/pair tiny", look).errors == []
    assert "draft" in offered["/compare "]
    assert "glide" not in offered["/compare "]
    assert offered["/drafter "] == ["ngram", "tables", "suffix", "maxgram", "none"]
