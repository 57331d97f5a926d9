"""Models that think: their thinking is shown dim, in a line or not at all, and is left out of later prompts."""

import re
from pathlib import Path
from typing import Any

import pytest

from app.chat.conversation import Conversation
from app.console.chat_commands import decode
from app.console.state import ConsoleState
from app.screen.palette import Look
from app.screen.panes import Pane
from app.screen.spans import Span, span_parts, thoughts
from tests.support.panes import pane_of
from tests.support.screen import Terminal
from tests.support.scripted import catalogue_of, run_lines
from tests.support.thinking import BEGINS, STRIPS, TEXT, thinking_pair
from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from utils.catalogue.templates import Thinking, thinking_marks

MARKS = Thinking("<think>", "</think>", False)
FOLDED = "[thought, 5 words: /thinking show]"
WRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}"
    "[/THINK]{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)
TOOLS = CHAT_TEMPLATE + "{% if tools %}<tools>{{ tools }}</tools><tool_call>…</tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (STRIPS, MARKS),
        (BEGINS, MARKS._replace(begun=True)),
        (WRITES, Thinking("[THINK]", "[/THINK]", False)),
        (TOOLS, None),
        (CHAT_TEMPLATE, None),
    ],
)
def test_the_marks_are_those_whose_inside_the_template_leaves_out_or_writes(template: str, marks: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert thinking_marks(tokenizer) == marks


# -- what is shown ------------------------------------------------------------------------------------


SPANS = [
    Span("<think> so", "target"),
    Span(" many", "accepted"),
    Span(" bones", "rejected"),
    Span(" stones</think>\n\nSev", "accepted"),
    Span("en", "bonus"),
]


def pane(mode: str, spans: list[Span] = SPANS, color: bool = False) -> list[tuple[str, str]]:
    """The text rows of a pane without colour, each segment with its style."""
    shown = span_parts(spans, thoughts("".join(span.text for span in spans if span.committed), MARKS, mode), mode)
    rows = Pane(pane_of("spec", shown, state="done"), Look(width=60, color=color)).rows()[1:-1]
    return [(segment.text, str(segment.style or "")) for row in rows for segment in row[1:-2]]


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("show", "{+<think> so+} many [-bones-] stones</think>Sev{*en*}"),
        ("fold", "[thought, 3 words: /thinking show]Sev{*en*}"),
        ("hide", "Sev{*en*}"),
    ],
)
def test_a_pane_shows_thinking_whole_folded_or_not_at_all(mode: str, shown: str) -> None:
    assert "".join(text for text, _ in pane(mode)) == shown


def test_a_pane_counts_the_words_of_thinking_that_goes_on() -> None:
    assert [text for text, _ in pane("fold", SPANS[:2])] == ["[thinking, 2 words so far]"]


def test_thinking_is_dim_and_keeps_its_colours() -> None:
    styles = dict(pane("show", color=True))
    assert (styles[" many"], styles["en"]) == ("dim green", "bold bright_magenta")
    assert dict(pane("fold", color=True))["[thought, 3 words: /thinking show]"] == "dim"


@pytest.mark.parametrize(
    ("marks", "before", "text", "shown"),
    [
        (MARKS, "", "<think>a</think>b<think>c</think>\n\nd", "b" + "d"),
        (MARKS, "<think>a", " b</think>c", "c"),
        (MARKS, "<think>a</think>b", "c", "c"),
        (MARKS._replace(begun=True), "", "a</think>\n\nb", "b"),
        (MARKS._replace(begun=True), "a</think>", "b", "b"),
        (MARKS, "", "no thought", "no thought"),
    ],
)
def test_thinking_is_found_where_it_stands(marks: Thinking, before: str, text: str, shown: str) -> None:
    found = thoughts(text, marks, "hide", before)
    assert "".join(part.text for part in span_parts([Span(text, "plain")], found, "hide")) == shown


# -- the console --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["strips", "begins", "channels"])
def catalogue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    return catalogue_of(
        folder,
        {"thinks-ngram": thinking_pair(folder / "model", *(request.param == kind for kind in ("begins", "channels")))},
    )


