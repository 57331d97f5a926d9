"""The alternatives at each position of a round, and the coins that decided it, for whoever looks into the round later.

They are worked out after the round, on no clock, from the distributions and the numbers that decided. Display only; no
decision is taken from it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sampling.events import Likely, Odds, Position, Step, Trial
from sampling.sampler import SamplerView
from sampling.types import Draft, Drafter, Rule, Sampler, Verdict, above
from sampling.vocabulary import best


class CoinNotes(SamplerView):
    """A sampler that remembers which coins it tossed."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.tossed: list[tuple[Tensor, Tensor]] = []  # chances [M], keys [M, 4]

    @property
    def tempered(self) -> float | None:
        return self._sampler.tempered

    def noise_state(self, row: int, position: int) -> int:
        return self._sampler.noise_state(row, position)

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        return self._sampler.draw(probs, keys)

    def drafting(self, starts: Tensor) -> Sampler:
        return self._sampler.drafting(starts)

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        self.tossed.append((prob, keys))
        return super().coin(prob, keys)


class PositionRecorder:
    """Records `count` alternatives at each position of the rounds that `sampler` decides by `rule`."""

    def __init__(self, sampler: Sampler, rule: Rule, count: int) -> None:
        self.sampler, self.rule, self.count = CoinNotes(sampler), rule, count

    def begin(self) -> Sampler:
        """The sampler that verifies a round, with no coin tossed yet."""
        self.sampler.tossed.clear()
        return self.sampler

    def noted(
        self, step: Step, place: int, start: int, drafter: Drafter | None, draft: Draft, verdict: Verdict
    ) -> Step:
        """The step of row `place`, which began behind `start` tokens, with its positions, odds and trials; `drafter` if
        it was asked."""
        accepted = [node for node in verdict.path[place].tolist() if node >= 0]
        nodes = torch.tensor([-1, *accepted][: len(step.emitted)], dtype=torch.long)
        logits = verdict.logits[place, nodes.to(verdict.logits.device) + 1].float()
        processed = verdict.at(torch.full_like(nodes, place), nodes)
        examined: list[list[int]] = [[] for _ in step.emitted]  # nodes, by depth
        for node in (*step.path, *step.rejected):
            examined[step.depths[node]].append(node)
        positions = self._positions(place, start, step, drafter, logits, processed, examined)
        trials = self._tossed(place, step, draft, accepted)
        known, drawn = {trial.node for trial in trials}, self.rule is Rule.POINT
        trials += [  # where coins decide, what has none had no chance
            Trial(node, float(processed[depth, step.drafted[node]]) if drawn else 0.0, None)
            for depth, found in enumerate(examined)
            for node in found
            if node not in known
        ]
        return replace(step, positions=positions, odds=self._odds(place, draft, verdict), trials=tuple(trials))

    def _positions(
        self,
        place: int,
        start: int,
        step: Step,
        drafter: Drafter | None,
        logits: Tensor,  # [positions, V]
        processed: Tensor,  # [positions, V]
        examined: list[list[int]],
    ) -> tuple[Position, ...]:
        log_p = logits.log_softmax(dim=-1)
        entropies = (-(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=-1) / math.log(2)).tolist()
        likeliest = best(logits, self.count)[1].tolist()
        positions = []
        for index, token in enumerate(step.emitted):
            own = [token, *(step.drafted[node] for node in examined[index])]
            ids = list(dict.fromkeys([*likeliest[index], *own]))
            where = torch.tensor(ids, device=logits.device)
            ranks = ((logits[index][None] > logits[index, where][:, None]).sum(dim=-1) + 1).tolist()
            p, drawn_from = log_p[index, where].exp().tolist(), processed[index, where].tolist()
            noise = self.sampler.noise(step.row, start + index, ids)
            target = sorted(map(Likely, ids, p, drawn_from, ranks, noise), key=lambda likely: likely.rank)
            path = list(step.emitted[:index])
            proposals = () if drafter is None else drafter.considered(place, path, self.count, own)
            positions.append(Position(tuple(target), proposals, entropies[index]))
        return tuple(positions)

    def _odds(self, place: int, draft: Draft, verdict: Verdict) -> tuple[Odds, ...]:
        """Those of every draft of row `place`."""
        tokens = draft.tokens[place]
        present = (tokens >= 0).nonzero()[:, 0]
        if not len(present):
            return ()
        logits, count = verdict.logits[place].float(), len(tokens)
        at = (torch.tensor(above(draft.parents, count)) + 1)[present].to(logits.device)
        p = (logits[at, tokens[present].to(logits.device)] - logits.logsumexp(dim=-1)[at]).exp()
        q = torch.ones(count) if draft.draft_prob is None else draft.draft_prob[place]
        return tuple(map(Odds, p.tolist(), q[present].tolist()))

    def _tossed(self, place: int, step: Step, draft: Draft, accepted: list[int]) -> list[Trial]:
        """The trials of row `place` that were decided by coins."""
        tokens = draft.tokens[place].tolist()
        parents = above(draft.parents, len(tokens))
        present = {node: index for index, node in enumerate(node for node, token in enumerate(tokens) if token >= 0)}
        stood, trials = [-1, *accepted], []
        for chances, keys in self.sampler.tossed:
            tossed = zip(chances.tolist(), keys.tolist(), self.sampler.numbers(keys), strict=True)
            for chance, (row, position, start, turn), number in tossed:
                if row != step.row:
                    continue
                depth = position - start
                parent = stood[depth] if depth < len(stood) else depth - 1  # a block's coins go on behind a refusal
                children = [node for node, above_it in enumerate(parents) if above_it == parent]
                trials.append(Trial(present[children[turn]], min(1.0, chance), number))
        return trials
