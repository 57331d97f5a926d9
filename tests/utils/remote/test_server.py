"""What a server sends, and every way in which one fails: a line each, and what came is kept."""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.screen.terminal import Interrupts
from app.settings.table import Settings
from tests.support.refusals import refused
from tests.support.scripted_server import LAST, Act, Reply, ScriptedOllama, ScriptedServer, chunk, line, said, usage
from utils.errors import UsageError
from utils.remote.pieces import ServerFigures
from utils.remote.server import ChatAnswer, OpenAIServer, Server, server_at

MESSAGES = [{"role": "user", "content": "hello"}]
protocols = pytest.mark.parametrize("speaks", [ScriptedServer, ScriptedOllama])


def asked(server: Server, interrupt: Callable[[], bool] = lambda: False) -> ChatAnswer:
    return ChatAnswer(server, MESSAGES, {"temperature": 0.0, "max_tokens": 5}, interrupt)


def heard(
    chat: Act | list[dict[str, Any]], speaks: type[ScriptedServer] = ScriptedServer, **more: Any
) -> tuple[list[str], ChatAnswer]:
    """The pieces of a scripted answer, and the answer."""
    with speaks(chat, **more) as scripted:
        answer = asked(replace(server_at(scripted.url), silence=0.5))
        return [text for text, _ in answer], answer


def test_an_answer_comes_piece_by_piece_with_the_servers_counts() -> None:
    texts, answer = heard(said("A ", "riv", "er", tokens=4))
    assert texts == ["A ", "riv", "er"]
    assert (answer.reason, answer.report) == ("eos", ServerFigures(tokens=4, prompt_tokens=7))


def test_the_seconds_of_the_pieces_are_those_since_the_request() -> None:
    def slow(reply: Reply, _: dict[str, Any]) -> None:
        reply.begin()
        for each in said("a", "b"):
            time.sleep(0.2)
            reply.raw(b"data: " + json.dumps(each).encode() + b"\n\n")

    with ScriptedServer(slow) as scripted:
        assert sum(spent for _, spent in asked(OpenAIServer(scripted.url))) >= 0.4


def test_the_request_has_messages_options_model_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    with ScriptedServer(said("x"), models=["the model"]) as scripted:
        list(asked(OpenAIServer(scripted.url, key_env="A_KEY")))
        headers, body = next(request[1:] for request in scripted.requests if request[0] == "/v1/chat/completions")
    assert headers["authorization"] == "Bearer secret"
    wanted = {"model": "the model", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 5, "stream": True}
    assert {name: body[name] for name in wanted} == wanted


def test_no_other_programs_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    with ScriptedServer(said("x")) as scripted:
        list(asked(OpenAIServer(scripted.url)))
        assert not any("another" in str(headers) for _, headers, _ in scripted.requests)


VLLM = {  # docs/features/speculative_decoding/acceptance_metrics.md and per_request_metrics.md of vLLM 0.32
    "time_to_first_token_ms": 85.2,
    "generation_time_ms": 1240.5,
    "tokens_per_second": 103.2,
    "speculative_decoding": {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3],
        "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    },
}
SGLANG = {  # SGLang's pull request 33518, for `return_spec_tokens_details`
    "spec_tokens_details": {
        "spec_accept_rate": 0.2,
        "spec_accept_length": 2.0,
        "spec_num_correct_drafts": 1,
        "spec_num_proposed_drafts": 5,
        "spec_verify_ct": 1,
    }
}
LM_STUDIO = {  # release notes of LM Studio 0.3.10
    "tokens_per_second": 17.92897117267284,
    "time_to_first_token": 1.162136,
    "draft_model": "d",
    "total_draft_tokens_count": 492,
    "accepted_draft_tokens_count": 176,
    "rejected_draft_tokens_count": 316,
}
LLAMA = {"predicted_n": 9, "predicted_ms": 100.0, "predicted_per_second": 90.0, "draft_n": 12, "draft_n_accepted": 6}


