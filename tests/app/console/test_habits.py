"""The console as people expect one: a welcome, a first question by Tab, long output in a pager, familiar words; on 24
rows of every width. One process serves many checks, in order.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.console.slash_commands import COMMANDS, TABLE, completions, dispatch, help_names, help_page
from app.console.state import ConsoleState
from app.prompts.questions import FIRST_QUESTION
from tests.support.screen import Terminal
from tests.support.scripted import run_lines
from utils.visible import visible

pytestmark = pytest.mark.slow

WIDTHS = (60, 80, 100, 140)
LOADED = ANSWER = 180.0  # seconds that a busy machine may take
LIVE = re.compile(r"^spec accepted …?[▁▂▃▄▅▆▇█·]+(  tok/s [▁-█]+  AR [▁-█]+  peak \d+)?$", re.MULTILINE)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    environ = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "SPEC_MAX_NEW_TOKENS": "48", "PAGER": "less"}
    environ["SPEC_GAMMA"] = "4"  # under auto a busy machine may draft nothing
    terminal = Terminal(columns=100, rows=24, environ=environ, warm=True)
    yield terminal
    terminal.child.close(force=True)


def entered(terminal: Terminal, line: str) -> str:
    """What the screen shows below a line when the prompt has come back."""
    terminal.enter(line, until=lambda: line[:40] in terminal.text and terminal.at_prompt, seconds=ANSWER)
    terminal.quiet()
    return terminal.text.rpartition(f"› {line[:40]}")[2]


def ask_first(terminal: Terminal) -> None:
    """The first question in a conversation that was cleared."""
    terminal.enter("/clear", until="conversation cleared", seconds=20)
    terminal.quiet()
    terminal.enter(
        FIRST_QUESTION, until=lambda: terminal.at_prompt and "cut at 48 tokens" in terminal.text, seconds=ANSWER
    )
    terminal.quiet()


def test_two_lines_say_what_is_shown_and_tab_brings_a_first_question(chat: Terminal) -> None:
    chat.wait(lambda: chat.at_prompt, LOADED)
    assert "Two panes show each answer: plainly, and with drafts.\nTab: a first question. /help: the" in chat.text
    chat.type("\t", until=FIRST_QUESTION[:60], seconds=20)
    chat.type("\x03", until="SmolLM2-135M-Instruct ←", seconds=LOADED)


@pytest.mark.parametrize("columns", WIDTHS)
def test_coloured_panes_and_the_live_line_stay_in_view_on_24_rows(chat: Terminal, columns: int) -> None:
    chat.resize(columns, 24)
    chat.type("\x0c")  # what the old width left is not ours to judge
    chat.quiet()
    ask_first(chat)
    (live,) = LIVE.finditer(chat.text)
    assert ("  AR " in live[0]) == (columns >= 60)
    border = max(row for row, line in enumerate(chat.lines) if line.startswith("└") and "tok/s ─┘" in line)
    assert any(  # accepted drafts above it
        cell.fg in ("green", "00af5f") and cell.data.isalnum()
        for row in range(border)
        for cell in chat.screen.buffer[row].values()
    )
    assert "TTFT" in chat.text
    assert "rejected" in chat.text
    assert all(len(line) <= columns for line in chat.lines)


@pytest.mark.parametrize(
    ("columns", "question"),
    [(60, "Why is the sky blue?"), pytest.param(140, "What is a poem?", marks=pytest.mark.exhaustive)],
)
def test_plots_heat_and_a_simulated_lane_at_the_least_and_the_largest_width(
    chat: Terminal, columns: int, question: str
) -> None:
    chat.resize(columns, 45)
    chat.type("\x0c")
    chat.quiet()
    for line, shown in [
        (question, "spec accepted"),
        ("/plot ranks", "in the drafter's list, after"),
        ("/plot time", "verify"),
        ("/heat", "perplexity"),
        ("/compare ar,oracle:.8:c=.1", "compare = ar,oracle:.8:c=.1"),
        ("/regen", "(simulated), identical by construction"),
        ("/plot gamma", "theory 1.00x"),
        ("/compare ar,spec", "compare = ar,spec"),
    ]:
        after = " ".join(entered(chat, line).split())
        assert shown in after, line
        assert "error" not in after
        assert all(len(text) <= columns for text in chat.lines)
    chat.resize(columns, 24)


def test_familiar_commands_and_the_pager(chat: Terminal, tmp_path: Path) -> None:
    columns = 60
    chat.resize(columns, 24)
    chat.type("\x0c")
    chat.quiet()
    ask_first(chat)
    for line, shown in [
        ("/history", "def fibonacci"),
        ("/render off", "```python def fibonacci"),
        ("/render on", "render = on"),
        ("/model", "pair = smollm2 (loaded); there are"),
        (f"/save {tmp_path}/a.json", "saved 1 turn"),
        (f"/load {tmp_path}/a.json", "loaded 1 turn"),
        ("/?", TABLE[-1].name),
        ("/help", "//text sends a line"),
    ]:
        after = " ".join(entered(chat, line).split())
        assert shown in after, line
        assert ("```" in after) == (line == "/render off")
        assert all(len(text) <= columns for text in chat.lines)
    if shutil.which("less"):
        chat.enter("/set", until=lambda: "Decoding:" in chat.text and not chat.at_prompt, seconds=20)
        chat.quiet()
        assert "Output:" not in chat.text
        chat.type("q", until=lambda: chat.at_prompt, seconds=20)


def test_quit_leaves_without_a_slash(chat: Terminal) -> None:
    chat.enter("quit")
    assert chat.end() == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_the_names_of_all_commands_fit_24_rows(width: int) -> None:
    assert len(TABLE) <= 42
    text = help_names(TABLE, width)
    assert len(text.splitlines()) <= 20
    assert all(len(line) <= width for line in text.splitlines())
    assert all(command.name in text.split() for command in TABLE)


def test_help_all_has_a_line_for_each_command(catalogue: Path) -> None:
    assert help_page(TABLE) in run_lines(catalogue, "/help all").text


@pytest.mark.parametrize("word", ["exit", "quit", "  Exit "])
def test_a_lone_word_leaves_and_in_a_sentence_it_is_a_message(catalogue: Path, word: str) -> None:

    def sent(state: ConsoleState) -> None:
        assert dispatch("exit the room", state, COMMANDS) == "exit the room"

    ran = run_lines(catalogue, sent, word, "never read")
    assert ran.state.leaving
    assert "never read" not in ran.text


def test_history_and_load_show_the_chat(catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_lines(catalogue, "/history", "one", "two", "/history", "/save a.json", "/clear", "/load a.json")
    assert ran.errors == ["error: no message yet"]
    first, second = (visible(turn.text) for turn in ran.state.said().turns)
    shown = "\n".join(line.rstrip() for line in ran.after("/history").splitlines())
    assert shown.startswith("› one\n")
    assert shown.count("› ") == 2
    words = " ".join(shown.split())
    assert " ".join(f"› one {first} › two {second}".split()) == words
    assert words in " ".join(ran.after("/load a.json").split())


def test_tab_offers_a_first_question_only_before_the_first_message(catalogue: Path) -> None:
    offered: list[list[str]] = []

    def look(state: ConsoleState) -> None:
        offered.append([each.text for each in completions("", state)])

    run_lines(catalogue, look, "one", look)
    assert offered == [[FIRST_QUESTION], []]
