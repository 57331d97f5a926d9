"""A form for the answer in the lanes of a pair and of servers: the same text in all, or one line why not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.lanes.answers import run_lane
from app.lanes.lane import Lane, PairEngine
from app.settings.table import Layers, Settings
from tests.support.refusals import refused
from utils.errors import UsageError
from utils.progress import never
from utils.remote.server import OpenAIServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tags": {"enum": ["the", "and"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
LANES = ["ar", "spec", "ngram", "maxgram", "suffix", "tables", "match+model"]


def answered(engine: PairEngine, lane: Lane, prompt: str = "tell me") -> Any:
    def decode(ids: list[int]) -> str:
        return str(engine.tokenizer.decode(ids, skip_special_tokens=True))

    ids = list(engine.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return run_lane(lane, ids, decode, interrupt=never)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1, "coupling": "gumbel"}, {"gamma": "auto"}, {"expand": "dynamic"}]
)
def test_the_lanes_say_the_same_and_it_fits(engine: PairEngine, how: dict[str, Any]) -> None:
    settings = Settings(**({"gamma": 3, "max_new_tokens": 60, "json_schema": TEXT} | how))
    answers = {name: answered(engine, engine.lane(name, settings)) for name in LANES}
    assert {answer.text for answer in answers.values()} == {answers["ar"].text}
    said = json.loads(answers["ar"].text)
    assert list(said) == ["name", "tags"]
    assert len(said["name"]) <= 6
    for name in LANES[1:]:
        lane, stats = engine.lane(name, settings), answers[name].stats
        forced = stats.sources[len(lane.source_names) - 1]
        assert lane.source_names[-1] == "grammar"
        assert forced[0] >= forced[1] > 10, name
        # the clock tells auto whether to draft more than the form forces
        assert settings.gamma == "auto" or stats.tokens_per_pass > 2


@pytest.mark.parametrize("name", ["draft", "spec"])
def test_the_drafter_alone_and_drawn_drafts_follow_it_too(engine: PairEngine, name: str) -> None:
    settings = Settings(gamma=3, max_new_tokens=60, json_schema=TEXT, temperature=1)
    assert list(json.loads(answered(engine, engine.lane(name, settings)).text)) == ["name", "tags"]


def test_an_oracle_drafts_what_the_target_says_in_the_form(engine: PairEngine) -> None:
    settings = Settings(gamma=3, max_new_tokens=60, json_schema=TEXT)
    plain, oracle = (answered(engine, engine.lane(name, settings)) for name in ("ar", "oracle:1"))
    assert (oracle.text, oracle.stats.alpha) == (plain.text, 1)


def test_without_a_form_nothing_is_named_grammar(engine: PairEngine) -> None:
    assert "grammar" not in engine.lane("spec", Settings()).source_names
    assert engine.lane("ar", Settings(json_schema=TEXT)).source_names == ()


def test_a_part_that_was_said_counts(engine: PairEngine) -> None:
    settings = Settings(gamma=3, max_new_tokens=60, json_schema=TEXT)
    whole = answered(engine, engine.lane("ar", settings)).text
    said = list(engine.tokenizer(whole[:12], add_special_tokens=False)["input_ids"])
    lane = engine.lane("ngram", settings)
    lane.begun = said
    assert answered(engine, lane, f"tell me{whole[:12]}").text == whole[12:]
    lane.begun = said[1:]
    assert refused(answered, engine, lane).startswith("the answer so far is no beginning of one by json_schema")


def test_a_file_that_changes_is_read_again(engine: PairEngine, tmp_path: Path) -> None:
    file = tmp_path / "form.lark"
    for word in ("the", "and"):
        file.write_text(f'start: "{word}"', encoding="utf-8")
        assert answered(engine, engine.lane("ngram", Settings(grammar=str(file)))).text == word


def test_what_cannot_be_is_one_line(engine: PairEngine) -> None:
    assert refused(engine.lane, "beam", Settings(regex="a")) == "lane beam: a beam search has no regex (now a)"
    assert refused(engine.lane, "spec", Settings(regex="a)")).startswith("regex: unopened group at character 2")
    line = refused(Layers().with_console_changes(regex="a").with_console_changes, grammar="b.lark", kind=UsageError)
    assert line == "an answer has one form: choose grammar or regex, and switch the others off"
    assert Layers().with_console_changes(json=TEXT).with_console_changes(json="off").settings.form is None


def server(kind: str) -> Any:
    return SimpleNamespace(kind=kind, address="host:1")


REQUESTS: list[tuple[str, dict[str, str], Any]] = [
    (
        "",
        {"json_schema": TEXT},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
    ),
    ("llama-cpp-python", {"json_schema": TEXT}, {"type": "json_object", "schema": SCHEMA}),
    ("vLLM", {"regex": "a+"}, {"regex": "a+"}),
    ("SGLang", {"regex": "a+"}, "a+"),
    ("SGLang", {"grammar": "{gbnf}"}, 'root ::= "a"'),
    ("llama-server", {"grammar": "{gbnf}"}, 'root ::= "a"'),
    ("llama-server", {"grammar": "{lark}"}, "host:1 reads grammars in GBNF, not in Lark (now "),
    ("llama-server", {"regex": "a+"}, "host:1 has no field for regex (now a+)"),
    ("", {"regex": "a+"}, "host:1 has no field for regex (now a+)"),
]
FIELDS = {"json_schema": "response_format", "vLLM": "structured_outputs", "SGLang": "ebnf", "llama-server": "grammar"}


@pytest.mark.parametrize(("kind", "form", "sent"), REQUESTS)
def test_a_request_has_the_servers_own_field(kind: str, form: dict[str, str], sent: Any, tmp_path: Path) -> None:
    files = {"{gbnf}": 'root ::= "a"', "{lark}": 'start: "a"'}
    ((name, value),) = form.items()
    if value in files:
        (tmp_path / "form").write_text(files[value], encoding="utf-8")
        value = str(tmp_path / "form")
    settings = Settings(**{name: value})
    if isinstance(sent, str) and sent.startswith("host"):
        assert refused(OpenAIServer.options, server(kind), settings).startswith(sent)
        return
    field = FIELDS.get(name) or ("regex" if (kind, name) == ("SGLang", "regex") else FIELDS[kind])
    assert OpenAIServer.options(server(kind), settings)[field] == sent
