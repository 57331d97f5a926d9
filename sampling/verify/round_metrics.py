"""Figures of a round for display: temperature-1 probabilities of the examined drafts, the gap of the two best logits;
and the alternatives at each position, with the trials that decided it. No decision depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampling.events import ENOUGH, INVERSE_TEMPERATURES, Likely, Odds, Position, Step, Trial
from sampling.rows import fetched, padded, put
from sampling.sampler import SamplerView
from sampling.types import Draft, Drafter, Rows, Rule, Sampler, Verdict, above
from sampling.vocabulary import best, single_thread_if_small


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """Per row, for every node: its token, parent, source, p(x) and q(x); per position the top-2 gap.

    p(x) and the gap are known where the verifier looked: at the root, after accepted nodes, and of their children.
    """

    tokens: Rows
    parents: list[int]
    source: Rows
    target_p: list[dict[int, float]]
    draft_p: list[list[float]]
    gaps: list[dict[int, float]]
    chosen: bool

    @staticmethod
    def of(verdict: Verdict, draft: Draft) -> RoundMetrics:
        """Return the metrics of the positions at which a row stood: a tree has many more."""
        rows, count = draft.tokens.shape
        tokens, parents = draft.tokens.tolist(), list(above(draft.parents, count))
        source = [[0] * count] * rows if draft.source is None else draft.source.tolist()
        draft_p = [[1.0] * count] * rows if draft.draft_prob is None else draft.draft_prob.tolist()
        stood = [[-1, *(node for node in path if node >= 0)] for path in verdict.path.tolist()]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        looks = [
            _Look(row, node, [child for child in children.get(node, ()) if tokens[row][child] >= 0])
            for row, nodes in enumerate(stood)
            for node in nodes
        ]
        ids = [[tokens[look.row][child] for child in look.children] for look in looks]
        gaps: list[dict[int, float]] = [{} for _ in tokens]
        target_p: list[dict[int, float]] = [{} for _ in tokens]
        for look, (gap, chances) in zip(looks, _read(verdict, looks, ids), strict=True):
            gaps[look.row][look.node] = gap
            target_p[look.row].update(zip(look.children, chances, strict=True))
        return RoundMetrics(tokens, parents, source, target_p, draft_p, gaps, bool(count) and draft.probs is None)

    def step(self, index: int, path: list[int], token: int | None, **more: Any) -> Step:
        """Return the Step of row `index`, `more` being its other fields; absent nodes get no number."""
        tokens, parents, source = self.tokens[index], self.parents, self.source[index]
        present = [node for node, drafted in enumerate(tokens) if drafted >= 0]
        last, target_p, draft_p = path[-1] if path else -1, self.target_p[index], self.draft_p[index]
        examined = path if token is None else [*path, *[node for node in present if parents[node] == last]]
        above, to = [parents[node] for node in present], path
        if present and present[-1] >= len(present):  # some before the last one are absent
            number = {node: count for count, node in enumerate(present)}
            above, to = [number.get(node, -1) for node in above], [number[node] for node in path]
        return Step(
            drafted=tuple([tokens[node] for node in present]),
            parents=tuple(above),
            source=tuple([source[node] for node in present]),
            path=tuple(to),
            token=token,
            target_p=tuple([target_p[node] for node in examined]),
            draft_p=tuple([draft_p[node] for node in examined]),
            chosen=self.chosen,
            top2_gap=self.gaps[index][last if token is not None else parents[last]],
            **more,
        )


class _Look(NamedTuple):
    """A node at which a row stood (-1: the root), and its children."""

    row: int
    node: int
    children: list[int]


def _read(verdict: Verdict, looks: list[_Look], ids: Rows) -> Iterable[tuple[float, list[float]]]:
    """For each look the gap of the two best logits, and the probabilities of its ids.

    Takes what the verifier saw when it drew the tokens, where it is known; else reads all logits at once.
    """
    known = verdict.distributions
    if not isinstance(known, Tensor) and known.glance(looks[0].row, looks[0].node) is not None:
        glances = [known.glance(look.row, look.node) for look in looks]
        return [(seen.gap, seen.chances(wanted)) for seen, wanted in zip(glances, ids, strict=True) if seen is not None]
    rows, nodes = put([look[:2] for look in looks], verdict.logits.device).unbind(1)
    values = verdict.logits[rows, nodes + 1].float()
    top = best(values, 2)[0]
    read = values.softmax(dim=-1).gather(1, put(padded(ids, 0), values.device)), top[:, 0] - top[:, -1]
    chances, gaps = (part.tolist() for part in fetched(*read))
    return [(gap, row[: len(wanted)]) for gap, row, wanted in zip(gaps, chances, ids, strict=True)]


# -- the alternatives at each position of a round, and the trials that decided it -------------------------------------
#
# They are computed after the round, off the clock, from the round's distributions and random numbers. One thread
# computes them, since the round waits for them.


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
        weights = self._weights = np.exp(less)
        mass, sum_of_logs = float(weights.sum()), float(weights @ less)
        if math.isnan(sum_of_logs):  # 0 · −∞ is 0
            sum_of_logs = float(weights @ np.maximum(less, np.finfo(np.float32).min))
        self.entropy = (math.log(mass) - sum_of_logs / mass) / math.log(2)  # in bits
        self._masses = {1.0: mass}  # by temperature

    def p(self, token: int, temperature: float = 1.0) -> float:
        if temperature not in self._masses:
            self._masses[temperature] = float(np.exp((self.values - self.top) / temperature).sum())
        return math.exp((float(self.values[token]) - self.top) / temperature) / self._masses[temperature]

    def rest(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return log Σ p^β over all other tokens, for each β of INVERSE_TEMPERATURES; −1e9 where there is no other."""
        weights = self._weights.copy()
        weights[list(tokens)] = 0.0
        if not (most := float(weights.max())):
            return (-1e9,) * len(INVERSE_TEMPERATURES)
        weights /= most
        root, square, left = np.sqrt(weights), weights * weights, len(weights) - len(tokens)
        sums = (left, root.sum(), root @ np.sqrt(root), weights.sum(), weights @ root, square.sum(), square @ square)
        less = math.log(most / self._masses[1.0])
        return tuple(math.log(mass) + beta * less for beta, mass in zip(INVERSE_TEMPERATURES, sums, strict=True))

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
            rest = at.rest(ids) if self.count >= ENOUGH else ()
            positions.append(Position(tuple(target), proposals, at.entropy, rest))
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
