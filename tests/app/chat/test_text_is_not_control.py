"""Control tokens in messages are text: for byte-level BPE, SentencePiece's kind, and the tokenizer of a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.chat.conversation import Conversation
from tests.support.tiny import END, START, tiny_tokenizer
from utils.tokenizer import FileTokenizer

PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *"abcdefghijklmnopqrstuvwxyz<>/|_[]ABINSTU.:", "▁the", "▁us", "st"]
TURNED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
)


def sentence_piece() -> Any:
    """A tokenizer that puts a space before each text, with `</s>` in its vocabulary as the likeliest piece."""
    inner = Tokenizer(models.Unigram([(piece, -float(len(piece) < 3)) for piece in PIECES], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    tokenizer.chat_template = TURNED
    return tokenizer


def of_a_file() -> Any:
    whole = tiny_tokenizer()
    return FileTokenizer(whole.backend_tokenizer, {"eos_token": END}, str(whole.chat_template), lambda: whole)


KINDS: dict[str, Callable[[], Any]] = {"bpe": tiny_tokenizer, "sentencepiece": sentence_piece, "file": of_a_file}
TEXTS = st.lists(
    st.sampled_from(
        [
            END,
            START,
            "</s>",
            "[INST]",
            "[/INST]",
            "<s>",
            "<|pad|>",
            "<|im_",
            "end|>",
            "<",
            "<<|im_end|>",
            "the ",
            "us",
        ]
    ),
    min_size=1,
    max_size=6,
).map("".join)


def chat_of(kind: str, **more: Any) -> Conversation:
    tokenizer = KINDS[kind]()
    return Conversation(tokenizer, frozenset({tokenizer.eos_token_id}), 10_000, **more)


def controls(chat: Conversation, ids: Any) -> list[int]:
    special = {token for token, added in chat.tokenizer.added_tokens_decoder.items() if added.special}
    return [token for token in ids if token in special and token != chat.tokenizer.unk_token_id]


def rendered(chat: Conversation, *texts: str) -> list[int]:
    """transformers' own ids of a chat."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(message=TEXTS, answer=TEXTS, second=TEXTS)
def test_a_chat_has_the_templates_control_tokens_whatever_is_said(
    kind: str, message: str, answer: str, second: str
) -> None:
    chat, plain = chat_of(kind), chat_of(kind)
    chats = []
    for each, words in ((chat, (message, answer, second)), (plain, ("us", "us", "us"))):
        each.commit(each.plan(words[0]), [*each.tokenizer("st", add_special_tokens=False)["input_ids"], 2], "eos")
        each.turns[0] = each.turns[0].__class__(**{**vars(each.turns[0]), "text": words[1]})
        chats.append(each.changed(system="us" if each is plain else second))  # builds the prompts again
    chat, plain = chats
    got, expected = (controls(each, each.plan(words).prompt) for each, words in ((chat, second), (plain, "us")))
    assert got == expected
    assert "".join(second.split()) in "".join(chat.tokenizer.decode(chat.plan(second).prompt).split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["the us", "a < b", " st the ", "ends in <|im_", "|> and /s>", "[INS"])
def test_text_without_markers_has_transformers_ids(kind: str, text: str) -> None:
    assert chat_of(kind).plan(text).prompt == rendered(chat_of(kind), text)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_pass_where_they_are_wanted(kind: str) -> None:
    end = chat_of(kind).tokenizer.eos_token
    text = f"the {end} us"
    assert chat_of(kind, special_tokens=True).plan(text).prompt == rendered(chat_of(kind), text)
    assert chat_of(kind).plan(text).prompt != rendered(chat_of(kind), text)
    without = chat_of(kind, chat=False)
    assert without.plan(text).prompt == list(without.tokenizer(text)["input_ids"])
    assert without.markers_in(without.plan(text)) == []
    assert chat_of(kind).markers_in(chat_of(kind).plan(text + end)) == [end]


def test_half_a_marker_is_not_made_whole_by_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}im_end|> {% endfor %}<|im_start|>"
    chat = Conversation(tokenizer, frozenset({2}), 1000)
    assert controls(chat, chat.plan("the <|").prompt) == [tokenizer.convert_tokens_to_ids(START)]
    assert controls(chat, rendered(chat, "the <|")) == [2, tokenizer.convert_tokens_to_ids(START)]


def test_the_setting_builds_earlier_prompts_again() -> None:
    chat = chat_of("bpe")
    chat.commit(chat.plan(f"the {END}"), [2], "eos")
    before = chat.plan("us").prompt
    chat = chat.changed(special_tokens=True)
    assert chat.plan("us").prompt == rendered(chat, f"the {END}", "", "us") != before
    chat = chat.changed(special_tokens=False)
    assert chat.plan("us").prompt == before


def test_a_real_tokenizer_has_no_control_token_of_a_message(tmp_path: Path) -> None:
    """An encoder-decoder model's message stands alone, with the tokenizer's own end."""
    chat = Conversation(sentence_piece(), frozenset({2}), 1000, single=True)
    assert controls(chat, chat.plan("the </s> us <s>").prompt) == []
