"""Forms for an answer: masks are those of the texts that fit, forced tokens are the tokenizer's own, and what is broken
is one line with its place.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from tests.support.refusals import refused
from tests.support.tiny import END, VOCAB, tiny_tokenizer
from utils.grammar import LAYOUT, GrammarState, compiled, form_text, vocabulary_of

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids(END)
VOCABULARY = vocabulary_of(TOKENIZER, VOCAB, frozenset({STOP}))
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["the", "and"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def begin(kind: str, value: str) -> GrammarState:
    return GrammarState(compiled(kind, form_text(kind, value), VOCABULARY), VOCAB, {STOP})


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def walked(state: GrammarState, text: str) -> GrammarState:
    for token in ids_of(text):
        following = state.after(token)
        assert following is not None, (text, token)
        state = following
    return state


def followers(state: GrammarState) -> set[str]:
    return {str(TOKENIZER.decode([token])) for token in (~state.refused).nonzero()[:, 0].tolist()}


def test_json_is_written_as_json_dumps_does_and_its_frame_is_forced() -> None:
    state, forced = begin("json_schema", json.dumps(PERSON)), list[int]()
    while (token := state.forced) is not None:
        forced.append(token)
        following = state.after(token)
        assert following is not None
        state = following
    assert TOKENIZER.decode(forced) == '{"name": "'
    assert forced == ids_of('{"name": "')
    assert followers(state) == {"t", "a"}
    assert followers(walked(state, 'the", "age": ')) == set("0123456789")


def test_after_a_whole_answer_only_the_end_can_follow() -> None:
    whole = walked(begin("json_schema", json.dumps(PERSON)), json.dumps({"name": "and", "age": 7}))
    assert whole.forced == STOP
    assert followers(whole) == {END}
    assert whole.after(STOP) is None


def test_what_cannot_follow_has_no_state_and_other_texts_are_not_disturbed() -> None:
    state = begin("regex", "a+b")
    refused_mask = state.refused.clone()
    assert [state.after(token) is None for token in (*ids_of("a"), *ids_of("b"), STOP)] == [False, True, True]
    assert followers(walked(state, "aa")) == {"a", "b"}
    assert (state.refused == refused_mask).all()
    assert followers(state) == {"a"}


@pytest.mark.parametrize(
    "text", ['start: "a" WORD\nWORD: /[bc]/\n', 'root ::= "a" word\nword ::= [bc]\n'], ids=["Lark", "GBNF"]
)
def test_grammars_are_read_in_lark_and_in_gbnf(text: str, tmp_path: Path) -> None:
    file = tmp_path / "form"
    file.write_text(text, encoding="utf-8")
    assert followers(walked(begin("grammar", str(file)), "a")) == {"b", "c"}


REFERS = {"properties": {"a": {"$ref": "#/$defs/b"}}}
SCHEMA_ERRORS: list[tuple[Any, str]] = [
    ({"properties": {"a": {"minimun": 3}}}, "/properties/a: unknown keyword minimun (did you mean minimum?)"),
    (
        {"properties": {"a": {"items": {"type": "objekt"}, "type": "array"}}},
        "/properties/a/items: Invalid type: objekt",
    ),
    ({"anyOf": [{"type": "string"}, {"not": {"type": "string"}}]}, '/anyOf/1: Unimplemented keys: ["not"]'),
    ({"items": {"type": "string", "pattern": "x(a"}}, "/items: unclosed group at character 2 of x(a"),
    ({"$defs": {"b": {"type": "x"}}, **REFERS}, "/$defs/b: Invalid type: x"),
    (REFERS, "/properties/a: Pointer '/$defs/b' does not exist"),
]


@pytest.mark.parametrize(("schema", "line"), SCHEMA_ERRORS)
def test_a_broken_schema_is_one_line_with_its_place(schema: Any, line: str) -> None:
    assert refused(lambda: begin("json_schema", json.dumps(schema))) == f"json_schema at {line}"


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("json_schema", '{"type": object}', "json_schema: no JSON: Expecting value: line 1 column 10 (char 9)"),
        ("json_schema", "{file}", "json_schema: must be a JSON object, got [1]"),
        (
            "json_schema",
            "missing.json",
            "cannot read missing.json: [Errno 2] No such file or directory: 'missing.json'",
        ),
        ("regex", "ab)", "regex: unopened group at character 3 of ab)"),
        ("grammar", "start: word\n", 'grammar: line 1, column 8: unknown name: "word"'),
        ("grammar", 'start: "a"\nb ! c\n', "grammar: line 2, column 4: lexer error"),
        ("grammar", 'root ::= "a" | b )\n', "grammar: Expected name at line 1"),
        ("grammar", "root ::= word\n", "grammar: Rule 'word' not found"),
    ],
)
def test_other_broken_forms_are_one_line_too(kind: str, text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "form"
    file.write_text("[1]" if text == "{file}" else text, encoding="utf-8")
    value = str(file) if kind == "grammar" or text == "{file}" else text
    said = refused(lambda: begin(kind, value))
    assert said.startswith(line)
    assert "\n" not in said


@pytest.mark.parametrize("limits", [{"step_max_items": 3}, {"step_max_items": 16}, {"max_lexer_states": 2}])
def test_a_form_that_is_too_complex_is_one_line_and_never_let_go(limits: dict[str, int]) -> None:
    grammar = LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=LAYOUT)
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=LLParserLimits(**limits))

    def answered() -> None:
        state: Any = GrammarState(matcher, VOCAB, {STOP})
        for token in ids_of('{"ab": {"x": "y"}}'):
            assert state.forced in (None, token)
            assert not state.refused[token]
            state = state.after(token)

    assert refused(answered).startswith("the form is too complex for this answer: ")
