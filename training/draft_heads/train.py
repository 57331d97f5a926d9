"""The training of a student: AdamW, cosine schedule, checkpoints, early stop on held-out acceptance.

A run's state lies on disk, so that it goes on where it was stopped. Knows examples
(training/draft_heads/features.py) and students; no texts, no screen.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.drafters.draft_heads.modules import Student
from sampling.loop import never
from training.draft_heads.batches import Batch, grouped, make_batch
from training.draft_heads.features import Example
from training.draft_heads.losses import Held, Law, Teacher, held_out, loss
from training.text.self_text import Told
from utils.errors import UserError
from utils.files import write_bytes

NAME = "checkpoint.pt"


@dataclass(frozen=True)
class Job:
    """How a student is trained.

    `law` is what it learns: the target's full law within the short list, its k most probable ids, or "hard"; `hard`
    puts that share on the favourite. `steps` drafted steps are unrolled (feature), each weighted by `decay` more;
    the first part of the schedule, `single`, unrolls only one.
    `minutes` ends training early with the schedule brought down in time (None: after `epochs`).
    """

    epochs: float = 4.0
    lr: float = 3e-3
    batch_tokens: int = 1536
    law: Law = "full"
    hard: float = 0.0
    steps: int = 1
    single: float = 0.4
    decay: float = 0.8
    prompt_weight: float = 0.3
    warmup: float = 0.03
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 42
    minutes: float | None = None
    evaluations: int = 12
    patience: int = 4
    depth: int = 4
    save_every: float = 60.0
    precise: bool = False  # float32 products also where 16 bit is to be had


@dataclass(frozen=True)
class Mark:
    """A point of the curve."""

    step: int
    tokens: int
    seconds: float
    loss: float
    held: Held

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_pass": self.held.tokens_per_pass}


@dataclass(frozen=True)
class Result:
    """`curve` ends with the last evaluation; `finished`: not interrupted. The best student lies in the folder."""

    curve: list[dict[str, Any]]
    best: dict[str, Any]
    finished: bool
    steps: int
    seconds: float


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state, whole or not at all. Raises OSError (a full disk) with the last one intact."""
    held = io.BytesIO()
    torch.save(state, held)
    data = held.getvalue()
    write_bytes(folder / NAME, zlib.crc32(data).to_bytes(4, "little") + data)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The state last saved; None if there is none. UserError if it is damaged."""
    file = folder / NAME
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {file}: {error.strerror}") from None
    if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4]:
        raise UserError(f"the checkpoint {file} is damaged: remove it to begin again")
    state: dict[str, Any] = torch.load(io.BytesIO(content[4:]), map_location="cpu", weights_only=True)
    return state


def train(
    student: Student,
    teacher: Teacher,
    examples: Sequence[Example],
    held: Sequence[Example],
    layers: Sequence[int],
    job: Job,
    folder: Path,
    about: dict[str, Any],
    told: Told,
    interrupt: Callable[[], bool] = never,
) -> Result:
    """Train `student` (on its device) and keep the best one in `folder` (see save_student).

    Goes on from the folder's checkpoint if there is one of the same job; UserError if it is of another.
    `layers`: the target's layers whose keys and values the examples hold, in the student's order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return _Run(student, teacher, examples, held, layers, job, folder, about, told, interrupt).run()


