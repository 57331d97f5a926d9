"""The training of a draft head: AdamW, cosine schedule, checkpoints, early stop on held-out acceptance.

A run's state lies on disk, so that a stopped run can be resumed. Knows examples, kept or streamed
(training/draft_heads/features.py), and draft heads; no texts, no screen.
"""

import contextlib
import io
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.drafters.draft_heads.modules import DraftHead
from training.draft_heads.features import Batch, Examples, grouped, make_batch
from training.draft_heads.losses import Teacher, block_loss, favourites, held_out, loss
from training.draft_heads.report import tokens_per_pass
from utils.errors import UserError
from utils.files import first_difference, write_bytes
from utils.progress import Progress, never

NAME = "checkpoint.pt"
_KEPT = ("step", "tokens", "seconds", "shown", "curve", "best", "worse")


@dataclass(frozen=True)
class TrainingJob:
    """The hyperparameters of a training; a checkpoint is resumed by the same job only.

    `steps` drafted steps are unrolled (feature and EAGLE-3 heads), each with the weight of the step before times
    `decay`; in the first `single` of the schedule, a share, only one. The schedule ends after `epochs`, or after
    `minutes` if that is earlier (None: no limit).
    """

    epochs: float = 4.0
    lr: float = 3e-3
    batch_tokens: int = 1536
    steps: int = 1
    single: float = 0.4
    decay: float = 0.8
    prompt_weight: float = 0.3  # of tokens before the answer; the answer's have 1
    warmup: float = 0.03  # share of the steps over which the learning rate rises
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 42
    minutes: float | None = None
    evaluations: int = 12  # of a whole schedule
    patience: int = 4  # evaluations without gain after which training stops
    depth: int = 4  # drafted positions that an evaluation measures
    save_every: float = 60.0  # seconds between checkpoints
    anchors: int = 0  # blocks of each sequence in a batch, of a head that drafts them
    precise: bool = False  # float32 products even where 16-bit ones are faster


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the state last saved; None if there is none. UserError if it cannot be read."""
    file = folder / NAME
    try:
        return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else None
    except Exception as error:  # pickle raises many errors
        why = " ".join(str(error).split())[:100]
        raise UserError(f"cannot read the checkpoint {file} ({why}): remove it to begin again") from error


class Training:
    """A run: it resumes the folder's checkpoint of the same job, if there is one; UserError for one of another job.

    `layers`: the target's layers whose keys and values the examples hold, in the draft head's order. `curve` ends with
    the last evaluation; `best` is that of the draft head in the folder.
    """

    def __init__(
        self,
        draft_head: DraftHead,
        teacher: Teacher,
        examples: Examples,
        held: Examples,
        layers: Sequence[int],
        job: TrainingJob,
        folder: Path,
    ) -> None:
        self.draft_head, self.teacher, self.examples, self.layers = draft_head, teacher, examples, layers
        self.job, self.folder, self.device = job, folder, draft_head.lm_head.weight.device
        self.lengths = examples.lengths
        self.held = [
            make_batch(held.take(batch), layers, job.prompt_weight)
            for batch in grouped(held.lengths, job.batch_tokens, 0)
        ]
        self.trained = {name: weight for name, weight in draft_head.named_parameters() if weight.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in self.trained.values() if weight.dim() > 1]},
            {"params": [weight for weight in self.trained.values() if weight.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=job.betas, weight_decay=job.weight_decay)
        self.total = max(1, round(job.epochs * len(grouped(self.lengths, job.batch_tokens, 0))))
        self.step = self.tokens = self.worse = 0
        self.seconds = self.shown = 0.0  # `shown`: the loss, smoothed over the last steps
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self._favourites: list[torch.Tensor] = []  # of the held-out batches, computed once
        # The batches of an epoch. Every step needs the earlier epochs' too, so they are kept.
        self._order = cache(lambda epoch: grouped(self.lengths, job.batch_tokens, job.seed + epoch))
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    # -- checkpoints ------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """Return all that must not change between a run and its continuation."""
        return {
            "job": {**asdict(self.job), "betas": list(self.job.betas)},
            "student": asdict(self.draft_head.config),
            "examples": len(self.lengths),
        }

    def _resume(self) -> None:
        if (state := load_checkpoint(self.folder)) is None:
            return
        if state["facts"] != self._facts():
            theirs, ours = (
                {**facts["job"], **facts["student"], "examples": facts["examples"]}
                for facts in (state["facts"], self._facts())
            )
            name = str(first_difference(theirs, ours))
            raise UserError(
                f"{self.folder} holds another run ({name} {theirs.get(name)} instead of {ours.get(name)}): choose "
                "another --out, or remove it"
            )
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.trained[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        vars(self).update({name: state[name] for name in _KEPT})

    def _save(self) -> None:
        """Write the state, whole or not at all. Raises OSError (a full disk) with the last one intact."""
        state = {
            "facts": self._facts(),
            "parameters": {name: value.detach() for name, value in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in _KEPT},
        }
        written = io.BytesIO()  # torch answers a full disk with an internal error
        torch.save(state, written)
        write_bytes(self.folder / NAME, written.getvalue())

    # -- the run ---------------------------------------------------------------------------------

    def run(self, about: dict[str, Any], progress: Progress, interrupt: Callable[[], bool] = never) -> bool:
        """Train; keep the best draft head in the folder, with `about` (see save_student). False if interrupted."""
        begun, saved = time.monotonic() - self.seconds, time.monotonic()
        while self._done() < 1 and self.worse < self.job.patience:
            if interrupt():
                self._save()
                return False
            learned = self._learn(self._batch())
            self.shown = learned if self.shown == 0.0 else 0.95 * self.shown + 0.05 * learned
            self.step += 1
            self.seconds = time.monotonic() - begun
            progress(f"training, loss {self.shown:.2f}", min(1.0, self._done()))
            if self._due():
                self._evaluate(about)
            if time.monotonic() - saved > self.job.save_every:
                self._save()
                saved = time.monotonic()
        if not self.curve or self.curve[-1]["step"] != self.step:
            self._evaluate(about)
        self._save()
        return True

    def _done(self) -> float:
        return max(self.step / self.total, self.seconds / (60 * (self.job.minutes or math.inf)))

    def _due(self) -> bool:
        if self.job.minutes is None:
            return self.step % max(1, self.total // self.job.evaluations) == 0
        last = self.curve[-1]["seconds"] if self.curve else 0.0
        return self.seconds - last >= 60 * self.job.minutes / self.job.evaluations

    def _batch(self) -> Batch:
        """Return the batch of this step: the epoch and the index in it follow from the step's number alone."""
        epoch, index = 0, self.step
        while index >= len(self._order(epoch)):
            epoch, index = epoch + 1, index - len(self._order(epoch))
        chosen = self.examples.take(self._order(epoch)[index])
        return make_batch(chosen, self.layers, self.job.prompt_weight).to(self.device)

    def _learn(self, batch: Batch) -> float:
        job, done = self.job, self._done()
        rate = min(1.0, (self.step + 1) / max(1.0, job.warmup * self.total)) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr * max(rate, 0.02)
        offset = random.Random(job.seed * 1_000_003 + self.step).randrange(self.draft_head.config.block_size)
        self.draft_head.train()
        with self._mixed():
            if job.anchors:
                noise = torch.Generator().manual_seed(job.seed * 1_000_003 + self.step)
                value, first = block_loss(self.draft_head, self.teacher, batch, job.anchors, noise)
            else:
                steps = 1 if done < job.single else job.steps
                value, first = loss(self.draft_head, self.teacher, batch, steps=steps, decay=job.decay, offset=offset)
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.trained.values()), job.clip)
        self.optimizer.step()
        self.tokens += batch.tokens
        return first

    def _mixed(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context of 16-bit products where they are faster; weights and sums stay float32."""
        mixed = fast_half(self.device) and not self.job.precise
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else contextlib.nullcontext()

    def _evaluate(self, about: dict[str, Any]) -> None:
        """Add an evaluation to the curve; the draft head is kept if it is the best so far."""
        self.draft_head.eval()
        batches = [batch.to(self.device) for batch in self.held]
        with self._mixed():
            self._favourites = self._favourites or favourites(self.teacher, batches)
            held = held_out(self.draft_head, self.teacher, batches, self.job.depth, self._favourites)
        result: dict[str, Any] = {
            **{"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "loss": self.shown},
            **{"held": asdict(held), "tokens_per_pass": tokens_per_pass(held.alpha, self.job.depth)},
        }
        self.curve.append(result)
        self.worse += 1
        if not self.best or result["tokens_per_pass"] > self.best["tokens_per_pass"]:
            self.best, self.worse = result, 0
            save_student(self.folder, self.draft_head, {**about, "held_out": result})


def fast_half(device: torch.device) -> bool:
    """Return whether bfloat16 products are faster than float32's on `device`."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def teacher_for(target: Any, draft_head: DraftHead, *, precise: bool = False) -> Teacher:
    """Return the target's head for a draft head, in 16 bit where that is fast, unless it must be `precise`."""
    device, ids = draft_head.lm_head.weight.device, draft_head.ids
    kind = torch.bfloat16 if fast_half(device) and not precise else torch.float32
    rows = target.get_output_embeddings().weight.detach().to(device, kind)
    return Teacher(rows, rows[ids] if len(ids) else rows)
