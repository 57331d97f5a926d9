"""A sampler that takes every branch: each draw and each coin forks with its probability, and no key may come twice.

`enumerate_runs` repeats a run under it, depth first, until all decisions with positive probability
have been taken, and returns the exact distribution of the run's result in float64. `enumerate_rows` does so with many
branches at once, each the row of a batch. Knows nothing of models or verification.
Forks are independent of each other, so a scheme that relies on *shared* noise (gumbel coupling)
cannot be enumerated this way.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.types import Rows, Sampler
from sampling.verify.rules import Keys

Result = TypeVar("Result", bound=Hashable)
Law = Callable[..., Tensor]  # logits → laws; of logits and prefixes where it has `needs_prefixes`
Drafting = Literal["law", "greedy"]


def softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits.double(), dim=-1)


class Script:
    """The decisions of one run: replayed from the front, then the first possible option."""

    def __init__(self, decisions: list[int]) -> None:
        self.decisions = decisions
        self.options: list[list[float]] = []
        self.probability = 1.0
        self.asked: set[tuple[object, ...]] = set()

    def choose(self, weights: list[float]) -> int:
        """The option taken at this fork; `weights` are the probabilities of all options."""
        turn = len(self.options)
        if turn == len(self.decisions):
            self.decisions.append(_next_option(weights, 0))
        chosen = self.decisions[turn]
        self.options.append(weights)
        self.probability *= weights[chosen]
        return chosen

    def ask(self, key: tuple[object, ...]) -> None:
        """Note what noise is asked for: the real sampler's is a function of this and of nothing else."""
        assert key not in self.asked, f"noise is used twice: {key}"
        self.asked.add(key)

    def backtrack(self) -> bool:
        """Move on to the next run; False when all have been taken."""
        while self.decisions:
            weights = self.options.pop()
            following = _next_option(weights, self.decisions.pop() + 1)
            if following < len(weights):
                self.decisions.append(following)
                return True
        return False


def _next_option(weights: list[float], start: int) -> int:
    return next((index for index in range(start, len(weights)) if weights[index] > 0), len(weights))


