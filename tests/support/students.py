"""Random targets and students for tests: any small vocabulary, weights lively enough that every part matters.

Nothing is trained: a student agrees with its target by chance, often enough in a vocabulary of 4 or 8.
`PrefixLM` is the target as the proofs want it, a function of the prefix without any cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from app.measure.proofs import enliven, make_drafter, make_student, make_target
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.models.causal import CausalLM, CausalSession
from sampling.types import Draft, Rows

__all__ = ["enliven", "make_drafter", "make_student", "make_target"]  # handed on

KINDS = ("plain", "glide", "feature", "eagle")
STATES = (-1, 0, 1, 2)  # of a target, that its drafters here read


class PrefixLM:
    """A target's logits by prefix, computed anew each time: what `tests.support.reference` asks of a model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """[len(contexts), V]."""
        return torch.stack([self._one(tuple(context)) for context in contexts])

    def _one(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self._known:
            session = CausalLM(self.model).open([list(prefix)])
            self._known[prefix] = session.score([list(prefix)], Draft.empty(1))[0, 0].clone()
        return self._known[prefix]


def text(seed: int, count: int, vocab: int = 40) -> list[int]:
    """Random ids."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fed(target: LlamaForCausalLM, rows: Rows, held: list[int], hidden: bool = False) -> CausalSession:
    """A target's session that holds the first `held[b]` tokens of each row (of one row none is possible)."""
    session = CausalLM(target).open(rows, hidden=hidden)
    if any(held):
        session.score([row[: max(count, 1)] for row, count in zip(rows, held, strict=True)], Draft.empty(len(rows)))
    return session


@torch.no_grad()
def spread_logits(student: DraftHead, states: Tensor) -> Tensor:
    """What the head makes of states [..., H]: [..., V], -inf outside the short list. Written naively."""
    short = states @ student.lm_head.weight.T
    ids = student.reduced_ids
    if not len(ids):
        return short
    wide = torch.full((*short.shape[:-1], student.config.vocab_size), float("-inf"), dtype=short.dtype)
    for place, token in enumerate(ids.tolist()):
        wide[..., token] = short[..., place]
    return wide


def close(got: Tensor, wanted: Tensor, within: float = 2e-5) -> None:
    """The same ids possible, and the same logits up to rounding."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert torch.equal(got.isinf(), wanted.isinf())
    left, right = (part.masked_fill(part.isinf(), 0.0).double() for part in (got, wanted))
    worst = float((left - right).abs().max() / right.abs().max())
    assert worst < within, f"off by {worst:.1e} of the largest value"