@pytest.mark.parametrize(
    ("last", "figures"),
    [
        ({"metrics": VLLM}, {"drafted": 129, "accepted": 10, "passes": 43, "rate": 103.2}),
        ({"metrics": {**VLLM, "speculative_decoding": None}}, {"rate": 103.2}),
        ({"metrics": None}, {}),
        # tools/server/README.md of llama.cpp: timings stand in the last chunk, draft_n only where drafts were made
        ({"timings": LLAMA}, {"drafted": 12, "accepted": 6, "rate": 90.0}),
        ({"timings": {"predicted_n": 9, "draft_n": 12, "draft_n_accepted": 6}}, {"drafted": 12, "accepted": 6}),
        ({"timings": {"draft_n": 9, "draft_n_accepted": 12}}, {}),
        ({"sglext": SGLANG}, {"drafted": 5, "accepted": 1, "passes": 1}),
        ({"sglext": {"spec_tokens_details": [SGLANG["spec_tokens_details"]]}}, {}),
        ({"stats": LM_STUDIO}, {"drafted": 492, "accepted": 176, "rate": LM_STUDIO["tokens_per_second"]}),
        ({"usage": {**usage(9)["usage"], **LM_STUDIO}}, {"drafted": 492, "accepted": 176}),
        ({"timings": {"draft_n": "many", "draft_n_accepted": -1, "predicted_per_second": True}}, {}),
        ({"timings": "x", "metrics": 3, "stats": [1]}, {}),
    ],
)
def test_an_engines_own_figures_of_its_drafts_are_read_from_the_last_chunk(
    last: dict[str, Any], figures: dict[str, Any]
) -> None:
    texts, answer = heard([chunk("x"), chunk(finish="stop"), {**usage(9), **last}])
    assert (texts, answer.report) == (["x"], ServerFigures(9, 7, **figures))


def test_what_a_chunk_says_of_its_own_answer_outranks_the_whole_servers_counters() -> None:
    page = "vllm:spec_decode_num_drafts_total {}\nvllm:spec_decode_num_accepted_tokens_total {}\n"
    metrics = counters(page.format(10, 10), page.format(90, 90))
    _, answer = heard([chunk("x"), chunk(finish="stop"), {**usage(9), "metrics": VLLM}], metrics=metrics)
    assert (answer.report.accepted, answer.report.passes) == (10, 43)


def counters(*texts: str) -> Act:
    """A /metrics page that says the next of these at each look, the last one from then on."""
    left = list(texts)

    def act(reply: Reply, _: dict[str, Any]) -> None:
        reply.begin(kind="text/plain")
        reply.raw((left.pop(0) if len(left) > 1 else left[0]).encode())

    return act


VLLM_PAGE = (
    '# HELP vllm:spec_decode_num_drafts_total Drafts\nvllm:spec_decode_num_drafts_total{{engine="0"}} {}\n'
    'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {}\n'
    'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {}\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 1.0\n'
)
SGLANG_PAGE = 'sglang:spec_verify_calls_total{{engine_type="unified"}} {}\nsglang:spec_accept_length 2.5\n'
NO_DRAFTS_PAGE = "vllm:spec_decode_num_drafts_total 0\nvllm:spec_decode_num_draft_tokens_total 0\n"


@pytest.mark.parametrize(
    ("pages", "drafts"),
    [
        (
            [VLLM_PAGE.format("10.0", "40.0", "30.0"), VLLM_PAGE.format("13.0", "52.0", "36.0")],
            {"drafted": 12, "accepted": 6, "passes": 3},
        ),
        ([SGLANG_PAGE.format("40"), SGLANG_PAGE.format("43.0")], {"accepted": 6, "passes": 3}),  # by its verify calls
        ([NO_DRAFTS_PAGE], {}),
    ],
    ids=["vLLM", "SGLang", "without drafts"],
)
def test_an_engines_counters_before_and_after_the_answer_are_its_drafts(
    pages: list[str], drafts: dict[str, int]
) -> None:
    _, answer = heard(said("x", tokens=10), metrics=counters(*pages))
    assert answer.report == ServerFigures(10, 7, **drafts)


