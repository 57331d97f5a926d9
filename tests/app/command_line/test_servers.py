"""`run` and `bench` with a server among the lanes: what is sent, and the exit codes of whole and cut answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.command_line.main import main
from tests.support.scripted_server import LAST, Reply, ScriptedOllama, ScriptedServer, chunk, line, said
from tests.support.tiny import TinyPair, write_prompts

SHAPE = {"context": 300}


def reply(reply: Reply, body: dict[str, Any]) -> None:
    """Says back the last message; breaks off, or lets a filter end it, if that is its text."""
    last = body["messages"][-1]["content"]
    if last == "cut":
        reply.events([chunk("so "), chunk("far")], done=False)
    else:
        reply.events(said("w1 ", *last.split(" "), finish="content_filter" if last == "filtered" else "stop"))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(reply) as server:
        yield server


@pytest.mark.parametrize(
    ("prompt", "code", "line"),
    [("whole", 0, ""), ("cut", 1, "closed the connection before"), ("filtered", 1, "ended it: content_filter")],
)
@pytest.mark.parametrize("flag", ["--ascii", "--quiet", "--json"])
def test_a_cut_answer_exits_with_1_and_says_why(
    server: ScriptedServer, prompt: str, code: int, line: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", prompt, "--target", server.url, flag]) == code
    out, err = capsys.readouterr()
    assert line in err
    if flag == "--json":
        assert line in json.loads(out)["results"][0]["report"]["problem"]
    else:
        assert out == {"whole": "w1 whole\n", "cut": "so far\n", "filtered": "w1 filtered\n"}[prompt]


@pytest.mark.parametrize("words", ["--compare URL,ar", "--compare URL,ar --json", "--compare URL --samples 2"])
def test_the_problem_of_every_lane_is_said_once(
    server: ScriptedServer, pair: TinyPair, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*f"run cut --temperature 1 {words}".replace("URL", server.url).split(), *pair.flags()]) == 1
    assert capsys.readouterr().err.count("closed the connection before") == 1


def bench(pair: TinyPair, server: ScriptedServer, folder: Path, *turns: str) -> tuple[int, Path]:
    prompts, out = write_prompts(folder / "p.jsonl", [{"turns": [*turns]}]), folder / "out.json"
    words = ["--methods", f"ar,{server.url}", "--prompts", str(prompts), "--out", str(out)]
    return main(["bench", *words, "--repeat", "1", "--max-new-tokens", "4", "--quiet", *pair.flags()]), out


def test_bench_sends_a_server_the_chat_and_keeps_its_text(
    server: ScriptedServer, pair: TinyPair, tmp_path: Path
) -> None:
    code, out = bench(pair, server, tmp_path, "one two", "three")
    assert code == 0
    chats = [body["messages"] for path, _, body in server.requests if "chat" in path][-2:]
    assert [message["content"] for chat in chats for message in chat if message["role"] == "user"] == [
        *["one two"],
        *["one two", "three"],
    ]
    results = [prompt["results"] for prompt in json.loads(out.read_text())["prompts"]]
    assert [rows[-1]["text"] for rows in results] == ["w1 onetwo", "w1 three"]


VLLM = {"speculative_decoding": {"num_draft_tokens": 12, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}}


@pytest.fixture
def drafting() -> Iterator[ScriptedServer]:
    *pieces, last = said("w1 ", "w2", tokens=10)
    with ScriptedServer([*pieces, {**last, "metrics": VLLM}], owner="sglang") as server:
        yield server


def test_a_servers_figures_of_its_drafts_are_shown_as_its_own(
    drafting: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hi", "--target", drafting.url]) == 0
    assert "by the server:  accepted 6/12 (50%)  3.00 tok/pass over 3 passes" in capsys.readouterr().err
    assert main(["run", "hi", "--target", drafting.url, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["report"] == {
        **{
            "tokens": 10,
            "prompt_tokens": 7,
            "drafted": 12,
            "accepted": 6,
            "passes": 3,
            "rate": None,
            "load_s": None,
            "problem": "",
        }
    }
    assert (result["draft_n"], result["acceptance_rate"]) == (0, None)  # ours: nothing was drafted here
    asked = [body for path, _, body in drafting.requests if "chat" in path]
    assert [body["return_spec_tokens_details"] for body in asked] == [True, True]  # one request an answer


def test_bench_says_a_servers_figures_of_its_drafts_as_its_own(
    drafting: ScriptedServer, pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = bench(pair, drafting, tmp_path, "one", "two")
    assert code == 0
    line = f"{drafting.url}, by the server: accepted 12/24 (50%), 3.00 tok/pass over 6 passes"
    assert line in capsys.readouterr().out.split("\n")
    assert [row["reported"].get("accepted") for row in json.loads(out.read_text())["summary"]] == [None, 12]
    report = tmp_path / "page.html"
    assert main(["bench", "--from", str(out), "--report", str(report), "--quiet"]) == 0
    assert f"<p>{line}.</p>" in report.read_text(encoding="utf-8")


def test_a_server_that_breaks_off_ends_bench_with_1_and_keeps_what_was_measured(
    server: ScriptedServer, pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = bench(pair, server, tmp_path, "one two", "cut")
    assert code == 1
    assert "before the answer's end after 2 answers: the same command resumes the run" in capsys.readouterr().err
    data = json.loads(out.read_text())
    assert (data["complete"], len(data["prompts"])) == (False, 1)


def test_ollama_in_run_gives_log_probabilities_and_cannot_verify_drafts(
    pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    with ScriptedOllama([line("x", logprobs=[entry]), LAST]) as scripted:
        assert main(["run", "hi", "--target", scripted.url, "--json", "--logprobs", "2"]) == 0
        (result,), body = json.loads(capsys.readouterr().out)["results"], scripted.requests[-1][2]
        assert main(["run", "x", "--target", scripted.url, "--tokenizer", str(pair.target)]) == 2
    assert (result["logprobs"]["content"], result["report"]["load_s"]) == ([entry], 1.334875)
    assert (body["model"], body["top_logprobs"]) == ("llama3.2:latest", 2)
    assert f"{scripted.address} (Ollama) gives no log-probabilities of a prompt's tokens" in capsys.readouterr().err
