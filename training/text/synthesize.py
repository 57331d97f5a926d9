"""A target writes training text: many chats at once, one token of each a pass, a finished row given to the next chat.

The noise of a token is keyed by (seed, chat, position), so that a chat's text depends neither on the chats beside it
nor on where a run was resumed (up to rounding: a pass over other rows may add up differently).
training/text/dialogues.py makes the chats, training/text/self_text.py keeps them. Knows no files and no screen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import torch
from torch import Tensor

from sampling.sampler import stream_key, uniforms
from sampling.types import LM, Draft
from training.text.dialogues import Ask, Chat, Line, Source
from utils.errors import UserError
from utils.progress import never

_STREAM = 16  # the noise's streams: this one for a chat's first continuation, the next for its second …
KEPT = torch.bfloat16  # states that are kept
_FRUITLESS = 200  # chats without an answer in a row, of an endless source

Ended = tuple[int, list[Line]]
"""The number of a chat and its lines; none if it has no answer."""
Keep = Callable[[Sequence[int], int, Tensor], None]
"""Receives each line as its chat ends: ids, where the answer starts, the target's last hidden states [T, H]."""


@dataclass(eq=False)
class _Row:
    """A chat that is being written; `answered`: the states of the ids at each answer's end."""

    number: int
    chat: Chat
    ask: Ask = field(init=False)
    ids: list[int] = field(default_factory=list)
    continuations: int = -1  # before this one
    answered: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)  # of a chat that is over

    def advance(self, answer: list[int] | None, capacity: int) -> bool:
        """Hand the chat its answer (None: it begins) and take its next request; return False if it is over."""
        try:
            ask = self.chat.send(answer)  # type: ignore[arg-type]  # None begins a generator
            while len(ask.prompt) >= capacity or not ask.prompt:
                ask = self.chat.send([])
        except StopIteration as ended:
            self.lines = list(ended.value)
            return False
        self.ask, self.ids = ask, list(ask.prompt)
        self.continuations += 1
        return True


@dataclass(frozen=True)
class TextWriter:
    """A causal target that writes `batch` chats at once, and the ids that end a turn.

    On the CPU quantised weights in the compiled pass are the fastest, then float32 with packed ones
    (utils.kernels.packed_linear). With `keep` the target's states of every line are kept.
    """

    lm: LM
    stop_ids: frozenset[int]
    source: Source
    seed: int = 42
    batch: int = 32
    keep: Keep | None = None

    def chats(self, done: Container[int] = (), interrupt: Callable[[], bool] = never) -> Iterator[Ended]:
        """Yield each chat as it finishes, but those `done`.

        Ends when the source does, or at the next token after an interrupt. Raises UserError if the chats of an endless
        source have no answers.
        """
        waiting, over, fruitless = self._waiting(done), list[_Row](), 0
        capacity = min(self.lm.context, self.source.longest)

        def following(row: _Row | None, answer: list[int] | None) -> _Row | None:
            """Return the row with its next request, or else the next chat that makes one."""
            while row is not None and not row.advance(answer, capacity):
                over.append(row)
                row, answer = next(waiting, None), None
            return row

        rows = [following(row, None) for row in islice(waiting, self.batch)]
        active = [row for row in rows if row is not None]
        session = None
        while True:
            for row in over:
                fruitless = 0 if row.lines else fruitless + 1
                if fruitless >= _FRUITLESS and self.source.endless:
                    raise UserError("the target's user turns do not end: give it files or prompts")
                yield row.number, self._kept(row)
            over.clear()
            if not active or interrupt():
                return
            ids = [row.ids for row in active]
            session = session or self.lm.open(ids, hidden=self.keep is not None)
            logits = session.score(ids, Draft.empty(len(ids)))[:, 0]
            # The last token of an answer has been fed too, so that every token has its state.
            ended = [index for index, row in enumerate(active) if self._ended(row, capacity)]
            self._draw(logits, active, ended)
            rows = list(active)
            for index in ended:
                row = active[index]
                if self.keep is not None:
                    row.answered[tuple(row.ids)] = session.hidden()[index, : len(row.ids)].to(KEPT)
                rows[index] = following(row, row.ids[len(row.ask.prompt) :])
            active = [row for row in rows if row is not None]
            if 0 < len(active) < len(rows):
                session.select(torch.tensor([index for index, row in enumerate(rows) if row is not None]))

    def _waiting(self, done: Container[int]) -> Iterator[_Row]:
        """Yield the source's chats but those `done`, each as a row that has not begun."""
        for number in count():
            if number not in done:
                chat = self.source.chat(number)
                if chat is None:
                    return
                yield _Row(number, chat)

    def _kept(self, row: _Row) -> list[Line]:
        """Return the lines of a chat; their states go to `keep`."""
        if self.keep is not None:
            for line in row.lines:
                self.keep(line["ids"], line["start"], row.answered[tuple(line["ids"])])
        return row.lines

    def _ended(self, row: _Row, capacity: int) -> bool:
        """Return whether the row's answer has its last token."""
        written = len(row.ids) - len(row.ask.prompt)
        full = written >= row.ask.limit or len(row.ids) >= capacity
        return written > 0 and (full or row.ids[-1] in self.stop_ids)

    def _draw(self, logits: Tensor, rows: Sequence[_Row], ended: Container[int]) -> None:
        """Append a token to each row that has not ended."""
        due = [index for index in range(len(rows)) if index not in ended]
        if due:
            chosen = [rows[index] for index in due]
            temperatures = [row.ask.temperature for row in chosen]
            keys = [stream_key(self.seed, _STREAM + row.continuations, row.number, len(row.ids)) for row in chosen]
            for row, token in zip(chosen, draw(logits[due].float(), temperatures, keys), strict=True):
                row.ids.append(token)


def draw(logits: Tensor, temperatures: list[float], keys: list[int]) -> list[int]:
    """Return one id a row: [M, V] float32 logits, each row at its temperature (0: the likeliest), by its key's noise.

    The inverse of the distribution function: one uniform number a row instead of one an id.
    """
    best = logits.max(dim=-1)
    chosen: list[int] = best.indices.tolist()
    warm = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not warm:
        return chosen
    heat = torch.tensor([temperatures[row] for row in warm], device=logits.device)[:, None]
    mass = (logits[warm] - best.values[warm, None]).div_(heat).exp_().cumsum(dim=-1)
    total = mass[:, -1:]
    point = (uniforms([keys[row] for row in warm], 1, logits.device) * total.double()).float()
    point = point.minimum(total.nextafter(torch.zeros_like(total)))
    # The first id whose mass reaches beyond the point: it lies below the total, so no id of probability 0 is drawn.
    for row, token in zip(warm, torch.searchsorted(mass, point, right=True)[:, 0].tolist(), strict=True):
        chosen[row] = token
    return chosen
