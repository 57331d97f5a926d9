"""Training text that a target writes: many chats at once, one token of each a pass; a finished chat's row goes to the
next chat.

The noise of a token is keyed by (seed, continuation, chat, position), so that a chat's text depends neither on the
chats beside it nor on where a run was resumed (up to rounding: a pass over other rows may add up differently).
training/text/dialogues.py makes the chats. Their lines are appended to a file, where a later run continues; they are
read back, and split into texts to learn from and texts that are held out. Knows no screen.
"""

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, filterfalse, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampling.sampler import stream_key, uniforms
from sampling.types import LM, Draft
from training.tables.build import Passage, passage_of
from training.text.dialogues import Ask, Chat, DialogueLine, PromptSource
from utils.errors import UserError
from utils.files import append, drop_half_line, numbered_lines
from utils.progress import never

_STREAM = 16  # the noise stream of a chat's first continuation; the second has the next stream, and so on
_FRUITLESS = 200  # consecutive chats without an answer after which an endless source is an error
ENDLESS = 1 << 60  # tokens: as many as there are prompts for
SHORTEST = 8  # tokens; a shorter sequence teaches nothing

Ended = tuple[int, list[DialogueLine]]  # the number of a chat and its lines; none if it has no answer


@dataclass(eq=False)
class _Row:
    """A chat that is being written."""

    number: int
    chat: Chat
    ask: Ask = field(init=False)
    ids: list[int] = field(default_factory=list)  # the request's prompt and the tokens drawn after it
    continuations: int = -1  # before this one
    lines: list[DialogueLine] = field(default_factory=list)  # of a chat that is over

    def advance(self, answer: list[int] | None, capacity: int) -> bool:
        """Hand the chat its answer (None: it begins) and take its next request; return False if it is over. A request
        without a prompt, or without room for a token in `capacity`, gets an empty answer."""
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
    (utils.kernels.quantized_linear).
    """

    lm: LM
    stop_ids: frozenset[int]
    source: PromptSource
    seed: int = 42
    batch: int = 32

    def chats(self, done: Container[int] = (), interrupt: Callable[[], bool] = never) -> Iterator[Ended]:
        """Yield each chat as it finishes, except those in `done`.

        Ends when the source does, or at the next token after an interrupt. Raises UserError if 200 chats of an endless
        source in succession have no answer.
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
                yield row.number, row.lines
            over.clear()
            if not active or interrupt():
                return
            ids = [row.ids for row in active]
            session = session or self.lm.open(ids)
            self._draw(session.score(ids, Draft.empty(len(ids)))[:, 0], active)
            rows = [
                following(row, row.ids[len(row.ask.prompt) :]) if self._ended(row, capacity) else row for row in active
            ]
            active = [row for row in rows if row is not None]
            if 0 < len(active) < len(rows):
                session.select(torch.tensor([index for index, row in enumerate(rows) if row is not None]))

    def _waiting(self, done: Container[int]) -> Iterator[_Row]:
        """Yield the source's chats except those in `done`, each as a row that has not begun."""
        for number in filterfalse(done.__contains__, count()):
            if (chat := self.source.chat(number)) is None:
                return
            yield _Row(number, chat)

    def _ended(self, row: _Row, capacity: int) -> bool:
        """Return whether the row's answer has its last token."""
        written = len(row.ids) - len(row.ask.prompt)
        return written >= row.ask.limit or len(row.ids) >= capacity or row.ids[-1] in self.stop_ids

    def _draw(self, logits: Tensor, rows: Sequence[_Row]) -> None:
        """Append a token to each row."""
        keys = [stream_key(self.seed, _STREAM + row.continuations, row.number, len(row.ids)) for row in rows]
        tokens = draw(logits.float(), [row.ask.temperature for row in rows], keys)
        for row, token in zip(rows, tokens, strict=True):
            row.ids.append(token)


