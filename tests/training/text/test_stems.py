"""How the user's turns of training chats begin: the kinds in turn, what depends on what, where a turn is cut."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.support.tiny import tiny_tokenizer
from training.text.dialogues import TASKS, Ask, OwnChats, TurnPart, whole_sentences

STOP = 2
STOPS = frozenset([STOP])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def played(chats: OwnChats, number: int, tokenizer: Any, said: Sequence[tuple[str, bool]]) -> tuple[list[Ask], Any]:
    """What chat `number` asks for and the lines it ends with; the target says `said`, (text, whether it ends there)."""
    chat, asks = chats.chat(number), list[Ask]()
    assert chat is not None
    ask = next(chat)
    try:
        for text, ends in [*said, ("Yes.", True)]:
            asks.append(ask)
            ask = chat.send(tokenizer(text, add_special_tokens=False)["input_ids"] + [STOP] * ends)
    except StopIteration as ended:
        return asks, ended.value
    raise AssertionError("it asks for more")


def turn_of(line: Any, tokenizer: Any) -> str:
    """The user's turn of an answer's line."""
    found = re.search(
        r"user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n$", tokenizer.decode(line["ids"][: line["start"]]), re.S
    )
    assert found is not None
    return found[1]


def only(monkeypatch: pytest.MonkeyPatch, *pieces: TurnPart) -> None:
    """Make the kind qa begin with these pieces."""
    monkeypatch.setitem(TASKS, "qa", lambda dice: list(pieces))  # type: ignore[arg-type]


# -- the beginnings -------------------------------------------------------------------------------


# -- the chats ------------------------------------------------------------------------------------


def test_each_kind_has_every_temperature_even_where_there_are_as_many_of_both(tokenizer: Any) -> None:
    chats = OwnChats(tokenizer, STOPS, 24, (0.0, 0.7, 1.0), ("qa", "chat", "maths"))
    lines = [played(chats, number, tokenizer, [("so it is?", True)])[1][0] for number in range(9)]
    assert len({(line.get("kind"), line["temperature"]) for line in lines}) == 9


def test_a_conversation_goes_on_for_two_to_four_turns_and_each_answer_is_a_line(tokenizer: Any) -> None:
    chats = OwnChats(tokenizer, STOPS, 24, kinds=("conversation",))
    lengths = set()
    for number in range(12):
        _, lines = played(chats, number, tokenizer, [(" so it is?", True), ("Yes.", True)] * 3 + [(" so it is?", True)])
        assert len({line["temperature"] for line in lines}) == 1
        assert all(
            tokenizer.decode(later["ids"]).startswith(tokenizer.decode(earlier["ids"][:-1]))
            for earlier, later in pairwise(lines)
        )
        lengths.add(len(lines))
    assert lengths == {2, 3, 4}


# -- where a turn ends ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One came. Two went. Three", "One came. Two went."),
        ("He said “No!” and she", "He said “No!”"),
        ("Is it? It is.", "Is it? It is."),
        ("It costs 3.5 million. Or 4.", "It costs 3.5 million."),
        ("Some. 2. ", "Some."),
        ("no end of it, www.example", ""),
        ("", ""),
    ],
)
def test_a_text_is_kept_up_to_its_last_full_sentence(text: str, kept: str) -> None:
    assert whole_sentences(text) == kept


def test_a_loose_part_is_cut_at_a_sentence_and_the_turn_goes_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, TurnPart("A river", 40, loose=True), TurnPart("\nWho", 20))
    chats = OwnChats(tokenizer, STOPS, 24, kinds=("qa",))
    asks, lines = played(chats, 0, tokenizer, [(" is wet. It runs. It fl", False), (" fell in?", True)])
    assert turn_of(lines[0], tokenizer) == "A river is wet. It runs.\nWho fell in?"
    assert [ask.limit for ask in asks] == [40, 20, 24]
    assert tokenizer.decode(asks[0].prompt).endswith("user\nA river")
    assert tokenizer.decode(asks[1].prompt).endswith("A river is wet. It runs.\nWho")
    assert lines[0]["kind"] == "qa"
    _, lines = played(chats, 0, tokenizer, [(" is wet", True), (" fell in?", True)])
    assert turn_of(lines[0], tokenizer) == "A river is wet\nWho fell in?"


@pytest.mark.parametrize(
    "said",
    [
        [(" is wet, and wetter", False)],  # loose, but without a sentence to be cut at
        [("", True)],  # ended where it began
        [(" is wet. It", False), (" fell in? Or", False)],  # the last part does not end
        [(" is wet. It", False), ("  ", True)],
    ],
)
def test_a_part_that_does_not_come_to_an_end_drops_the_chat(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, bool]]
) -> None:
    only(monkeypatch, TurnPart("A river", 40, loose=True), TurnPart("\nWho", 20))
    asks, lines = played(OwnChats(tokenizer, STOPS, 24, kinds=("qa",)), 0, tokenizer, said)
    assert lines == []
    assert len(asks) == len(said)  # no answer was asked for


def test_a_tokenizer_that_drops_leading_spaces_loses_no_space(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropping:
        chat_template = tokenizer.chat_template

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **more: Any) -> Any:
            return tokenizer(text, **more)

        def decode(self, ids: list[int], **more: Any) -> str:
            return str(tokenizer.decode(ids, **more)).removeprefix(" ")

    only(monkeypatch, TurnPart("Who", 20))
    _, lines = played(OwnChats(Dropping(), STOPS, 24, kinds=("qa",)), 0, tokenizer, [(" fell in?", True)])
    assert turn_of(lines[0], tokenizer) == "Who fell in?"
