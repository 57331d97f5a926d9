"""Servers as targets and as lanes, in a console over scripted ones: chats, comparisons, logs, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.lanes.pairing import choose_pair
from app.replay.session_log import read_log
from app.settings.table import ModelOptions
from tests.support.refusals import refused
from tests.support.scripted import Ran, run_lines
from tests.support.scripted_server import LAST, Reply, ScriptedOllama, ScriptedServer, chunk, line, said
from tests.support.tiny import tiny_pair
from utils.errors import UsageError


def echo(reply: Reply, body: dict[str, Any]) -> None:
    """Says how many messages there are and what the last one was; breaks off in mid answer if it was `cut`."""
    last = body["messages"][-1]["content"]
    if last == "nothing":
        reply.events(said())
    elif last == "refuse":
        reply.json({"error": {"message": "not that"}}, 400)
    elif last == "cut":
        reply.events([chunk("so "), chunk("far")], done=False)
    else:
        reply.events(said(f"{len(body['messages'])}: ", *last.split(" ")))


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    with ScriptedServer(echo) as one, ScriptedServer(echo) as other:
        yield one, other


@pytest.fixture(scope="module")
def catalogue(servers: tuple[ScriptedServer, ScriptedServer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    pair = tiny_pair(folder / "tiny", stop=False)
    file = folder / "models.yaml"
    served = [f"  {name}: {{target: {{url: '{server.url}'}}}}" for name, server in zip("ab", servers, strict=True)]
    local = f"  local: {{target: {{path: {pair.target}}}, drafter: ngram}}"
    file.write_text("\n".join(["default: a", "pairs:", *served, local]) + "\n", encoding="utf-8")
    return file


def run(catalogue: Path, *lines: Any, pair: str = "a", **settings: Any) -> Ran:
    compare = {"a": ("server",), "local": ("ar", "spec")}[pair]
    first = [] if pair == "a" else [f"/pair {pair}"]
    return run_lines(catalogue, *first, *lines, settings={"compare": compare, "max_new_tokens": 6, **settings})


def test_a_chat_of_three_turns_with_a_server(catalogue: Path, servers: Any) -> None:
    ran = run(catalogue, "/system be brief", "one", "two words", "three", "/stats session", "/trace", "/info")
    assert ran.errors == []
    assert [turn.text for turn in ran.state.chat.turns] == ["2: one", "4: twowords", "6: three"]
    sent = [body for path, _, body in servers[0].requests if "chat" in path][-1]
    assert [message["role"] for message in sent["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert "server  3 tok" in ran.after("two words")
    assert "tok/s" in ran.after("two words")
    assert "gamma" not in ran.after("two words")
    assert f"served at {servers[0].address}" in ran.after("/info")


def test_the_settings_that_the_protocol_has_are_sent(catalogue: Path, servers: Any) -> None:
    run(catalogue, "/set temperature=0.5 top_p=0.9 seed=3", "hello")
    sent = [body for path, _, body in servers[0].requests if "chat" in path][-1]
    wanted = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 6}
    assert {name: sent[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        ("vllm", {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.1}),
        ("llamacpp", {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.1}),
    ],
)
def test_an_engine_that_has_a_field_for_a_setting_gets_it(owner: str, fields: dict[str, float], tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    with ScriptedServer(echo, owner=owner) as server:
        file.write_text(f"pairs:\n  a: {{target: {{url: '{server.url}'}}}}\n", encoding="utf-8")
        run(file, "hello", repetition_penalty=1.1)
        sent = next(body for path, _, body in server.requests if "chat" in path)
    assert {name: sent[name] for name in fields} == fields


def test_two_servers_are_compared_by_their_texts(catalogue: Path, servers: Any) -> None:
    ran = run(catalogue, f"/compare server,{servers[1].url}", "hello there")
    assert ran.errors == []
    assert f"{servers[1].address}  3 tok" in ran.after("hello there")
    assert "same output" in ran.after("hello there")
    assert ran.state.chat.turns[0].text == "1: hellothere"


def test_a_server_beside_the_local_pair(catalogue: Path, servers: Any) -> None:
    ran = run(catalogue, f"/compare ar,{servers[1].url}", "w1 w2", "/compare ar,spec", "w3", pair="local")
    assert ran.errors == []
    assert "the texts part at character 1" in ran.after("w1 w2")
    first, second = ran.state.chat.turns
    assert first.text == ran.state.chat.text(list(first.answer))
    assert list(second.prompt[: len(first.prompt)]) == list(first.prompt)
    assert "same output" in ran.after("w3")


def test_an_answer_that_breaks_off_stays_with_the_reason(catalogue: Path, servers: Any) -> None:
    ran = run(catalogue, "cut", "next", "nothing")
    assert f"stopped at 2 pieces: {servers[0].address} closed the connection" in ran.after("cut")
    assert "- tok/s" in ran.after("cut")
    assert "no token came: the conversation is unchanged" in ran.after("nothing")
    assert [turn.text for turn in ran.state.chat.turns] == ["so far", "3: next"]


def test_a_refused_message_goes_back_and_the_conversation_stays(catalogue: Path, servers: Any) -> None:
    ran = run(catalogue, "one", "refuse", "two")
    assert ran.errors == [f"error: {servers[0].address} answers 400: not that"]
    assert ran.reader.defaults[2] == "refuse"
    assert [turn.user for turn in ran.state.chat.turns] == ["one", "two"]


def test_a_pair_whose_server_is_absent_is_refused_in_a_line(catalogue: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("pairs:\n  gone: {target: {url: 'http://127.0.0.1:9/v1'}}\n", encoding="utf-8")
    assert "error: gone could not be loaded: no server answers at 127.0.0.1:9" in run(file, "hello").text


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["one", "/compare ar,server"], "answers in text, lanes are server, URL"),
        (["/set top_k=5", "one"], "has no field for top_k"),
        (["one", "/set no_repeat_ngram=2"], "a server has no no_repeat_ngram"),
        (["/drafter ngram"], "is a server: nothing drafts for it here"),
        (["a b c d e f g", "/continue"], "nothing to continue"),
        (["cut", "/continue"], "a server answers whole messages"),
        (["/pair local", "/compare ar,server"], "lane server: the target is no server"),
    ],
)
def test_what_a_server_cannot_do_is_one_line(catalogue: Path, lines: list[str], error: str) -> None:
    ran = run(catalogue, *lines)
    assert len(ran.errors) == 1, ran.text
    assert error in ran.errors[0]


def test_a_log_shows_a_servers_answer_without_the_server(catalogue: Path, tmp_path: Path) -> None:
    log = tmp_path / "session.jsonl"
    ran = run(catalogue, "hello there", record=str(log))
    (answer,) = read_log(log).answers
    (track,), (live,) = answer.over(), ran.state.latest.tracks
    assert (track.text, track.meter.stats) == (live.text, live.meter.stats)


def test_a_saved_chat_goes_on_with_another_server(catalogue: Path, servers: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    run(catalogue, "one", f"/save {file}")
    ran = run(catalogue, "/pair b", f"/load {file}", "two")
    assert [turn.text for turn in ran.state.chat.turns] == ["1: one", "3: two"]
    assert json.loads(file.read_text(encoding="utf-8"))


def test_a_server_is_named_on_the_command_line_with_its_model() -> None:
    pair = choose_pair(ModelOptions(target="http://127.0.0.1:8000/v1", model="m"))
    assert (pair.target.url, pair.target.model, pair.defaults["compare"]) == ("http://127.0.0.1:8000/v1", "m", "server")
    assert pair.defaults == choose_pair(ModelOptions(target="org/name")).defaults | {"compare": "server"}
    refused(choose_pair, ModelOptions(model="m"), match="--model is a server", kind=UsageError)


def test_ollama_chats_beside_a_server_with_openais_protocol(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    with ScriptedOllama([line("x "), line("y"), LAST]) as ollama, ScriptedServer(said("x", "z")) as other:
        file.write_text(f"pairs:\n  a: {{target: {{url: '{ollama.url}'}}}}\n", encoding="utf-8")
        lines = ("one", "/why", f"/compare {other.url},server", "two", "/set top_k=5", "three")
        ran = run_lines(file, *lines, settings={"compare": ("server",)})
    assert "by the server:  62.2 tok/s  1.3 s for loading" in ran.after("one")
    assert "where its time went; by the server: 62.2 tok/s, 1.3 s" in " ".join(ran.after("/why").split())
    assert "the texts part at character 2" in ran.after("two")
    assert ran.errors == [f"error: {other.address} has no field for top_k (now 5)"]  # Ollama's protocol has one