def draw(logits: Tensor, temperatures: list[float], keys: list[int]) -> list[int]:
    """Draw one id for each row of [M, V] float32 logits, at its temperature (0: the likeliest), by its key's noise.

    The draw inverts the distribution function: it needs one uniform number a row instead of one an id.
    """
    best = logits.max(dim=-1)
    chosen: list[int] = best.indices.tolist()
    if not (warm := [row for row, temperature in enumerate(temperatures) if temperature > 0]):
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


# -- the file ----------------------------------------------------------------------------------------------


def written(file: Path) -> tuple[int, set[int]]:
    """Return (answer tokens, numbers of the chats) of a file begun earlier; a line cut off at its end is removed."""
    if not file.is_file():
        return 0, set()
    drop_half_line(file)
    rows = _rows(file)
    return sum(len(row["ids"]) - row["start"] for row in rows), {row["number"] for row in rows}


def _rows(file: Path) -> list[DialogueLine]:
    return [_row(line, file) for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]


def _row(line: str, file: Path) -> DialogueLine:
    with suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        if isinstance(row["ids"], list) and isinstance(row["start"], int) and isinstance(row["number"], int):
            return dict(row)
    raise UserError(f"{file} is no file of self-written text: remove it, or name another")


def write_self(
    writer: TextWriter,
    file: Path,
    tokens: int,
    progress: Callable[[int], Any],
    interrupt: Callable[[], bool] = never,
) -> int:
    """Append answers to `file` (jsonl) until it holds `tokens` answer tokens; return how many it holds.

    Resumes an earlier run; chats without an answer leave a line without ids. `progress` gets the tokens so far, first
    those of the file, unless they are enough already. The file has fewer tokens than wanted only after an interrupt or
    the source's end. Raises OSError (a full disk) with the whole lines written so far intact.
    """
    count, done = written(file)
    if count >= tokens:
        return count
    progress(count)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as out:
        for number, lines in writer.chats(done, interrupt):
            kept = lines or [{"ids": [], "start": 0, "number": number}]
            append(out, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept).encode("ascii"), file)
            count += sum(len(line["ids"]) - line["start"] for line in lines)
            progress(count)
            if count >= tokens:
                break
    return count


def passages(file: Path) -> list[Passage]:
    """Return the answers that :func:`write_self` wrote, to be counted."""
    return [Passage(row["ids"], row["start"]) for row in _rows(file) if row["ids"]]


def cut(ids: Sequence[int], start: int, longest: int) -> Passage | None:
    """Return the first `longest` ids; None if their answer is too short to learn from."""
    text = Passage(tuple(ids[:longest]), min(start, longest))
    return text if len(text.ids) - text.start >= SHORTEST else None


def read_texts(files: Iterable[str | Path], vocab_size: int, longest: int) -> list[Passage]:
    """Return the sequences of jsonl files with `ids`, and optionally `start`, a line; other fields are ignored.

    Sequences are cut at `longest` tokens; those with an answer of fewer than 8 are left out.

    Raises:
        UserError: a file or line that cannot be read, or an id outside the vocabulary, named by its number.
    """
    texts = [
        passage_of(line, f"{file}:{number}", vocab_size) for file in files for number, line in numbered_lines(file)
    ]
    return [text for each in texts if (text := cut(each.ids, each.start, longest)) is not None]


def split(texts: Sequence[Passage], held: int) -> tuple[list[Passage], list[Passage]]:
    """Return (to learn from, held out): `held` sequences at equal steps are held out, at most a fifth."""
    held = max(1, min(held, len(texts) // 5))
    chosen = {index * (len(texts) // held) for index in range(held)}
    return (
        [text for index, text in enumerate(texts) if index not in chosen],
        [text for index, text in enumerate(texts) if index in chosen],
    )


def short_list(texts: Iterable[Passage], size: int, always: Iterable[int] = ()) -> list[int]:
    """Return the `size` most frequent ids of the answers, ascending; `always` are among them."""
    counts = Counter(token for text in texts for token in text.ids[text.start :])
    first = list(dict.fromkeys(always))
    ranked = sorted(counts.keys() - set(first), key=lambda token: (-counts[token], token))
    return sorted([*first, *ranked][:size])
