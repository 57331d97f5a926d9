"""Stop strings: the answer ends before the first one, whatever was drafted past it, in every lane."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from app.chat.conversation import Plan
from app.lanes.answers import run_lane
from app.lanes.lane import PairEngine
from app.prompts.questions import conversation
from app.screen.live import sampled
from app.settings.table import Layers, Settings
from sampling.events import Event, Finished, Step
from sampling.stops import StopStrings
from tests.support.refusals import refused
from utils.progress import never
from utils.remote.server import OpenAIServer

PIECES = ["a", "b", "ab", "ba", "aab", "c", "\n"]
TEXTS = st.text("abc\n", min_size=1, max_size=3)


def decode(ids: list[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def encode(text: str) -> list[int]:
    return [PIECES.index(letter) for letter in text]


def rounds(tokens: list[int], sizes: list[int]) -> Iterator[Event]:
    """Tokens in rounds of these sizes, all but the last of a round accepted drafts, and a draft more that is not."""
    while tokens:
        size, *sizes = sizes or [1]
        part, tokens = tokens[:size], tokens[size:]
        drafted, nodes = (*part[:-1], 0), tuple(range(len(part) - 1))
        odds = (0.5,) * len(drafted)
        yield replace(
            Step(0, 4, (), (), (), (), part[-1], (), (), 1.0, (), 0.0, 0.0, 0.0),
            **{"drafted": drafted, "parents": tuple(range(-1, len(part) - 1)), "path": nodes},
            **{"target_p": odds, "draft_p": odds, "source": (0,) * len(drafted)},
        )
    yield Finished(0, "length")


def said(stops: tuple[str, ...], tokens: list[int], sizes: list[int]) -> tuple[str, Any, list[int]]:
    events = list(StopStrings(stops, decode, encode).over(rounds(tokens, sizes)))
    ids = [token for event in events if isinstance(event, Step) for token in event.emitted]
    assert all(len(event.target_p) in (len(event.path), len(event.path) + 1) for event in events[:-1])
    return decode(ids), events[-1].reason, ids


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=14),
    st.lists(TEXTS, min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=8),
)
def test_the_text_ends_before_the_first_stop_string(tokens: list[int], stops: list[str], sizes: list[int]) -> None:
    text, reason, ids = said(tuple(stops), tokens, sizes)
    whole = decode(tokens)
    # Naively: after each token, look for a stop string anywhere in the text.
    naive = whole
    for count in range(1, len(tokens) + 1):
        starts = [at for stop in stops if (at := decode(tokens[:count]).find(stop)) >= 0]
        if starts:
            naive = whole[: min(starts)]
            break
    assert text == naive
    assert reason == ("stop" if naive != whole else "length")
    assert (text, reason, ids) == said(tuple(stops), tokens, [1] * len(tokens))  # plain decoding's


def test_rounds_wait_while_a_stop_string_may_be_beginning() -> None:
    a, b, c = 0, 1, 5
    assert [
        event.emitted if isinstance(event, Step) else event.reason
        for event in StopStrings(("bc",), decode, encode).over(rounds([a, b, a, b, c, a], []))
    ] == [
        *[(a,), (b,), (a,), (), ()],
        "stop",
    ]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_lanes_say_the_same(engine: PairEngine, temperature: float) -> None:
    how: dict[str, Any] = {"gamma": 4, "max_new_tokens": 40, "temperature": temperature, "coupling": "gumbel"}
    prompt = list(engine.tokenizer("tell me", add_special_tokens=False)["input_ids"])

    def decode(ids: list[int]) -> str:
        return str(engine.tokenizer.decode(ids, skip_special_tokens=True))

    text = run_lane(engine.lane("ar", Settings(**how)), prompt, decode, interrupt=never).text
    ascii_texts = re.findall("[ -~]{2}", text)
    stop = ascii_texts[len(ascii_texts) // 2]
    chosen = Settings(**how, stop=(stop,))
    for name in ["ar", "spec", "ngram", "maxgram"]:
        answer = run_lane(engine.lane(name, chosen), prompt, decode, interrupt=never)
        assert answer.text == text[: text.index(stop)], name
        assert answer.stats.stop_reason == "stop"


def test_an_answer_that_ends_before_its_first_token_has_no_rate(engine: PairEngine) -> None:
    prompt = list(engine.tokenizer("tell me", add_special_tokens=False)["input_ids"])
    stats = run_lane(
        engine.lane("spec", Settings(max_new_tokens=4, logit_bias="'a'=100", stop=("a",))), prompt, str, interrupt=never
    ).stats
    assert (stats.predicted_n, stats.stop_reason, stats.predicted_per_second or 0, stats.tokens_per_pass or 0) == (
        *(0, "stop"),
        *(0, 0),
    )


def test_texts_are_read_and_shown() -> None:
    chosen = Layers().with_console_changes(stop=r"\nUser:").settings
    assert chosen.stop == ("\nUser:",)
    assert Settings(stop=chosen.show("stop")).stop == chosen.stop
    assert Settings(stop='["a", "b", "a"]').stop == ("a", "b")
    assert Settings(stop="[1]").stop == ("[1]",)
    assert refused(lambda: Settings(stop=[1])).startswith("stop must be a text, or several as a JSON list")
    assert Layers().with_console_changes(stop="off").settings.stop == ()


def test_servers_get_them() -> None:
    server: Any = SimpleNamespace(kind="", address="localhost")
    assert OpenAIServer.options(server, Settings(stop=("a", "b")))["stop"] == ["a", "b"]
    assert "stop" not in OpenAIServer.options(server, Settings())


def test_a_beam_search_refuses_them(engine: PairEngine) -> None:
    assert refused(lambda: engine.lane("beam", Settings(stop=("a",)))).startswith(
        "lane beam: a beam search has no stop"
    )


@given(
    st.lists(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=8), min_size=1, max_size=4),
    st.lists(TEXTS, min_size=1, max_size=2),
    st.lists(st.integers(1, 3), max_size=4),
)
def test_rows_of_a_batch_end_each_by_itself(rows: list[list[int]], stops: list[str], sizes: list[int]) -> None:
    runs = [list(rounds(row, sizes)) for row in rows]
    turns = itertools.zip_longest(*([replace(event, row=at) for event in run] for at, run in enumerate(runs)))
    together: Iterator[Any] = (event for turn in turns for event in turn if event is not None)
    events: list[Any] = list(StopStrings(tuple(stops), decode, encode).over(together, len(rows)))
    for at, row in enumerate(rows):
        own = [event for event in events if event.row == at]
        ids = [token for event in own if isinstance(event, Step) for token in event.emitted]
        assert (decode(ids), own[-1].reason, ids) == said(tuple(stops), row, sizes)


def test_samples_end_before_a_stop_string_too(engine: PairEngine) -> None:
    how: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1}
    prompt = list(engine.tokenizer("tell me", add_special_tokens=False)["input_ids"])

    def texts(**more: Any) -> list[str]:
        tracks = sampled(engine, Settings(**how, **more), prompt, 3, engine.tokenizer.decode, never)
        return [engine.tokenizer.decode(track.meter.ids) for track in tracks]

    whole = texts()
    stop = next(pair for pair in re.findall("[ -~]{2}", whole[0][5:]))
    assert texts(stop=[stop]) == [text.partition(stop)[0] for text in whole]


def test_a_stop_string_across_a_cut_is_found_when_the_answer_goes_on(engine: PairEngine) -> None:
    letters = ",".join(f"'{letter}'=90" for letter in "abcdefgh")
    how: dict[str, Any] = {"chat": False, "max_new_tokens": 40, "temperature": 2, "coupling": "gumbel"}
    how["logit_bias"] = letters
    chat = conversation(engine, Settings(**how))

    def ids_of(plan: Plan, **more: Any) -> tuple[list[int], Any]:
        answer = run_lane(engine.lane("spec", Settings(**{**how, **more})), plan.prompt, chat.text, interrupt=never)
        return list(answer.ids), answer.stats.stop_reason

    plan = chat.plan("tell me")
    whole, _ = ids_of(plan)
    at = 20
    stop = chat.text(whole[at - 2 : at + 2])
    wanted = chat.text(whole).partition(stop)[0]
    ids, reason = ids_of(plan, stop=[stop], max_new_tokens=at)
    assert (ids, reason) == (whole[:at], "length")
    chat.commit(plan, ids, "length")
    plan = chat.plan_continue([stop])
    ids, reason = ids_of(plan, stop=[stop])
    assert (chat.commit(plan, ids, reason).text, reason) == (wanted, "stop")
    assert len(wanted) < at
