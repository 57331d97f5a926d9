"""A target played back from a file: its recorded answers replace a model that cannot run.

The files are those of sampling/recorded/answers.py. At each position the recorded token has probability 1, so only
greedy decoding is meaningful; other likely ids of the recording rank after it with probability 0. Knows no model and no
text; has no keys, values or hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.recorded.answers import Ids, RecordedAnswers, read_answers
from sampling.rows import common_prefix
from sampling.types import LM, Draft, Hidden, Rows, Session, depths_of
from utils.errors import UserError

PEAK = 1e4  # logit of the recorded token: every other one has probability 0 in float32
RUNNER_UP = PEAK / 2  # logit of the first of the model's other likeliest ids; each later one has STEP less
STEP = 10.0


class RecordedLM(LM):
    """A target that answers known prompts as recorded; satisfies :class:`sampling.types.LM`.

    Args:
        answers: prompt ids → answer ids.
        end_id: its token after the end of a recording.
        vocab_size: of the recorded model; by default just large enough for the recorded ids.
        name: its name in events and figures.
        start_id: the first id of its decoder, for a recording of an encoder-decoder model: rows begin with it, not with
            the prompt.
        best: prompt ids → the model's likeliest ids at each position of the answer, likeliest first.
    """

    takes_trees = True

    def __init__(
        self,
        answers: Mapping[Ids, Sequence[int]],
        end_id: int,
        vocab_size: int | None = None,
        name: str = "target",
        context: int = 1 << 30,
        start_id: int | None = None,
        best: Mapping[Ids, Sequence[Ids]] | None = None,
    ) -> None:
        if not answers:
            raise UserError(f"the recording of {name} holds no answer")
        self.answers = {tuple(prompt): list(answer) for prompt, answer in answers.items()}
        highest = max(end_id, *(max((*prompt, *answer)) for prompt, answer in self.answers.items()))
        if vocab_size is not None and highest >= vocab_size:
            raise UserError(f"the recording of {name} holds id {highest}, its vocabulary ends at {vocab_size - 1}")
        self.vocab_size = highest + 1 if vocab_size is None else vocab_size
        self.name, self.end_id, self.context, self.start_id = name, end_id, context, start_id
        self.encodes = start_id is not None  # an encoder read the prompts
        self.best = {
            tuple(prompt): [tuple(token for token in ids if token < self.vocab_size) for ids in positions]
            for prompt, positions in (best or {}).items()
        }

    @staticmethod
    def read(
        path: str | Path,
        end_id: int,
        vocab_size: int | None = None,
        name: str = "target",
        start_id: int | None = None,
    ) -> RecordedLM:
        """Read a file that separates prompts and answers; UserError, in one line, for any other.

        `end_id` and `start_id` are defaults for the file's; with a `start_id` it is an encoder-decoder model's.
        """
        recording = read_answers(path, arch=None if start_id is None else "seq2seq", start_id=start_id)
        return RecordedLM.of(recording, end_id, vocab_size, name)

    @staticmethod
    def of(
        recording: RecordedAnswers,
        end_id: int = 0,
        vocab_size: int | None = None,
        name: str = "target",
        start_id: int | None = None,
    ) -> RecordedLM:
        """Return a recording as an LM; its header outranks `end_id` and `start_id`."""
        header = recording.header
        return RecordedLM(
            {said.prompt: said.answer for said in recording.answers},
            header.get("end_id", end_id),
            recording.vocab_size if vocab_size is None else vocab_size,
            name,
            header.get("context", 1 << 30),
            header.get("start_id", start_id),
            {said.prompt: said.best for said in recording.answers if said.best},
        )

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> RecordedSession:
        """Open a session for recorded prompts; UserError for others, and for wanted hidden states."""
        if hidden:
            raise UserError(f"{self.name} is a recording: it has no hidden states for a drafter to read")
        size = self.vocab_size if target is None else target.vocab_size
        return RecordedSession(self, [list(row) for row in prompt], size)

    def answer(self, prompt: list[int]) -> list[int]:
        """Return the recorded answer; UserError for a prompt without one."""
        if (answer := self.answers.get(tuple(prompt))) is None:
            raise UserError(f"the recording of {self.name} holds no answer to this prompt of {len(prompt)} tokens")
        return answer


class RecordedSession(Session):
    """Rows of a recording; satisfies :class:`sampling.types.Session`. Read tokens count as cached."""

    def __init__(self, lm: RecordedLM, prompt: Rows, vocab_size: int) -> None:
        self.lm, self.vocab_size, self.described = lm, vocab_size, f"{lm.name} is a recording: it"
        self.source = prompt if lm.start_id is not None else None
        self.initial = prompt if lm.start_id is None else [[lm.start_id] for _ in prompt]
        answers = [lm.answer(row) for row in prompt]
        self._texts = [first + answer for first, answer in zip(self.initial, answers, strict=True)]
        self._best = [lm.best.get(tuple(row), []) for row in prompt]
        self._begins = list(map(len, self.initial))
        self._cached: Rows = [[] for _ in prompt]

    def rollback(self, rows: Rows) -> list[int]:
        """Return the number of tokens of each row that were read before."""
        lengths = [common_prefix(cached, row) for cached, row in zip(self._cached, rows, strict=True)]
        self._cached = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return lengths

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """Return [B, N+1, V]: the recorded token of each position has all the mass."""
        self._cached = [list(row) for row in rows]
        count = draft.tokens.shape[1] + 1
        depths = [0, *depths_of(draft.parents, count - 1)]
        said = [
            [text[at] if at < len(text) else self.lm.end_id for at in (len(row) + depth for depth in depths)]
            for row, text in zip(rows, self._texts, strict=True)
        ]
        logits = torch.zeros(len(rows), count, self.lm.vocab_size)
        for index, (row, best) in enumerate(zip(rows, self._best, strict=True)):
            first = len(row) - self._begins[index]
            for column, depth in enumerate(depths):
                ids = best[first + depth] if 0 <= first + depth < len(best) else ()
                logits[index, column, list(ids)] = RUNNER_UP - STEP * torch.arange(len(ids))
        logits.scatter_(2, torch.tensor(said)[..., None], PEAK)
        return F.pad(logits, (0, self.vocab_size - self.lm.vocab_size), value=-torch.inf)

    def select(self, rows: Tensor) -> None:
        chosen = rows.tolist()
        self._texts = [self._texts[row] for row in chosen]
        self._best = [self._best[row] for row in chosen]
        self._begins = [self._begins[row] for row in chosen]
        self._cached = [list(self._cached[row]) for row in chosen]
        self.initial = [self.initial[row] for row in chosen]
        self.source = self.source and [self.source[row] for row in chosen]

    def fork(self) -> RecordedSession:
        """Return an independent session with the same rows."""
        twin = copy(self)
        twin._cached = [list(row) for row in self._cached]
        return twin
