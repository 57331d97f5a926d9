"""The only source of randomness: seeded noise that depends on nothing but its key.

A draw is the argmax of log p + Gumbel noise, computed as an exponential race (p / E is largest, E exponential).
The target's noise is keyed by (seed, row, position), so a token of a sequence does not depend on
how many drafts were tried before it. Coins and the drafters' own draws come from other streams, and
their keys also hold the committed lengths at which the round, and each round of a cascade inside it,
began. There is no counter: equal calls give equal text with any sampler of the same settings, and no
key decides twice within one text (under Gumbel coupling the drafter draws with the target's keys).
Knows no text, no models; never touches torch's global generator.

The noise is a hash (the SplitMix64 generator, Steele et al. 2014, seeded by the key), the same on every device.
"""

import math
from collections.abc import Sequence
from functools import cache, cached_property, reduce
from typing import Any, Literal, cast

import torch
from torch import Tensor

from sampling.events import Filters
from sampling.types import Constraint, Rows, Sampler
from sampling.vocabulary import MANY, largest, single_thread_if_small
from utils.errors import UserError, raise_first
from utils.kernels.bindings import at_hand, over_noise
from utils.logits_processors import HOTTEST, LogitsProcessor

_Anything: Any = object  # for the type checker a view has every attribute; as a Sampler it would inherit defaults

Coupling = Literal["rejection", "gumbel"]
DraftSampling = Literal["law", "greedy"]  # draw drafts from the drafter's law (its distribution), or the likeliest

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_TARGET, _COIN, _DRAFT = 1, 2, 3  # the streams
MEAN = 0.5772156649015329  # of Gumbel noise
_ROUNDED = 1e-4  # relative error, far above that of a quotient


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: Tensor, bits: int, into: Tensor) -> Tensor:
    """Logical right shift of int64 words."""
    return torch.bitwise_right_shift(words, bits, out=into).bitwise_and_((1 << (64 - bits)) - 1)


def _mixed(words: Tensor) -> Tensor:
    """Apply `_mix` to int64 words in place: for a whole vocabulary, new memory costs more than the arithmetic."""
    spare = torch.empty_like(words)
    words.bitwise_xor_(_shifted(words, 30, spare)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shifted(words, 27, spare)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shifted(words, 31, spare))


@cache
def _steps(count: int, device: torch.device) -> Tensor:
    """Return (i + 1) × golden ratio, the SplitMix64 increments [count], wrapped to int64 and cached."""
    return torch.arange(1, count + 1, device=device) * _signed(_GOLDEN)


def uniforms(keys: list[int] | Tensor, count: int, device: torch.device) -> Tensor:
    """Return [M, count] float64 in (0, 1): `count` numbers from the SplitMix64 stream of each of M keys, or of each
    generator in these states [M]."""
    states = keys if isinstance(keys, Tensor) else torch.tensor(list(map(_signed, keys)), dtype=torch.long)
    words = _mixed(states.to(device, non_blocking=True)[:, None] + _steps(count, device))
    return _shifted(words, 12, words).double().add_(0.5).mul_(2.0**-52)


def stream_key(seed: int, stream: int, *parts: int) -> int:
    """Return a 64-bit key for (seed, stream, parts). Their number is mixed in first, then every part, so that no key is
    a prefix state of a longer one."""
    return reduce(_part, (stream + ((len(parts) - 2) << 32), *parts), _mix((seed + _GOLDEN) & _WORD))


def _part(word: int, part: int) -> int:
    """Return the key `word` extended by one more part."""
    return _mix((word + (part + 1) * _GOLDEN) & _WORD)


def gumbel(key: int, position: int, ids: Sequence[int]) -> list[float]:
    """Return the Gumbel noise of each id in the draw at a position of a row with this
    :meth:`sampling.types.Sampler.noise_key`."""
    state = _part(key, position)
    words = (_mix((state + (token + 1) * _GOLDEN) & _WORD) for token in ids)
    return [-math.log(-math.log1p(-((word >> 12) + 0.5) * 2.0**-52)) for word in words]  # −log E of E in `_race`


