"""Chat templates by name, for tokenizers that carry none, and the tokens that end an answer under each.

Under the name "auto" a tokenizer's own template holds; "plain" means none at all. Knows a tokenizer by its
`chat_template`, its vocabulary and `apply_chat_template`; knows no models. Imports no torch and no transformers.
"""

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from utils.errors import UsageError, did_you_mean
from utils.objects import HfTokenizer, Json
from utils.tokenizer import BOS_BEFORE_CHAT

AUTO, PLAIN = "auto", "plain"

# Sets `system` and `turns`; templates without a system prompt put it before the first message.
_SPLIT = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
_FOLDED = "{% if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}{{ turn['content'] }}"
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


def _turns(user: str, assistant: str) -> str:
    return (
        "{% for turn in turns %}{% if turn['role'] == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}"
        "{% endfor %}"
    )


def _headed(head: str, end: str, begin: str = "") -> str:
    """Every message, the system's too, between a heading with its role and a token that ends it."""
    start, _, rest = head.partition("ROLE")
    return (
        begin + "{% for message in messages %}" + start + "{{ message['role'] }}" + rest + "{{ message['content'] }}"
        + end + "{% endfor %}{% if add_generation_prompt %}" + start + "assistant" + rest + "{% endif %}"
    )  # fmt: skip


TEMPLATES: Mapping[str, str] = {
    "vicuna": _SPLIT
    + "{{ bos_token }}{{ system or \"" + _VICUNA + "\" }}{{ ' ' }}"
    + _turns("{{ 'USER: ' + turn['content'] + ' ASSISTANT:' }}", "{{ ' ' + turn['content'] }}{{ eos_token }}"),
    "llama-2": _SPLIT
    + _turns(
        "{{ bos_token }}{{ '[INST] ' }}{% if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}"
        "{% endif %}{{ turn['content'] + ' [/INST]' }}",
        "{{ ' ' + turn['content'] + ' ' }}{{ eos_token }}",
    ),
    "llama-3": _headed("<|start_header_id|>ROLE<|end_header_id|>{{ '\\n\\n' }}", "<|eot_id|>", "{{ bos_token }}"),
    "mistral": _SPLIT
    + "{{ bos_token }}"
    + _turns("{{ '[INST] ' }}" + _FOLDED + "{{ ' [/INST]' }}", "{{ ' ' + turn['content'] }}{{ eos_token }}"),
    "chatml": _headed("<|im_start|>ROLE{{ '\\n' }}", "<|im_end|>{{ '\\n' }}"),
    "gemma": _SPLIT
    + "{{ bos_token }}"
    + _turns(
        "{{ '<start_of_turn>user\\n' }}" + _FOLDED + "{{ '<end_of_turn>\\n' }}",
        "{{ '<start_of_turn>model\\n' + turn['content'] + '<end_of_turn>\\n' }}",
    )
    + "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    "zephyr": _headed("<|ROLE|>{{ '\\n' }}", "{{ eos_token }}{{ '\\n' }}"),
    "alpaca": _SPLIT
    + "{{ (system or '" + _ALPACA + "') + '\\n\\n' }}"
    + _turns(
        "{{ '### Instruction:\\n' + turn['content'] + '\\n\\n### Response:\\n' }}",
        "{{ turn['content'] }}{{ eos_token }}{{ '\\n\\n' }}",
    ),
}  # fmt: skip
NAMES = (AUTO, PLAIN, *TEMPLATES)
_ANSWER = "answer"
# By role, the roles of a chat that shows in which form a template takes that role's content:
_PROBES = {"user": ("user",), "assistant": ("user", "assistant", "user"), "system": ("system", "user")}


def check_template(name: str) -> str:
    """`name` if there is such a template; UsageError with the nearest one otherwise."""
    if name in NAMES:
        return name
    raise UsageError(f"no chat template '{name}'{did_you_mean(str(name), NAMES)}: have {', '.join(NAMES)}")


