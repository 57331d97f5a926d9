"""/load takes back what /save wrote; the exported pages hold the chat, load nothing and nothing in them is alive."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from app.chat.conversation import Turn
from app.chat.page import PageAnswer, page
from app.chat.saved import answered_of, picture, read_chat
from app.settings.table import Settings
from tests.support.scripted import Ran, catalogue_of, run_lines
from tests.support.tiny import TinyPair, tiny_model, tiny_pair, tiny_tokenizer

HOSTILE = (
    '<script>alert(1)</script> <img src=x onerror=y> [red]markup[/red] --> ]]> </code></pre> \x1b[31mred &amp; "\u202e'
)
HEADINGS = "# heading\n```\n`````\n~~~~\n<b>bold</b>\n[link](http://a.b)\n    - list\n***"


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, and `other` whose tokenizer has other ids."""
    folder = tmp_path_factory.mktemp("chats")
    tiny = tiny_pair(folder / "tiny", stop=False)
    other = TinyPair(folder / "other" / "target", folder / "other" / "drafter")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([" entirely", " different"])
    for path in (other.target, other.drafter):
        model = tiny_model(5)
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return catalogue_of(folder, {"tiny": tiny, "other": other})


@pytest.fixture(scope="module")
def saved(catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    folder = tmp_path_factory.mktemp("saved")
    files = [f"/save {folder / 'chat'}{ending}" for ending in (".json", ".html", ".svg", ".txt")]
    ran = run_lines(
        catalogue, "/system Be brief.", "one", "/continue", HOSTILE, *files, "/trace", "three", settings={"log_top": 20}
    )
    assert not ran.errors
    return folder / "chat", ran


# -- /load ----------------------------------------------------------------------------------------


def test_a_loaded_chat_is_the_saved_one_and_goes_on_by_its_ids(
    catalogue: Path, saved: tuple[Path, Ran], tmp_path: Path
) -> None:
    chat, before = saved
    file = chat.with_suffix(".json")
    ran = run_lines(
        catalogue,
        f"/load {file}",
        f"/save {tmp_path}/again.json",
        "/stats",
        "/trace",
        "/plot gamma",
        f"/save {tmp_path}/again.html",
        "three",
    )
    assert ran.errors == ["error: /plot gamma needs an answer of this run: the last one was loaded"]
    assert f"loaded 2 turns from {file}, system = Be brief." in ran.text.replace("\n", "")
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()
    assert (tmp_path / "again.html").read_bytes() == chat.with_suffix(".html").read_bytes()
    assert ran.after("/trace") == before.after("/trace")
    assert "12 tok" in ran.after("/stats")
    turns, known = ran.state.chat.turns, before.state.chat.turns
    assert [(turn.prompt, turn.answer) for turn in turns] == [(turn.prompt, turn.answer) for turn in known]


def test_a_chat_of_another_tokenizer_goes_on_from_its_texts(catalogue: Path, saved: tuple[Path, Ran]) -> None:
    chat, before = saved
    ran = run_lines(
        catalogue, "/pair other", "hi", f"/load {chat}.json", "/trace", "/stats", "/stats session", "/regen"
    )
    assert "made with another tokenizer: the conversation continues from its texts" in " ".join(ran.text.split())
    assert ran.errors == ["error: the last answer was loaded without its figures"] * 2
    assert "1 answer" in ran.after("/stats session")
    turns, known = ran.state.chat.turns, before.state.chat.turns
    assert [turn.user for turn in turns] == [turn.user for turn in known][:2]
    assert turns[0].prompt != known[0].prompt or turns[0].answer != known[0].answer
    assert turns[0].text == known[0].text


def spoilt(told: Any, keys: list[Any], value: Any) -> str:
    """The saved chat with this value in the first lane of its first turn."""
    told = json.loads(json.dumps(told))
    place = told["turns"][0]["decodings"][0]["lanes"][0]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return json.dumps(told)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["prompt_n"], "x"),
        (["events", -2, "drafted"], 3),
        (["events", -2, "gamma"], 10**9),
        (["events", -2, "verify_s"], float("nan")),
        (["events", -2, "calls", 0, 2], float("inf")),
        (["events", -2, "path"], [7]),
        (["events", -2, "parents"], [5]),
        (["events", -2, "token"], "x"),
        (["events", -2, "event"], "leap"),
    ],
)
def test_a_chat_whose_figures_no_run_can_have_is_loaded_without_them(
    keys: list[Any], value: Any, catalogue: Path, saved: tuple[Path, Ran], tmp_path: Path
) -> None:
    told = json.loads(Path(f"{saved[0]}.json").read_text())
    file = tmp_path / "spoilt.json"
    file.write_text(spoilt(told, keys, value))
    chat = read_chat(file)
    assert answered_of(chat.turns[0], saved[1].state.chat.text) == []
    assert len(answered_of(chat.turns[1], saved[1].state.chat.text)) == 1


def test_nothing_in_a_loaded_chat_is_obeyed_by_the_terminal(
    catalogue: Path, saved: tuple[Path, Ran], tmp_path: Path
) -> None:
    text = Path(f"{saved[0]}.json").read_text()
    text = text.replace('"name": "spec"', '"name": "\\u001b[31m"')
    told = {**json.loads(text), "system": "x\x1b]0;pwn\x07"}
    for turn in told["turns"]:
        for decoding in turn["decodings"]:
            decoding["models"]["where"] = "\x1b[2J"
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(told))
    looks = ["/stats", "/stats session", "/trace 1", "/plot time", "/set", "/system", "/set system"]
    ran = run_lines(catalogue, f"/load {file}", *looks, "one", "/stats", "/gamma \x1b[31m")
    assert not set(ran.text.split("<<< /gamma")[0]) & {"\x1b", "\x07", "\x9b"}
    assert "\x1b" not in ran.errors[-1]
    assert "␛]0;pwn␇" in ran.after("/system")


