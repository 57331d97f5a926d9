"""What a student is taught and how well it does: the target's law from its states, and agreement with it.

Knows students and batches, no optimizer and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.draft_heads.modules import Student
from training.draft_heads.batches import Batch

Law = Literal["full", "hard"] | int
CHUNK = 2048  # positions whose laws are held at once


@dataclass(frozen=True)
class Teacher:
    """The target's head. `rows` [V, G]; `listed` [N, G] are those of the student's short list (all, without one)."""

    rows: Tensor
    listed: Tensor
    short_list: Tensor  # [N] long, or empty

    @staticmethod
    def of(rows: Tensor, short_list: Tensor) -> Teacher:
        rows = rows.detach()
        return Teacher(rows, rows[short_list] if len(short_list) else rows, short_list)

    def law(self, hidden: Tensor, kind: Law) -> Tensor:
        """[M, G] states → [M, N] the target's law within the short list, at temperature 1."""
        logits = (hidden.to(self.listed.dtype) @ self.listed.t()).float()
        if kind == "hard":
            return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
        if isinstance(kind, int):
            least = logits.topk(min(kind, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return logits.softmax(dim=-1)

    def favourite(self, hidden: Tensor) -> Tensor:
        """[M, G] → [M] the target's most probable id, of all."""
        return (hidden.to(self.rows.dtype) @ self.rows.t()).argmax(dim=-1)


def loss(
    student: Student,
    teacher: Teacher,
    batch: Batch,
    *,
    kind: Law,
    hard: float,
    steps: int,
    decay: float,
    offset: int,
) -> tuple[Tensor, float]:
    """(loss, cross-entropy of the first step in nats), means over the tokens that count.

    Cross-entropy against the target's law at each drafted step, the later ones weighted by `decay` to the power of the
    step; a share `hard` of the law is put on the token that the target likes best.
    """
    wanted = batch.weight > 0
    weight = batch.weight[wanted]
    states = student.states(
        batch.ids,
        batch.hidden if student.config.kind == "feature" else None,
        batch.kv or None,
        offset,
        steps,
    )
    hidden = batch.hidden[wanted]
    total, first = torch.zeros((), device=weight.device), 0.0
    scale = sum(decay**step for step in range(steps))
    chosen = [state[wanted] for state in states]
    for begin in range(0, len(weight), CHUNK):
        part = slice(begin, begin + CHUNK)
        with torch.no_grad():
            law = teacher.law(hidden[part], kind)
            if hard:
                law = (1 - hard) * law + hard * F.one_hot(law.argmax(dim=-1), law.shape[-1])
        for step, state in enumerate(chosen):
            logits = student.lm_head(state[part]).float()
            each = F.cross_entropy(logits, law, reduction="none") * weight[part]
            total = total + each.sum() * decay**step / scale
            first += float(each.sum().detach()) if step == 0 else 0.0
    count = float(weight.sum())
    return total / count, first / count


@dataclass(frozen=True)
class Held:
    """How a student does on held-out text.

    `alpha` per drafted position: how often the student's favourite is the target's where all drafts before it in
    the round were. `overlap`: Σ min(p, q) of the first draft at temperature 1, i.e. its chance of acceptance there.
    """

    alpha: tuple[float, ...]
    overlap: float
    loss: float

    @property
    def tokens_per_pass(self) -> float:
        """1 + Σ ∏ α over the positions measured: greedy drafts of that many tokens, all examined."""
        product, total = 1.0, 1.0
        for alpha in self.alpha:
            product *= alpha
            total += product
        return total


@torch.no_grad()
def held_out(student: Student, teacher: Teacher, batches: Sequence[Batch], depth: int) -> Held:
    """Measure a student on batches that it has not learned from; `depth` drafted positions."""
    hits, seen = [0.0] * depth, [0.0] * depth
    overlap = entropy = count = 0.0
    for batch in batches:
        favourite = _by_chunk(teacher.favourite, batch.hidden.flatten(0, 1)).view(batch.ids.shape)
        before = batch.weight >= 1
        for step, state in enumerate(drafted_states(student, batch, depth)):
            best = _by_chunk(lambda part: student.lm_head(part).argmax(dim=-1), state.flatten(0, 1))
            best = student.ids[best] if len(student.ids) else best
            agree = best.view(batch.ids.shape) == favourite
            seen[step] += float(before.sum())
            hits[step] += float((before & agree).sum())
            if step == 0:
                shared, nats = _first(student, teacher, batch, state)
                overlap, entropy, count = overlap + shared, entropy + nats, count + float((batch.weight >= 1).sum())
            before = F.pad(before & agree, (1, 0))[:, :-1] & (batch.weight >= 1)
    alpha = tuple(hit / all_ if all_ else 0.0 for hit, all_ in zip(hits, seen, strict=True))
    return Held(alpha, overlap / max(count, 1.0), entropy / max(count, 1.0))


def drafted_states(student: Student, batch: Batch, depth: int) -> list[Tensor]:
    """The states of drafted positions 1 … depth, as in a round whose earlier drafts were right."""
    kind = student.config.kind
    if kind == "feature":
        return student.states(batch.ids, batch.hidden, steps=depth)
    if kind == "plain":
        return student.states(batch.ids) * depth
    return [student.states(batch.ids, kv=batch.kv, lag=step)[0] for step in range(depth)]


def _first(student: Student, teacher: Teacher, batch: Batch, state: Tensor) -> tuple[float, float]:
    """Sums over the tokens that count: Σ min(p, q) and cross-entropy, within the short list."""
    wanted = batch.weight >= 1
    shared = nats = 0.0
    for hidden, own in zip(torch.split(batch.hidden[wanted], CHUNK), torch.split(state[wanted], CHUNK), strict=True):
        law, logs = teacher.law(hidden, "full"), student.lm_head(own).float().log_softmax(dim=-1)
        shared += float(torch.minimum(law, logs.exp()).sum())
        nats -= float((law * logs).sum())
    return shared, nats


def _by_chunk(act: object, rows: Tensor) -> Tensor:
    return torch.cat([act(part) for part in torch.split(rows, CHUNK)])  # type: ignore[operator]
