"""What a target is made to write: chats it makes up by itself, or answers to given prompts.

A chat is a generator that asks for continuations and gets them; it ends with the lines to be kept. Knows a
tokenizer and no model; how text is sampled is training/synthesize.py's business.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from utils.errors import UserError

_MARK = "user-turn-0"
TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, chat by chat
USER_TOKENS = 96  # a longer user turn is thrown away
_TAIL = 32  # tokens that a template puts between a user's turn and its answer, at most


@dataclass(frozen=True)
class Ask:
    """Continue `prompt` at `temperature` until a stop id or `limit` tokens."""

    prompt: list[int]
    temperature: float
    limit: int


Line = dict[str, Any]
"""`ids`, `start` (the first answered token), `temperature` and `number` of one answer."""
Chat = Generator[Ask, list[int], list[Line]]


class Source(Protocol):
    """Where chats come from; their content depends on their number alone."""

    @property
    def longest(self) -> int: ...  # tokens of the longest sequence
    def chat(self, number: int) -> Chat | None: ...  # None: there are no more


class Talk:
    """A tokenizer's chat template, as ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.templated = bool(getattr(tokenizer, "chat_template", None))

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat up to where its answer begins; without a template the first message itself."""
        if not self.templated:
            return list(self._tokenizer(messages[0]["content"])["input_ids"])
        return self._encode(self._render(messages))

    def opening(self) -> list[int]:
        """The template up to where the user's turn begins. UserError if there is none to be found."""
        if not self.templated:
            raise UserError("the target has no chat template to write to itself with: give it files or prompts")
        head, found, _ = self._render([_user(_MARK)]).partition(_MARK)
        if not found:
            raise UserError("the target's chat template changes the user's turn: give it files or prompts")
        return self._encode(head)

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class OwnChats:
    """Chats without end whose user turns the target samples itself (Magpie, arXiv 2406.08464).

    Raises UserError for a tokenizer whose chat template does not allow it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: frozenset[int],
        answer_tokens: int = 384,
        temperatures: Sequence[float] = TEMPERATURES,
    ) -> None:
        self._talk, self._stop, self._answer = Talk(tokenizer), stop_ids, answer_tokens
        self._temperatures = tuple(temperatures)
        self._head = self._talk.opening()

    @property
    def longest(self) -> int:
        return len(self._head) + USER_TOKENS + _TAIL + self._answer

    def chat(self, number: int) -> Chat | None:
        return self._chat(number)

    def _chat(self, number: int) -> Chat:
        turn = yield Ask(self._head, 1.0, USER_TOKENS)
        text = self._talk.text(turn[:-1]) if turn and turn[-1] in self._stop else ""
        if not text:
            return []
        prompt = self._talk.prompt([_user(text)])
        temperature = self._temperatures[number % len(self._temperatures)]
        answer = yield Ask(prompt, temperature, self._answer)
        return [_line(prompt, answer, temperature, number)]


class GivenPrompts:
    """Chats whose user turns are given, each answered once at each temperature: all of them at the first one first."""

    def __init__(
        self,
        tokenizer: Any,
        turns: Sequence[Sequence[str]],
        answer_tokens: int = 384,
        temperatures: Sequence[float] = TEMPERATURES,
        most: int = 1024,
    ) -> None:
        self._talk, self._turns = Talk(tokenizer), [list(one) for one in turns]
        self._answer, self._temperatures, self._most = answer_tokens, tuple(temperatures), most
        if not self._talk.templated:
            self._turns = [one[:1] for one in self._turns]

    @property
    def longest(self) -> int:
        """No more than `most` tokens; a chat that outgrows them ends before that turn."""
        first = [len(self._talk.prompt([_user(one[0])])) for one in self._turns]
        several = any(len(one) > 1 for one in self._turns)
        return self._most if several else min(self._most, max(first, default=0) + self._answer)

    def chat(self, number: int) -> Chat | None:
        if number >= len(self._turns) * len(self._temperatures):
            return None
        return self._chat(number)

    def _chat(self, number: int) -> Chat:
        temperature = self._temperatures[number // len(self._turns)]
        messages, lines = list[dict[str, str]](), list[Line]()
        for text in self._turns[number % len(self._turns)]:
            messages.append(_user(text))
            prompt = self._talk.prompt(messages)
            answer = yield Ask(prompt, temperature, self._answer)
            if not answer:
                break
            lines.append(_line(prompt, answer, temperature, number))
            messages.append({"role": "assistant", "content": self._talk.text(answer)})
        return lines


def _line(prompt: list[int], answer: list[int], temperature: float, number: int) -> Line:
    return {"ids": [*prompt, *answer], "start": len(prompt), "temperature": temperature, "number": number}
