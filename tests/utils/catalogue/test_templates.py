"""Chat templates by name: their exact texts, and how the console takes them."""

from pathlib import Path

import pytest

from app.chat.conversation import Conversation
from app.lanes.pairing import catalogue_in
from app.settings.table import Settings
from tests.support.refusals import refused
from tests.support.tiny import END, tiny_model, tiny_tokenizer
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.catalogue.templates import NAMES, TEMPLATES, carries_template, check_template, end_ids, render
from utils.errors import UsageError
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Why?"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
LLAMA_3 = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
EXPECTED = {
    "vicuna": (
        f"<s>{VICUNA} USER: Hi ASSISTANT: Yo</s>USER: Why? ASSISTANT:",
        "<s>Be brief. USER: Hi ASSISTANT: Yo</s>USER: Why? ASSISTANT:",
    ),
    "llama-2": (
        "<s>[INST] Hi [/INST] Yo </s><s>[INST] Why? [/INST]",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yo </s><s>[INST] Why? [/INST]",
    ),
    "llama-3": tuple(
        "<s>"
        + "".join(LLAMA_3.format(m["role"], m["content"]) + "<|eot_id|>" for m in chat)
        + LLAMA_3.format("assistant", "")
        for chat in (CHAT, [SYSTEM, *CHAT])
    ),
    "mistral": (
        "<s>[INST] Hi [/INST] Yo</s>[INST] Why? [/INST]",
        "<s>[INST] Be brief.\n\nHi [/INST] Yo</s>[INST] Why? [/INST]",
    ),
    "chatml": tuple(
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat) + "<|im_start|>assistant\n"
        for chat in (CHAT, [SYSTEM, *CHAT])
    ),
    "gemma": tuple(
        f"<s><start_of_turn>user\n{first}<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
        for first in ("Hi", "Be brief.\n\nHi")
    ),
    "zephyr": tuple(
        f"{head}<|user|>\nHi</s>\n<|assistant|>\nYo</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n"
        for head in ("", "<|system|>\nBe brief.</s>\n")
    ),
    "alpaca": tuple(
        f"{head}\n\n### Instruction:\nHi\n\n### Response:\nYo</s>\n\n### Instruction:\nWhy?\n\n### Response:\n"
        for head in (ALPACA, "Be brief.")
    ),
}


def bare() -> object:
    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_says_exactly_this(name: str) -> None:
    assert (render(bare(), CHAT, name), render(bare(), [SYSTEM, *CHAT], name)) == EXPECTED[name]


def test_the_tokenizers_own_template_holds_unless_a_name_is_given() -> None:
    own, none = tiny_tokenizer(), tiny_tokenizer(chat=False)
    assert render(own, CHAT[:1]) == f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    assert render(own, CHAT[:1], "llama-2").startswith("[INST] Hi")
    assert [carries_template(own, name) for name in ("auto", "plain", "vicuna")] == [True, False, True]
    assert [carries_template(none, name) for name in ("auto", "plain", "vicuna")] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("chatml", [END]),
        ("gemma", []),  # the vocabulary has no such token
        ("auto", []),
    ],
)
def test_what_ends_an_answer_goes_with_the_template(name: str, ends: list[str]) -> None:
    tokenizer = tiny_tokenizer(chat=False)
    assert end_ids(tokenizer, name) == set(tokenizer.convert_tokens_to_ids(ends))


def test_the_token_that_the_tokenizers_own_template_writes_behind_an_answer_ends_one() -> None:
    tokenizer = tiny_tokenizer()
    written = "{% for m in messages %}{{ m['content'] }}LAST{% endfor %}"
    ends = {"<extra_7>": {"<extra_7>"}, "\n<extra_7>" + END: {"<extra_7>"}, " none": set(), "": set()}
    for last, expected in ends.items():
        tokenizer.chat_template = written.replace("LAST", last)
        assert set(tokenizer.convert_ids_to_tokens(sorted(end_ids(tokenizer)))) == expected
    tokenizer.chat_template = "{{ raise_exception('no answers here') }}"
    assert end_ids(tokenizer) == frozenset()


def test_all_ends_that_a_folder_lists_end_an_answer(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<extra_7>{% endfor %}"
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    pair = load_pair(PairSpec(name="x", target=spec_from_argument(str(tmp_path)), drafter="none"), LoadOptions())
    assert pair.stop_ids == {7, 9, 2, tokenizer.convert_tokens_to_ids("<extra_7>")}  # 2: the tokenizer's own


def test_an_unknown_name_is_one_line_with_a_suggestion() -> None:
    assert (
        refused(check_template, "llama2", kind=UsageError)
        == f"no chat template 'llama2' (did you mean llama-2?): have {', '.join(NAMES)}"
    )
    assert refused(Settings().changed, template="vicunna", kind=UsageError) == (
        "template must be auto, plain, vicuna, llama-2, llama-3, mistral, chatml, gemma, zephyr or alpaca "
        "(did you mean vicuna?), got 'vicunna' (still auto)"
    )


def test_a_pair_names_its_template(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("pairs:\n  a:\n    target: org/big\n    template: vicuna\n")
    assert catalogue_in(file).pair("a").defaults == {"template": "vicuna"}
    file.write_text("pairs:\n  a:\n    target: org/big\n    template: vicunna\n")
    told = refused(catalogue_in, file, kind=UsageError)
    assert told.startswith(f"{file}:4: pair 'a': ")
    assert "no chat template 'vicunna' (did you mean vicuna?)" in told


def test_every_pair_without_a_template_of_its_own_has_one_in_the_catalogue() -> None:
    pairs = catalogue_in(Path(__file__).parents[3] / "models.yaml").pairs
    assert {name for name, pair in pairs.items() if pair.template == "vicuna"} == {
        name for name, pair in pairs.items() if str(pair.target.id).startswith("lmsys/vicuna-")
    }


def text_of(chat: Conversation, ids: list[int]) -> str:
    return str(chat.tokenizer.decode(ids))


def test_a_chat_goes_on_under_another_template() -> None:
    tokenizer = tiny_tokenizer(chat=False)
    chat = Conversation(tokenizer, frozenset([2]), 500, template="llama-2")
    plan = chat.plan("Hi")
    assert text_of(chat, plan.prompt) == "[INST] Hi [/INST]"
    chat.commit(plan, tokenizer("Yo")["input_ids"], "length")
    assert text_of(chat, chat.plan("Why?").prompt).startswith("[INST] Hi [/INST]Yo ")
    chat = chat.changed(template="chatml")
    assert chat.stop_ids == {2}  # END is the tokenizer's stop id as well
    assert text_of(chat, chat.plan("Why?").prompt) == (
        f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\nYo{END}\n<|im_start|>user\nWhy?{END}\n<|im_start|>assistant\n"
    )
    chat = chat.changed(template="plain")
    assert not chat.templated
    assert text_of(chat, chat.plan("Why?").prompt) == "HiYo\nWhy?"
