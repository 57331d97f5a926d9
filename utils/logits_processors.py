"""Logits → probabilities → draw: greedy, multinomial, top-k, nucleus, top-k + nucleus, min-p.

:data:`ARGUMENTS` has a row for each number that shapes a distribution, in the order in which they act, and
:data:`PROCESSORS` one for each named combination; flags, `/processor`, help and docs follow these rows. The order,
that of transformers, is logit bias → repetition penalty → presence and frequency penalties → no-repeat n-grams →
temperature → top-k → top-p → min-p → typical-p. Penalties and n-grams change the score of an id by the tokens before
it, the prompt's included (as llama.cpp and transformers have it); penalties see the last `penalty_window` of them. In
speculative decoding these are the committed tokens and the drafts before the position, which is why the caller gives a
prefix for each distribution. A processor never changes the caller's logits.

Probabilities are float32 (float64 for float64 logits). Knows no models, no text and no seeds: `sample` takes the
caller's generator. Importing it is cheap: torch comes in with the first distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from utils.errors import COLDEST, LogitsError, UserError, number, shown, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HOTTEST = 1 / COLDEST  # the highest temperature by which logits are divided
MANY = 4096  # in a larger vocabulary, on a CPU, filters see only the ids that they can keep
ROUNDING = 1e-6  # a sum of probabilities may be off by less

# Amounts that are added to the scores of ids. A key is an id, or a tuple of ids, whose last gets the amount after the
# others, as in transformers' `sequence_bias`. −∞ bans.
Bias = Mapping[Any, float]


# -- what each number does --------------------------------------------------------------------------


def bias_sequences(scores: Tensor, bias: Mapping[tuple[int, ...], float], prefixes: Sequence[Sequence[int]]) -> None:
    """Add each amount to the score of a sequence's last id where a prefix ends with its other ids, in place; scores
    [M, V] with M prefixes."""
    for (*before, last), amount in bias.items():
        rows = [row for row, prefix in enumerate(prefixes) if [*prefix[-len(before) :]] == before]
        if last < scores.shape[-1]:
            scores[rows, last] += amount


def penalise(scores: Tensor, penalty: float, prefixes: Sequence[Sequence[int]]) -> None:
    """Divide the positive scores of ids in the prefix by `penalty` and multiply the negative ones, in place.

    scores [M, V] with M prefixes; penalty above 0, above 1 discourages (Keskar et al., arXiv 1909.05858, section 4.1).
    Finite scores stay finite: a penalty makes no id impossible.
    """
    import torch

    penalty, most = min(max(penalty, COLDEST), 1 / COLDEST), torch.finfo(scores.dtype).max
    at, flat = _flat_indices(scores, (set(prefix) for prefix in prefixes)), scores.view(-1)
    before = flat[at]
    changed = torch.where(before < 0, before * penalty, before / penalty).clamp_(-most, most)
    flat[at] = torch.where(before.isfinite(), changed, before)


def discourage_said(scores: Tensor, amount: float, prefixes: Sequence[Sequence[int]]) -> None:
    """Subtract `amount` from the scores [M, V] of ids in the prefix, in place (OpenAI's presence penalty)."""
    scores.view(-1)[_flat_indices(scores, (set(prefix) for prefix in prefixes))] -= amount


def discourage_counted(scores: Tensor, amount: float, prefixes: Sequence[Sequence[int]]) -> None:
    """Subtract `amount` for each time that an id is in the prefix from scores [M, V], in place (OpenAI's frequency
    penalty)."""
    counts = [Counter(prefix) for prefix in prefixes]
    size = scores.shape[-1]
    times = [count for row in counts for token, count in row.items() if 0 <= token < size]
    scores.view(-1)[_flat_indices(scores, counts)] -= scores.new_tensor(times) * amount


def ban_repeats(scores: Tensor, n: int, prefixes: Sequence[Sequence[int]]) -> None:
    """Give -inf to every id that would end an n-gram the prefix already holds, in place; scores [M, V].

    A row that would keep no id stays as it is: there is always a distribution to draw from.
    """
    banned = scores.clone()
    banned.view(-1)[_flat_indices(scores, (followers(prefix, n) for prefix in prefixes))] = -math.inf
    scores.copy_(banned.where((banned > -math.inf).any(dim=-1, keepdim=True), scores))


def followers(prefix: Sequence[int], n: int) -> set[int]:
    """Return the ids after earlier occurrences of the prefix's last n - 1 tokens."""
    size = n - 1
    tail = prefix[len(prefix) - size :]
    return {prefix[end] for end in range(size, len(prefix)) if prefix[end - size : end] == tail}


def _flat_indices(scores: Tensor, ids: Iterable[Iterable[int]]) -> Tensor:
    """Return indices into scores.view(-1) of these ids of each row, without ids outside the vocabulary."""
    import torch

    size = scores.shape[-1]
    flat = [row * size + token for row, tokens in enumerate(ids) for token in tokens if 0 <= token < size]
    return torch.tensor(flat, dtype=torch.long, device=scores.device)


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Give -inf to all but the `count` best ids of scores [..., V]; those that tie with the last of them stay."""
    least = scores.topk(min(count, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep an id of probs [..., V] iff the ids before it have a mass below top_p; the most probable id is first, of
    equal ones the lowest.

    Only values are sorted, without ids: they give the least one that is kept, and how many equal to it are kept.
    """
    on_device, values = probs.device.type != "cpu", _descending(probs)
    before = values.cumsum(dim=-1).sub_(values)
    count = (before < max(top_p, COLDEST)).sum(dim=-1, keepdim=True)
    least = values.gather(-1, count - 1)
    kept = probs >= least
    spare = kept.sum(dim=-1, keepdim=True) - count
    if on_device or bool((spare > 0).any()):
        equal = probs == least
        kept &= ~equal | (equal.cumsum(dim=-1) <= equal.sum(dim=-1, keepdim=True) - spare)
    return _normalised(probs.masked_fill(~kept, 0.0))


def likely(probs: Tensor, least: float) -> Tensor:
    """Drop the ids of probs [..., V] that are less probable than `least` × the most probable one."""
    return _normalised(probs.masked_fill(probs < least * probs.amax(dim=-1, keepdim=True), 0.0))


def typical(probs: Tensor, mass: float) -> Tensor:
    """Keep the ids of probs [..., V] whose surprise is nearest to the entropy, until they have this mass; those as near
    as the last stay (Meister et al., arXiv 2202.00666; as transformers computes it)."""
    surprise = -probs.log()
    entropy = (probs * surprise).nansum(dim=-1, keepdim=True)
    distance = (surprise - entropy).abs()
    nearest = distance.sort(dim=-1)
    count = (probs.gather(-1, nearest.indices).cumsum(dim=-1) < mass).sum(dim=-1, keepdim=True)
    most = nearest.values.gather(-1, count.clamp(max=probs.shape[-1] - 1))
    return _normalised(probs.masked_fill(distance > most, 0.0))


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _descending(values: Tensor) -> Tensor:
    """Return values [..., V] in descending order; on a CPU numpy is many times as fast as torch, which sorts indices
    too."""
    import numpy as np
    import torch

    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1)).flip(-1)


