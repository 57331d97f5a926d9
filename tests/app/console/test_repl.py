"""The console as whole transcripts: every command with valid, missing and bad arguments, over tiny real pairs."""

import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy.stats import binomtest

import app.screen.live
from app.console.state import ConsoleState, load_engine
from app.settings.table import Layers
from sampling.models.causal import CausalSession
from tests.support.runs import counted_anew, noise_asked, twice
from tests.support.scripted import catalogue_of, failing, run_lines
from tests.support.tiny import tiny_pair


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of random models whose answers never stop by themselves; `short` has a context of 120."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = {
        "tiny": tiny_pair(folder / "tiny", stop=False),
        "tiny-ngram": tiny_pair(folder / "ngram", stop=False, seed=3),
        "short": tiny_pair(folder / "short", stop=False, context=120),
        "plain": tiny_pair(folder / "plain", stop=False, chat=False),
    }
    return catalogue_of(folder, pairs)


def test_a_conversation_of_three_turns(catalogue: Path) -> None:
    ran = run_lines(catalogue, "one", "two", "three", "/exit", "never read")
    assert ran.code == 0
    assert ran.text.count("same output") == 3
    assert ran.text.count("cut at 12 tokens, /continue") == 3
    assert "never read" not in ran.text
    turns = ran.state.chat.turns
    assert [turn.user for turn in turns] == ["one", "two", "three"]
    for before, after in itertools.pairwise(turns):
        assert after.prompt[: len(before.prompt) + 12] == (*before.prompt, *before.answer)


BAD = {
    "/set num_beams=0": "num_beams must be a whole number from 1 to 64, got 0 (still 4)",
    "/set cascade=x,x": "cascade must be",
    "/set k_matrix=x": "k_matrix must be",
    "/set expand=sideways": "expand must be auto, none or dynamic",
    "/set nodes=0": "nodes must be a whole number from 1 to 64, got 0 (still 24)",
    "/temperature -1": "temperature must be",
    "/top_k -3": "top_k must be",
    "/set no_repeat_ngram=-1": "no_repeat_ngram must be",
    "/set coupling=maybe": "coupling must be",
    "/set nothing=1": "unknown setting",
    "/set gamma = 5": "/set takes NAME=VALUE without spaces around =, got 'gamma = 5' (nothing changed)",
    "/compare ar,wings": "compare must be",
    "/set palette=pink": "palette must be",
    "/drafter /no/such/folder": "/no/such/folder",
    "/load missing.json": "(the conversation is unchanged)",
    "/save /no/such/folder/a.json": "nothing was saved",
    "/bench 0": "/bench is no command: use infer.py bench",
    "/plot": "/plot",
    "/help nothing": "nothing",
    "/min_p 0.1": "/min_p is no command: use /set min_p=VALUE",
}


def test_bad_arguments_are_one_line_and_change_nothing(catalogue: Path) -> None:
    seen: list[Any] = []

    def look(state: ConsoleState) -> None:
        seen.append((state.settings, state.pairs.name, list(state.chat.turns), state.leaving))

    ran = run_lines(catalogue, "one", look, *BAD, look)
    assert seen[0] == seen[1]
    for line, wanted in BAD.items():
        said = ran.after(line.strip()).strip()
        assert said.startswith("error: "), line
        assert wanted in said.replace("\n", " "), (line, said)
    assert "Traceback" not in ran.text


def test_nothing_to_look_back_on_is_one_line_each(catalogue: Path) -> None:
    lines = ["/undo", "/regen", "/continue", "/save a.txt", "/stats", "/trace", "/plot gamma"]
    ran = run_lines(catalogue, *lines)
    assert len(ran.errors) == len(lines)
    assert all("no message yet" in line or "no answer yet" in line for line in ran.errors)


SHOWN = {
    "/top_p .9": "top_p = 0.9",
    "/set repetition_penalty=1.2": "repetition_penalty = 1.2",
    "/set no_repeat_ngram=3": "no_repeat_ngram = 3",
    "/length 7": "= 7",
    "/set palette=cb": "palette = cb",
    "/slow 1": "slow = 1",
    "/pair": "there are tiny, tiny-ngram, short, plain",
    "/drafter": "drafter = ",
    "/info": "context  ",
    "/set": "palette = cb  (default default)",
    "/help": "/gamma",
    "/help gamma": "gamma",
    "/reset": "palette = default",
}


