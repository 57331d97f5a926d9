"""A chat template as text: the head of a chat and the tail behind an answer. Knows no ids and no turns."""

from __future__ import annotations

from typing import Any

from utils.catalogue.templates import AUTO, carries_template, render
from utils.errors import UserError

Message = dict[str, str]


class Template:
    """A chat template as text: the head of a chat and the tail behind an answer. `name` as in
    utils/catalogue/templates.py.
    """

    def __init__(self, tokenizer: Any, name: str = AUTO) -> None:
        self._tokenizer, self._name = tokenizer, name
        self.present = carries_template(tokenizer, name)
        self.folds_system = False  # the template refuses a system role: it goes into the first message

    def render(self, system: str, messages: list[Message]) -> str:
        """The chat as the model reads it, up to where its answer begins; UserError where the template refuses it."""
        ways = [(False, messages)]
        if system:
            folded = {"role": "user", "content": f"{system}\n\n{messages[0]['content']}"}
            ways = [(False, [{"role": "system", "content": system}, *messages]), (True, [folded, *messages[1:]])]
        for folds, way in ways:
            if system and self.folds_system and not folds:
                continue
            try:
                text = render(self._tokenizer, way, self._name)
            except Exception as error:
                why = error
            else:
                self.folds_system = self.folds_system or folds
                return text
        raise UserError(f"the chat template refuses this chat ({why}); /set chat=off goes without it")

    def tail(self, system: str, messages: list[Message], text: str) -> str | None:
        """What follows the last message's answer when `text` is the next; None if it cannot be told.

        `messages` ends with the user's message whose answer is already there, by its ids.
        """
        mark, said = "answer-0", text + system + "".join(message["content"] for message in messages)
        while mark in said:
            mark += "0"
        chat = [*messages, {"role": "assistant", "content": mark}, {"role": "user", "content": text}]
        _, found, tail = self.render(system, chat).rpartition(mark)
        return tail if found else None