def test_reasoning_that_is_sent_apart_is_timed_and_not_shown() -> None:
    thinking = chunk()
    thinking["choices"][0]["delta"] = {"reasoning_content": "hm"}
    assert heard([thinking, *said("yes")])[0] == ["", "yes"]


def test_half_a_character_becomes_a_replacement() -> None:
    assert heard(said("a\ud83d\ude00", "x", "\ud83d"))[0] == ["a😀", "x", "\ufffd"]


def test_an_absent_server_and_a_wrong_port_are_one_line() -> None:
    refused(list, asked(OpenAIServer("http://127.0.0.1:9/v1")), match="^no server answers at 127.0.0.1:9 ")
    for url in ("http://127.0.0.1:99999/v1", "http://host:abc/api"):
        refused(server_at, url, kind=UsageError, match=f"^{url}: a port is a whole number from 0 to 65535, got [9a]")
    assert server_at("http://[::1]/v1").address == "[::1]"


def cut(reply: Reply, _: dict[str, Any]) -> None:
    reply.events(["so far"], done=False)


def silent(reply: Reply, _: dict[str, Any]) -> None:
    reply.raw(b"")
    time.sleep(2)


def stalled(reply: Reply, _: dict[str, Any]) -> None:
    reply.events(["so far"], done=False)
    time.sleep(2)


def broken(data: bytes) -> Act:
    return lambda reply, _: reply.events(["so far", data], done=False)


def refusal(status: int, error: Any) -> Act:
    return lambda reply, _: reply.json(error, status)