def test_valid_arguments_are_taken_and_shown(catalogue: Path) -> None:
    ran = run_lines(catalogue, "hello", *SHOWN)
    for line, wanted in SHOWN.items():
        assert wanted in ran.after(line), (line, ran.after(line))
    assert not ran.errors


def test_regen_takes_the_next_seed_and_says_it(catalogue: Path) -> None:
    ran = run_lines(catalogue, "/temperature 1.5", "one", "/regen", "/regen", "/temperature 0", "/regen")
    assert "seed 43" in ran.after("/regen") or "seed 43" in ran.text
    assert "seed 44" in ran.text
    assert "temperature 0: the same answer again" in ran.after("/regen")
    assert len(ran.state.chat.turns) == 1
    assert len({answered.turn.answer for answered in ran.state.answers}) >= 3


LETTERS = list(range(60, 68))  # eight ids of the tiny tokenizer, none of which ends an answer


def evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and drafter hold these eight ids for equally likely, whatever was said."""
    real = CausalSession.score_reduced

    def score_reduced(session: Any, rows: Any, draft: Any) -> Any:
        logits = torch.full_like(real(session, rows, draft), -1e9)
        logits[..., LETTERS] = 0.0
        return logits

    monkeypatch.setattr(CausalSession, "score_reduced", score_reduced)


DRAWN = {"temperature": 1.0, "compare": "spec", "max_new_tokens": 100}


@pytest.mark.parametrize("then", ["/continue", "two"])
def test_what_follows_an_answer_is_drawn_with_noise_of_its_own(
    catalogue: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token i of what follows is token i of the answer for 1 in 8, as by chance; with a counter that begins anew with
    every answer it was for most."""

    def chance() -> float:
        turns = run_lines(catalogue, "one", then, settings=DRAWN).state.chat.turns
        first, rest = (
            (turns[0].answer, turns[1].answer) if then == "two" else (turns[0].answer[:100], turns[0].answer[100:])
        )
        assert len(first) == len(rest) == 100
        return float(binomtest(sum(map(int.__eq__, first, rest)), 100, 1 / 8).pvalue)

    evenly(monkeypatch)
    assert chance() > 1e-6
    noise_asked(monkeypatch, counted_anew)
    assert chance() < 1e-6


