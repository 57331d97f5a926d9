"""The alternatives at each position of a round, and the trials that decided it, for display.

They are computed after the round, off the clock, from the round's distributions and random numbers. No decision depends
on them. One thread computes them, since the round waits for them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sampling.events import Likely, Odds, Position, Step, Trial
from sampling.sampler import SamplerView
from sampling.types import Draft, Drafter, Rule, Sampler, Verdict, above
from sampling.vocabulary import best, single_thread_if_small


class CoinNotes(SamplerView):
    """A sampler that records its coins."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.tossed: list[tuple[Tensor, Tensor]] = []  # chances [M], keys [M, 4]

    notes = True

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        self.tossed.append((prob, keys))
        return self._sampler.coin(prob, keys)


class NodeSoftmax:
    """The logits [V] after other node: `p` are the probabilities of their softmax, `entropy` that at temperature 1."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.values = logits, logits.numpy()
        self.argmax = int(self.values.argmax())
        self.top = float(self.values[self.argmax])
        less = self.values - self.top
        weights = np.exp(less)
        mass, sum_of_logs = float(weights.sum()), float(weights @ less)
        if math.isnan(sum_of_logs):  # 0 · −∞ is 0
            sum_of_logs = float(weights @ np.maximum(less, np.finfo(np.float32).min))
        self.entropy = (math.log(mass) - sum_of_logs / mass) / math.log(2)  # in bits
        self._masses = {1.0: mass}  # by temperature

    def p(self, token: int, temperature: float = 1.0) -> float:
        if temperature not in self._masses:
            self._masses[temperature] = float(np.exp((self.values - self.top) / temperature).sum())
        return math.exp((float(self.values[token]) - self.top) / temperature) / self._masses[temperature]

    def ranks(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ranks from 1, by logit; the first `count` tokens are the likeliest, in order."""
        values = [float(self.values[token]) for token in tokens]
        most = values[:count]
        return [
            1 + (most.index(value) if value in most else int(np.count_nonzero(self.values > value))) for value in values
        ]


class PositionRecorder:
    """A recorder of `count` alternatives at each position of the rounds that `sampler` decides by `rule`."""

    def __init__(self, sampler: Sampler, rule: Rule, count: int) -> None:
        self.sampler, self.rule, self.count = CoinNotes(sampler), rule, count

    def begin(self) -> Sampler:
        """Return the sampler of a new round, with no coins recorded."""
        self.sampler.tossed.clear()
        return self.sampler

    def noted(
        self, step: Step, index: int, start: int, drafter: Drafter | None, draft: Draft, verdict: Verdict
    ) -> Step:
        """Return the step of row `index`, which began after `start` tokens, with positions, odds and trials; `drafter`
        is None if it did not draft."""
        logits, tokens = verdict.logits[index].float().cpu(), draft.tokens[index].tolist()
        parents, softmaxes = above(draft.parents, len(tokens)), dict[int, NodeSoftmax]()
        present = [node for node, token in enumerate(tokens) if token >= 0]
        accepted = [node for node in verdict.path[index].tolist() if node >= 0]
        stood = [-1, *accepted][: len(step.emitted)]
        for node in {*stood, *(parents[node] for node in present)}:
            softmaxes[node] = NodeSoftmax(logits[node + 1])
        examined: list[list[int]] = [[] for _ in stood]  # the step's nodes, by depth
        for node in (*step.path, *step.rejected):
            examined[step.depths[node]].append(node)
        positions, processed = [], list[dict[int, float]]()
        for depth, (token, node) in enumerate(zip(step.emitted, stood, strict=True)):
            own, at = [token, *(step.drafted[other] for other in examined[depth])], softmaxes[node]
            likeliest = best(at.logits, self.count)[1].tolist()
            ids = list(dict.fromkeys([*likeliest, *own]))
            processed.append(dict(zip(ids, self._processed(verdict, index, node, at, ids), strict=True)))
            noise, ranks = self.sampler.noise(step.row, start + depth, ids), at.ranks(ids, len(likeliest))
            target = [
                Likely(other, at.p(other), processed[depth][other], rank, gumbel)
                for other, rank, gumbel in zip(ids, ranks, noise, strict=True)
            ]
            path = list(step.emitted[:depth])
            proposals = () if drafter is None else drafter.considered(index, path, self.count, own)
            target.sort(key=lambda likely: likely.rank)
            positions.append(Position(tuple(target), proposals, at.entropy))
        trials = self._tossed(step, parents, present, accepted)
        known, drawn = {trial.node for trial in trials}, self.rule is Rule.POINT
        trials += [  # if coins decide, a draft without one had no chance
            Trial(node, processed[depth][step.drafted[node]] if drawn else 0.0, None)
            for depth, nodes in enumerate(examined)
            for node in nodes
            if node not in known
        ]
        q = torch.ones(len(tokens)) if draft.draft_prob is None else draft.draft_prob[index]
        odds = [Odds(softmaxes[parents[node]].p(tokens[node]), float(q[node])) for node in present]
        return replace(step, positions=tuple(positions), odds=tuple(odds), trials=tuple(trials))

    def _processed(
        self, verdict: Verdict, index: int, node: int, known: NodeSoftmax, tokens: Sequence[int]
    ) -> Sequence[float]:
        """Return the probabilities of some tokens in the distribution of the draw there."""
        if self.sampler.greedy:
            return [float(token == known.argmax) for token in tokens]
        if (temperature := self.sampler.tempered) is not None:
            return [known.p(token, temperature) for token in tokens]
        with single_thread_if_small(known.values.size):
            probs: list[float] = verdict.at(torch.tensor([index]), torch.tensor([node]))[0][list(tokens)].tolist()
        return probs

    def _tossed(self, step: Step, parents: Sequence[int], present: list[int], accepted: list[int]) -> list[Trial]:
        """Return the trials of a row that coins decided."""
        number, stood, trials = {node: count for count, node in enumerate(present)}, [-1, *accepted], []
        for chances, keys in self.sampler.tossed:
            tossed = zip(chances.tolist(), keys.tolist(), self.sampler.numbers(keys), strict=True)
            for chance, (row, position, start, turn), coin in tossed:
                if row != step.row:
                    continue
                depth = position - start
                parent = stood[depth] if depth < len(stood) else depth - 1  # a block has coins after a refusal too
                children = [node for node, above_it in enumerate(parents) if above_it == parent]
                trials.append(Trial(number[children[turn]], min(1.0, chance), coin))
        return trials
