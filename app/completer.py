"""Completion at the prompt: what app/commands.py offers, for prompt_toolkit. Knows no command itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

Offer = Callable[[str], Iterable[Any]]  # the line up to the cursor → records with text, start, help


class CommandCompleter(Completer):
    """Completes a first line that begins with one "/"; messages are left alone."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/") or line.startswith("//") or "\n" in line:
            return
        for found in self._offer(line):
            yield Completion(found.text, start_position=found.start - len(line), display_meta=found.help)
