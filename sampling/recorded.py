"""Recorded answers read from a file: the ids that followed each prompt, and facts of the recorded model; and a target
played back from them, which replaces a model that cannot run.

Three formats, recognised by their text: lines as torch prints them (`tensor([[518, 799, …`, rows may wrap,
one or several a tensor) whose rows begin with their prompt; a JSON map from a prompt's ids to the answer's
("12_7_99": "5_6"); and this project's JSON lines: a line with `vocab_size` and `end_id`, and every line with both
`prompt_ids` and `answer_ids`.

In the maps in which the experiments of Cascade Speculative Drafting cached their targets (arXiv 2312.11462), a value is
the whole row of the decoder: of a decoder-only model the prompt's ids and then the answer's, of an encoder-decoder
model the decoder start id and then the answer's. All values together show which; `RecordedAnswers.reading` has the
result. Errors name file and line. At each position the recorded token has probability 1, so only
greedy decoding is meaningful; other likely ids of the recording rank after it with probability 0. Knows no text and no
models; has no keys, values or hidden states.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from sampling.rows import common_prefix
from sampling.types import LM, Draft, Hidden, Rows, Session
from utils.errors import UserError, raise_first, whole
from utils.files import object_in, read_text
from utils.objects import Json

IdTuple = tuple[int, ...]
Starts = Sequence[Sequence[Sequence[int]]]

_TENSOR = re.compile(
    r"tensor\(\s*(\[[\s,]*(?:\[[^\[\]]*\][\s,]*)+\]|\[[^\[\]]*\])[^()\[\]]*\)|\S+"
)  # a printed tensor (group 1: its numbers), or any other word
_ROW = re.compile(r"\[[^\[\]]*\]")

Arch = Literal["causal", "seq2seq"]
# How the values of a file were read; "told": as the file or the caller says.
Reading = Literal["told", "answers alone", "prompt first", "start first"]


def _rows(file: Path, text: str) -> Iterator[tuple[int, IdTuple]]:
    """Yield every row of every tensor, with the line on which it begins."""
    hint = " (torch has shortened a tensor: torch.set_printoptions(threshold=…))" if "..." in text else ""
    for tensor in _TENSOR.finditer(text):
        if tensor[1] is None:
            refuse(file, text, tensor.start(), f"expected tensor([[…]]), rows of ids, got {tensor[0][:20]!r}{hint}")
        for row in _ROW.finditer(tensor[1]):
            line = line_of(text, tensor.start(1) + row.start())
            ids = [int(word) if word.strip().isdecimal() else None for word in row[0][1:-1].split(",")]
            yield line, checked(file, line, f"a row{hint}", ids)


def _split(
    file: Path, rows: list[tuple[int, IdTuple]], starts: Starts | None, prompt_tokens: int | None
) -> Iterator[tuple[IdTuple, IdTuple]]:
    """Yield each row as (prompt, answer). `starts` and `prompt_tokens` as in :func:`read_answers`."""
    raise_first(
        {
            f"{file}: its rows hold prompts and answers together: say which prompts they begin with, or how many "
            "tokens those have": starts is None and not prompt_tokens,
            f"{file}: the prompts tell their tokens: prompt_tokens must be 0 beside them, got {prompt_tokens}": (
                starts is not None and prompt_tokens
            ),
        },
        UserError,
    )
    if starts is not None and len(rows) > len(starts):
        raise UserError(f"{file}:{rows[len(starts)][0]}: row {len(starts) + 1} has no prompt, there are {len(starts)}")
    for number, (line, row) in enumerate(rows):
        prompts = [row[:prompt_tokens]] if starts is None else [tuple(ids) for ids in starts[number]]
        answer_alone = starts is not None and prompt_tokens == 0
        prompt = prompts[0] if answer_alone else next((ids for ids in prompts if ids and _begins(row, ids)), None)
        if prompt is None:
            raise UserError(f"{file}:{line}: row {number + 1} does not begin with its prompt")
        answer = row if answer_alone else row[len(prompt) :]
        if not answer:
            raise UserError(f"{file}:{line}: row {number + 1} of {len(row)} tokens has no answer after its prompt")
        yield prompt, answer


def checked(file: Path, number: int, what: str, ids: Any) -> IdTuple:
    """Return a list of ids as a tuple. UserError, with file and line, for anything else."""
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise UserError(f"{file}:{number}: {what} must be a list of ids, at least one, none below 0")
    return tuple(ids)


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def refuse(file: Path, text: str, offset: int, why: str) -> NoReturn:
    """Raise UserError with the line of the file at `offset` of its text."""
    raise UserError(f"{file}:{line_of(text, offset)}: {why}")


@dataclass(frozen=True)
class RecordedAnswer:
    """One recorded answer. `best` holds the model's likeliest ids at each position, likeliest first, if recorded."""

    prompt: IdTuple
    answer: IdTuple
    best: tuple[IdTuple, ...] = ()