def _tops(scores: Tensor) -> Tensor:
    top = scores.amax(dim=-1, keepdim=True)
    if scores.device.type == "cpu":  # on other devices the host would wait: the caller checks the numbers it fetches
        check_finite(top)
    return top


def check_finite(numbers: Tensor) -> None:
    """Raise LogitsError unless all these numbers, computed from rows of logits, are finite."""
    if not bool(numbers.isfinite().all()):
        check_number(math.nan)


def check_number(value: float) -> None:
    """Raise LogitsError unless this number, computed from a row of logits, is finite."""
    if not math.isfinite(value):
        raise LogitsError(
            "a model's logits hold NaN, +inf or no finite value: no probabilities can be made of them "
            "(float16 overflows in some models; bfloat16 and float32 do not)"
        )


# -- the numbers and the processors ---------------------------------------------------------------------


class Argument(NamedTuple):
    """A number that shapes a distribution."""

    off: float  # the value that leaves the distribution as it is
    check: Callable[..., float]  # its name and value → the value; UserError outside its range
    letter: str  # stands for it in the usage of a named processor
    on_prefixes: Callable[[Tensor, Any, Sequence[Sequence[int]]], None] | None = None  # changes scores [M, V] in place
    windowed: bool = False  # only the last `penalty_window` tokens of a prefix count
    on_scores: Callable[..., Tensor] | None = None  # scores [..., V] and the value → filtered scores
    on_probs: Callable[..., Tensor] | None = None  # probabilities [..., V] and the value → filtered probabilities


