"""The journal of `bench --out F.json`: F.json.partial, JSON lines that are only ever appended, one an answer.

A killed run loses no answer and goes on. The first line says what run it is of (:func:`about`: known before a model is
loaded, but for the machine), a `part` line begins each time the run is taken up; an answer of a later part replaces
that of an earlier one. A line without its newline was cut by a kill and is dropped; any other that cannot be read is
an error. Knows answers and their places, no models and no figures.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic import BaseModel, ValidationError

from app.bench.options import BenchArgs
from app.lanes.answers import Answer, shown_settings
from app.lanes.comparison import Variant
from app.prompts.questions import Question
from app.settings.table import MODEL_FIELDS, ModelOptions, Settings
from utils.errors import UsageError, UserError
from utils.files import append, beside, drop_half_line, first_difference

_ELSEWHERE = (  # entered under another key, or without influence on the figures
    *("prompts", "ids", "limit", "turns", "methods"),
    *("out", "report", "check_identity"),
)
_MODELS_ELSEWHERE = (  # entered by the pair's own names or by the machine, or without influence on the figures
    *("pair", "models", "target", "drafter", "device", "dtype", "quantization"),
    *("trust_remote_code", "offline"),
)
_SAME = ("device", "gpu", "dtype", "quantization", "threads", "processes")  # of the machine: what speeds depend on
About = Mapping[str, Any]


class Slot(NamedTuple):
    """Which of a benchmark's answers: question and turn (from 0), repeat (from 0), variant."""

    question: int
    turn: int
    repeat: int
    variant: Variant


def about(settings: Settings, options: ModelOptions, args: BenchArgs, questions: Sequence[Question]) -> dict[str, Any]:
    """What makes a run this run, known before a model is loaded; plain JSON values."""
    from app.lanes.pairing import choose_pair

    spec = choose_pair(options)
    models = {name: getattr(options, name) for name in MODEL_FIELDS if name not in _MODELS_ELSEWHERE}
    own = {name: value for name, value in vars(args).items() if name not in _ELSEWHERE}
    found = {
        "pair": spec.name,
        "target": spec.target.source,
        "drafter": spec.drafter_name,
        **{f"weights of {name}": mark for name, mark in spec.weights(options.revision).items()},
        "spec": spec.model_dump(exclude={"name", "notes", "defaults"}),
        **models,
        **shown_settings(settings),
        "methods": args.methods or settings.compare,
        **own,
        "prompts": [_digest(question) for question in questions],
    }
    return dict(json.loads(json.dumps(found, default=str)))


def _digest(question: Question) -> str:
    text = json.dumps([question.turns, question.category, question.question_id])
    return sha256(text.encode()).hexdigest()[:12]


def difference(there: About, here: About) -> str | None:
    """What the journal's run and this one differ in, in words: the first such thing; None if they are the same."""
    name = first_difference(there, here)
    if name == "prompts":
        return _other_prompts(there.get(name) or [], here.get(name) or [])
    return None if name is None else f"{name} {_shown(there.get(name))} there, {_shown(here.get(name))} here"


def _other_prompts(there: Sequence[str], here: Sequence[str]) -> str:
    if len(there) != len(here):
        return f"{len(there)} prompts there, {len(here)} here"
    number = next(number for number, pair in enumerate(zip(there, here, strict=True), start=1) if pair[0] != pair[1])
    return f"other prompts (the first that differs is the {number}. of {len(here)})"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)


class _Line(BaseModel, extra="forbid"):
    question: int
    turn: int
    repeat: int
    method: str
    gamma: int | str | None
    temperature: float | None
    answer: Answer

    @property
    def place(self) -> Slot:
        return Slot(self.question, self.turn, self.repeat, Variant(self.method, self.gamma, self.temperature))


VERSION = 2


def open_journal(
    settings: Settings, options: ModelOptions, args: BenchArgs, questions: Sequence[Question]
) -> Journal | None:
    """The journal beside --out with what an earlier run of this command measured; None where there is none to keep."""
    if args.out is None or args.check_identity:
        return None
    if beside(args.out, f"{args.out.name}.partial") is None:
        if not settings.quiet:
            sys.stderr.write(f"no journal can be kept beside {args.out}: a stopped run begins anew\n")
        return None
    journal = Journal(args.out, about(settings, options, args, questions))
    if not settings.quiet and journal.known:
        sys.stderr.write(f"going on: {len(journal.known)} answers are in {journal.path}\n")
    elif not settings.quiet and args.out.exists():
        sys.stderr.write(f"{args.out} is there already: this run begins anew and replaces it in the end\n")
    return journal