def test_no_noise_comes_twice_in_a_conversation(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over turns, continuations, an answer anew (which takes a seed of its own), an edit; what was taken back and asked
    again is the same answer from the same noise."""
    evenly(monkeypatch)
    asked = noise_asked(monkeypatch)
    parts: list[list[Any]] = []

    def note(state: ConsoleState) -> None:
        parts.append([*asked])
        asked.clear()

    lines = ("one", "/continue", note, "two", note, "/undo", "two", note, "/continue", note, "/regen", note)
    ran = run_lines(catalogue, *lines, "/undo", "deux", note, settings={**DRAWN, "max_new_tokens": 20})
    assert [turn.user for turn in ran.state.chat.turns] == ["one", "deux"]
    one, two, again, more, anew, edited = parts
    assert twice([*one, *two, *more]) == []
    assert sorted(again) == sorted(two)
    assert {seed for seed, _, _ in anew} == {43}
    assert twice([*one, *anew]) == []
    assert {seed for seed, _, _ in edited} == {42}
    assert twice([*one, *edited]) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continue_gives_the_text_of_the_uncut_answer(catalogue: Path, temperature: float) -> None:
    settings = {"temperature": temperature, "compare": ("ar", "ngram")}
    whole = run_lines(catalogue, "one", settings={**settings, "max_new_tokens": 24}).state.chat.turns
    turns = run_lines(
        catalogue, "one", "/continue", "/continue", settings={**settings, "max_new_tokens": 8}
    ).state.chat.turns
    assert len(turns) == 1
    assert turns[0].answer == whole[0].answer
    assert turns[0].text == whole[0].text


def test_a_prompt_beyond_the_context_leaves_the_conversation_alone(catalogue: Path) -> None:
    ran = run_lines(catalogue, "/pair short", "one", "x" * 500, "/undo", "after")
    assert re.search(r"error: the prompt is \d+ tokens, the context holds 120: nothing was sent", ran.text)
    assert [turn.user for turn in ran.state.chat.turns] == ["after"]


def test_a_message_that_was_refused_goes_back_into_the_input_line(catalogue: Path) -> None:
    long = "x" * 500
    ran = run_lines(catalogue, "/pair short", "one", long, "two")
    assert ran.reader.defaults[3] == long
    assert [turn.user for turn in ran.state.chat.turns] == ["one", "two"]


def test_an_answer_that_fills_the_context_says_so(catalogue: Path) -> None:
    ran = run_lines(catalogue, "/pair short", "/length 500", "hello", "/continue")
    assert "the context is full" in ran.after("hello")
    assert ran.after("/continue").startswith("error: the prompt is 120 tokens, the context holds 120")


def test_a_model_without_template_is_continued_and_says_so_once(catalogue: Path) -> None:
    ran = run_lines(catalogue, "/pair plain", "Once", "Then")
    assert ran.text.count("has no chat template") == 1
    read = ran.state.chat.tokenizer.decode(list(ran.state.chat.turns[1].prompt))
    assert read.startswith("Once")
    assert read.endswith("\nThen")


def test_a_pair_that_fails_leaves_the_old_one(catalogue: Path) -> None:
    def loader(spec: Any, options: Any, progress: Any) -> Any:
        return failing() if spec.name == "short" else load_engine(spec, options, progress)

    ran = run_lines(catalogue, "one", "/pair short", "two", loader=loader)
    assert ran.after("/pair short").startswith("error: no such folder (still tiny)")
    assert [turn.user for turn in ran.state.chat.turns] == ["one", "two"]


def test_another_pair_brings_its_own_settings_to_chat_and_log(catalogue: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    told = yaml.safe_load(catalogue.read_text())
    told["pairs"]["other"] = {**told["pairs"]["tiny"], "defaults": {"system": "You are B.", "record": str(log)}}
    told["pairs"]["off"] = {**told["pairs"]["tiny"], "defaults": {"chat": False}}
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump(told))
    seen: list[Any] = []

    def look(state: ConsoleState) -> None:
        seen.append((state.chat.system, state.chat.settings.chat, state.log is not None, state.settings.system))

    ran = run_lines(
        file, "one", "/pair other", look, "two", "/pair off", look, layers=Layers(flags={"max_new_tokens": 12})
    )
    assert not ran.errors
    assert seen == [("You are B.", True, True, "You are B."), ("", False, False, "")]
    assert "You are B." in log.read_text()


def test_a_drafter_that_cannot_run_is_refused(catalogue: Path) -> None:
    seen: list[Any] = []

    def look(state: ConsoleState) -> None:
        seen.append((state.settings, state.pairs.engine, state.pairs.spec, state.chat.turns[:]))

    lines = ["/drafter cascade", "/set compare=ar,cascade cascade=nobody"]
    ran = run_lines(catalogue, "one", look, *lines, look)
    assert seen[0] == seen[1]
    assert len(ran.errors) == 2
    assert "(still tiny)" in ran.after(lines[0])


def test_a_trace_names_the_rule_of_blocks(catalogue: Path) -> None:
    ran = run_lines(catalogue, "one", "/trace", settings={"temperature": 0.8, "verify": "block"})
    assert [words in ran.after("/trace") for words in ("block: of a chain drawn from q", "min(1,")] == [True, False]


def test_a_failing_first_load_is_one_line_and_another_pair_can_be_loaded(catalogue: Path) -> None:
    def loader(spec: Any, options: Any, progress: Any) -> Any:
        return failing() if spec.name == "tiny" else load_engine(spec, options, progress)

    ran = run_lines(catalogue, "one", "/pair tiny-ngram", "one", loader=loader)
    first = ran.text.split("<<< /pair")[0]
    assert "error: tiny could not be loaded: no such folder (/pair NAME loads another)" in first
    assert "no model is loaded: /pair NAME loads one of tiny, tiny-ngram" in first.replace("\n", " ")
    assert ran.reader.defaults[1] == "one"
    assert len(ran.state.chat.turns) == 1


def test_what_is_called_off_while_loading_is_told_as_it_is(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(spec: Any, options: Any, progress: Any) -> None:
        while True:
            progress("waiting")

    monkeypatch.setattr("app.console.state.watch", lambda *_, **more: False)
    ran = run_lines(catalogue, "one", "x" * 1001, "/drafter ngram", loader=endless)
    assert ran.errors == ["error: nothing was done: loading continues"] * 3
    assert ran.reader.defaults == ["", "one", "", ""]  # neither a command nor what would fill the screen comes back


def test_an_error_while_decoding_is_one_line_and_the_next_turn_works(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.lanes.lane import Lane

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: 99 GB")

    ran = run_lines(
        catalogue,
        "one",
        lambda _: monkeypatch.setattr(Lane, "run", out_of_memory),
        "two",
        lambda _: monkeypatch.undo(),
        "three",
    )
    assert ran.after("two").startswith("error: out of memory")
    assert [turn.user for turn in ran.state.chat.turns] == ["one", "three"]
    assert "Traceback" not in ran.text


def interrupt_after(events: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Send Ctrl-C to this process when the screen has taken in so many events."""
    feed, seen = app.screen.live.Track.feed, [0]

    def counting(self: Any, event: Any) -> None:
        feed(self, event)
        seen[0] += 1
        if events <= seen[0] < events + times:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(app.screen.live.Track, "feed", counting)


@pytest.mark.parametrize("events", [4, 7, 10])
def test_ctrl_c_keeps_the_partial_answer_and_the_next_turn_works(
    catalogue: Path, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_lines(
        catalogue,
        lambda _: interrupt_after(events, monkeypatch),
        "one",
        lambda _: monkeypatch.undo(),
        "two",
    )
    first, second = ran.state.chat.turns
    assert first.reason == "interrupted"
    assert 0 < len(first.answer) < 12
    assert "stopped" in ran.after("one")
    assert second.prompt[: len(first.prompt) + len(first.answer)] == (*first.prompt, *first.answer)
    assert "same output" in ran.after("two")


def test_ctrl_c_before_the_first_token_changes_nothing_and_keeps_the_message(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_lines(
        catalogue,
        "one",
        lambda _: interrupt_after(1, monkeypatch),
        "x" * 300,
        lambda _: monkeypatch.undo(),
        "two",
    )
    assert "no token came: the conversation is unchanged" in ran.after("x" * 300)
    assert ran.reader.defaults[-2] == "x" * 300
    assert [turn.user for turn in ran.state.chat.turns] == ["one", "two"]


def test_save_json_holds_ids_texts_settings_figures_and_events(catalogue: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat with spaces.json"
    ran = run_lines(catalogue, "one", "/continue", "two", f"/save {file}")
    data = json.loads(file.read_text(encoding="utf-8"))
    assert f"saved 2 turns to {file}" in ran.text.replace("\n", "")
    assert [turn["user"] for turn in data["turns"]] == ["one", "two"]
    assert [tuple(turn["answer_ids"]) for turn in data["turns"]] == [turn.answer for turn in ran.state.chat.turns]
    first = data["turns"][0]
    assert [decoding["settings"]["gamma"] for decoding in first["decodings"]] == [4, 4]
    lanes = first["decodings"][0]["lanes"]
    assert [lane["method"] for lane in lanes] == ["ar", "spec"]
    steps = [event for event in lanes[1]["events"] if event["event"] == "step"]
    assert sum(len(step["path"]) + (step["token"] is not None) for step in steps) == lanes[1]["predicted_n"] == 12
    assert lanes[0]["ids"] + first["decodings"][1]["lanes"][0]["ids"] == first["answer_ids"]