class _Run:
    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        examples: Sequence[Example],
        held: Sequence[Example],
        layers: Sequence[int],
        job: Job,
        folder: Path,
        about: dict[str, Any],
        told: Told,
        interrupt: Callable[[], bool],
    ) -> None:
        self.student, self.teacher, self.examples, self.layers = student, teacher, examples, layers
        self.job, self.folder, self.about, self.told, self.interrupt = job, folder, about, told, interrupt
        self.device = student.lm_head.weight.device
        self.held = [
            make_batch([held[index] for index in batch], layers, job.prompt_weight)
            for batch in grouped(held, job.batch_tokens, 0)
        ]
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        vectors = [parameter for parameter in trained if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=job.betas)
        self.trained = trained
        self.total = max(1, round(job.epochs * len(grouped(examples, job.batch_tokens, 0))))
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self.worse = 0
        self._orders: dict[int, list[list[int]]] = {}
        self._resume()

    # -- where it was stopped --------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """What must not change between a run and its continuation."""
        return {
            "job": {**asdict(self.job), "betas": list(self.job.betas)},
            "student": self.student.config.to_dict(),
            "examples": len(self.examples),
        }

    def _resume(self) -> None:
        state = load_checkpoint(self.folder)
        if state is None:
            return
        if state["facts"] != self._facts():
            other = next(
                f"{key} {theirs} instead of {ours}"
                for part in ("job", "student", "examples")
                for key, theirs, ours in _differences(part, state["facts"][part], self._facts()[part])
            )
            raise UserError(f"{self.folder} holds another run ({other}): choose another --out, or remove it")
        own = dict(self.student.named_parameters())
        with torch.no_grad():
            for name, value in state["parameters"].items():
                own[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.curve, self.best, self.worse = state["curve"], state["best"], state["worse"]

    def _save(self) -> None:
        parameters = {name: value.detach() for name, value in self.student.named_parameters() if value.requires_grad}
        save_checkpoint(
            self.folder,
            {
                "facts": self._facts(),
                "parameters": parameters,
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "curve": self.curve,
                "best": self.best,
                "worse": self.worse,
            },
        )

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> Result:
        begun, saved = time.monotonic() - self.seconds, time.monotonic()
        every = max(1, self.total // self.job.evaluations)
        shown = 0.0
        while self._progress() < 1 and self.worse < self.job.patience:
            if self.interrupt():
                self._save()
                return Result(self.curve, self.best, False, self.step, self.seconds)
            learned = self._learn(self._batch())
            shown = learned if shown == 0.0 else 0.95 * shown + 0.05 * learned
            self.step += 1
            self.seconds = time.monotonic() - begun
            self.told(f"training, loss {shown:.2f}", min(1.0, self._progress()))
            if self._due(every):
                self._evaluate(shown)
            if time.monotonic() - saved > self.job.save_every:
                self._save()
                saved = time.monotonic()
        if not self.curve or self.curve[-1]["step"] != self.step:
            self._evaluate(shown)
        self._save()
        return Result(self.curve, self.best, True, self.step, self.seconds)

    def _progress(self) -> float:
        """The part of the schedule that is done."""
        by_time = 0.0 if self.job.minutes is None else self.seconds / (60 * self.job.minutes)
        return max(self.step / self.total, by_time)

    def _due(self, every: int) -> bool:
        if self.job.minutes is None:
            return self.step % every == 0
        last = self.curve[-1]["seconds"] if self.curve else 0.0
        return self.seconds - last >= 60 * self.job.minutes / self.job.evaluations

    def _batch(self) -> Batch:
        """The batch of this step: the epoch and the place in it follow from the number alone."""
        epoch, place = 0, self.step
        while True:
            order = self._order(epoch)
            if place < len(order):
                chosen = [self.examples[index] for index in order[place]]
                return make_batch(chosen, self.layers, self.job.prompt_weight).to(self.device)
            epoch, place = epoch + 1, place - len(order)

    def _order(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch; earlier epochs are asked for at every step, so none is made twice."""
        if epoch not in self._orders:
            self._orders[epoch] = grouped(self.examples, self.job.batch_tokens, self.job.seed + epoch)
        return self._orders[epoch]

    def _learn(self, batch: Batch) -> float:
        job, done = self.job, self._progress()
        rate = min(1.0, (self.step + 1) / max(1.0, job.warmup * self.total)) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr * max(rate, 0.02)
        draw = random.Random(job.seed * 1_000_003 + self.step)
        self.student.train()
        with self._mixed():
            value, first = loss(
                self.student,
                self.teacher,
                batch,
                kind=job.law,
                hard=job.hard,
                steps=1 if done < job.single else job.steps,
                decay=job.decay,
                offset=draw.randrange(self.student.config.block_size),
            )
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.trained, job.clip)
        self.optimizer.step()
        self.tokens += batch.tokens
        return first

    def _mixed(self) -> contextlib.AbstractContextManager[Any]:
        """16-bit products where the machine multiplies 16 bit faster; weights and sums stay float32."""
        if self.job.precise or not fast_half(self.device):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _evaluate(self, shown: float) -> None:
        self.student.eval()
        with self._mixed():
            held = held_out(self.student, self.teacher, [batch.to(self.device) for batch in self.held], self.job.depth)
        mark = Mark(self.step, self.tokens, self.seconds, shown, held).to_json()
        self.curve.append(mark)
        if not self.best or mark["tokens_per_pass"] > self.best["tokens_per_pass"]:
            self.best, self.worse = mark, 0
            save_student(self.folder, self.student, {**self.about, "held_out": mark})
        else:
            self.worse += 1


def fast_half(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32's there."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def _differences(part: str, theirs: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(ours, dict):
        return [(part, theirs, ours)] if theirs != ours else []
    return [(name, theirs.get(name), ours[name]) for name in ours if theirs.get(name) != ours[name]]


def teacher_for(target: Any, student: Student) -> Teacher:
    """The target's head for a student, in 16 bit where that is fast."""
    rows: Tensor = target.get_output_embeddings().weight.detach()
    place = student.lm_head.weight.device
    kind = torch.bfloat16 if fast_half(place) else torch.float32
    return Teacher.of(rows.to(place, kind), student.ids)
