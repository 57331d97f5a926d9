"""Logits → probabilities → draw: greedy, multinomial, top-k, nucleus, top-k + nucleus, min-p.

The order is repetition penalty → no-repeat n-grams → temperature → top-k → top-p → min-p (the one
transformers uses); the first two need the tokens before each law. A processor never changes the caller's
logits. Probabilities are float32 (float64 for float64 logits). Knows no models and no seeds: `sample`
takes the caller's generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from utils.checks import number, whole
from utils.prefix_rules import ban_repeats, penalise

TOP = 1024  # candidates looked at before the whole vocabulary is sorted


class Rules(TypedDict, total=False):
    """What every processor takes besides its own numbers; see :class:`LogitsProcessor`."""

    repetition_penalty: float
    no_repeat_ngram: int


class LogitsProcessor:
    """All numbers in one record; the named processors below set parts of it.

    Args:
        temperature: divides the logits; 0 puts all mass on the largest logit (the first of equals).
        top_k: keep the k most probable ids, 0 = all. Ids that tie with the k-th are kept.
        top_p: keep the smallest set of most probable ids whose mass reaches top_p, 1 = all.
        min_p: drop ids less probable than min_p × the most probable one, 0 = none.
        repetition_penalty: above 1, ids of the prefix become less probable, 1 = off (utils/prefix_rules.py).
        no_repeat_ngram: n-grams of this length that the prefix holds are not said again, 0 = off.

    Raises:
        UserError: a value outside its range, or no number.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram: int = 0,
    ) -> None:
        self.temperature = number("temperature", temperature, lambda value: value >= 0, "0 or more")
        self.top_k = whole("top_k", top_k, 0, "0 (off) or more")
        self.top_p = number("top_p", top_p, lambda value: 0 < value <= 1, "above 0 and at most 1")
        self.min_p = number("min_p", min_p, lambda value: 0 <= value < 1, "at least 0 and below 1")
        self.repetition_penalty = number(
            "repetition_penalty", repetition_penalty, lambda value: value > 0, "above 0 (1 = off)"
        )
        self.no_repeat_ngram = whole("no_repeat_ngram", no_repeat_ngram, 0, "0 (off) or more")

    @property
    def needs_prefixes(self) -> bool:
        """Whether the law depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram > 0

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass on the largest logit."""
        return self.temperature == 0

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Logits [..., V] → probabilities [..., V]. NaN, or a row without a finite logit, is an error.

        `prefixes`: the tokens before each law, flattened over the leading dimensions; looked at only where
        `needs_prefixes` says so, and then one for each law is needed (ValueError).
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        top = _tops(scores)
        if self.needs_prefixes:
            scores = self.ruled(scores, prefixes)
            top = _tops(scores)
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

    def ruled(self, scores: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """The scores after the rules about the tokens before them."""
        flat = scores.reshape(-1, scores.shape[-1]).clone()
        if prefixes is None or len(prefixes) != len(flat):
            given = 0 if prefixes is None else len(prefixes)
            raise ValueError(f"this processor needs the tokens before each law: {len(flat)} laws, {given} prefixes")
        if self.repetition_penalty != 1:
            penalise(flat, prefixes, self.repetition_penalty)
        if self.no_repeat_ngram:
            ban_repeats(flat, prefixes, self.no_repeat_ngram)
        return flat.view(scores.shape)

    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one id from each row: [..., V] → [..., 1] long."""
        if self.greedy:
            return probs.argmax(dim=-1, keepdim=True)
        flat = probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).reshape(*probs.shape[:-1], 1)


def _tops(scores: Tensor) -> Tensor:
    top = scores.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(top).all()):
        raise ValueError("logits hold NaN or no finite value: no probabilities can be made of them")
    return top


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

    def __init__(self, temperature: float = 1.0, **rules: Unpack[Rules]) -> None:
        number("temperature", temperature, lambda value: value >= 0, "0 or more")
        super().__init__(temperature=0.0, **rules)


class MultinomialProcessor(LogitsProcessor):
    """The whole law at a temperature."""

    def __init__(self, temperature: float = 1.0, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, **rules)


class TopKProcessor(LogitsProcessor):
    """The k most probable ids."""

    def __init__(self, temperature: float = 1.0, top_k: int = 50, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, top_k=top_k, **rules)


class NucleusProcessor(LogitsProcessor):
    """The nucleus: the smallest set of ids with mass top_p (Holtzman et al., arXiv 1904.09751)."""

    def __init__(self, temperature: float = 1.0, top_p: float = 0.9, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, top_p=top_p, **rules)


class TopKNucleusProcessor(LogitsProcessor):
    """Top-k first, then the nucleus of what is left."""

    def __init__(self, temperature: float = 1.0, top_k: int = 50, top_p: float = 0.9, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, top_k=top_k, top_p=top_p, **rules)


class MinPProcessor(LogitsProcessor):
    """Ids at least min_p times as probable as the best one (Nguyen et al., arXiv 2407.01082)."""

    def __init__(self, temperature: float = 1.0, min_p: float = 0.05, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, min_p=min_p, **rules)


def make_processor(
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **rules: Unpack[Rules]
) -> LogitsProcessor:
    """The processor of a set of settings; temperature 0 is greedy, whatever top-k, top-p and min-p say."""
    return LogitsProcessor(temperature, top_k, top_p, min_p, **rules)
