"""The target writes its own training text: user turns sampled from its chat template, then answers.

Fed only the template up to the user's turn, a chat model samples plausible user messages (Magpie,
arXiv 2406.08464); it then answers them, at a temperature of each batch's own. Everything goes through
the one decode loop. Knows no screen; says how far it is through a callable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sampling.drafters.none import NoDrafter
from sampling.events import Step
from sampling.loop import generate, never
from sampling.sampler import KeyedSampler
from sampling.types import LM, Limits, Rows
from training.ngram_counts import Passage
from utils.errors import UserError
from utils.logits_processors import make_processor

_MARK = "user-turn-0"
TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, batch by batch
USER_TOKENS = 96  # a longer user turn is thrown away
_FRUITLESS = 20  # batches in a row that came to nothing


@dataclass(frozen=True)
class Writer:
    """A chat model that writes to itself.

    `lm` and `tokenizer` are the target's, `stop_ids` end a turn, `batch` rows are decoded at once,
    answers have at most `answer_tokens` tokens.
    """

    lm: LM
    tokenizer: Any
    stop_ids: frozenset[int]
    seed: int = 42
    batch: int = 8
    answer_tokens: int = 384

    def conversations(self, first: int, interrupt: Callable[[], bool] = never) -> Iterator[dict[str, Any]]:
        """Conversations without end (but an interrupt): `ids`, `start`, `temperature`, `batch`, from batch `first` on.

        Raises UserError for a tokenizer without a chat template, or if no user turn ever ends.
        """
        head = self._encode(self._opening())
        number, fruitless = first, 0
        while not interrupt():
            turns = self._decode([head] * self.batch, 1.0, 2 * number, USER_TOKENS, interrupt)
            texts = [self._text(turn) for turn in turns if turn and turn[-1] in self.stop_ids]
            prompts = [self._encode(self._template(text)) for text in texts if text]
            fruitless = 0 if prompts else fruitless + 1
            if fruitless >= _FRUITLESS:
                raise UserError("the target's user turns do not end: give it files with --from")
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            answers = (
                self._decode(prompts, temperature, 2 * number + 1, self.answer_tokens, interrupt) if prompts else []
            )
            if interrupt():
                return
            for prompt, answer in zip(prompts, answers, strict=True):
                yield {"ids": [*prompt, *answer], "start": len(prompt), "temperature": temperature, "batch": number}
            number += 1

    def _decode(
        self, prompts: Rows, temperature: float, stream: int, length: int, interrupt: Callable[[], bool]
    ) -> Rows:
        sampler = KeyedSampler(make_processor(temperature), self.seed + stream)
        limits = Limits(length, self.stop_ids)
        emitted: Rows = [[] for _ in prompts]
        for event in generate(self.lm, prompts, NoDrafter(), sampler, limits, interrupt=interrupt):
            if isinstance(event, Step):
                emitted[event.row] += event.emitted
        return emitted

    def _template(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _opening(self) -> str:
        """The template up to where the user's turn begins."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the target has no chat template to write to itself with: give files with --from")
        head, found, _ = self._template(_MARK).partition(_MARK)
        if not found:
            raise UserError("the target's chat template changes the user's turn: give files with --from")
        return head

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids[:-1], skip_special_tokens=True)).strip()


def written(file: Path) -> tuple[int, int]:
    """(answer tokens, next batch number) of a file begun earlier; a line cut off at its end is taken away."""
    if not file.is_file():
        return 0, 0
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    rows = [_row(line, file) for line in whole.splitlines()]
    return sum(len(row["ids"]) - row["start"] for row in rows), max((row["batch"] + 1 for row in rows), default=0)


def _row(line: str, file: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row["ids"], list) and isinstance(row["start"], int) and isinstance(row["batch"], int):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file} is no file of self-written text: remove it, or choose another --out")


def write_self(
    writer: Writer,
    file: Path,
    tokens: int,
    told: Callable[[int], None],
    interrupt: Callable[[], bool] = never,
) -> int:
    """Append conversations to `file` (jsonl) until it holds `tokens` answer tokens; returns how many it holds.

    Goes on where an earlier run stopped. `told` hears the tokens so far. Less than asked for comes
    back only when interrupted.
    """
    count, batch = written(file)
    if count >= tokens:
        return count
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for row in writer.conversations(batch, interrupt):
            out.write(json.dumps(row, separators=(",", ":")) + "\n")
            out.flush()
            count += len(row["ids"]) - row["start"]
            told(count)
            if count >= tokens:
                break
    return count


def passages(file: Path) -> list[Passage]:
    """What :func:`write_self` wrote, its answers to be counted."""
    rows = [_row(line, file) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Passage(row["ids"], row["start"]) for row in rows]