@dataclass(frozen=True)
class RecordedAnswers:
    """The answers of a file (of JSON lines the last one of each prompt), and its header.

    `header` may have `vocab_size`, `end_id`, `stop_ids`, `start_id`, `context`, `tokenizer` (its fingerprint),
    `settings` and `pass_seconds` (seconds of a pass over n tokens, by n). Only JSON lines have one; every file that is
    read as an encoder-decoder model's has `start_id`. `unanswered` counts the prompts without an answer.
    """

    answers: tuple[RecordedAnswer, ...]
    header: Json = field(default_factory=dict)
    reading: Reading = "told"
    unanswered: int = 0

    @property
    def highest(self) -> int:
        """Return the highest id of all prompts and answers."""
        return max(max(*answer.prompt, *answer.answer) for answer in self.answers)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end an answer, as far as the header has them."""
        end = self.header.get("end_id")
        return frozenset([*self.header.get("stop_ids", ()), *([] if end is None else [end])])

    @property
    def pass_seconds(self) -> dict[int, float]:
        """Return the recorded seconds of a pass over n tokens, by n; {} if not measured."""
        return {int(n): float(seconds) for n, seconds in self.header.get("pass_seconds", {}).items()}

    @property
    def best(self) -> int:
        """Return the number of likeliest ids known at every position; 1: only the recorded one."""
        counts = [[1] if len(each.best) < len(each.answer) else list(map(len, each.best)) for each in self.answers]
        return max(1, min(min(each, default=1) for each in counts))


def read_answers(
    path: str | Path,
    starts: Starts | None = None,
    prompt_tokens: int | None = None,
    arch: Arch | None = None,
    start_id: int | None = None,
) -> RecordedAnswers:
    """Read the recording in a file.

    Args:
        path: the file, of any format.
        starts: for rows that torch printed: possible prompts of each row, in order, as ids (the first that the row
            begins with is taken).
        prompt_tokens: tokens of each such row's prompt, without `starts`; 0 beside `starts`: the rows hold answers
            alone. With 0 a map's values are answers alone too.
        arch: the kind of the recorded model; None: as the file says, by default causal.
        start_id: the first id of its decoder (seq2seq); None: the first id of all values.

    Raises:
        UserError: a file that cannot be read or holds no recording; with file and line.
    """
    file = Path(path)
    text = read_text(file)
    if not (begin := text.lstrip()):
        raise UserError(f"{file} holds no recording: it is empty")
    if begin.startswith("tensor("):
        rows = list(_split(file, list(_rows(file, text)), starts, prompt_tokens))
        return _after_start(file, rows, start_id) if arch == "seq2seq" else _recording(rows)
    if not begin.startswith("{"):
        raise UserError(
            f'{file} holds no recording: it must be tensor(…) lines, a JSON map of "id_id_…" to "id_id_…" or JSON lines'
        )
    entries = _map(file, text)
    if entries is None:
        return _lines(file, text, arch, start_id)
    if arch == "seq2seq":
        return _after_start(file, entries, start_id)
    return _recording(entries, "answers alone") if prompt_tokens == 0 else _after_prompts(file, entries)


def _recording(
    rows: Iterable[tuple[IdTuple, IdTuple]], reading: Reading = "told", start_id: int | None = None
) -> RecordedAnswers:
    """Return prompts with their answers; count the prompts without one."""
    pairs = [RecordedAnswer(prompt, answer) for prompt, answer in rows]
    answers = tuple(pair for pair in pairs if pair.answer)
    return RecordedAnswers(
        answers, {} if start_id is None else {"start_id": start_id}, reading, len(pairs) - len(answers)
    )


def _after_prompts(file: Path, entries: list[tuple[IdTuple, IdTuple]]) -> RecordedAnswers:
    """Split values that all begin with their prompts' ids; take other values as answers alone.

    UserError if most values begin with their prompts and some do not: neither reading would be right.
    """
    readings = [[prompt for prompt, _ in entries]]
    # The begin-of-text id may be missing in all keys, or in all values. Two ids alone could agree by chance.
    if len({value[0] for _, value in entries}) == 1:
        readings.append([value[:1] + prompt for prompt, value in entries])
    if len({prompt[0] for prompt, _ in entries}) == 1:
        readings.append([prompt[1:] for prompt, _ in entries])
    readings[1:] = [prompts for prompts in readings[1:] if all(len(prompt) > 2 for prompt in prompts)]
    for prompts in readings:
        pairs = zip(prompts, (value for _, value in entries), strict=True)
        rows = [(prompt, value[len(prompt) :]) for prompt, value in pairs if _begins(value, prompt)]
        if len(rows) == len(entries) and any(answer for _, answer in rows):
            return _recording(rows, "prompt first")
    others = [prompt for prompt, value in entries if not _begins(value, prompt)]
    if 0 < 2 * len(others) < len(entries):
        raise UserError(
            f"{file}: {len(entries) - len(others)} of {len(entries)} values begin with their prompts' ids, that of "
            f'"{_short("_".join(map(str, others[0])))}" does not: prompt_tokens 0 takes all of them as answers alone'
        )
    return _recording(entries, "answers alone")


def _begins(value: IdTuple, prompt: IdTuple) -> bool:
    return value[: len(prompt)] == prompt


def _after_start(file: Path, rows: list[tuple[IdTuple, IdTuple]], start_id: int | None) -> RecordedAnswers:
    """Remove the decoder start id if all values begin with it; if none begins with a known one, they are answers alone.

    UserError for any other values.
    """
    firsts = sorted({value[0] for _, value in rows})
    start = firsts[0] if start_id is None and firsts else start_id
    if start is not None and start not in firsts:
        return _recording(rows, "answers alone", start)
    if len(firsts) > 1:
        wanted = "one decoder start id" if start_id is None else f"the decoder start id {start_id}"
        shown = ", ".join(map(str, firsts[:5])) + ("…" if len(firsts) > 5 else "")
        raise UserError(f"{file}: all values of an encoder-decoder model must begin with {wanted}, got {shown}")
    return _recording([(prompt, value[1:]) for prompt, value in rows], "start first", start)


def _map(file: Path, text: str) -> list[tuple[IdTuple, IdTuple]] | None:
    """Return the entries of the JSON map; None for a file of JSON lines."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if {"vocab_size", "prompt_ids", "answer_ids", "event"} & entry.keys():
        return None
    return [(_joined(file, text, key, key), _joined(file, text, key, value)) for key, value in entry.items()]


