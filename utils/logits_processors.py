"""Logits → probabilities → draw: greedy, multinomial, top-k, nucleus, top-k + nucleus, min-p.

The order is temperature → top-k → top-p → min-p (the one transformers uses). A processor never
changes the caller's logits. Probabilities are float32 (float64 for float64 logits). Knows no
tokens, no models and no seeds: `sample` takes the caller's generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.errors import UserError

TOP = 1024  # candidates looked at before the whole vocabulary is sorted


class LogitsProcessor:
    """Temperature, top-k, top-p and min-p in one record; the named processors below set parts of it.

    Args:
        temperature: divides the logits; 0 puts all mass on the largest logit (the first of equals).
        top_k: keep the k most probable ids, 0 = all. Ids that tie with the k-th are kept.
        top_p: keep the smallest set of most probable ids whose mass reaches top_p, 1 = all.
        min_p: drop ids less probable than min_p × the most probable one, 0 = none.

    Raises:
        UserError: a value outside its range.
    """

    needs_prefixes = False

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
        _check("temperature", temperature, temperature >= 0, "0 or more")
        _check("top_k", top_k, top_k >= 0, "0 (off) or more")
        _check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")
        _check("min_p", min_p, 0 <= min_p < 1, "at least 0 and below 1")
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass on the largest logit."""
        return self.temperature == 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [..., V] → probabilities [..., V]. NaN, or a row without a finite logit, is an error."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        top = scores.amax(dim=-1, keepdim=True)
        if not bool(torch.isfinite(top).all()):
            raise ValueError("logits hold NaN or no finite value: no probabilities can be made of them")
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)
        scores = (scores - top).div_(self.temperature)
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill_(scores < kth, -torch.inf)
        probs = scores.softmax(dim=-1)
        if self.top_p < 1:
            probs = _nucleus(probs, self.top_p)
        if self.min_p > 0:
            probs = _normalised(probs.masked_fill(probs < self.min_p * probs.amax(dim=-1, keepdim=True), 0.0))
        return probs

    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one id from each row: [..., V] → [..., 1] long."""
        if self.greedy:
            return probs.argmax(dim=-1, keepdim=True)
        flat = probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).reshape(*probs.shape[:-1], 1)


def _check(name: str, value: float, fits: bool, allowed: str) -> None:
    if not fits:  # NaN fits nothing
        raise UserError(f"{name} must be {allowed}, got {value}")


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep an id iff the mass of all ids before it, most probable first, is below top_p."""
    size = probs.shape[-1]
    values, ids = probs.topk(min(TOP, size), dim=-1)
    mass = values.cumsum(dim=-1)
    if values.shape[-1] < size and bool((mass[..., -1] < top_p).any()):
        values, ids = probs.sort(dim=-1, descending=True, stable=True)
        mass = values.cumsum(dim=-1)
    kept = values.masked_fill(mass - values >= top_p, 0.0)
    return torch.zeros_like(probs).scatter_(-1, ids, _normalised(kept))


class GreedyProcessor(LogitsProcessor):
    """Always the most probable id. `temperature` is accepted for the callers' convenience; it changes nothing."""

    def __init__(self, temperature: float = 1.0) -> None:
        _check("temperature", temperature, temperature >= 0, "0 or more")
        super().__init__(temperature=0.0)


class MultinomialProcessor(LogitsProcessor):
    """The whole law at a temperature."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__(temperature=temperature)


class TopKProcessor(LogitsProcessor):
    """The k most probable ids."""

    def __init__(self, temperature: float = 1.0, top_k: int = 50) -> None:
        super().__init__(temperature=temperature, top_k=top_k)


class NucleusProcessor(LogitsProcessor):
    """The nucleus: the smallest set of ids with mass top_p (Holtzman et al., arXiv 1904.09751)."""

    def __init__(self, temperature: float = 1.0, top_p: float = 0.9) -> None:
        super().__init__(temperature=temperature, top_p=top_p)


class TopKNucleusProcessor(LogitsProcessor):
    """Top-k first, then the nucleus of what is left."""

    def __init__(self, temperature: float = 1.0, top_k: int = 50, top_p: float = 0.9) -> None:
        super().__init__(temperature=temperature, top_k=top_k, top_p=top_p)


class MinPProcessor(LogitsProcessor):
    """Ids at least min_p times as probable as the best one (Nguyen et al., arXiv 2407.01082)."""

    def __init__(self, temperature: float = 1.0, min_p: float = 0.05) -> None:
        super().__init__(temperature=temperature, min_p=min_p)


def make_processor(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> LogitsProcessor:
    """The processor of a set of settings; temperature 0 is greedy whatever the rest says."""
    return LogitsProcessor(temperature, top_k, top_p, min_p)