def test_a_conversation_with_a_model_that_thinks(catalogue: Path, tmp_path: Path) -> None:
    file, turns = tmp_path / "chat.json", list[Any]()

    def look(state: ConsoleState) -> None:
        assert state.chat is not None
        turns.append([*state.chat.turns])

    lines = ["one", "/thinking show", "/thinking hide", "two", look, "/regen", look, "/undo", look, "/thinking fold"]
    lines += [f"/save {file}", "/clear", f"/load {file}", "/history", look]
    ran = run_lines(catalogue, *lines, settings={"max_new_tokens": 20})  # type: ignore[arg-type]
    assert not ran.errors
    assert FOLDED in ran.after("one")
    assert "stones" not in ran.after("one")
    assert "so many stones lie here" in ran.after("/thinking show")
    assert "stones" not in ran.after("two")
    assert "thought" not in ran.after("two")
    assert "Seven of them." in ran.after("two")
    decode = ran.state.conversation().tokenizer.decode
    first, second = (list(turn.prompt) for turn in turns[0])
    begun = "<think>\n" if decode(first).endswith("<think>\n") else ""
    said = TEXT.removeprefix(begun.strip())
    assert [[turn.text for turn in each] for each in turns] == [[said, said], [said, said], [said], [said]]
    assert ran.after("/history").split() == ["›", "one", *FOLDED.split(), "Seven", "of", "them."]
    assert decode(second).startswith(decode(first).removesuffix(begun) + "Seven of them.<|im_end|>")
    count = len(first) - 2 * bool(begun)
    assert second[:count] == first[:count], "the cache serves up to the thinking"


def test_an_answer_that_is_cut_within_its_thinking_goes_on(catalogue: Path) -> None:
    ran = run_lines(
        catalogue, "one", "/set max_new_tokens=20", "/continue", "/thinking show", settings={"max_new_tokens": 5}
    )
    assert "so far]" in ran.after("one")
    assert "Seven of them." in ran.after("/continue")
    assert FOLDED in ran.after("/continue")
    assert "so many stones lie here" in ran.after("/thinking show")
    assert not ran.errors


def test_an_answer_that_the_chat_goes_back_to_hides_its_thinking_too(catalogue: Path) -> None:
    def force(state: ConsoleState) -> None:
        chat = state.conversation()
        decode(state, chat.plan_force(3, chat.turns[0].answer[3]))

    ran = run_lines(catalogue, "one", force, "/undo", settings={"max_new_tokens": 20})
    assert "the answer is as it was before a token was forced" in ran.after("/undo")
    assert FOLDED in ran.after("/undo")
    assert "stones" not in ran.after("/undo")
    assert not ran.errors


def test_an_earlier_answer_keeps_the_ids_that_it_was_decoded_as(tmp_path: Path) -> None:
    """Its text would be split otherwise; only what the template changes is made anew."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = STRIPS
    chat = Conversation(tokenizer, frozenset({2}), 4000)
    ids = [token for letter in "ting" for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    chat.commit(chat.plan("one"), [*ids, 2], "eos")
    thought = tokenizer("<think>x</think>\n\ny", add_special_tokens=False)["input_ids"]
    chat.commit(chat.plan("two"), [*thought, 2], "eos")
    prompt = list(chat.turns[1].prompt)
    assert chat.plan("three").prompt[: len(prompt)] == prompt
    assert tokenizer(chat.turns[0].text, add_special_tokens=False)["input_ids"] != ids


@pytest.mark.slow
def test_thinking_in_a_real_terminal(tmp_path: Path) -> None:
    flags = ["--target", str(thinking_pair(tmp_path / "model").target), "--drafter", "ngram", "--device", "cpu"]
    terminal = Terminal(*flags, environ={"NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path)}, warm=True)
    try:
        terminal.wait(lambda: terminal.at_prompt, 240)
        terminal.enter("one", until=lambda: "TTFT" in terminal.raw and terminal.at_prompt, seconds=240)
        assert FOLDED in terminal.text
        terminal.enter("/thinking show", until="so many stones lie here")
        assert not re.search(r"\x1b\[([0-9]+;)*(3[0-8]|4[0-8]|9[0-7])[;m]", terminal.raw), "no colour"
        terminal.enter("/exit", until=lambda: not terminal.child.isalive())
    finally:
        terminal.child.close(force=True)
