"""The journal of `bench --out F.json`: F.json.partial, JSON lines that are only ever appended, one an answer.

A killed run can be resumed. It answers again only the prompt and repeat at which it was killed, since the methods that
are compared must be timed together. The first line describes the run (:func:`about`), by facts known before a model is
loaded; each start of the run adds a `part` line with its machine. An answer replaces an earlier one in the same slot. A
last line without a newline was cut by a kill and is dropped; any other line that cannot be read is an error. Knows
answers and their slots, no models and no figures.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from app.lanes.answers import Answer, Variant, shown_settings
from app.lanes.pairing import choose_pair
from app.prompts.questions import Question
from app.screen.rows import plural
from app.settings.table import MODEL_FIELDS, ModelOptions, Settings
from utils.errors import UsageError, UserError
from utils.files import append, drop_half_line, first_difference, stream_of
from utils.objects import Json
from utils.visible import to_stderr

_ELSEWHERE = (  # flags that `about` has under another key, or that do not change the figures
    *("prompts", "ids", "limit", "turns", "methods"),
    *("out", "report", "source", "check_identity"),
)
_MODELS_ELSEWHERE = (  # options that the pair's entries or the machine have, or that do not change the figures
    *("pair", "models", "target", "drafter", "device", "dtype", "quantization"),
    *("trust_remote_code", "offline"),
)
_SAME = (
    "device",
    "gpu",
    "dtype",
    "quantization",
    "threads",
    "processes",
)  # facts of a machine that all starts of a run must share
VERSION = 3


class Slot(NamedTuple):
    """The key of an answer in a benchmark: question, turn and repeat (from 0), variant."""

    question: int
    turn: int
    repeat: int
    variant: Variant


def about(settings: Settings, options: ModelOptions, args: Namespace, questions: Sequence[Question]) -> Json:
    """Return the facts that identify a run, as plain JSON values; all are known before a model is loaded."""
    spec = choose_pair(options)
    facts = {
        "pair": spec.name,
        "target": spec.target.source,
        "drafter": spec.drafter_name,
        **{f"weights of {name}": mark for name, mark in spec.weights(options.revision).items()},
        "spec": spec.model_dump(exclude={"name", "notes", "defaults"}),
        **{name: getattr(options, name) for name in MODEL_FIELDS if name not in _MODELS_ELSEWHERE},
        **shown_settings(settings),
        "methods": args.methods or settings.compare,
        **{name: value for name, value in vars(args).items() if name not in _ELSEWHERE},
        "prompts": [
            sha256(json.dumps([question.turns, question.category, question.question_id]).encode()).hexdigest()[:12]
            for question in questions
        ],
    }
    return dict(json.loads(json.dumps(facts, default=str)))


def difference(before: Json, now: Json) -> str | None:
    """Return the first fact that differs between the journal's run and this one, in words; None for the same run."""
    name = first_difference(before, now)
    if name == "prompts":
        return f"other prompts ({len(before.get(name) or [])} there, {len(now[name])} here)"
    return name and f"{name} {before.get(name)} there, {now.get(name)} here"


class _Line(BaseModel, extra="forbid"):
    question: int
    turn: int
    repeat: int
    method: str
    gamma: int | str | None
    answer: Answer


def open_journal(
    settings: Settings, options: ModelOptions, args: Namespace, questions: Sequence[Question]
) -> "Journal | None":
    """Open the journal beside --out, with the answers of an earlier run of this command; None if none can be kept."""
    if args.out is None:
        return None
    if stream_of(args.out) is not None:
        if not settings.quiet:
            to_stderr(f"no journal can be kept beside {args.out}: a stopped run begins again")
        return None
    journal = Journal(args.out, about(settings, options, args, questions))
    if not settings.quiet and journal.known:
        to_stderr(f"resuming: {plural(len(journal.known), 'answer')} in {journal.path}")
    elif not settings.quiet and args.out.exists():
        to_stderr(f"{args.out} exists: this run begins again and replaces it at its end")
    return journal


class Journal:
    """The answers of earlier starts (`known`), their `machines`, and the file that takes new ones.

    UsageError for a journal of another run, one that another process writes, or one with a broken line.
    """

    def __init__(self, out: Path, run: Json) -> None:
        self.path, self.run = out.with_name(f"{out.name}.partial"), dict(run)
        self.known: dict[Slot, Answer] = {}
        self.machines: list[Json] = []  # of each start
        self._file: IO[bytes] | None = None
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"another run is writing {self.path}: wait for it, or give another --out") from None
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    # -- reading ------------------------------------------------------------------------------

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else ()
        for number, line in enumerate(lines, start=1):
            try:
                self._take(json.loads(line), first=number == 1)
            except (ValueError, ValidationError, RecursionError) as error:
                problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                raise UsageError(
                    f"{self.path}:{number}: no line of a journal: {problem} (delete the file to begin again)"
                ) from None

    def _take(self, row: object, *, first: bool) -> None:
        if not isinstance(row, dict):
            raise ValueError("no JSON object")
        if first:
            if row.get("journal") != VERSION:
                problem = "is a journal of another version" if "journal" in row else "has no line of a journal"
                raise UsageError(f"{self.path} {problem}: delete it to begin again, or give another --out")
            self._check_same(difference(row.get("run") or {}, self.run))
        elif "part" in row:
            self.machines.append(dict(row["part"]))
        else:
            line = _Line.model_validate(row)
            self.known[Slot(line.question, line.turn, line.repeat, Variant(line.method, line.gamma))] = line.answer

    def drop_broken_rounds(self, variants: Collection[Variant]) -> None:
        """Drop the answers to a prompt in a repeat in which a variant is missing: compared answers must be timed
        together."""
        rounds = Counter(slot[:3] for slot in self.known if slot.variant in variants)
        self.known = {slot: answer for slot, answer in self.known.items() if rounds[slot[:3]] >= len(variants)}

    def answer(self, slot: Slot, prompt_n: int) -> Answer | None:
        """Return the earlier answer; UsageError if the prompt had another number of tokens then."""
        if (answer := self.known.get(slot)) is not None and answer.stats.prompt_n != prompt_n:
            self._check_same(f"prompt {slot.question + 1} has {answer.stats.prompt_n} tokens there, {prompt_n} here")
        return answer

    def _check_same(self, differs: str | None) -> None:
        if differs is not None:
            raise UsageError(
                f"{self.path} is the journal of another run: {differs} (delete it to begin again, or give another "
                "--out)"
            )

    # -- writing ------------------------------------------------------------------------------

    def begin(self, machine: Json) -> None:
        """Write the line of a new start on this machine.

        UsageError if a fact of `_SAME` differs from the first start's; UserError if the file cannot be written.
        """
        if self.machines:
            kinds = ({name: facts.get(name) for name in _SAME} for facts in (self.machines[0], machine))
            self._check_same(difference(*kinds))
        try:
            drop_half_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        if not self._file.tell():
            self._write({"journal": VERSION, "run": self.run})
        self.machines.append(dict(machine))
        self._write({"part": dict(machine)})

    def add(self, slot: Slot, answer: Answer) -> None:
        """Write an answer to the file, where it outlives this process."""
        question, turn, repeat, variant = slot
        self._write({"question": question, "turn": turn, "repeat": repeat, **vars(variant), "answer": asdict(answer)})

    def _write(self, row: Json) -> None:
        assert self._file is not None
        append(self._file, json.dumps(row).encode() + b"\n", self.path)

    def close(self, *, done: bool = False) -> None:
        """Close the journal and keep it for the next run of the same command, or remove it if the run is `done`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if done:
            self.path.unlink(missing_ok=True)
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()
