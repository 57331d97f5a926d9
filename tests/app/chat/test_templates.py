"""The next prompt is the template's: also where that changes what was said, wants parts, or knows channels."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.chat.conversation import Conversation
from app.command_line.run import AnswerWriter
from sampling.models.encoder_decoder import lm_of
from sampling.types import Draft
from tests.support.tiny import END, VOCAB, tiny_model, tiny_tokenizer
from utils.catalogue.templates import end_ids

STOP = 2
OPEN, CLOSE = "<extra_0>", "<extra_1>"  # around thinking
CHANNEL, MESSAGE, OVER, START = "<extra_2>", "<extra_3>", "<extra_4>", "<extra_5>"  # of harmony

# As Qwen 3: of earlier answers only what follows the thinking.
THINKING = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and CLOSE in content %}{% set content = content.split(CLOSE)[-1].lstrip('\\n') %}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("CLOSE", f"'{CLOSE}'")
# As DeepSeek R1: the prompt begins the thinking, which later prompts leave out.
BEGUN = THINKING.replace("<|im_start|>assistant\n{% endif %}", f"<|im_start|>assistant\n{OPEN}\n{{% endif %}}")
# As Mistral: the system prompt stands in the last user's message.
LAST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}[INST] {% if loop.last and system is defined %}"
    "{{ system }}\n\n{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
# As SmolVLM: content is a list of parts; as Llama 3.2 Vision: but the system prompt is a text.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_AND_PARTS = PARTS.replace(
    "{% for part in m", "{% if m.role == 'system' %}{{ m.content }}{% else %}{% for part in m"
)
TEXT_AND_PARTS = TEXT_AND_PARTS.replace(
    "{% endif %}{% endfor %}<|im_end|>", "{% endif %}{% endfor %}{% endif %}<|im_end|>"
)
# As gpt-oss: of an earlier answer only the channel `final`; its schema as transformers has it.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}STARTassistantCHANNELfinalMESSAGE{{ m.content }}OVER"
    "{% else %}START{{ m.role }}MESSAGE{{ m.content }}OVER{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}STARTassistant{% endif %}"
)
SCHEMA = {
    "defaults": {"role": "assistant"},
    "start_anchor": f"{START}assistant",
    "fields": {
        "thinking": {"open": f"{CHANNEL}analysis{MESSAGE}", "close": OVER, "content": "text"},
        "content": {"open": f"{START}assistant{CHANNEL}final{MESSAGE}", "close": [OVER, END], "content": "text"},
    },
}


def marked(text: str) -> str:
    for name, token in {"CHANNEL": CHANNEL, "MESSAGE": MESSAGE, "OVER": OVER, "START": START}.items():
        text = text.replace(name, token)
    return text


def conversation(template: str, schema: Any = None, **more: Any) -> Conversation:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = template, schema
    return Conversation(tokenizer, frozenset({STOP}), 4000, **more)


def ids(chat: Conversation, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def answer(chat: Conversation, message: str, text: str) -> None:
    chat.commit(chat.plan(message), [*ids(chat, text), STOP], "eos")


def templated(chat: Conversation, *messages: tuple[str, Any]) -> list[int]:
    """The ids that transformers makes of the chat."""
    said = [
        {"role": role, **(content if isinstance(content, dict) else {"content": content})} for role, content in messages
    ]
    return list(chat.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))


def kept(before: list[int], prompt: list[int]) -> tuple[int, int]:
    """How many tokens of the cache behind `before` serve `prompt`, and how many the two have in common."""
    lm = lm_of(tiny_model(context=1024), "target", VOCAB)
    session = lm.open([before])
    with torch.inference_mode():
        session.score([before], Draft.empty(1))
    common = next((at for at, (one, two) in enumerate(zip(before, prompt, strict=False)) if one != two), len(before))
    return lm.open([prompt], previous=session).rollback([prompt])[0], common


@pytest.mark.parametrize(("template", "begun"), [(THINKING, f"{OPEN}\n"), (BEGUN, "")])
def test_thinking_is_stripped_where_the_template_strips_it(template: str, begun: str) -> None:
    chat = conversation(template)
    said = [f"{begun}so many\n{CLOSE}\n\nseven", f"{begun}and more\n{CLOSE}\n\neight"]
    answer(chat, "how many?", said[0])
    before = chat.ids
    second = [("user", "how many?"), ("assistant", said[0]), ("user", "and now?")]
    assert chat.plan("and now?").prompt == templated(chat, *second)
    answer(chat, "and now?", said[1])
    assert chat.plan("ok").prompt == templated(chat, *second, ("assistant", said[1]), ("user", "ok"))
    assert "so many" not in chat.tokenizer.decode(chat.plan("ok").prompt)
    reused, common = kept(before, list(chat.turns[1].prompt))
    assert reused >= common - 1 > len(templated(chat, ("user", "how many?"))) - 4


def test_an_answer_without_thinking_keeps_its_ids() -> None:
    chat = conversation(THINKING)
    answer(chat, "how many?", "seven")
    said = chat.ids
    assert chat.plan("and now?").prompt[: len(said)] == said


def test_a_system_prompt_in_the_last_message_stands_there_alone() -> None:
    chat = conversation(LAST, system="Be brief.")
    answer(chat, "one", "first")
    second = chat.plan("two").prompt
    assert second == templated(chat, ("system", "Be brief."), ("user", "one"), ("assistant", "first"), ("user", "two"))
    assert chat.tokenizer.decode(second).count("Be brief.") == 1
    reused, common = kept(chat.ids, second)
    assert reused >= common - 1 > 0


@pytest.mark.parametrize(("template", "listed"), [(PARTS, True), (TEXT_AND_PARTS, False)])
def test_a_template_that_wants_parts_gets_them(template: str, listed: bool) -> None:
    def part(text: str) -> Any:
        return [{"type": "text", "text": text}]

    chat = conversation(template, system="Be brief.")
    answer(chat, "one", "first")
    system = part("Be brief.") if listed else "Be brief."
    messages = [("system", system), ("user", part("one")), ("assistant", part("first")), ("user", part("two"))]
    assert chat.plan("two").prompt == templated(chat, *messages)
    text = chat.tokenizer.decode(chat.plan("two").prompt)
    assert all(text.count(said) == 1 for said in ("Be brief.", "one", "first", "two"))
    assert end_ids(chat.tokenizer) == {STOP}


def test_channels_are_read_by_the_schema_and_left_to_the_template() -> None:
    chat = conversation(marked(HARMONY), SCHEMA)
    answer(chat, "2+2?", marked("CHANNELanalysisMESSAGEadd themOVERSTARTassistantCHANNELfinalMESSAGEfour"))
    assert chat.turns[0].text == "<think>add them</think>\n\nfour"
    assert chat.plan("sure?").prompt == templated(
        chat, ("user", "2+2?"), ("assistant", {"thinking": "add them", "content": "four"}), ("user", "sure?")
    )
    assert "add them" not in chat.tokenizer.decode(chat.plan("sure?").prompt)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("CHANNELanal", ""),
        ("CHANNELanalysisMESSAGEadd th", "<think>add th"),
        ("CHANNELanalysisMESSAGEadd themOVERSTARTassis", "<think>add them</think>"),
        ("CHANNELanalysisMESSAGEadd themOVERSTARTassistantCHANNELfinalMESSAGEfo", "<think>add them</think>\n\nfo"),
    ],
)
def test_channels_that_are_still_written_show_no_marks(written: str, shown: str) -> None:
    chat = conversation(marked(HARMONY), SCHEMA)
    assert chat.text(ids(chat, marked(written))) == shown


@pytest.mark.parametrize("begun", ["", "CHANNEL", "CHANNELanalysis", "CHANNELanalysisMESSAGE"])
def test_an_answer_written_as_it_comes_is_its_channels_alone(begun: str) -> None:
    template = HARMONY.replace("STARTassistant{% endif", f"STARTassistant{begun}{{% endif")
    chat, stream = conversation(marked(template), SCHEMA), io.StringIO()
    writer = AnswerWriter(stream, chat.text)
    written = "CHANNELanalysisMESSAGEadd themOVERSTARTassistantCHANNELfinalMESSAGEfour".removeprefix(begun)
    answer = [*ids(chat, marked(written)), STOP]
    for token in answer:
        writer.feed(SimpleNamespace(emitted=[token]))  # type: ignore[arg-type]
    writer.finish(chat.text(answer))
    assert stream.getvalue() == "<think>add them</think>\n\nfour\n"


def test_what_a_header_lacks_takes_nothing_from_an_answer() -> None:
    chat = conversation(marked(HARMONY), SCHEMA)
    written = "CHANNELanalysisMESSAGEadd themOVERSTARTassistantCHANNELfinalMESSAGEfouMESSAGEr"
    assert chat.text(ids(chat, marked(written))) == "<think>add them</think>\n\nfou\n\nr"
    assert conversation(marked(HARMONY), SCHEMA).text([*ids(chat, "no channel"), STOP]) == "no channel"
