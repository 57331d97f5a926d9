"""Tab completes commands, values, names and paths, and looks only at what stands before the cursor."""

from pathlib import Path

import pytest

from app.console.slash_commands import COMMANDS, TABLE, completions, dispatch
from app.settings.types import LANES
from tests.app.console.test_slash_commands import ScriptedConsole


def offered(line: str, cursor: int | None = None) -> list[str]:
    """The lines that Tab would make of `line`."""
    at = len(line) if cursor is None else cursor
    return [
        line[: at + each.start_position] + each.text + line[at:] for each in completions(line[:at], ScriptedConsole())
    ]


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("/ga", ["/gamma"]),
        ("  /ga", ["  /gamma"]),
        ("/top", ["/top_p", "/top_k"]),
        ("/view s", ["/view side", "/view stack"]),
        ("/set palette=", ["/set palette=default", "/set palette=cb"]),
        ("/seed r", ["/seed random"]),
        ("/pair s", ["/pair smollm2"]),
        ("/drafter n", ["/drafter ngram", "/drafter none"]),
        ("/help vie", ["/help view"]),
        ("/help /vie", ["/help /view"]),
        ("/stats s", ["/stats session"]),
        ("/system c", ["/system clear"]),
        ("/set gam", ["/set gamma="]),
        ("/set gamma=8 view=si", ["/set gamma=8 view=side"]),
        ("/set compare=ar,n", ["/set compare=ar,ngram"]),
        ("/compare ar,", [f"/compare ar,{lane}" for lane in LANES if lane != "ar"]),
        ("/reset gamma top_", ["/reset gamma top_p", "/reset gamma top_k"]),
    ],
)
def test_completion_offers_commands_values_and_names_word_by_word(line: str, lines: list[str]) -> None:
    assert offered(line) == lines


def test_completion_offers_every_command() -> None:
    assert len(offered("/")) == len(COMMANDS)


def test_completion_looks_only_at_what_stands_before_the_cursor() -> None:
    assert offered("/ga 8", cursor=3) == ["/gamma 8"]


def test_completion_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my chats").mkdir()
    for name in ("a.json", "b.txt", "c.html", "d.pdf", ".hidden.json", "my chats/d.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    expected = {
        "/save ": ["/save a.json", "/save b.txt", "/save c.html", "/save my chats/"],
        "/load ": ["/load a.json", "/load my chats/"],
        "/save my chats/": ["/save my chats/d.json"],
        "/save .": ["/save .hidden.json"],
        "/save nowhere/": [],
        "/save a\x00b/": [],
        "/drafter my": ["/drafter my chats/"],
    }
    assert {line: offered(line) for line in expected} == expected


def test_every_completion_of_a_value_is_accepted() -> None:
    for command in (command for command in TABLE if command.setting and command.complete):
        for line in offered(f"{command.name} "):
            console = ScriptedConsole()
            dispatch(line, console, COMMANDS)
            assert not any(text.startswith("error") for text in console.lines), line