_PENALTY = partial(number, fits=lambda value: -2 <= value <= 2, allowed="from -2 to 2 (0 = off)")

ARGUMENTS: Mapping[str, Argument] = {
    "repetition_penalty": Argument(
        1.0,
        partial(number, fits=lambda value: value > 0, allowed="above 0 (1 = off)"),
        "R",
        on_prefixes=penalise,
        windowed=True,
    ),
    "presence_penalty": Argument(0.0, _PENALTY, "A", on_prefixes=discourage_said, windowed=True),
    "frequency_penalty": Argument(0.0, _PENALTY, "F", on_prefixes=discourage_counted, windowed=True),
    "penalty_window": Argument(0, partial(whole, least=0, allowed="0 (all) or more"), "W"),
    "no_repeat_ngram": Argument(
        0,
        partial(whole, least=0, allowed="0 (off) or more"),
        "N",
        on_prefixes=ban_repeats,
    ),
    "temperature": Argument(
        1.0,
        partial(number, fits=lambda value: value >= 0, allowed="a finite number, 0 or more"),
        "T",
    ),
    "top_k": Argument(
        0,
        partial(whole, least=0, allowed="0 (off) or more"),
        "K",
        on_scores=keep_best,
    ),
    "top_p": Argument(
        1.0,
        partial(number, fits=lambda value: 0 < value <= 1, allowed="above 0 and at most 1"),
        "P",
        on_probs=nucleus,
    ),
    "min_p": Argument(
        0.0,
        partial(number, fits=lambda value: 0 <= value < 1, allowed="at least 0 and below 1"),
        "P",
        on_probs=likely,
    ),
    "typical_p": Argument(
        1.0,
        partial(number, fits=lambda value: 0 < value <= 1, allowed="above 0 and at most 1"),
        "P",
        on_probs=typical,
    ),
}


def read_bias(bias: object) -> dict[tuple[int, ...], float]:
    """Return a bias with all keys as tuples of ids; UserError for anything else."""
    by_ids: dict[tuple[int, ...], float] = {}
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias must be numbers by ids, got {shown(bias)}")
    for given, amount in bias.items():
        ids = given if isinstance(given, tuple) and given else (given,)
        key = tuple(whole("logit_bias", token, 0, "by ids of 0 or more") for token in ids)
        by_ids[key] = amount if amount == -math.inf else number("logit_bias", amount, lambda _: True, "finite, or -inf")
    return by_ids


class Rules(TypedDict, total=False):
    """The arguments that every named processor takes besides its own; see :class:`LogitsProcessor`."""

    repetition_penalty: float
    no_repeat_ngram: int
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Bias


