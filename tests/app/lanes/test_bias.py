"""A bias is given by ids or texts and reaches every lane by ids; what a lane cannot do is refused in one line."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from app.lanes.answers import run_lane
from app.lanes.lane import PairEngine
from app.settings.table import Settings
from tests.support.refusals import refused
from utils.progress import never
from utils.remote.server import OpenAIServer


def test_texts_mean_their_tokens(engine: PairEngine) -> None:
    bias = engine.lane("spec", Settings(logit_bias="12=-1.5,'e'=2,'tell me'=-100")).bias
    *_, several = bias
    letter = engine.tokenizer("e", add_special_tokens=False)["input_ids"]
    assert {**bias} == {(12,): -1.5, tuple(letter): 2.0, several: -math.inf}
    assert engine.tokenizer.decode(list(several)) == "tell me"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("'tell me'=3", "logit_bias: 'tell me' is "),
        ("999999=3", "logit_bias: id 999999 is outside the vocabulary of "),
    ],
)
def test_what_has_no_single_id_is_refused(engine: PairEngine, given: str, line: str) -> None:
    assert refused(lambda: engine.lane("spec", Settings(logit_bias=given))).startswith(line)


@pytest.mark.parametrize(
    "text", ["e", "12", "'", "e=1", "12=", "12=101", "12=x", "'e'=1;'a'=2", "{", "{}}", '["a"]', 5]
)
def test_what_is_no_bias_is_one_line(text: Any) -> None:
    assert refused(lambda: Settings(logit_bias=text)).startswith("logit_bias must be ")


@pytest.mark.parametrize("lane", ["ar", "spec", "ngram", "maxgram", "draft", "beam"])
def test_every_lane_leaves_a_banned_token_out(engine: PairEngine, lane: str) -> None:
    prompt = list(engine.tokenizer("tell me", add_special_tokens=False)["input_ids"])

    def said(**more: Any) -> list[int]:
        chosen = Settings(max_new_tokens=12, num_beams=2, **more)
        return list(run_lane(engine.lane(lane, chosen), prompt, str, interrupt=never).ids)

    first = said()[3]
    assert first not in said(logit_bias={first: -100})
    assert set(said(logit_bias={first: 100})) == {first}


def test_servers_get_it_by_their_schema(engine: PairEngine) -> None:
    bias = {(12,): -math.inf, (7,): 1.5}
    plain, llama = (SimpleNamespace(kind=kind, address="localhost") for kind in ("", "llama-server"))
    assert OpenAIServer.options(plain, Settings(), bias)["logit_bias"] == {"12": -100.0, "7": 1.5}  # type: ignore[arg-type]
    assert OpenAIServer.options(llama, Settings(), bias)["logit_bias"] == [[12, False], [7, 1.5]]  # type: ignore[arg-type]
    assert "logit_bias" not in OpenAIServer.options(plain, Settings())  # type: ignore[arg-type]
    assert {**engine.lane("http://localhost:9/v1", Settings(logit_bias="12=-100")).bias} == {(12,): -math.inf}
    assert refused(lambda: engine.lane("http://localhost:9/v1", Settings(logit_bias="' a'=1"))) == (
        "lane http://localhost:9/v1: its tokens are not known here, so ' a' has no id: bias by ids"
    )
