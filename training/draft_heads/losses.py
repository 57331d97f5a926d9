"""The losses of a draft head against its target's distribution, and its agreement with the target on held-out text.

Knows draft heads and batches, no optimizer and no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.draft_heads.config import BlockConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.models.cache import joined
from training.draft_heads.features import Batch
from utils.catalogue.heads import BLOCK_KINDS

CHUNK = 2048  # positions whose distributions are held at once
ANCHORS = 64  # blocks of a sequence that are computed at once
DECAY = 4.0  # positions of a block over which the weight falls to 1 / e


@dataclass(frozen=True)
class Teacher:
    """The target's head: its weight's `rows` [V, G] (G: the target's hidden size), and of these `listed` [N, G], the
    reduced vocabulary's (all rows if there is none)."""

    rows: Tensor
    listed: Tensor

    def probs(self, hidden: Tensor) -> Tensor:
        """Return [M, N], the target's distribution over the reduced vocabulary, for [M, G] states."""
        return (hidden.to(self.listed.dtype) @ self.listed.t()).float().softmax(dim=-1)

    def favourite(self, hidden: Tensor) -> Tensor:
        """Return [M], the target's most probable id of all, for [M, G] states."""
        return (hidden.to(self.rows.dtype) @ self.rows.t()).argmax(dim=-1)


class _CrossEntropy(torch.autograd.Function):
    """See :func:`cross_entropy`. The gradient, softmax − probabilities, is computed along with the value, in half the
    passes over memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        logs = logits.float().log_softmax(dim=-1)
        result: Tensor = -torch.linalg.vecdot(probs, logs)
        ctx.save_for_backward(logs.exp_().sub_(probs).to(logits.dtype))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None].to(slope.dtype), None


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return [M], the cross-entropy in nats of logits [M, N] against probabilities [M, N] that add up to 1."""
    return cast(Tensor, _CrossEntropy.apply(logits, probs))  # type: ignore[no-untyped-call]


def loss(
    draft_head: DraftHead, teacher: Teacher, batch: Batch, *, steps: int, decay: float, offset: int
) -> tuple[Tensor, float]:
    """Return (loss [], cross-entropy of the first step in nats), weighted means over the tokens.

    Cross-entropy against the target's distribution at each drafted step, the later ones weighted by `decay` to the
    power of the step. `offset`: where a glide head's first block begins (see `DraftHead.states`).
    """
    wanted = batch.weight > 0
    weight, hidden = batch.weight[wanted], batch.hidden[wanted]
    states = draft_head.states(batch.ids, _read(draft_head, batch), batch.kv or None, offset, steps)
    states = [state[wanted] for state in states]
    total, first = torch.zeros((), device=weight.device), 0.0
    scale = sum(decay**step for step in range(steps))
    for begin in range(0, len(weight), CHUNK):
        part = slice(begin, begin + CHUNK)
        with torch.no_grad():
            probs = teacher.probs(hidden[part])
        for step, state in enumerate(states):
            each = cross_entropy(draft_head.lm_head(state[part]), probs) * weight[part]
            total = total + each.sum() * decay**step / scale
            first += float(each.sum().detach()) if step == 0 else 0.0
    count = float(weight.sum())
    return total / count, first / count


def block_loss(
    draft_head: DraftHead, teacher: Teacher, batch: Batch, anchors: int, noise: torch.Generator
) -> tuple[Tensor, float]:
    """Return (loss [], cross-entropy of the first draft in nats) of blocks after tokens at `anchors` random positions.

    Cross-entropy against the target's distribution at each position of a block, after the text's own tokens. The
    draft at depth k has the weight exp(−(k − 1) / 4): it is of use only if all drafts before it were right (DFlash,
    arXiv 2602.06036, equation 4 and appendix A.1, which takes 4 for blocks of 8). A confidence head learns Σ min(p,
    q) by binary cross-entropy (DSpark, as *speculators* trains it).
    """
    assert batch.read is not None
    config = cast(BlockConfig, draft_head.config)
    length = batch.ids.shape[1]
    begins = torch.randperm(length - 1, generator=noise)[:anchors].sort().values.to(batch.ids.device)
    states = draft_head.blocks(batch.ids, batch.read, begins)[:, :, -config.drafts :]
    steps = torch.arange(states.shape[2], device=begins.device)
    positions = begins[:, None] + steps  # the target's distribution there is that of the step's draft
    inside = positions < length - 1
    positions = positions.clamp(max=length - 1)
    weight = batch.weight[:, positions] * inside * (-steps / DECAY).exp()
    wanted = weight > 0
    total, first = torch.zeros((), device=weight.device), 0.0
    for depth in range(states.shape[2]):
        chosen = wanted[:, :, depth]
        with torch.no_grad():
            probs = teacher.probs(batch.hidden[:, positions[:, depth]][chosen])
        before, state = batch.ids[:, positions[:, depth]][chosen], states[:, :, depth][chosen]
        logits = draft_head.logits(state, before)
        each = cross_entropy(logits, probs) * weight[:, :, depth][chosen]
        first = first or float(each.sum().detach())
        total = total + each.sum()
        if config.confidence:
            accepted = torch.minimum(probs, logits.detach().float().softmax(dim=-1)).sum(dim=-1)
            total = total + F.binary_cross_entropy_with_logits(
                draft_head.confidence(state, before).float(), accepted, weight[:, :, depth][chosen], reduction="sum"
            )
    return total / float(weight.sum()), first / max(1e-9, float(weight[:, :, 0].sum()))


@dataclass(frozen=True)
class Held:
    """Figures of a draft head on held-out text.

    `alpha` per drafted position: the share of its favourites that are the target's, where all drafts before it in the
    round were right. `overlap`: Σ min(p, q) of the first draft at temperature 1, its chance of acceptance there.
    `loss`: its cross-entropy in nats.
    """

    alpha: tuple[float, ...]
    overlap: float
    loss: float


@torch.no_grad()
def favourites(teacher: Teacher, batches: Sequence[Batch]) -> list[Tensor]:
    """Return of each batch [B, T] the target's most probable ids; −1 where nothing is measured."""
    result = [torch.full_like(batch.ids, -1) for batch in batches]
    for batch, ids in zip(batches, result, strict=True):
        wanted = batch.weight >= 1
        ids[wanted] = torch.cat([teacher.favourite(part) for part in torch.split(batch.hidden[wanted], CHUNK)])
    return result


@torch.no_grad()
def held_out(
    draft_head: DraftHead, teacher: Teacher, batches: Sequence[Batch], depth: int, best_ids: Sequence[Tensor] = ()
) -> Held:
    """Measure a draft head on batches that it has not learned from; `depth` drafted positions.

    `best_ids` [B, T]: the batches' :func:`favourites`, where they are known.
    """
    hits, seen = [0.0] * depth, [0.0] * depth
    overlap = entropy = count = 0.0
    ids = draft_head.ids
    for batch, favourite in zip(batches, best_ids or favourites(teacher, batches), strict=True):
        wanted = before = batch.weight >= 1
        states = drafted_states(draft_head, batch, depth)
        for step, state in enumerate(states):  # fewer than `depth` if the block is shorter
            chunks = zip(torch.split(state.flatten(0, 1), CHUNK), torch.split(batch.ids.flatten(), CHUNK), strict=True)
            best = torch.cat([draft_head.logits(*chunk).argmax(dim=-1) for chunk in chunks]).view(batch.ids.shape)
            agree = (ids[best] if len(ids) else best) == favourite
            seen[step] += float(before.sum())
            hits[step] += float((before & agree).sum())
            before = F.pad(before & agree, (1, 0))[:, :-1] & wanted
        count += float(wanted.sum())
        parts = (torch.split(part[wanted], CHUNK) for part in (batch.hidden, states[0], batch.ids))
        for target, own, before in zip(*parts, strict=True):  # over the head's ids
            probs, logs = teacher.probs(target), draft_head.logits(own, before).float().log_softmax(dim=-1)
            overlap += float(torch.minimum(probs, logs.exp()).sum())
            entropy -= float((probs * logs).sum())
    alpha = tuple(hit / all_ if all_ else 0.0 for hit, all_ in zip(hits, seen, strict=True))
    return Held(alpha, overlap / max(count, 1.0), entropy / max(count, 1.0))


def drafted_states(draft_head: DraftHead, batch: Batch, depth: int) -> list[Tensor]:
    """Return the states [B, T, H] of drafted positions 1 … depth, as in a round whose earlier drafts were right."""
    kind = draft_head.config.kind
    if kind in ("feature", "eagle"):
        return draft_head.states(batch.ids, _read(draft_head, batch), steps=depth)
    if kind == "plain":
        return draft_head.states(batch.ids) * depth
    if kind not in BLOCK_KINDS:
        return [draft_head.states(batch.ids, kv=batch.kv, lag=step)[0] for step in range(depth)]
    assert batch.read is not None
    length = batch.ids.shape[1]
    anchors = torch.arange(length, device=batch.ids.device)
    rows = torch.cat([draft_head.blocks(batch.ids, batch.read, part) for part in torch.split(anchors, ANCHORS)], dim=1)
    rows = rows[:, :, -cast(BlockConfig, draft_head.config).drafts :]
    # Draft k of the block after token t comes after token t + k; a block is at most as deep as it was trained for.
    return [F.pad(rows[:, :, step], (0, 0, step, 0))[:, :length] for step in range(min(depth, rows.shape[2]))]


def _read(draft_head: DraftHead, batch: Batch) -> Tensor | None:
    """Return the target's states that `DraftHead.states` of this kind reads; None for plain and glide."""
    last = [batch.hidden] if draft_head.config.kind == "feature" else []
    between = [batch.read] if draft_head.config.reads and batch.read is not None else []
    return joined([*last, *between]) if last or between else None