def stream_states(seed: int, stream: int, keys: Tensor) -> Tensor:
    """Return [M] int64 on the host, the first state of a generator for each of keys [M, K]: its :func:`stream_key`."""
    return torch.tensor([_signed(stream_key(seed, stream, *parts)) for parts in keys.tolist()], dtype=torch.long)


class KeyedSampler(Sampler):
    """Processors, seed and coupling of one answer; satisfies :class:`sampling.types.Sampler`.

    Args:
        processor: logits → distribution.
        seed: any integer; the same seed gives the same answer.
        coupling: "rejection" draws drafts with separate noise, "gumbel" with the target's.
        draft_sampling: "greedy" makes every draft of a model a point mass.
        constraint: the ids that can follow a text; all others are masked before the processor.

    Raises UserError for another word of coupling or draft_sampling.
    """

    def __init__(
        self,
        processor: LogitsProcessor,
        seed: int = 0,
        *,
        coupling: Coupling = "rejection",
        draft_sampling: DraftSampling = "law",
        constraint: Constraint | None = None,
    ) -> None:
        cases = {
            f"coupling must be rejection or gumbel, got {coupling!r}": coupling not in ("rejection", "gumbel"),
            f"draft_sampling must be law or greedy, got {draft_sampling!r}": draft_sampling not in ("law", "greedy"),
        }
        raise_first(cases, UserError)
        self.processor, self.seed, stream = processor, seed, _part(_mix((seed + _GOLDEN) & _WORD), _TARGET)
        self._key_of = cache(lambda row: _part(stream, row))
        self.coupling, self.draft_sampling, self.constraint = coupling, draft_sampling, constraint
        self.biases = bool(getattr(processor, "logit_bias", None))
        self.banned = processor.banned if self.biases else frozenset()
        self._shaped = processor.shaped if self.biases else processor
        self.needs_prefixes = processor.needs_prefixes or constraint is not None
        self.greedy = processor.greedy and not self.needs_prefixes
        self.point_mass = processor.greedy or coupling == "gumbel" or draft_sampling == "greedy"
        if not (processor.greedy or processor.temperature > HOTTEST or self.needs_prefixes) and processor.only_filters:
            self.filters = Filters(processor.temperature, processor.top_k, processor.top_p, processor.min_p)

    def noise_key(self, row: int) -> tuple[int, float]:
        return self._key_of(row), self.processor.temperature

    def biased(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.processor.biased(logits, ids) if self.biases else logits

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        """Map [..., V] biased logits to [..., V] probabilities after every processor."""
        with single_thread_if_small(logits.numel()):
            if self.constraint is not None:
                logits = self.constraint.masked(logits, prefixes)
            return self._shaped(logits, prefixes) if self.processor.needs_prefixes else self._shaped(logits)

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Draw one id a row: [M, V] probabilities, [M, 2] keys (row, position) → [M] long."""
        return self._race(probs, keys, _TARGET)

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        """Toss coins: [M] probabilities → [M] bool, u < prob with u in (0, 1), so 0 is never and 1 always accepted.

        Keys [M, 4]: row, position, committed length at the round's start, turn among the siblings there.
        """
        return uniforms(self.generator_states(_COIN, keys), 1, prob.device)[:, 0] < prob.double()

    def coin_uniforms(self, keys: Tensor) -> list[float]:
        """Return the uniform number u of each coin with these keys [M, K]."""
        return cast(list[float], uniforms(stream_states(self.seed, _COIN, keys), 1, torch.device("cpu"))[:, 0].tolist())

    def drafting(self, starts: Sequence[Sequence[int]]) -> "DraftingSampler":
        """Return the drafter's sampler in the round that begins at these (row, committed length)."""
        return DraftingSampler(self, starts)

    def noise(self, row: int, position: int, ids: Sequence[int]) -> list[float]:
        """Return the Gumbel noise of each id in the target's draw there; 0 in greedy decoding."""
        return [0.0] * len(ids) if self.processor.greedy else gumbel(self.noise_key(row)[0], position, ids)

    def generator_states(self, stream: int, keys: Tensor) -> Tensor:
        """Return [M], the state from which SplitMix64 makes the noise of each draw or coin, by its key [M, K]."""
        return stream_states(self.seed, stream, keys)

    def _race(self, probs: Tensor, keys: Tensor, stream: int) -> Tensor:
        if self.processor.greedy:
            return largest(probs)
        states = self.generator_states(stream, keys)
        if _compiled(probs):
            return torch.tensor([_quick_race(*row) for row in zip(probs, states.tolist(), strict=True)])
        with single_thread_if_small(probs.numel()):
            return largest(_raced(probs, uniforms(states, probs.shape[-1], probs.device)))


def _raced(probs: Tensor, noise: Tensor) -> Tensor:
    """Return p / E, with E the exponential numbers made of `noise`, uniform numbers in float64 of the same shape."""
    noise = noise.to(probs.dtype).clamp_(max=1 - torch.finfo(probs.dtype).eps / 2)  # below 1
    return torch.div(probs, noise.neg_().log1p_().neg_(), out=noise)


def _compiled(probs: Tensor) -> bool:
    """Return whether the compiled kernels can find the candidates of a race; they are not loaded for this alone."""
    return (
        probs.device.type == "cpu"
        and probs.dtype == torch.float32
        and probs.shape[-1] >= MANY
        and at_hand()
        and probs.is_contiguous()
    )


def _quick_race(probs: Tensor, state: int) -> int:
    """Return the winner of the race among probs [V]; for most ids the bounds u < E < u / (1 − u) suffice."""
    most = over_noise(state, probs)
    first = int(most.argmax())
    least = (float(most[first]) - float(probs[first])) * (1 - _ROUNDED)
    (rivals,) = (most >= least).nonzero()
    if len(rivals) == 1:
        return first
    words = (_mix((state + (token + 1) * _GOLDEN) & _WORD) for token in rivals.tolist())
    noise = torch.tensor([((word >> 12) + 0.5) * 2.0**-52 for word in words], dtype=torch.float64)
    return int(rivals[int(_raced(probs[torch.from_numpy(rivals)], noise).numpy().argmax())])


class SamplerView(_Anything):  # type: ignore[misc]
    """A view of another sampler, which has all attributes that a subclass does not override."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class DraftingSampler(SamplerView):
    """The drafter's view of a :class:`KeyedSampler` in one round: the same distribution, other noise unless coupled.

    `starts`: rows and committed lengths at the round's start. A round of a cascade inside it is a view within
    this view (`outer`): lengths only grow while a round drafts, so no two nested rounds begin at the same length.
    """

    _sampler: KeyedSampler

    def __init__(
        self, sampler: KeyedSampler, starts: Sequence[Sequence[int]], outer: "DraftingSampler | None" = None
    ) -> None:
        self._sampler, self._starts, self._outer = sampler, starts, outer
        self.greedy, self.constraint, self.banned = sampler.greedy, sampler.constraint, sampler.banned
        self.biases, self.biased = sampler.biases, sampler.biased

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Draw ids [M] as the sampler's `draw` does: the argmax for greedy drafts, with the target's noise under Gumbel
        coupling, else with the round's."""
        sampler = self._sampler
        if sampler.draft_sampling == "greedy":
            return probs.argmax(dim=-1)
        if sampler.coupling == "gumbel" or sampler.processor.greedy:
            return sampler.draw(probs, keys)
        return sampler._race(probs, self._within(torch.nn.functional.pad(keys, (0, 1))), _DRAFT)

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        return self._sampler.coin(prob, self._within(keys))

    def drafting(self, starts: Sequence[Sequence[int]]) -> "DraftingSampler":
        """Return the view of a round inside this one."""
        return DraftingSampler(self._sampler, starts, self)

    def _within(self, keys: Tensor) -> Tensor:
        """Extend keys [M, K] by the committed lengths at the starts of the enclosing rounds, outermost first."""
        return torch.tensor([[*parts, *self._start_lengths[parts[0]]] for parts in keys.tolist()], dtype=torch.long)

    @cached_property
    def _start_lengths(self) -> dict[int, tuple[int, ...]]:
        """Return the committed lengths at those starts, by row; computed at the first draw."""
        outer = {} if self._outer is None else self._outer._start_lengths
        return {row: (*outer.get(row, ()), length) for row, length in self._starts}