@dataclass(eq=False)
class LogitsProcessor:
    """Turns logits into a distribution by all the numbers; the named processors below set some of them.

    Args:
        temperature: divides the logits; 0, or a number too small to divide by, puts all mass on the largest logit (the
            first of equals); a number too large makes all ids that the filters leave equally likely.
        top_k: keep the k most probable ids, 0 = all. Ids that tie with the k-th are kept.
        top_p: keep the smallest set of most probable ids whose mass reaches top_p, 1 = all.
        min_p: drop ids less probable than min_p × the most probable one, 0 = none.
        repetition_penalty: above 1, ids of the prefix become less probable, 1 = off (:func:`penalise`).
        no_repeat_ngram: n-grams of this length that the prefix holds are not repeated, 0 = off.
        presence_penalty: subtracted from the scores of ids of the prefix, 0 = off.
        frequency_penalty: subtracted from them once for each occurrence, 0 = off.
        penalty_window: the number of last tokens that the three penalties see, 0 = all.
        typical_p: keep the ids whose surprise is nearest to the entropy, with this mass; 1 = all.
        logit_bias: added to the scores of ids before everything else.

    Raises:
        UserError: a value is outside its range, or no number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    typical_p: float = 1.0
    logit_bias: Bias = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logit_bias = bias = read_bias(self.logit_bias)
        self._single = {ids[0]: amount for ids, amount in bias.items() if len(ids) == 1}
        self._several = {ids: amount for ids, amount in bias.items() if len(ids) > 1}
        for name, rule in ARGUMENTS.items():
            setattr(self, name, rule.check(name, getattr(self, name)))

    @property
    def at_work(self) -> list[tuple[Argument, float]]:
        """The rows of ARGUMENTS that are not off, with their values, in the order in which they act."""
        return [(rule, value) for name, rule in ARGUMENTS.items() if (value := getattr(self, name)) != rule.off]

    @cached_property
    def needs_prefixes(self) -> bool:
        """Whether the distribution depends on the tokens before it."""
        return bool(self._several) or any(rule.on_prefixes for rule, _ in self.at_work)

    @cached_property
    def banned(self) -> frozenset[int]:
        """The ids that a bias makes impossible after every prefix."""
        return frozenset(token for token, amount in self._single.items() if amount == -math.inf)

    @cached_property
    def only_filters(self) -> bool:
        """Whether only temperature, top-k, top-p, min-p and a bias of single ids shape the distribution."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return not self._several and all(rule in map(ARGUMENTS.get, names) for rule, _ in self.at_work)

    @property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass on the largest score."""
        return self.temperature < COLDEST

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Logits [..., V] → probabilities [..., V]. On a CPU LogitsError for NaN, +inf, or a row of nothing but -inf.

        `prefixes`: the tokens before each distribution, flattened over the leading dimensions; used only if
        `needs_prefixes`, and then each distribution needs one (else ValueError).
        """
        return self.shaped(self.biased(logits), prefixes)

    def biased(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., n] of these ascending ids (None: of all) with the bias of single ids added."""
        if not self._single:
            return logits
        import torch

        tokens = torch.tensor([*self._single], device=logits.device)
        columns, amounts = tokens, torch.tensor([*self._single.values()], device=logits.device)
        known = tokens < logits.shape[-1]
        if ids is not None:
            columns = torch.searchsorted(ids, tokens).clamp_(max=len(ids) - 1)
            known = ids[columns] == tokens
        scores = logits.clone() if logits.dtype.itemsize > 2 else logits.float()
        scores[..., columns[known]] += amounts[known].to(scores)
        return scores

    def shaped(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """:meth:`__call__` of biased logits [..., V]."""
        scores = logits if logits.dtype.itemsize == 8 else logits.float()
        top, rules = _tops(scores), self.at_work
        if self.needs_prefixes:
            scores = self.ruled(scores, prefixes)
            top = _tops(scores)
        if self.greedy:
            return scores.new_zeros(scores.shape).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)
        filters, hot = self.top_k or self.top_p < 1 or self.min_p, self.temperature > HOTTEST
        if filters and not hot and scores.device.type == "cpu" and scores.shape[-1] > MANY:
            import torch

            return torch.stack(
                [self._of_candidates(*row) for row in zip(scores.view(-1, scores.shape[-1]), top.view(-1), strict=True)]
            ).view(scores.shape)
        for rule, value in rules:  # before the temperature, which keeps the order but rounds differences away if high
            scores = rule.on_scores(scores, value) if rule.on_scores else scores
        if hot:
            probs = _normalised((scores > -math.inf).to(scores))
        else:
            probs = (scores - top).div_(self.temperature).softmax(dim=-1)
        for rule, value in rules:
            probs = rule.on_probs(probs, value) if rule.on_probs else probs
        return probs

    def _of_candidates(self, scores: Tensor, top: Tensor) -> Tensor:
        """Return the distribution of scores [V], computed over the few ids that the filters can keep."""
        if 0 < self.top_k < len(scores):
            index = (scores >= scores.topk(self.top_k).values[-1]).nonzero()[:, 0]
            probs = ((scores[index] - top) / self.temperature).softmax(dim=-1)
        else:
            probs = ((scores - top) / self.temperature).softmax(dim=-1)
            # Ids below (1 − top_p) / V have less than 1 − top_p together.
            least = (1 - self.top_p) / len(scores) if self.top_p < 1 else self.min_p * probs.max()
            index = (probs >= least * (1 - ROUNDING)).nonzero()[:, 0]
            probs = probs[index]
        for rule, value in self.at_work:
            probs = rule.on_probs(probs, value) if rule.on_probs else probs
        return scores.new_zeros(scores.shape).index_copy_(0, index, probs)

    def ruled(self, scores: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """Return scores [..., V] after the arguments that read prefixes. ValueError unless each row has a prefix."""
        flat = scores.reshape(-1, scores.shape[-1]).clone()
        given = len(prefixes or ())
        if prefixes is None or given != len(flat):
            raise ValueError(
                f"this processor needs the tokens before each distribution: {len(flat)} rows, {given} prefixes"
            )
        window = self.penalty_window
        recent = [prefix[-window:] for prefix in prefixes] if window else prefixes
        bias_sequences(flat, self._several, prefixes)
        for rule, value in self.at_work:
            if rule.on_prefixes:
                rule.on_prefixes(flat, value, recent if rule.windowed else prefixes)
        return flat.view(scores.shape)

    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one id from each row: [..., V] → [..., 1] long."""
        if self.greedy:
            return probs.argmax(dim=-1, keepdim=True)
        return probs.reshape(-1, probs.shape[-1]).multinomial(1, generator=generator).reshape(*probs.shape[:-1], 1)