def test_one_damaged_answer_leaves_the_pages_of_a_chat_whole(
    catalogue: Path, saved: tuple[Path, Ran], tmp_path: Path
) -> None:
    told = json.loads(Path(f"{saved[0]}.json").read_text())
    file = tmp_path / "spoilt.json"
    file.write_text(spoilt(told, ["events", -2, "drafted"], 3))
    assert not run_lines(catalogue, f"/load {file}", "/stats", f"/save {tmp_path}/a.html").errors
    assert (tmp_path / "a.html").read_text().count("the drafts and figures of this answer are not there") == 1


def test_what_cannot_be_loaded_is_one_line_and_changes_nothing(
    catalogue: Path, saved: tuple[Path, Ran], tmp_path: Path
) -> None:
    told = json.loads(Path(f"{saved[0]}.json").read_text())
    wrong: dict[str, Any] = {
        "half.json": Path(f"{saved[0]}.json").read_text()[:900],
        "deep.json": "[" * 100_000,
        "binary.json": "\x00\x01",
        "list.json": "[1]",
        "foreign.json": '{"messages": []}',
        "newer.json": json.dumps({**told, "version": 9}),
        "empty.json": json.dumps({**told, "turns": []}),
        "typed.json": json.dumps({**told, "turns": [{**told["turns"][0], "answer_ids": "x"}]}),
        "reason.json": json.dumps({**told, "turns": [{**told["turns"][0], "reason": "bored"}]}),
    }
    for name, text in wrong.items():
        (tmp_path / name).write_text(text)
    names = [*wrong, "missing.json"]
    kept: list[Any] = []

    def look(actions: Any) -> None:
        kept.append((list(actions.chat.turns), actions.settings, actions.latest))

    ran = run_lines(catalogue, "one", look, *(f"/load {tmp_path / name}" for name in names), look, "/trace")
    assert len(ran.errors) == len(names)
    assert " ".join(ran.text.split()).count("(the conversation is unchanged)") == len(names)
    assert kept[0] == kept[1]


def test_ids_that_say_something_else_here_are_not_trusted(
    catalogue: Path, saved: tuple[Path, Ran], tmp_path: Path
) -> None:
    told = json.loads(Path(f"{saved[0]}.json").read_text())
    told["turns"][0]["answer_ids"][0] = 10**9
    del told["tokenizer"]
    file = tmp_path / "huge.json"
    file.write_text(json.dumps(told))
    ran = run_lines(catalogue, f"/load {file}", "two")
    assert "another tokenizer" in ran.text
    assert max(ran.state.chat.ids) < 300
    assert not ran.errors


# -- pages ----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


SEEN = '<script>alert(1)</script> <img src=x onerror=y> [red]markup[/red] --> ]]> </code></pre> ␛[31mred &amp; "'


def test_the_html_page_is_inert_and_complete(saved: tuple[Path, Ran]) -> None:
    text = Path(f"{saved[0]}.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.isdisjoint({"img", "b", "a", "link", "iframe", "object"})
    assert not {name for name in page.attributes if name.startswith("on")} | set(page.attributes) & {"src", "href"}
    assert "url(" not in text
    assert "http:" not in text.replace("(http://a.b)", "")
    assert "https:" not in text
    assert "\x1b" not in text
    assert SEEN in " ".join(page.text.split())
    assert [
        told
        for told in ("target ← drafter", "γ 4", "tok/s", "accepted", "rejected", "from the target", "same output")
        if told not in page.text
    ] == []
    assert {"rejected", "target"} <= page.attributes["class"]


def test_the_svg_is_inert_and_complete(saved: tuple[Path, Ran]) -> None:
    text = Path(f"{saved[0]}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names <= {"svg", "style", "defs", "clipPath", "rect", "g", "text", "circle", "path"}
    assert re.findall(r"https?:[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert "@font-face" not in text
    shown = "".join(element.text or "" for element in root.iter() if element.tag.endswith("}text")).replace("\xa0", " ")
    assert "<script>alert(1)</script> <img src=x onerror=y> [red]markup[/red]" in shown
    assert [told for told in ("target ← drafter", "tok/s", "from the target", "same output") if told not in shown] == []


def test_the_pictures_of_the_readme_load_nothing() -> None:
    text = (Path(__file__).parents[3] / "docs" / "screen.svg").read_text(encoding="utf-8")
    assert re.findall(r"https?:[^\"' ]*", text.replace("https://www.textualize.io", "")) == [
        "http://www.w3.org/2000/svg"
    ]


@pytest.mark.parametrize(
    "text", [HOSTILE, HEADINGS, "".join(map(chr, range(0x20))), "\ud800 \ufffe \uffff \x85 \u2028", ""]
)
def test_any_text_is_a_whole_page(text: str) -> None:
    turn = Turn(text, (1,), (2,), text, "eos")
    ElementTree.fromstring(picture([(turn, ())], Settings()).encode("utf-8", "replace"))
    made = page([PageAnswer(turn.user, turn.text)])
    assert Page(made).tags.isdisjoint({"img", "b", "a"})
    assert made.count("<script") == 2
    made.encode()
