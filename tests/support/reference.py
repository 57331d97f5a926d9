"""Naive oracles: the laws and decoders that the fast code must equal.

Everything here is float64, one row at a time, without caches, drafts or tricks. Imports nothing
of `sampling` but its types.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from scipy.stats import chisquare
from torch import Tensor


@dataclass(frozen=True)
class NaiveLaw:
    """Repetition penalty and no-repeat n-grams, token by token, then temperature, top-k, top-p and min-p by a full
    sort; temperature 0 is one-hot.

    Ties at a boundary: top-k keeps every token as large as the k-th, as transformers does.
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
    logit_bias: tuple[
        tuple[tuple[int, ...], float], ...
    ] = ()  # by ids: what is added to the last one behind the others

    @property
    def needs_prefixes(self) -> bool:
        penalties = self.presence_penalty or self.frequency_penalty or any(len(ids) > 1 for ids, _ in self.logit_bias)
        return self.repetition_penalty != 1 or self.no_repeat_ngram > 0 or bool(penalties)

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """[..., V] logits, and the tokens before each, → [..., V] float64 probabilities."""
        flat = logits.double().reshape(-1, logits.shape[-1])
        before: Sequence[Sequence[int]] = [()] * len(flat) if prefixes is None else prefixes
        laws = [self.one(row, prefix) for row, prefix in zip(flat, before, strict=True)]
        return torch.stack(laws).reshape(logits.shape)

    def ruled(self, values: list[float], prefix: Sequence[int]) -> list[float]:
        """The scores after the rules about the tokens before."""
        penalty, n = self.repetition_penalty, self.no_repeat_ngram
        for (*before, token), amount in self.logit_bias:
            if list(prefix)[len(prefix) - len(before) :] == before and token < len(values):
                values[token] += amount
        recent = list(prefix)[-self.penalty_window :]
        for token in set(recent) & set(range(len(values))):
            values[token] = values[token] * penalty if values[token] < 0 else values[token] / penalty
            values[token] -= self.presence_penalty + self.frequency_penalty * recent.count(token)
        if n == 0:
            return values
        said = {tuple(prefix[start : start + n]) for start in range(len(prefix) - n + 1)}
        end = tuple(prefix[len(prefix) - n + 1 :]) if len(prefix) >= n - 1 else None
        left = [-math.inf if end is not None and (*end, token) in said else value for token, value in enumerate(values)]
        return values if max(left) == -math.inf else left

    def one(self, logits: Tensor, prefix: Sequence[int] = ()) -> Tensor:
        values = self.ruled([float(value) for value in logits], prefix)
        if self.temperature == 0:
            best = values.index(max(values))
            return torch.tensor([float(token == best) for token in range(len(values))], dtype=torch.float64)
        values = [value / self.temperature for value in values]
        if 0 < self.top_k < len(values):
            bar = sorted(values, reverse=True)[self.top_k - 1]
            values = [value if value >= bar else -math.inf for value in values]
        if self.top_p < 1:
            kept = nucleus(normalised(values), self.top_p)
            values = [value if token in kept else -math.inf for token, value in enumerate(values)]
        if self.min_p > 0:
            probs = normalised(values)
            bar = self.min_p * max(probs)
            values = [value if prob >= bar else -math.inf for value, prob in zip(values, probs, strict=True)]
        if self.typical_p < 1:
            probs = normalised(values)
            entropy = -math.fsum(prob * math.log(prob) for prob in probs if prob > 0)
            distances = [abs(-math.log(prob) - entropy) if prob > 0 else math.inf for prob in probs]
            mass, bar = 0.0, 0.0
            for token in sorted(range(len(probs)), key=lambda token: distances[token]):
                if mass >= self.typical_p:
                    break
                mass, bar = mass + probs[token], distances[token]
            values = [v if d <= bar else -math.inf for v, d in zip(values, distances, strict=True)]
        return torch.tensor(normalised(values), dtype=torch.float64)


