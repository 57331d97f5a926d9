"""The history by ids: prompts, tails of chat templates, edits, and what an error leaves unchanged."""

from typing import Any

import pytest

from app.chat.conversation import ChatModels, Conversation, clean
from tests.support.refusals import refused
from tests.support.tiny import END, tiny_tokenizer

STOP = 2
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FUSSY = (
    "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no bad') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)


def conversation(template: str | None = DEFAULT_SYSTEM, context: int = 4000, **more: Any) -> Conversation:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Conversation(tokenizer, frozenset({STOP}), context, **more)


def ids(chat: Conversation, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def shown(chat: Conversation, tokens: list[int]) -> str:
    return chat.tokenizer.decode(tokens)


def answer(chat: Conversation, message: str, text: str, reason: Any = "eos", **more: Any) -> None:
    chat.commit(chat.plan(message), ids(chat, text) + ([STOP] if reason == "eos" else []), reason, **more)


@pytest.mark.parametrize("reason", ["eos", "length", "interrupted"])
def test_the_prompt_reads_like_the_template_whatever_ended_the_answers(reason: Any) -> None:
    chat = conversation()
    answer(chat, "hi", "hello", reason)
    answer(chat, "more", "yes", reason)
    messages = [
        {"role": role, "content": text}
        for role, text in [
            ("user", "hi"),
            ("assistant", "hello"),
            ("user", "more"),
            ("assistant", "yes"),
            ("user", "?"),
        ]
    ]
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown(chat, chat.plan("?").prompt) == whole
    assert "Be kind." in whole


def test_answers_are_never_tokenised_again() -> None:
    chat = conversation()
    odd = ids(chat, "t") + ids(chat, "h") + ids(chat, "e")  # " the" would be one token
    odd = [*ids(chat, " "), *odd]
    assert ids(chat, " the") != odd
    chat.commit(chat.plan("a"), [*odd, STOP], "eos")
    prompt = chat.plan("b").prompt
    before = list(chat.turns[0].prompt)
    assert prompt[: len(before) + len(odd) + 1] == [*before, *odd, STOP]


def test_a_prompt_begins_with_everything_said_so_that_the_cache_is_reused() -> None:
    chat = conversation()
    for number in range(3):
        said = chat.ids
        assert chat.plan(f"message {number}").prompt[: len(said)] == said
        answer(chat, f"message {number}", "fine")


def test_a_system_prompt_reaches_earlier_turns_and_answers_keep_their_ids() -> None:
    chat = conversation()
    answer(chat, "hi", "hello")
    kept = chat.turns[0].answer
    chat = chat.changed(system="Be brief.")
    assert chat.turns[0].answer == kept
    assert shown(chat, chat.ids).startswith("<|im_start|>system\nBe brief.")
    chat = chat.changed(system="")
    assert "Be kind." in shown(chat, chat.ids)


def test_a_template_without_system_role_takes_it_in_the_first_message() -> None:
    chat = conversation(NO_SYSTEM, system="Be brief.")
    assert shown(chat, chat.plan("hi").prompt) == f"[user] Be brief.\n\nhi {END}[assistant]"


def test_white_space_before_the_end_token_does_not_end_the_turn_twice() -> None:
    chat = conversation(NO_SYSTEM)
    answer(chat, "hi", " hello")
    assert shown(chat, chat.plan("more").prompt) == f"[user] hi {END}[assistant] hello{END}[user] more {END}[assistant]"


def test_a_stop_token_that_the_template_does_not_use_is_dropped() -> None:
    chat = conversation()
    chat.stop_ids = frozenset({0, STOP})
    chat.commit(chat.plan("hi"), [*ids(chat, "hello"), 0], "eos")
    assert f"hello{END}\n<|im_start|>user\nmore" in shown(chat, chat.plan("more").prompt)


def test_a_template_that_hides_earlier_answers_is_refused_in_one_line() -> None:
    chat = conversation("{{ messages[-1]['content'] }}")
    answer(chat, "hi", "hello")
    refused(chat.plan, "more", match="leaves out earlier answers")
    assert len(chat.turns) == 1


def test_a_refused_change_leaves_the_whole_chat_as_it_was() -> None:
    chat = conversation(FUSSY)
    chat = chat.changed(template="chatml")
    answer(chat, "hi", "hello")
    before, turns = dict(vars(chat)), list(chat.turns)
    refused(chat.changed, system="bad", template="auto", match="no bad")
    assert (vars(chat), chat.turns) == (before, turns)
    chat = chat.changed(template="auto")
    refused(chat.changed, system="bad", match="no bad")
    chat = chat.changed(system="good")
    assert shown(chat, chat.ids).startswith("<system>good<user>hi")  # it takes a system prompt all the same


@pytest.mark.parametrize("chat", [conversation(None), conversation(chat=False)])
def test_without_template_the_text_simply_goes_on(chat: Conversation) -> None:
    assert not chat.templated
    answer(chat, "Once", " upon a time")
    assert shown(chat, chat.plan("Then").prompt) == "Once upon a time\nThen"


def test_continue_goes_on_from_the_ids_and_keeps_one_turn() -> None:
    chat = conversation()
    answer(chat, "one", "half", "length", seed=7)
    plan = chat.plan_continue()
    assert (plan.prompt, plan.seed) == (chat.ids, 7)
    turn = chat.commit(plan, [*ids(chat, " done"), STOP], "eos", seed=7)
    assert (turn.text, len(chat.turns), turn.reason) == ("half done", 1, "eos")
    assert shown(chat, chat.ids).endswith(f"half done{END}")
    refused(chat.plan_continue, match="ended by itself")


def test_a_prompt_needs_room_for_one_token() -> None:
    chat = conversation(None)
    chat.context = 5
    assert len(chat.plan("abcd").prompt) == 4
    refused(chat.plan, "abcde", match="needs one more")


def test_another_tokenizer_rebuilds_the_history_from_its_texts() -> None:
    chat = conversation()
    answer(chat, "one", "the answer")
    other = tiny_tokenizer()
    other.add_tokens(["one more token"])
    other.chat_template = DEFAULT_SYSTEM
    chat = chat.changed(ChatModels(other, frozenset({STOP}), 4000))
    assert chat.retokenised
    assert chat.turns[0].text == "the answer"
    assert f"the answer{END}\n<|im_start|>user\ntwo" in shown(chat, chat.plan("two").prompt)


def test_the_same_tokenizer_keeps_the_ids() -> None:
    chat = conversation()
    answer(chat, "one", "the answer")
    said = chat.ids
    chat = chat.changed(ChatModels(tiny_tokenizer(), frozenset({STOP}), 4000))
    assert (chat.ids, chat.retokenised) == (said, False)


@pytest.mark.parametrize(
    ("raw", "text"),
    [("a\x00b", "ab"), ("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("é\udcff", "é\ufffd"), ("ok", "ok")],
)
def test_text_that_no_tokenizer_takes_is_cleaned(raw: str, text: str) -> None:
    assert clean(raw) == text
    assert conversation().plan(clean(raw)).prompt