def carries_template(tokenizer: HfTokenizer, name: str = AUTO) -> bool:
    """Return whether messages go through a template: a named one, or under "auto" the tokenizer's own."""
    check_template(name)
    return bool(getattr(tokenizer, "chat_template", None)) if name == AUTO else name != PLAIN


def render(tokenizer: HfTokenizer, messages: list[dict[str, str]], name: str = AUTO) -> str:
    """Return the chat as the model reads it, up to its answer. Raises whatever the template raises."""
    return _rendered(tokenizer, messages, name, add_generation_prompt=True)


def _rendered(tokenizer: HfTokenizer, messages: list[dict[str, str]], name: str, **how: object) -> str:
    if name != AUTO:
        how["chat_template"] = TEMPLATES[check_template(name)]
    else:
        messages = _in_parts(messages, _roles_in_parts(tokenizer, str(tokenizer.chat_template)))
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
    begin = tokenizer.bos_token if getattr(tokenizer, "init_kwargs", {}).get(BOS_BEFORE_CHAT) else ""
    return text if text.startswith(begin) else begin + text


def _in_parts(messages: list[dict[str, str]], roles: frozenset[str]) -> list[Json]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["role"] in roles else message
        for message in messages
    ]


@functools.lru_cache(maxsize=8)
def _roles_in_parts(tokenizer: HfTokenizer, template: str) -> frozenset[str]:
    """Return the roles whose content the tokenizer's own template takes only as a list of parts."""
    listed: frozenset[str] = frozenset()
    for role, chat in _PROBES.items():
        messages = [{"role": each, "content": f"{each}-0"} for each in chat]
        for roles in (listed, listed | {role}):
            with suppress(Exception):  # a template may refuse any chat, in any way
                if f"{role}-0" in tokenizer.apply_chat_template(_in_parts(messages, roles), tokenize=False):
                    listed = roles
                    break
    return listed


class Thinking(NamedTuple):
    """The marks around a model's thinking. `begun`: the prompt ends after the first of them."""

    open: str
    close: str
    begun: bool


_CLOSING = re.compile(r"([<\[])/([\w:|]+)([>\]])")  # </x> or [/X]
_REASONING = ("reasoning_content", "reasoning", "thinking")  # the key of a message's thinking in templates


@functools.lru_cache(maxsize=8)
def thinking_marks(tokenizer: HfTokenizer, name: str = AUTO) -> Thinking | None:
    """Return the marks between which the model thinks; None if there are none.

    Between them the template drops the text of an earlier answer, or writes a message's reasoning.
    """
    if not carries_template(tokenizer, name):
        return None
    source = str(tokenizer.chat_template) if name == AUTO else TEMPLATES[name]
    for begin, word, end in dict.fromkeys(_CLOSING.findall(source)):
        open_, close = f"{begin}{word}{end}", f"{begin}/{word}{end}"
        question = {"role": "user", "content": "question"}
        marked = {"role": "assistant", "content": f"{open_}\nthought-0\n{close}\n\n{_ANSWER}"}
        separate = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(_REASONING, "thought-0")}
        with suppress(Exception):  # a template may refuse any chat, in any way
            later = render(tokenizer, [question, marked, question], name)
            between = _rendered(tokenizer, [question, separate], name).partition(open_)[2].partition(close)
            if ("thought-0" not in later and _ANSWER in later) or (between[1] and "thought-0" in between[0]):
                prompt = render(tokenizer, [question], name)
                return Thinking(open_, close, prompt.rfind(open_) > prompt.rfind(close))
    return None


def end_ids(tokenizer: HfTokenizer, name: str = AUTO) -> frozenset[int]:
    """Return the id of the token that the template writes after an answer, if the vocabulary has it."""
    if not carries_template(tokenizer, name):
        return frozenset()
    text = ""
    with suppress(Exception):  # a template may refuse any chat, in any way
        text = _rendered(
            tokenizer, [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}], name
        )
    _, answered, rest = text.rpartition(_ANSWER)
    added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    ends = [token for token in added if answered and rest.lstrip().startswith(token)]
    return frozenset([added[max(ends, key=len)]] if ends else [])