def normalised(values: Sequence[float]) -> list[float]:
    """exp(values) / Σ exp(values)."""
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def nucleus(probs: Sequence[float], top_p: float) -> set[int]:
    """The fewest best tokens whose mass reaches `top_p`; the best one always."""
    kept: set[int] = set()
    mass = 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if kept and mass >= top_p:
            break
        kept.add(token)
        mass += probs[token]
    return kept


class HasLogits(Protocol):
    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor: ...


def exact_law(
    lm: HasLogits,
    prompt: Sequence[int],
    law: Callable[..., Tensor],
    max_new_tokens: int,
    stop: Iterable[int] = (),
) -> dict[tuple[int, ...], float]:
    """The target's own distribution over answers: each ends at a stop token or at `max_new_tokens`."""
    stops, outcome = frozenset(stop), {}
    open_answers = {(): 1.0}
    for length in range(1, max_new_tokens + 1):
        following: dict[tuple[int, ...], float] = {}
        for answer, mass in open_answers.items():
            prefix = [*prompt, *answer]
            before = ([prefix],) if getattr(law, "needs_prefixes", False) else ()
            for token, prob in enumerate(law(lm.logits([prefix]), *before)[0].tolist()):
                if prob == 0:
                    continue
                done = token in stops or length == max_new_tokens
                (outcome if done else following)[(*answer, token)] = mass * prob
        open_answers = following
    return outcome


def greedy_answer(lm: HasLogits, prompt: Sequence[int], max_new_tokens: int, stop: Iterable[int] = ()) -> list[int]:
    """Argmax decoding, one token at a time."""
    stops, answer = frozenset(stop), []
    while len(answer) < max_new_tokens and not (answer and answer[-1] in stops):
        answer.append(int(lm.logits([[*prompt, *answer]])[0].argmax()))
    return answer


@dataclass(frozen=True)
class GreedyRun:
    """Tokens and, for each, the gap between the two best logits it was chosen from."""

    ids: list[int]
    gaps: list[float]


@torch.inference_mode()
def transformers_greedy(
    model: Any, prompt: list[int], max_new_tokens: int, stop: Iterable[int], **rules: Any
) -> GreedyRun:
    """transformers' own `generate(do_sample=False)`, stopped by `stop` alone; `rules` such as repetition_penalty.

    The gaps are those of the scores that it chose by.
    """
    stops = sorted(stop)
    ids = torch.tensor([prompt], device=model.device)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        return_dict_in_generate=True,
        output_scores=True,
        **rules,
    )
    best = [scores[0].float().topk(2).values for scores in result.scores]
    return GreedyRun(result.sequences[0, len(prompt) :].tolist(), [float(first - second) for first, second in best])


def same_or_tied(ids: Sequence[int], reference: GreedyRun, bound: float = 1e-3) -> str:
    """ "same", "tied" (first different where the top-2 gap is below `bound`) or "different"."""
    if list(ids) == reference.ids:
        return "same"
    common = 0
    while common < min(len(ids), len(reference.ids)) and ids[common] == reference.ids[common]:
        common += 1
    if common < min(len(ids), len(reference.ids)) and reference.gaps[common] < bound:
        return "tied"
    return "different"


def chi_square_p(counts: dict[Any, int], law: dict[Any, float]) -> float:
    """p-value that `counts` were drawn from `law`; cells that expect < 5 are pooled.

    An outcome the law gives probability 0 makes it 0 at once.
    """
    total = sum(counts.values())
    if any(law.get(key, 0.0) <= 0 for key in counts):
        return 0.0
    seen, expected, rest_seen, rest_expected = [], [], 0.0, 0.0
    for key, prob in law.items():
        if prob * total < 5:
            rest_seen += counts.get(key, 0)
            rest_expected += prob * total
        else:
            seen.append(counts.get(key, 0))
            expected.append(prob * total)
    if rest_expected > 0:
        seen.append(rest_seen)
        expected.append(rest_expected)
    if len(seen) == 1:
        return 1.0
    scale = sum(seen) / sum(expected)  # 1 up to rounding, which scipy looks at
    return float(chisquare(seen, [scale * want for want in expected]).pvalue)
