"""Cascades and chains of toys for the proofs: models, point masses, two levels and three. Decides nothing."""

from collections.abc import Callable
from typing import Any

import torch

import sampling.drafters.cascade
from sampling.drafters.cascade import ChainDrafter, cascade_of, chain_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.types import Drafter
from sampling.verify.rules import Review, review
from tests.support.toys import LawDrafter, PointDrafter, TableLM

LENIENCES = (1.0, 2.0, 3.0, 5.0)


def big(vocab_size: int = 3, seed: int = 41) -> TableLM:
    return TableLM(vocab_size, seed, name="big") if vocab_size < 8 else _wide(vocab_size, seed, "big")


def small(vocab_size: int = 3, seed: int = 42) -> TableLM:
    return TableLM(vocab_size, seed, name="small") if vocab_size < 8 else _wide(vocab_size, seed, "small")


def _wide(vocab_size: int, seed: int, name: str) -> TableLM:
    return TableLM(vocab_size, seed, name=name, sharpness=1.2, dtype=torch.float32)


def points(vocab_size: int = 3) -> PointDrafter:
    """A stand-in for max-gram: the token behind the last one, silent behind token 0."""
    return PointDrafter(vocab_size, lambda row: (row[-1] + 1) % vocab_size if row[-1] else None)


Make = Callable[[float, int], ChainDrafter]

MAKERS: dict[str, Make] = {
    "model < points": lambda lam, v: cascade_of([ModelDrafter(big(v)), points(v)], [[1, 0], [0, 2]], lam),
    "model < points, points behind": lambda lam, v: cascade_of(
        [ModelDrafter(big(v)), points(v)], [[1, 1], [0, 1]], lam
    ),
    "model < model": lambda lam, v: cascade_of([ModelDrafter(big(v)), ModelDrafter(small(v))], [[1, 0], [0, 1]], lam),
    "model < law": lambda lam, v: cascade_of([ModelDrafter(big(v)), LawDrafter(small(v))], [[1, 0], [0, 1]], lam),
    "model < model < points": lambda lam, v: cascade_of(
        [ModelDrafter(big(v)), ModelDrafter(small(v)), points(v)], [[1, 0, 0], [0, 1, 0], [0, 0, 1]], lam
    ),
    "chain of cascades": lambda lam, v: cascade_of(
        [ModelDrafter(big(v)), ModelDrafter(small(v)), points(v)], [[1, 1, 0], [0, 1, 0], [0, 0, 1]], lam
    ),
    "chain": lambda lam, v: chain_of([ModelDrafter(big(v)), points(v)], [1, 1]),
    "chain of models": lambda lam, v: chain_of([LawDrafter(small(v)), ModelDrafter(big(v))], [1, 1]),
}


def unmended(*given: Any) -> Review:
    """A mutant of `review`: passes the reviewer's own law m up, not the law its tokens have."""
    found = review(*given)
    return found if found.probs is None else Review(found.verdict, found.verdict.distributions.all())


def shifted(*given: Any) -> Review:
    """A mutant: the laws are passed up one position late."""
    found = review(*given)
    if found.probs is None:
        return found
    late = found.probs.roll(1, dims=1).clamp(min=1e-3)
    return Review(found.verdict, late / late.sum(dim=-1, keepdim=True))


def with_review(mutant: Callable[..., Review], patch: Callable[[object, str, object], None]) -> None:
    """Let every cascade review by `mutant`; `patch` is monkeypatch.setattr."""
    patch(sampling.drafters.cascade, "review", mutant)


def drafter(name: str, lenience: float, vocab_size: int) -> Drafter:
    return MAKERS[name](lenience, vocab_size)
