"""Several answers as a tree: shared beginnings once, the probabilities of the target itself, and a walk over it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.command_line.main import main
from app.lanes.lane import PairEngine
from app.replay.session_log import read_log
from app.screen.live import sampled, tokens_of
from app.screen.palette import Look
from app.screen.samples import Branch, SampleTree, tree_of
from app.settings.table import Settings
from tests.support.refusals import refused
from tests.support.screen import Terminal
from tests.support.scripted import catalogue_of, run_lines
from tests.support.scripted_server import Reply, ScriptedServer, chunk, usage
from tests.support.tiny import TinyPair

SETTINGS = Settings(temperature=0.3, max_new_tokens=5)


def test_the_tree_holds_every_answer_with_the_targets_own_probability(engine: PairEngine, pair: TinyPair) -> None:
    prompt = [5, 6, 7]

    def decode(ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    tracks = sampled(engine, SETTINGS, prompt, 12, decode, lambda: False)
    answers = [track.meter.ids for track in tracks]
    model = AutoModelForCausalLM.from_pretrained(pair.target).eval()

    def chance(ids: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return float((logits / SETTINGS.temperature).log_softmax(-1)[range(len(ids)), ids].sum().exp())

    def check(branches: tuple[Branch, ...], rows: set[int], before: str) -> None:
        left = set(rows)
        for branch in branches:
            text = before + branch.text
            under = {row for row in left if decode(answers[row]).startswith(text)}
            assert (branch.row in under, len(under)) == (True, branch.count)
            length = next(n for n in range(1, 6) if decode(answers[branch.row][:n]) == text)
            assert branch.p == pytest.approx(chance(answers[branch.row][:length]), rel=1e-3)
            left -= under
            check(branch.children, under, text)
        assert not left or not branches

    tree = tree_of([tokens_of(track) for track in tracks])
    check(tree, set(range(12)), "")
    assert len({tuple(ids) for ids in answers}) > 1  # other noise in each row
    assert tree[0].count == max(branch.count for branch in tree)
    assert sum(branch.count for branch in tree) == 12


TREE = (
    Branch(text="A b", count=3, p=0.5, row=0, children=(
        Branch(text="c", count=2, p=0.25, row=1), Branch(text="d\n", count=1, p=1e-7, row=0))),
    Branch(text="E", count=1, p=0.125, row=3),
)  # fmt: skip


def lines(tree: SampleTree, look: Look) -> list[str]:
    return ["".join(part.text for part in row).rstrip() for row in tree.rows(look)]


def test_keys_walk_close_and_take() -> None:
    tree, look = SampleTree(TREE), Look(40, 12, False)
    assert lines(tree, look.sized()) == ["  3/4 .50 A b", "    2/4 .25 c", "    1/4 1e-07 d↵", "  1/4 .12 E"]
    tree.keys["down"]()
    assert lines(tree, look)[1].startswith("›")
    assert lines(tree, look)[-1] == "A bc"  # its whole text
    assert tree.keys["enter"]() == 1
    tree.keys["up"]()
    tree.keys["left"]()
    assert [line[1] for line in lines(tree, look)[:2]] == ["+", " "]
    tree.keys["down"]()
    tree.keys["down"]()
    assert tree.keys["enter"]() == 3
    tree.keys["up"]()
    tree.keys["right"]()
    assert len(lines(tree, look.sized())) == 4
    assert all(len(tree.rows(Look(10, height))) <= height for height in range(1, 12))


def test_samples_stand_on_the_page_as_a_tree(pair: TinyPair, tmp_path: Path) -> None:
    settings = {"temperature": 0.5, "max_new_tokens": 6}
    files = [f"/save {tmp_path}/chat.html", f"/save {tmp_path}/chat.json", f"/load {tmp_path}/chat.json"]
    again = f"/save {tmp_path}/again.html"
    ran = run_lines(catalogue_of(tmp_path, {"tiny": pair}), "one", "/samples 9", *files, again, settings=settings)
    assert ran.errors == []
    shown = ran.after("/samples 9")
    for text in ((tmp_path / "chat.html").read_text(), (tmp_path / "again.html").read_text()):
        tree = text.partition('class="branches"')[2].partition("</section>")[0]
        assert sorted(re.findall(r"<b>(\d+)</b>", tree)) == sorted(re.findall(r"(\d+)/9 ", shown))
        assert tree.count("<details open>") == tree.count("</details>") > 0


def test_run_writes_the_tree_or_json(catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "one", "--samples", "4", "--models", str(catalogue), "--max-new-tokens", "5"]
    assert main([*words, "--temperature", "0.7"]) == 0
    assert re.search(r"\d/4 ", capsys.readouterr().out)
    assert main([*words, "--temperature", "0.7", "--json", "--log", str(tmp_path / "log.jsonl")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [len(result["ids"]) for result in data["results"]] == [5] * 4
    assert [answer.text(answer.over()) for answer in read_log(tmp_path / "log.jsonl").answers] == [
        result["text"] for result in data["results"]
    ]
    assert math.isclose(sum(branch["count"] for branch in data["tree"]), 4)
    assert main(words) == 2
    assert "error: at temperature 0 all answers are the same (--temperature 0.8" in capsys.readouterr().err


def test_samples_need_a_model_here_and_a_message(engine: PairEngine, pair: TinyPair, tmp_path: Path) -> None:
    refused(
        sampled, engine, Settings(), [5], 2, engine.tokenizer.decode, lambda: False, match="all answers are the same"
    )
    assert [
        line[:24]
        for line in run_lines(
            catalogue_of(tmp_path, {"tiny": pair}), "/samples 3", "one", "/samples 1", "/samples 3"
        ).errors
    ] == [
        "error: no message yet",
        "error: /samples must be ",
        "error: at temperature 0 ",
    ]


# -- a server's answers ----------------------------------------------------------------------------------

WORDS = {1: ("Red", " wine", "."), 2: ("Red", " car"), 3: ("Red", " wine", "!"), 4: ("Blue",)}  # by the seed
LOG_P = {"Red": -0.25, "Blue": -1.5, " wine": -0.5, " car": -1.0, ".": -0.1, "!": -2.5}


def logprobs(*words: str) -> dict[str, object]:
    """As vLLM and llama-server stream them (OpenAI's ChatCompletionTokenLogprob)."""
    return {"content": [{"token": word, "logprob": LOG_P[word], "bytes": None, "top_logprobs": []} for word in words]}


def by_seed(reply: Reply, body: dict[str, Any]) -> None:
    """Another answer for each seed; with log-probabilities where they are asked for and the question wants them."""
    words = WORDS[1 + (body["seed"] - 1) % 4]
    known = body.get("logprobs") and "plain" not in body["messages"][-1]["content"]
    chunks = [chunk(word) for word in words]
    if known and len(words) == 3:  # two tokens in a chunk
        chunks = [chunk(words[0] + words[1]), chunk(words[2])]
        chunks[0]["choices"][0]["logprobs"] = logprobs(*words[:2])
        chunks[1]["choices"][0]["logprobs"] = logprobs(words[2])
    elif known:
        for word, each in zip(words, chunks, strict=True):
            each["choices"][0]["logprobs"] = logprobs(word)
    reply.events([*chunks, chunk(finish="stop"), usage(len(words))])


def test_a_servers_answers_are_a_tree_with_its_probabilities(tmp_path: Path) -> None:
    with ScriptedServer(by_seed) as server:
        (tmp_path / "models.yaml").write_text(f"default: a\npairs:\n  a: {{target: {{url: '{server.url}'}}}}\n")
        settings = {"compare": ("server",), "temperature": 0.8, "seed": 0, "max_new_tokens": 8}
        files = (f"/save {tmp_path}/chat.html", "plain please", "/samples 4")
        ran = run_lines(tmp_path / "models.yaml", "colours", "/samples 4", *files, settings=settings)
        bodies = [body for path, _, body in server.requests if "chat" in path]
    assert ran.errors == []
    p = {name: math.exp(value) for name, value in LOG_P.items()}
    wine = p["Red"] * p[" wine"]
    expected = [
        f"3/4 {told(p['Red'])} Red",
        f"2/4 {told(wine)} wine",
        f"1/4 {told(wine * p['.'])} .",
        f"1/4 {told(wine * p['!'])} !",
        f"1/4 {told(p['Red'] * p[' car'])} car",
        f"1/4 {told(p['Blue'])} Blue",
    ]
    parts = ran.text.split("<<< /samples 4\n")
    assert [" ".join(line.split()) for line in parts[1].splitlines()[:6]] == expected
    assert (tmp_path / "chat.html").read_text().count(f"{told(wine)}</span>") == 1
    assert len({body["seed"] for body in bodies[1:5]}) == 4
    assert all(("logprobs" in body) == (number in (1, 2, 3, 4, 6, 7, 8, 9)) for number, body in enumerate(bodies))
    rows = [" ".join(line.split()) for line in parts[2].splitlines()]
    assert rows[:6] == [re.sub(r"\.\d+", "-", line, count=1) for line in expected]
    assert rows[6] == "without probabilities: the server gives no log-probabilities of its tokens"


def told(p: float) -> str:
    return f"{p:.2f}"[1:]


def test_run_writes_a_servers_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(by_seed) as server:
        words = ["run", "colours", "--target", server.url, "--compare", "server", "--samples", "4", "--seed", "1"]
        assert main([*words, "--temperature", "1", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert main([*words, "--temperature", "0"]) == 2
    assert [result["text"] for result in data["results"]] == ["".join(WORDS[seed]) for seed in (1, 2, 3, 4)]
    assert data["tree"][0]["p"] == pytest.approx(math.exp(-0.25))


@pytest.mark.slow
def test_enter_takes_a_branch_as_the_answer(pair: TinyPair, tmp_path: Path) -> None:
    flags = ("--models", str(catalogue_of(tmp_path, {"tiny": pair})), "--temperature", "0.7", "--log")
    environ = {"XDG_STATE_HOME": str(tmp_path), "SPEC_MAX_NEW_TOKENS": "6"}
    opened = Terminal(*flags, str(tmp_path / "log.jsonl"), columns=80, rows=24, environ=environ, warm=True)
    opened.wait("›", 30)
    opened.enter("one", until=lambda: "TTFT" in opened.raw and opened.at_prompt, seconds=120)
    opened.enter("/samples 5", until="Enter takes it as the answer")
    opened.type("\x1b[B\r", until=lambda: opened.raw.count("TTFT") > 1 and opened.at_prompt)
    opened.enter("/inspect", until="token 1/6")
    opened.type("q")
    opened.enter("/exit")
    assert opened.end() == 0
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows].count("answered") == 2