def _joined(file: Path, text: str, key: str, ids: Any) -> IdTuple:
    parts = ids.split("_") if isinstance(ids, str) else []
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        refuse(file, text, max(0, text.find(json.dumps(key))), f'the entry "{_short(key)}" must be ids joined by "_"')
    return tuple(map(int, parts))


def _short(key: str) -> str:
    return key if len(key) <= 30 else key[:29] + "…"


def _lines(file: Path, text: str, arch: Arch | None, start_id: int | None) -> RecordedAnswers:
    """Read JSON lines. A damaged last line was being written when the writer stopped: it is left out."""
    header: Json = {}
    answers: dict[IdTuple, RecordedAnswer] = {}
    unanswered = set[IdTuple]()
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = object_in(line, f"{file}:{number}")
        except UserError:
            if number == len(lines) and number > 1:
                break
            raise
        if "prompt_ids" in entry and "answer_ids" in entry:
            if entry["answer_ids"] == []:  # stopped before its first token
                unanswered.add(checked(file, number, "prompt_ids", entry["prompt_ids"]))
                continue
            answer = _answer(file, number, entry)
            answers[answer.prompt] = answer
        elif "vocab_size" in entry or "pass_seconds" in entry:
            header |= _header(file, number, entry)
    if arch == "seq2seq" and start_id is not None:
        header.setdefault("start_id", start_id)
    if arch is not None and (arch == "seq2seq") != ("start_id" in header):
        named = f"start_id {header['start_id']}" if "start_id" in header else "no start_id"
        raise UserError(f"{file}: its header has {named}, arch must be {'seq2seq' if arch == 'causal' else 'causal'}")
    return RecordedAnswers(tuple(answers.values()), header, unanswered=len(unanswered - answers.keys()))


def _answer(file: Path, number: int, entry: Json) -> RecordedAnswer:
    prompt, answer = (checked(file, number, name, entry[name]) for name in ("prompt_ids", "answer_ids"))
    best = entry.get("best_ids", [])
    if not isinstance(best, list):
        raise UserError(f"{file}:{number}: best_ids must be a list of lists of ids")
    return RecordedAnswer(prompt, answer, tuple(checked(file, number, "an entry of best_ids", ids) for ids in best))