class GreedyProcessor(LogitsProcessor):
    """Always the most probable id. `temperature` is checked, as for the others, but changes nothing."""

    def __init__(self, temperature: float = 1.0, **rules: Unpack[Rules]) -> None:
        ARGUMENTS["temperature"].check("temperature", temperature)
        super().__init__(temperature=0.0, **rules)


class MultinomialProcessor(LogitsProcessor):
    """The whole distribution at a temperature."""

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
    """Top-k first, then the nucleus of the rest."""

    def __init__(self, temperature: float = 1.0, top_k: int = 50, top_p: float = 0.9, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, top_k=top_k, top_p=top_p, **rules)


class MinPProcessor(LogitsProcessor):
    """Ids at least min_p times as probable as the best one (Nguyen et al., arXiv 2407.01082)."""

    def __init__(self, temperature: float = 1.0, min_p: float = 0.05, **rules: Unpack[Rules]) -> None:
        super().__init__(temperature=temperature, min_p=min_p, **rules)


PROCESSORS: Mapping[str, tuple[str, ...]] = {  # by their names: the numbers of ARGUMENTS that each takes
    "greedy": (),
    "multinomial": ("temperature",),
    "top_k": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "top_k_nucleus": ("temperature", "top_k", "top_p"),
    "min_p": ("temperature", "min_p"),
}


def make_processor(
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **rules: Unpack[Rules]
) -> LogitsProcessor:
    """Return the processor with these settings; temperature 0 is greedy, whatever top-k, top-p and min-p are."""
    return LogitsProcessor(temperature, top_k, top_p, min_p, **rules)
