"""Drafts made here for a target in a server: the server's own greedy text, one request a round, by three formats."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.lanes.answers import run_lane
from app.lanes.lane import PairEngine
from app.lanes.pairing import choose_pair
from app.prompts.questions import conversation
from app.screen.output import load_engine
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.events import Finished
from tests.support.refusals import refused
from tests.support.runs import crossed, emitted
from tests.support.scoring_server import SAYING, Sayer, llama_cpp_python, sglang, vllm
from tests.support.scripted import run_lines
from tests.support.scripted_server import ScriptedServer, said
from tests.support.tiny import START, TinyPair, tiny_tokenizer
from utils.progress import never
from utils.remote.pieces import ServerFigures

SETTINGS = Settings(quiet=True, max_new_tokens=60, gamma=4)


@pytest.fixture(scope="module")
def sayer() -> Sayer:
    return Sayer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer alone, without a model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def servers(sayer: Sayer) -> Iterator[dict[str, ScriptedServer]]:
    begin = sayer.tokenizer.convert_tokens_to_ids(START)
    with ExitStack() as stack:
        made = {
            "vllm": vllm(sayer),
            "sglang": sglang(sayer),
            "llama-cpp-python": llama_cpp_python(sayer),
            "llama-cpp-python, chats begin as texts do": llama_cpp_python(sayer, begin),
        }
        yield {name: stack.enter_context(server) for name, server in made.items()}


def engine_of(server: ScriptedServer, folder: Path, drafter: str = "ngram") -> PairEngine:
    return load_engine(
        SETTINGS, ModelOptions(target=server.url, tokenizer=str(folder), drafter=drafter), never, servers=True
    )


@pytest.mark.parametrize(
    ("name", "length"),
    crossed(["vllm", "sglang", "llama-cpp-python", "llama-cpp-python, chats begin as texts do"], [60, 13]),
)
def test_the_text_is_the_servers_own_and_drafts_are_accepted(
    name: str, length: int, servers: dict[str, ScriptedServer], folder: Path, sayer: Sayer
) -> None:
    engine, settings = engine_of(servers[name], folder), SETTINGS.changed(max_new_tokens=length)
    if "begin" in name:
        engine.tokenizer.bos_token = START
        engine = PairEngine(engine.loaded)
    prompt = conversation(engine, settings).plan("anything").prompt
    answer = run_lane(engine.lane("spec", settings), prompt, engine.tokenizer.decode, interrupt=never)
    assert list(answer.ids) == sayer.answer(prompt, length)
    asked = len(servers[name].requests)
    again = run_lane(engine.lane("spec", settings), prompt, engine.tokenizer.decode, interrupt=never)
    assert again.ids == answer.ids
    stats = again.stats
    assert stats.stop_reason == ("eos" if length == 60 else "length")
    if length == 60:
        assert stats.draft_n_accepted > 8
        assert stats.draft_n_rejected > 0
    if "llama" not in name:
        assert len(servers[name].requests) - asked == stats.target_passes + 1  # the opening round's too


def test_examined_drafts_have_the_servers_probabilities(
    servers: dict[str, ScriptedServer], folder: Path, sayer: Sayer
) -> None:
    engine = engine_of(servers["vllm"], folder)
    prompt = conversation(engine, SETTINGS).plan("anything").prompt
    steps = [event for event in engine.lane("spec", SETTINGS).run(prompt) if getattr(event, "target_p", ())]
    assert 0.6 in {round(p, 3) for step in steps for p in step.target_p}
    assert all(step.top2_gap > 0 for step in steps)


@pytest.mark.parametrize("dies", [False, True])
def test_what_came_is_kept_where_ctrl_c_or_a_servers_death_ends_the_wait_for_it(
    dies: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sayer, over = Sayer(), threading.Event()
    with vllm(sayer) as server, Interrupts() as stopped:
        engine = engine_of(server, folder)
        prompt = conversation(engine, SETTINGS).plan("anything").prompt
        events = engine.lane("spec", SETTINGS).run(prompt, interrupt=stopped)
        (ids,) = emitted(next(events) for _ in range(4))
        fails = OSError if dies else lambda *_: {0: float(over.wait(30))}
        monkeypatch.setattr(sayer, "logprobs", Mock(side_effect=fails))
        threading.Timer(0.3, os.kill, (os.getpid(), 0 if dies else signal.SIGINT)).start()
        why = f"{server.address} closed the connection (Server disconnected without sending a response.)"
        assert [*events] == [Finished(0, "interrupted", ServerFigures(problem=why) if dies else None)]
        assert stopped() is not dies
        over.set()
    assert ids == sayer.answer(prompt, len(ids)) != []


def test_the_console_shows_the_servers_answer_beside_the_drafts(
    servers: dict[str, ScriptedServer], folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        f"pairs:\n  far:\n    target: {{url: '{servers['vllm'].url}', tokenizer: {folder}}}\n    drafter: ngram\n",
        encoding="utf-8",
    )
    settings = {"compare": ("server", "spec"), "max_new_tokens": 60}
    ran = run_lines(file, "say it", "again", "/trace 2", "/temperature 0.5", settings=settings)
    assert ran.text.count("for looking, not for speed") == 1
    assert ran.text.count("same output") == 2
    assert [turn.text for turn in ran.state.chat.turns] == [SAYING, SAYING]
    assert "accepted" in ran.after("again")
    assert ran.errors == [
        "error: lane spec: drafts for a server are verified by its likeliest tokens, without temperature 0.5"
    ]


@pytest.mark.parametrize("owner", ["llamacpp", "huggingface"])
def test_a_server_without_a_prompts_log_probabilities_is_refused_by_name(owner: str, folder: Path) -> None:
    with ScriptedServer(said("x"), owner=owner) as server:
        line = refused(engine_of, server, folder, match="gives no log-probabilities of a prompt's tokens")
    refused(choose_pair, ModelOptions(target=server.url, drafter="ngram"), match="nothing drafts for it here without")
    assert f"{server.address} " in line


def test_trained_drafters_are_refused_and_models_draft(
    servers: dict[str, ScriptedServer], folder: Path, pair: TinyPair
) -> None:
    refused(engine_of, servers["vllm"], folder, "feature", match="no feature drafter")
    engine = engine_of(servers["vllm"], folder, str(pair.drafter))
    answer = run_lane(
        engine.lane("spec", SETTINGS.changed(max_new_tokens=4)),
        conversation(engine, SETTINGS).plan("x").prompt,
        engine.tokenizer.decode,
        interrupt=never,
    )
    assert (answer.text, answer.stats.calls["drafter"] > 0) == (
        engine.tokenizer.decode(engine.tokenizer(SAYING)["input_ids"][:4]),
        True,
    )


@pytest.mark.parametrize(
    ("owner", "path", "answer"),
    [
        ("vllm", "v1__completions", {"choices": []}),
        ("vllm", "v1__completions", {"choices": [{"logprobs": None, "prompt_logprobs": None}]}),
        ("sglang", "generate", {"meta_info": {}}),
        ("me", "v1__completions", {"choices": [{"logprobs": {"top_logprobs": []}}], "usage": {"prompt_tokens": 3}}),
    ],
)
def test_an_answer_without_log_probabilities_is_one_line(owner: str, path: str, answer: Any, folder: Path) -> None:
    with ScriptedServer(said("x"), owner=owner, **{path: lambda reply, _: reply.json(answer)}) as server:
        engine = engine_of(server, folder)
        refused(
            run_lane,
            engine.lane("spec", SETTINGS),
            conversation(engine, SETTINGS).plan("x").prompt,
            engine.tokenizer.decode,
            interrupt=never,
            match=f"^{server.address} ",
        )