def _header(file: Path, number: int, entry: Json) -> Json:
    """Return the header's line; the fields that readers use are checked."""
    for name, least in (("vocab_size", 1), ("end_id", 0), ("start_id", 0), ("context", 1)):
        if entry.get(name) is not None:
            whole(f"{file}:{number}: {name}", entry[name], least, f"a whole number, {least} or more")
    if entry.get("stop_ids"):
        checked(file, number, "stop_ids", entry["stop_ids"])
    seconds = entry.get("pass_seconds")
    if seconds is not None and not (
        isinstance(seconds, dict)
        and all(n.isascii() and n.isdigit() and int(n) for n in seconds)
        and all(isinstance(value, int | float) and 0 < value < 1e9 for value in seconds.values())
    ):
        raise UserError(f'{file}:{number}: pass_seconds must map numbers of tokens to seconds, such as {{"1": 0.05}}')
    return {name: value for name, value in entry.items() if value is not None}


# -- the target ------------------------------------------------------------------------------------------

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

    Raises UserError without answers, and for an id beyond the vocabulary.
    """

    takes_trees = True

    def __init__(
        self,
        answers: Mapping[IdTuple, Sequence[int]],
        end_id: int,
        vocab_size: int | None = None,
        name: str = "target",
        context: int = 1 << 30,
        start_id: int | None = None,
        best: Mapping[IdTuple, Sequence[IdTuple]] | None = None,
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
    ) -> "RecordedLM":
        """Read a file that separates prompts and answers; UserError, in one line, for any other.

        `end_id` and `start_id` are defaults for the file's; with a `start_id` it is an encoder-decoder model's.
        """
        arch: Arch | None = None if start_id is None else "seq2seq"
        return RecordedLM.of(read_answers(path, arch=arch, start_id=start_id), end_id, vocab_size, name)

    @staticmethod
    def of(
        recording: RecordedAnswers,
        end_id: int = 0,
        vocab_size: int | None = None,
        name: str = "target",
        start_id: int | None = None,
    ) -> "RecordedLM":
        """Return a recording as an LM; its header outranks `end_id` and `start_id`."""
        header = recording.header
        return RecordedLM(
            {recorded.prompt: recorded.answer for recorded in recording.answers},
            header.get("end_id", end_id),
            header.get("vocab_size") if vocab_size is None else vocab_size,
            name,
            header.get("context", 1 << 30),
            header.get("start_id", start_id),
            {recorded.prompt: recorded.best for recorded in recording.answers if recorded.best},
        )

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> "RecordedSession":
        """Open a session for recorded prompts; UserError for others, and for wanted hidden states."""
        if hidden:
            raise UserError(f"{self.name} is a recording: it has no hidden states for a drafter to read")
        return RecordedSession(self, [list(row) for row in prompt], (target or self).vocab_size)

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
        each = zip(self.initial, prompt, strict=True)
        # Of each row its whole text, and the likeliest ids at each position of the answer.
        self._texts = [(first + lm.answer(row), lm.best.get(tuple(row), [])) for first, row in each]
        self._cached: Rows = [[] for _ in prompt]

    def rollback(self, rows: Rows) -> list[int]:
        """Return the number of tokens of each row that were read before."""
        lengths = list(map(common_prefix, self._cached, rows))
        self._cached = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return lengths

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """Return [B, N+1, V]: the recorded token of each position has all the mass."""
        self._cached = [list(row) for row in rows]
        logits = torch.zeros(len(rows), draft.width + 1, self.lm.vocab_size)
        for index, (row, tree) in enumerate(zip(rows, draft.trees, strict=True)):
            text, best = self._texts[index]
            for column, depth in enumerate([0, *tree.depths, *[0] * (draft.width - len(tree.depths))]):
                at, answered = len(row) + depth, len(row) + depth - len(self.initial[index])
                ids = best[answered] if 0 <= answered < len(best) else ()
                logits[index, column, list(ids)] = RUNNER_UP - STEP * torch.arange(len(ids))
                logits[index, column, text[at] if at < len(text) else self.lm.end_id] = PEAK
        return torch.nn.functional.pad(logits, (0, self.vocab_size - self.lm.vocab_size), value=-torch.inf)

    def select(self, rows: Tensor) -> None:
        chosen = rows.tolist()
        self._texts = [self._texts[row] for row in chosen]
        self._cached = [list(self._cached[row]) for row in chosen]
        self.initial = [self.initial[row] for row in chosen]
        self.source = self.source and [self.source[row] for row in chosen]

    def fork(self) -> "RecordedSession":
        """Return an independent session with the same rows."""
        return copy(self)
