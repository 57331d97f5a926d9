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


def test_completion_offers_commands_values_and_names() -> None:
    assert offered("/ga") == ["/gamma"]
    assert offered("/top") == ["/top_p", "/top_k"]
    assert len(offered("/")) == len(COMMANDS)
    assert offered("/view s") == ["/view side", "/view stack"]
    assert offered("/set palette=") == ["/set palette=default", "/set palette=cb"]
    assert offered("/seed r") == ["/seed random"]
    assert offered("/pair s") == ["/pair smollm2"]
    assert offered("/drafter n") == ["/drafter ngram", "/drafter none"]
    assert offered("/help vie") == ["/help view"]
    assert offered("/help /vie") == ["/help /view"]
    assert offered("/stats s") == ["/stats session"]
    assert offered("/system c") == ["/system clear"]


def test_completion_goes_word_by_word_through_set_and_compare() -> None:
    assert offered("/set gam") == ["/set gamma="]
    assert offered("/set gamma=8 view=si") == ["/set gamma=8 view=side"]
    assert offered("/set compare=ar,n") == ["/set compare=ar,ngram"]
    assert offered("/compare ar,") == [f"/compare ar,{lane}" for lane in LANES if lane != "ar"]
    assert offered("/reset gamma top_") == ["/reset gamma top_p", "/reset gamma top_k"]


def test_completion_looks_only_at_what_stands_before_the_cursor() -> None:
    assert offered("/ga 8", cursor=3) == ["/gamma 8"]
    assert offered("  /ga") == ["  /gamma"]


def test_completion_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my chats").mkdir()
    for name in ("a.json", "b.txt", "c.html", "d.pdf", ".hidden.json", "my chats/d.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert offered("/save ") == ["/save a.json", "/save b.txt", "/save c.html", "/save my chats/"]
    assert offered("/load ") == ["/load a.json", "/load my chats/"]
    assert offered("/save my chats/") == ["/save my chats/d.json"]
    assert offered("/save .") == ["/save .hidden.json"]
    assert offered("/save nowhere/") == []
    assert offered("/save a\x00b/") == []
    assert offered("/drafter my") == ["/drafter my chats/"]


def test_every_completion_of_a_value_is_accepted() -> None:
    for command in (command for command in TABLE if command.setting and command.complete):
        for line in offered(f"{command.name} "):
            console = ScriptedConsole()
            dispatch(line, console, COMMANDS)
            assert not any(text.startswith("error") for text in console.lines), line
