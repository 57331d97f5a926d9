"""Pieces of text by number, for answers that come without token ids; a tokenizer of them; and a server's own figures.

A server's answer reaches the screen, the figures and the log as ids, like any other: those of its pieces of text.
Knows no server and no model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

FIRST = 1 << 30  # the first piece's id where there are token ids too: above those of every vocabulary


class Pieces:
    """Texts and their ids, which count from `first`."""

    def __init__(self, first: int = FIRST) -> None:
        self.first = first
        self._texts: list[str] = []
        self.ids: dict[str, int] = {}  # pieces → their ids

    def id_of(self, text: str) -> int:
        """Return the id of a piece, a new one at its first use."""
        if text not in self.ids:
            self.ids[text] = self.first + len(self._texts)
            self._texts.append(text)
        return self.ids[text]

    def text(self, ids: Sequence[int]) -> str:
        """Return the pieces, joined; an id that stands for none has no text."""
        numbers = (token - self.first for token in ids)
        return "".join(self._texts[number] for number in numbers if 0 <= number < len(self._texts))

    def has(self, ids: Sequence[int]) -> bool:
        """Return whether these are ids of pieces; the ids of an answer are all pieces, or all tokens."""
        return bool(ids) and ids[0] >= self.first

    def beside(self, decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
        """Return a function that decodes pieces too."""
        return lambda ids: self.text(ids) if self.has(ids) else decode(ids)


class PieceTokenizer:
    """A tokenizer that makes one piece of every text, for a server whose own tokenizer is not known here.

    Its chat template shows who said what; a server puts the messages into its own.
    """

    chat_template = "ROLE: CONTENT"
    added_tokens_decoder: Mapping[int, str] = {}

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self.pieces.id_of(text)] if text else []}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return self.pieces.text(ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.pieces.ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = False, **_: object
    ) -> str:
        said = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return f"{said}assistant: " if add_generation_prompt else said


class ServerFigures(NamedTuple):
    """A server's own figures of an answer; None where it gives none. `problem`: why the answer broke off, in a line.

    `passes` are runs of its target that verified drafts, `rate` is tokens a second by its own clock and definition,
    `load_s` seconds for loading the model before the answer.
    """

    tokens: int | None = None
    prompt_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    passes: int | None = None
    rate: float | None = None
    load_s: float | None = None
    problem: str = ""