def page(status: int) -> Act:
    def act(reply: Reply, _: dict[str, Any]) -> None:
        reply.begin(status, "text/html")
        reply.raw(b"\n<!DOCTYPE html>\n<html><title>Welcome</title>\n\n")

    return act


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (refusal(401, {"error": {"message": "bad key"}}), "refuses a request without a key .*: bad key"),
        (refusal(403, {"detail": "not you"}), "refuses a request without a key .*: not you"),
        (refusal(404, {"error": {"message": "no such model"}}), "answers 404: no such model"),
        (refusal(404, {"error": "model 'x' not found"}), "answers 404: model 'x' not found"),
        (refusal(429, {"message": "too\nmany"}), "answers 429: too many"),
        (refusal(500, "it broke"), "answers 500: it broke"),
        (silent, "sent nothing for 0.5 s"),
        (
            lambda reply, _: reply.raw(b"HTTP/1.1 307 \r\nLocation: %b\r\n\r\n" % reply.path.encode()),
            "redirects without end",
        ),
        (lambda reply, _: reply.events([], done=False), "closed the connection before the answer's end"),
        (lambda reply, _: reply.events([7], done=False), "no answer in .*'s protocol .7 in place of an object"),
        (page(200), "sends no answer in .*'s protocol .a web page in place of an API"),
        (page(403), "refuses a request without a key .*: a web page in place of an API"),
        (page(502), "answers 502: a web page in place of an API"),
    ],
)
@protocols
def test_a_failure_before_the_first_piece_is_one_line(speaks: type[ScriptedServer], act: Act, line: str) -> None:
    refused(heard, act, speaks, match=line)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([], "closed the connection before the answer's end"),
        (refusal(200, {"choices": []}), "no answer in OpenAI's protocol .plain JSON in place of a stream"),
        ([{"choices": 7}], "no answer in OpenAI's protocol"),
        ([chunk(7)], "no answer in OpenAI's protocol"),  # type: ignore[arg-type]
        ([{"choices": [{"delta": None}]}], "closed the connection before"),
        ([{"choices": [{"delta": "x"}]}], "no answer in OpenAI's protocol"),
        (
            [{"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": 800}]}}]}],
            "no answer in OpenAI's protocol .logprob is 800.0",
        ),
        ([line(7)], "no answer in Ollama's protocol .content is 7"),  # type: ignore[arg-type]
    ],
)
def test_parts_of_another_shape_are_refused_in_a_line(parts: Act | list[dict[str, Any]], line: str) -> None:
    refused(heard, parts, ScriptedOllama if "Ollama" in line else ScriptedServer, match=line)


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (cut, "closed the connection"),
        (stalled, "sent nothing for 0.5 s"),
        (broken(b'{"choices": [{"del'), "no answer in {}'s protocol"),
        (broken(b"[1, 2]"), "no answer in {}'s protocol"),
        (broken(b'{"logprob": NaN}'), "no answer in {}'s protocol (NaN is no JSON)"),
        (broken(b"[" * 100_000), "no answer in {}'s protocol"),
        (broken('{"choices": [{"index": 0, "delta": {"content": "é'.encode()[:-1] + b'"}}]}'), "no answer in {}'s"),
        (broken(b'{"error": {"message": "out of memory"}}'), "broke off: out of memory"),
        (broken(b'{"error": "worker died"}'), "broke off: worker died"),
    ],
)
@protocols
def test_a_failure_in_mid_answer_keeps_what_came(
    speaks: type[ScriptedServer], act: Act, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts, answer = heard(act, speaks)
    assert (texts, answer.reason) == (["so far"], "interrupted")
    assert line.format(answer.server.protocol) in answer.report.problem
    assert "\n" not in answer.report.problem
    assert not caplog.records


@pytest.fixture(params=[ScriptedServer, ScriptedOllama])
def endless(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    def act(reply: Reply, _: dict[str, Any]) -> None:
        reply.begin()
        while True:
            reply.part("on ")
            time.sleep(0.01)

    with request.param(act) as scripted:
        yield scripted


@pytest.mark.parametrize("looks", [3, 4, 5, 20])
def test_an_interrupt_closes_the_stream_and_keeps_what_came(
    endless: ScriptedServer, looks: int, caplog: pytest.LogCaptureFixture
) -> None:
    looked = itertools.count()
    answer = asked(server_at(endless.url), lambda: next(looked) >= looks)
    texts = [text for text, _ in answer]
    assert (set(texts) <= {"on "}, answer.reason, answer.report.problem) == (True, "interrupted", "")
    assert looks < 20 or texts
    sent = any("chat" in path for path, _, _ in endless.requests)  # a busy machine may be interrupted before that
    assert endless.left.wait(10) or (looks < 20 and not sent)
    assert not caplog.records  # asyncio reports a stream that could not be closed


def test_an_answer_that_nobody_reads_on_closes_the_stream(
    endless: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = iter(asked(server_at(endless.url)))
    assert next(pieces)[0] == "on "
    pieces.close()
    assert endless.left.wait(10)
    assert not caplog.records


@protocols
def test_an_interrupt_does_not_wait_for_a_server_that_is_silent(speaks: type[ScriptedServer]) -> None:
    stop = threading.Event()
    with speaks(silent) as scripted:
        answer = asked(server_at(scripted.url), stop.is_set)
        threading.Timer(0.2, stop.set).start()
        assert [*answer] == []
    assert answer.reason == "interrupted"
    with speaks(said("x"), v1__models=silent, api__tags=silent) as scripted, Interrupts():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        refused(list, asked(server_at(scripted.url)), match=f"^stopped waiting for {scripted.address}$")


WHOLE = ["data: [DONE]"]
HEAD = '{"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [{"index": 0, '
TEXT = HEAD + '"delta": {"content": "far"}, "finish_reason": null}]}'
END = HEAD + '"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2, "prompt_tokens": 7}}'


@pytest.mark.parametrize(
    "lines",
    [
        ["retry: 3000", "", f"data: {TEXT}", "", f"data: {END}", "", *WHOLE],
        ["id: 1", "", ": ping", "", "event: x", "", "data:", "", f"data:{TEXT}", ":", "id: 2", "", f"data: {END}"],
        [f"data: {TEXT[:60]}", f"data: {TEXT[60:]}", "", "data: null", "", "data: {}", "", f"data: {END}", ""],
        [f"data: {TEXT}", "", f"data: {END}", "", *WHOLE, "", "data: no more", ""],
        [f"data: {TEXT}", "", f"data: {END.replace('{}', 'null')}", ""],
        [f"data: {TEXT}", "", f"data: {END.replace(HEAD, HEAD.replace('[{', '[null, {'))}", ""],
        ["", "", f"data: {TEXT}", "", f"data: {END}", "", f"data: {END}", "", *WHOLE],
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_is_read_whatever_stands_between_its_pieces(lines: list[str], end: str) -> None:
    def act(reply: Reply, _: dict[str, Any]) -> None:
        reply.begin()
        for each in lines:
            reply.raw(f"{each}{end}".encode())

    texts, answer = heard(act)
    assert (texts, answer.reason, answer.report) == (["far"], "eos", ServerFigures(2, 7))


def test_a_line_separator_in_a_text_ends_no_line_of_the_stream() -> None:
    def act(reply: Reply, _: dict[str, Any]) -> None:
        reply.begin()
        text = TEXT.replace("far", "a\u2028b\x85c")
        reply.raw(f"data: {text}\n\ndata: {END}\n\n".encode())

    assert heard(act)[0] == ["a\u2028b\x85c"]


RECORDED: dict[str, list[dict[str, Any]]] = {
    "llama-server": [  # the role first, usage and timings in a chunk of their own
        {**chunk(), "choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]},
        {**chunk("A "), "system_fingerprint": "b7000-x"},
        chunk("river"),
        chunk(finish="stop"),
        {**usage(9), "timings": {"prompt_n": 7, "predicted_n": 9, "draft_n": 12, "draft_n_accepted": 6}},
    ],
    "vLLM": [  # usage in every chunk (continuous_usage_stats), null fields written out
        {
            **chunk(text),
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": None, "content": text, "reasoning_content": None, "tool_calls": []},
                    "logprobs": None,
                    "finish_reason": finish,
                    "stop_reason": None,
                }
            ],
            "usage": {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}},
            "error": None,
        }
        for count, (text, finish) in enumerate([("A ", None), ("river", None), ("", "stop")], start=1)
    ],
}


def places_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every field and element in JSON."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places_of(value[key], (*at, key))


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("engine", RECORDED)
def test_a_field_that_is_missing_null_or_new_changes_only_what_it_says(engine: str, step: int) -> None:
    """Each field in one way or two; in all three in the exhaustive run."""
    chunks = RECORDED[engine]
    whole, first = heard(chunks)
    sent: list[dict[str, Any]] = []
    with ScriptedServer(lambda reply, _: reply.events(sent)) as scripted:
        server = OpenAIServer(scripted.url)
        changes = itertools.product(places_of(chunks), ("drop", "null", "new"))
        for place, change in itertools.islice(changes, 0, None, step):
            sent[:] = json.loads(json.dumps(chunks))
            inner: Any = sent
            for key in place[:-1]:
                inner = inner[key]
            if change == "new" and not isinstance(inner[place[-1]], dict):
                continue
            if change == "drop":
                del inner[place[-1]]
            elif change == "null":
                inner[place[-1]] = None
            else:
                inner[place[-1]]["x"] = {"y": [None]}
            answer = asked(server)
            texts = [text for text, _ in answer]
            lost = chunks[place[0]]["choices"] and place[-1] in (place[0], "choices", 0, "delta", "content")
            own = chunks[place[0]]["choices"][0]["delta"].get("content") if lost and change != "new" else None
            assert texts == [text for text in whole if text != own], (place, change)
            assert (answer.reason, answer.report.problem) == ("eos", ""), (place, change)
            if not {"usage", "timings"} & {*place} and len(place) > 1:
                assert answer.report == first.report, (place, change)


def test_several_models_are_named_and_none_is_chosen() -> None:
    with ScriptedServer(said("x"), models=["one", "two"]) as scripted:
        refused(list, asked(OpenAIServer(scripted.url)), match="has several models: --model names one of one, two")
        assert [text for text, _ in asked(OpenAIServer(f"{scripted.url}#two"))] == ["x"]
        assert [body["model"] for path, _, body in scripted.requests if "chat" in path] == ["two"]


@pytest.mark.parametrize(
    "listed",
    [
        refusal(500, "Internal Server Error"),  # of `transformers serve` where the hub's cache folder is not there
        *(refusal(200, each) for each in ({}, {"data": None}, {"data": [None, {"id": None}, {"x": 1}]})),
    ],
)
def test_a_server_that_names_no_model_is_asked_for_none(listed: Act) -> None:
    with ScriptedServer(said("x"), v1__models=listed) as scripted:
        assert [text for text, _ in asked(OpenAIServer(scripted.url))] == ["x"]
        assert "model" not in next(body for path, _, body in scripted.requests if "chat" in path)
        assert (OpenAIServer(scripted.url).kind, OpenAIServer(scripted.url).context) == ("", None)


@protocols
def test_a_web_page_in_place_of_the_models_is_called_one(speaks: type[ScriptedServer]) -> None:
    with speaks(said("x"), v1__models=page(200), api__tags=page(200)) as scripted:
        refused(list, asked(server_at(scripted.url)), match=r"a web page in place of an API: a URL ends in /v1")


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    refused(
        list,
        asked(OpenAIServer("http://127.0.0.1:1/v1", key_env="A_KEY")),
        match="needs a key in the environment variable A_KEY",
    )


# -- Ollama's own protocol: docs/api.md, docs/openapi.yaml and docs/modelfile.mdx of ollama/ollama -------------------


@pytest.mark.parametrize(
    ("reason", "ending"), [("stop", "eos"), ("length", "length"), (None, "eos"), ("unload", "eos")]
)
def test_ollama_answers_in_lines_with_its_figures_in_the_last(reason: str | None, ending: str) -> None:
    thought = line("", message={"role": "assistant", "content": "", "thinking": "hm"})
    lines = [thought, line("The "), line("sk\ud83d"), line("y"), {**LAST, "done_reason": reason}, line("no more")]
    texts, answer = heard(lines, ScriptedOllama)
    problem = f"{answer.server.address} ended it: unload" * (reason == "unload")
    figures = ServerFigures(282, 26, rate=1e9 * 282 / 4535599000, load_s=1.334875, problem=problem)
    assert (texts, answer.reason, answer.report) == (["", "The ", "sk\ufffd", "y"], ending, figures)


def test_ollama_gets_settings_as_options_and_refuses_others_in_a_line() -> None:
    server, schema = server_at("http://host:1/api#m"), {"type": "object", "properties": {"a": {"enum": ["b"]}}}
    settings = Settings(temperature=0.5, top_k=7, min_p=0.1, seed=3, max_new_tokens=9, stop=("a",))
    options = {"temperature": 0.5, "top_p": 1.0, "top_k": 7, "min_p": 0.1, "seed": 3, "num_predict": 9, "stop": ["a"]}
    options |= {"repeat_penalty": 1.0, "repeat_last_n": -1, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert server.options(settings) == {"options": options}
    assert server.options(Settings(json_schema=json.dumps(schema)))["format"] == schema
    assert refused(server.options, Settings(regex="a+")) == "host:1 has no field for regex (now a+)"
    line = refused(server.options, Settings(logit_bias="12=1"), {(12,): 1.0})
    assert line == "host:1 has no field for logit_bias (now 12=1)"
