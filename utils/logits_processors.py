"""Logits → probabilities → draw: greedy, multinomial, top-k, nucleus, top-k + nucleus, min-p.

The order is repetition penalty → no-repeat n-grams → temperature → top-k → top-p → min-p (the one transformers uses).
The first two change the score of an id by the tokens before it, as transformers defines them: the tokens before are
the whole prefix, the prompt included. Under speculation that prefix is the committed tokens and the drafts before the
position, which is why the caller gives one for each distribution. A processor never changes the caller's logits.
Probabilities are float32 (float64 for float64 logits). Knows no models, no text and no seeds: `sample` takes the
caller's generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from utils.errors import COLDEST, LogitsError, number, whole

HOTTEST = 1 / COLDEST
TOP = 1024  # candidates for a nucleus that are looked at before the whole vocabulary is
ROUNDING = 1e-6  # a sum of probabilities may be off by less


_FINITE = "a finite number, 0 or more"


def penalise(scores: Tensor, prefixes: Sequence[Sequence[int]], penalty: float) -> None:
    """Divide the positive scores of ids in the prefix by `penalty` and multiply the negative ones, in place.

    scores [M, V] with M prefixes; penalty above 0, above 1 discourages (Keskar et al., arXiv 1909.05858, section 4.1).
    What is finite stays finite: a penalty makes no id impossible.
    """
    penalty, most = min(max(penalty, COLDEST), 1 / COLDEST), torch.finfo(scores.dtype).max
    at = _places(scores, (set(prefix) for prefix in prefixes))
    flat = scores.view(-1)
    said = flat[at]
    changed = torch.where(said < 0, said * penalty, said / penalty).clamp_(-most, most)
    flat[at] = torch.where(said.isfinite(), changed, said)


def ban_repeats(scores: Tensor, prefixes: Sequence[Sequence[int]], n: int) -> None:
    """Give -inf to every id that would end an n-gram the prefix already holds, in place; scores [M, V].

    Where that would leave no id at all nothing is banned: there is always a law to draw from.
    """
    banned = scores.clone()
    banned.view(-1)[_places(scores, (followers(prefix, n) for prefix in prefixes))] = -torch.inf
    left = (banned > -torch.inf).any(dim=-1, keepdim=True)
    scores.copy_(torch.where(left, banned, scores))


def followers(prefix: Sequence[int], n: int) -> set[int]:
    """The ids that stand behind an earlier occurrence of the prefix's last n - 1 tokens."""
    if len(prefix) < n:
        return set()
    tail = list(prefix[len(prefix) - n + 1 :])
    if not tail:
        return set(prefix)
    found: set[int] = set()
    last, end = tail[-1], n - 2
    while True:
        try:
            end = prefix.index(last, end, len(prefix) - 1)
        except ValueError:
            return found
        if list(prefix[end - n + 2 : end + 1]) == tail:
            found.add(prefix[end + 1])
        end += 1


def _places(scores: Tensor, ids: Iterable[Iterable[int]]) -> Tensor:
    """Indices into scores.view(-1) of these ids of each row; what is no id of the vocabulary (-1) is left out."""
    size = scores.shape[-1]
    flat = [row * size + token for row, tokens in enumerate(ids) for token in tokens if 0 <= token < size]
    return torch.tensor(flat, dtype=torch.long, device=scores.device)


class Rules(TypedDict, total=False):
    """What every processor takes besides its own numbers; see :class:`LogitsProcessor`."""

    repetition_penalty: float
    no_repeat_ngram: int


class LogitsProcessor:
    """All numbers in one record; the named processors below set parts of it.

    Args:
        temperature: divides the logits; 0, or what is too small to divide by, puts all mass on the largest logit (the
            first of equals); what is too large makes all ids that the filters leave alike.
        top_k: keep the k most probable ids, 0 = all. Ids that tie with the k-th are kept.
        top_p: keep the smallest set of most probable ids whose mass reaches top_p, 1 = all.
        min_p: drop ids less probable than min_p × the most probable one, 0 = none.
        repetition_penalty: above 1, ids of the prefix become less probable, 1 = off (utils/logits_processors.py).
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
        self.temperature = number("temperature", temperature, lambda value: value >= 0, _FINITE)
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
        return self.temperature < COLDEST

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Logits [..., V] → probabilities [..., V]. LogitsError for NaN, +inf, or a row of nothing but -inf.

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
        if 0 < self.top_k < scores.shape[-1]:  # a temperature changes no order; a high one would hide it
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.temperature > HOTTEST:
            probs = _normalised((scores > -torch.inf).to(scores))
        else:
            probs = (scores - top).div_(self.temperature).softmax(dim=-1)
        if self.top_p < 1:
            probs = _nucleus(probs, max(self.top_p, COLDEST))
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
    check_finite(top)
    return top


def check_finite(figures: Tensor) -> None:
    """LogitsError unless all these figures, made of whole rows of logits, are finite."""
    if not bool(torch.isfinite(figures).all()):
        raise LogitsError(
            "a model's logits hold NaN, +inf or no finite value: no probabilities can be made of them "
            "(float16 overflows in some models; bfloat16 and float32 do not)"
        )


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep an id iff the mass of all ids before it, most probable first and the first of equal ones, is below top_p.

    Only values are sorted: they tell the least one that is kept, and how many of those equal to it are.
    """
    size = probs.shape[-1]
    for most in sorted({min(TOP, size), size}):
        values = _largest(probs, most)
        before = values.cumsum(dim=-1).sub_(values)
        if bool((before[..., -1] >= top_p + ROUNDING).all()):
            break
    count = (before < top_p).sum(dim=-1, keepdim=True)
    least = values.gather(-1, count - 1)
    kept = probs >= least
    spare = kept.sum(dim=-1, keepdim=True) - count
    if bool((spare > 0).any()):
        equal = probs == least
        kept &= ~equal | (equal.cumsum(dim=-1) <= equal.sum(dim=-1, keepdim=True) - spare)
    return _normalised(probs.masked_fill(~kept, 0.0))


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest of values [..., V], the largest first; on a CPU numpy finds them many times as fast as torch,
    which sorts places too."""
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values
    found = values.detach().numpy()
    if count < values.shape[-1]:
        found = np.partition(found, -count, axis=-1)[..., -count:]
    return torch.from_numpy(np.sort(found, axis=-1)).flip(-1)


class GreedyProcessor(LogitsProcessor):
    """Always the most probable id. `temperature` is accepted for the callers' convenience; it changes nothing."""

    def __init__(self, temperature: float = 1.0, **rules: Unpack[Rules]) -> None:
        number("temperature", temperature, lambda value: value >= 0, _FINITE)
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
