"""Log-probabilities of said tokens, in OpenAI's format: those of a plain pass, whoever drafted the token."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs

from app.command_line.main import main
from app.lanes.answers import logprobs_of
from sampling.events import Likely, Position, Step
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.stops import StopStrings
from sampling.types import Draft
from sampling.vocabulary import single_thread_if_small
from tests.sampling.verify.test_settings import drafters
from tests.support.blocks import V, target_of
from tests.support.runs import decode, emitted, steps
from tests.support.scripted_server import ScriptedServer, chunk, said
from tests.support.students import text
from tests.support.tiny import TinyPair
from utils.logits_processors import LogitsProcessor

CLOSE = 1e-4


def spelled(token: int) -> bytes:
    return str(token).encode()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@single_thread_if_small(1)
def test_they_are_a_plain_passes(tmp_path: Path, temperature: float) -> None:
    """Under settings that change the draw, which they do not see."""
    target = target_of("Llama")
    lm, prompt, accepted = CausalLM(target), text(1, 9, V), 0
    sampler = KeyedSampler(LogitsProcessor(temperature, top_k=7, presence_penalty=0.5), 3)
    known = drafters(tmp_path, target)
    for name in (None, "ngram", "model", "tree", "block head"):
        events = decode(lm, [prompt], known[name] if name else None, sampler, length=12, alternatives=3)
        row, accepted = emitted(events, 1)[0], accepted + sum(len(step.path) for step in steps(events))
        entries = logprobs_of(steps(events), spelled, 2)["content"]
        assert [int(entry["token"]) for entry in entries] == row
        for at, entry in enumerate(entries):
            plain = lm.open([prompt]).score([prompt + row[:at]], Draft.empty(1))[0, 0].double().log_softmax(dim=-1)
            top = plain.topk(2)
            assert entry["logprob"] == pytest.approx(float(plain[row[at]]), abs=CLOSE)
            assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(top.values.tolist(), abs=CLOSE)
    assert accepted > 3


def run(flags: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["run", "tell me", "--json", "--quiet", *flags]) == 0
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["results"]
    return results


def test_run_writes_them_in_openais_schema(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--logprobs", "3", "--max-new-tokens", "12", *pair.flags()]
    for result in run(flags, capsys):
        read = ChoiceLogprobs.model_validate(result["logprobs"], strict=True)
        assert read.content is not None
        assert len(read.content) == len(result["ids"])
        assert b"".join(bytes(entry.bytes or ()) for entry in read.content).decode(errors="replace") == result["text"]
        assert all(len(entry.top_logprobs) == 3 for entry in read.content)
        assert all(entry.logprob <= 0 for entry in read.content)
    assert all("logprobs" not in result for result in run(flags[2:], capsys))


def test_a_token_that_a_stop_string_cuts_has_none() -> None:
    lm: Any = CausalLM(target_of("Llama"))
    events = decode(lm, [text(1, 9, V)], None, KeyedSampler(LogitsProcessor(0.0)), length=6, alternatives=1)
    row = emitted(events, 1)[0]
    letters: Callable[[list[int]], str] = lambda ids: "".join(f"{token:02}" for token in ids)  # noqa: E731
    stopped = StopStrings((letters(row)[5:8],), letters, lambda part: [*map(ord, part)]).over(iter(events))
    assert len(logprobs_of(steps(stopped), spelled, 1)["content"]) == 2


ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


@pytest.mark.parametrize("gives", [True, False])
def test_a_server_is_asked_for_its_own(gives: bool, capsys: pytest.CaptureFixture[str]) -> None:
    first = chunk("a")
    first["choices"][0]["logprobs"] = {"content": [ENTRY]} if gives else None
    with ScriptedServer([first, *said()]) as server:
        assert main(["run", "x", "--json", "--logprobs", "2", "--target", server.url]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["results"][0]["logprobs"]["content"] == ([ENTRY] if gives else None)
    assert ("gives no log-probabilities" in err) is not gives
    body = next(body for path, _, body in server.requests if "chat" in path)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--logprobs", "2", "--json", "--samples", "2"], "--logprobs needs --json, and answers without --samples"),
        (["--logprobs", "21", "--json"], "--logprobs must be a whole number from 0 to 20"),
        (["--logprobs", "2", "--json", "--compare", "beam"], "lane beam: a beam search has no log-probabilities"),
    ],
)
def test_what_has_none_is_one_line(
    pair: TinyPair, flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "x", *flags, *pair.flags()]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_no_probability_is_openais_number() -> None:
    step = Step(0, 0, (), (), (), (), 5, (), (), 1.0, (), 0.0, 0.0, 0.0)
    likely = (Likely(4, 1.0, 1.0, 1, 0.0), Likely(5, 0.0, 0.0, 2, 0.0))
    (entry,) = logprobs_of([replace(step, positions=(Position(likely, (), 0.0),))], spelled, 1)["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, 0.0)