class BranchingSampler(Sampler):
    """Implements `sampling.types.Sampler`; `law` turns raw logits [..., V] into float64 laws."""

    def __init__(
        self, script: Script, law: Law = softmax, drafts: Drafting = "law", starts: tuple[dict[int, int], ...] = ()
    ) -> None:
        self.script, self._given, self._drafts, self._starts = script, law, drafts, starts
        bias = getattr(law, "logit_bias", ())
        self._single = {ids[0]: amount for ids, amount in bias if len(ids) == 1}
        several = tuple((ids, amount) for ids, amount in bias if len(ids) > 1)
        self._law: Any = replace(law, logit_bias=several) if bias else law
        self.constraint, self.biases = getattr(law, "constraint", None), bool(self._single)

    @property
    def needs_prefixes(self) -> bool:
        return bool(getattr(self._law, "needs_prefixes", False))

    def biased(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        known = range(logits.shape[-1]) if ids is None else ids.tolist()
        added = [self._single.get(token, 0.0) for token in known]
        return logits + torch.tensor([*added, *[0.0] * (logits.shape[-1] - len(added))]).to(logits)

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        if not self.needs_prefixes:
            return self._law(logits.double())
        assert len(prefixes) == logits[..., 0].numel(), f"{len(prefixes)} prefixes for logits {tuple(logits.shape)}"
        return self._law(logits.double(), prefixes)

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        assert probs.dim() == 2, f"draw takes laws [M, V], got {tuple(probs.shape)}"
        assert keys.shape in ((probs.shape[0], 2), (probs.shape[0], 3)), (
            f"keys are [M, 2 or 3], got {tuple(keys.shape)}"
        )
        if self._starts and self._drafts == "greedy":
            return probs.argmax(dim=-1)
        padded = (keys if keys.shape[1] > 2 else F.pad(keys, (0, 1))).tolist()
        laws = [_checked(row) for row in probs.double().tolist()]
        return torch.tensor(
            [self._choose("draw", key, law) for key, law in zip(padded, laws, strict=True)], dtype=torch.long
        )

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        assert keys.shape == (prob.shape[0], 4), f"a coin's keys are [M, 4], got {tuple(keys.shape)}"
        flat = [min(max(value, 0.0), 1.0) for value in prob.double().flatten().tolist()]
        pairs = zip(keys.tolist(), flat, strict=True)
        return torch.tensor(
            [self._choose("coin", key, [value, 1.0 - value]) == 0 for key, value in pairs], dtype=torch.bool
        ).reshape(prob.shape)

    def _choose(self, kind: str, key: list[int], weights: list[float]) -> int:
        """The option that a draw or a coin takes; `key` begins with its row."""
        self.script.ask((kind, *key, "within", *(begun[key[0]] for begun in self._starts)))
        return self.script.choose(weights)

    def drafting(self, starts: Keys) -> "BranchingSampler":
        return BranchingSampler(self.script, self._given, self._drafts, (*self._starts, dict(starts)))

    @property
    def point_mass(self) -> bool:
        return self._drafts == "greedy"


def _checked(law: list[float]) -> list[float]:
    assert min(law) >= 0, f"a negative probability in {law}"
    assert abs(sum(law) - 1) < 1e-6, f"a law that sums to {sum(law)}"
    return law


def enumerate_runs(
    run: Callable[[BranchingSampler], Result], law: Law = softmax, drafts: Drafting = "law", limit: int = 200_000
) -> dict[Result, float]:
    """The exact distribution of `run(sampler)` over all decisions. Fails beyond `limit` runs.

    `run` must be deterministic but for its sampler.
    """
    outcome: dict[Result, float] = defaultdict(float)
    script = Script([])
    for _ in range(limit):
        outcome[run(BranchingSampler(script, law, drafts))] += script.probability
        if not script.backtrack():
            return dict(outcome)
        script = Script(script.decisions)
    raise AssertionError(f"more than {limit} runs")


Fate = tuple[dict[tuple[object, ...], int], float]  # options by key of their noise, and the probability of them all


class RowSampler(BranchingSampler):
    """Takes in each row of a batch the branch that its fate lays down, by the keys of the noise; where that ends, the
    first option. What else could have been is in `others` then."""

    def __init__(
        self,
        fates: list[Fate],
        law: Law = softmax,
        drafts: Drafting = "law",
        starts: tuple[dict[int, int], ...] = (),
        shared: "RowSampler | None" = None,
    ) -> None:
        super().__init__(Script([]), law, drafts, starts)
        self.taken: list[dict[tuple[object, ...], int]] = (
            shared.taken if shared else [dict(taken) for taken, _ in fates]
        )
        self.probability = shared.probability if shared else [probability for _, probability in fates]
        self.asked: set[tuple[object, ...]] = shared.asked if shared else set()
        self.others: list[Fate] = shared.others if shared else []

    def _choose(self, kind: str, key: list[int], weights: list[float]) -> int:
        row, *parts = key
        name = (kind, *parts, "within", *(begun[row] for begun in self._starts))
        assert (row, name) not in self.asked, f"noise is used twice: {row} {name}"
        self.asked.add((row, name))
        taken, before = self.taken[row], self.probability[row]
        if name not in taken:
            first, *others = [option for option, weight in enumerate(weights) if weight > 0]
            self.others += [({**taken, name: option}, before * weights[option]) for option in others]
            taken[name] = first
            self.probability[row] = before * weights[first]
        return taken[name]

    def drafting(self, starts: Keys) -> "RowSampler":
        return RowSampler([], self._given, self._drafts, (*self._starts, dict(starts)), self)


def enumerate_rows(
    run: Callable[[RowSampler, int], list[Result]],
    law: Law = softmax,
    drafts: Drafting = "law",
    together: int = 128,
    limit: int = 200_000,
) -> dict[Result, float]:
    """The distribution of each row's result of `run(sampler, rows)` over all decisions, `together` branches at once.

    Fails beyond `limit` branches. A decision is known by its noise's key: what other rows ask for does not matter.
    """
    outcome: dict[Result, float] = defaultdict(float)
    waiting: list[Fate] = [({}, 1.0)]
    while waiting:
        fates, waiting = waiting[-together:], waiting[:-together]
        sampler = RowSampler(fates, law, drafts)
        for result, probability in zip(run(sampler, len(fates)), sampler.probability, strict=True):
            outcome[result] += probability
        waiting += sampler.others
        limit -= len(fates)
        assert limit >= 0, "more branches than the limit"
    return dict(outcome)


def distance(left: dict[Result, float], right: dict[Result, float]) -> float:
    """The largest difference of a probability between two laws."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())