class Journal:
    """What was measured before (`known`) and a place for what is measured now.

    UsageError for a journal of another run, one that another process is writing, or one with a broken line.
    """

    def __init__(self, out: Path, run: About) -> None:
        self.path, self.run = out.with_name(f"{out.name}.partial"), dict(run)
        self.known: dict[Slot, Answer] = {}
        self.parts: list[dict[str, Any]] = []  # machine and answers of each part
        self._part_of: dict[Slot, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        self._lock = self._locked()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _locked(self) -> Any:
        from filelock import FileLock, Timeout

        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"{self.path} is being written by another run: wait for it, or give another --out"
            ) from None
        return lock

    # -- reading ------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                self._take(json.loads(line), first=number == 1)
            except (ValueError, ValidationError, RecursionError) as error:
                problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                raise UsageError(
                    f"{self.path}:{number}: no line of a journal: {problem} (delete the file to begin anew)"
                ) from None

    def _take(self, row: Any, *, first: bool) -> None:
        if not isinstance(row, dict):
            raise ValueError("no JSON object")
        if first:
            if row.get("journal") != VERSION:
                what = "is a journal of another version" if "journal" in row else "has no line of a journal"
                raise UsageError(f"{self.path} {what}: delete it to begin anew, or give another --out")
            self._must_be_same(difference(row.get("run") or {}, self.run))
        elif "part" in row:
            self.parts.append({"machine": dict(row["part"]), "answers": 0})
        else:
            line = _Line.model_validate(row)
            if not self.parts or self._part_of.get(line.place) is self.parts[-1]:
                raise ValueError("an answer twice, or of no part")
            self._drop(line.place)  # a later part has answered it anew
            self.known[line.place] = line.answer
            self._count(line.place)

    def _count(self, place: Slot) -> None:
        self._part_of[place] = self.parts[-1]
        self.parts[-1]["answers"] += 1

    def _drop(self, place: Slot) -> None:
        if self.known.pop(place, None) is not None:
            self._part_of.pop(place)["answers"] -= 1

    def drop_broken_rounds(self, variants: Collection[Variant]) -> None:
        """Forget the answers of a prompt's rounds that lack a variant: what is compared is timed in one go."""
        rounds = Counter(place[:3] for place in self.known if place.variant in variants)
        for place in [place for place in self.known if rounds[place[:3]] < len(variants)]:
            self._drop(place)

    def answer(self, place: Slot, prompt_n: int) -> Answer | None:
        """What was answered there before; UsageError if the prompt had another number of tokens then."""
        found = self.known.get(place)
        if found is not None and found.stats.prompt_n != prompt_n:
            there, number = found.stats.prompt_n, place.question + 1
            self._must_be_same(f"prompt {number} has {there} tokens there, {prompt_n} here")
        return found

    def _must_be_same(self, found: str | None) -> None:
        if found is not None:
            raise UsageError(
                f"{self.path} is the journal of another run: {found} (delete it to begin anew, or give another --out)"
            )

    # -- writing ------------------------------------------------------------------------------

    def begin(self, machine: Mapping[str, Any]) -> None:
        """Begin a part on this machine. UsageError on another kind of device than before."""
        if self.parts:
            kinds = ({name: one.get(name) for name in _SAME} for one in (self.parts[0]["machine"], machine))
            self._must_be_same(difference(*kinds))
        try:
            drop_half_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        if not self._file.tell():
            self._write({"journal": VERSION, "run": self.run})
        self.parts.append({"machine": dict(machine), "answers": 0})
        self._write({"part": dict(machine)})
        self.sync()

    def add(self, place: Slot, answer: Answer) -> None:
        """Enter an answer; it outlives this process from here on."""
        question, turn, repeat, variant = place
        where = {"question": question, "turn": turn, "repeat": repeat, **vars(variant)}
        self._write({**where, "answer": asdict(answer)})
        self._count(place)

    def sync(self) -> None:
        """What was entered outlives the machine from here on."""
        assert self._file is not None
        os.fsync(self._file.fileno())

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self._file is not None
        append(self._file, json.dumps(row).encode() + b"\n", self.path)

    def close(self, *, done: bool = False) -> None:
        """Leave the journal for the next run of the same command, or take it away where all is `done`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if done:
            self.path.unlink(missing_ok=True)
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()
