"""Figures of a round for display: temperature-1 probabilities of the examined drafts, the gap of the two best logits;
and the alternatives at each position, with the trials that decided it. No verdict depends on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch import Tensor

from sampling.events import ENOUGH, Call, Filters, Likely, Odds, Position, Step, Trial
from sampling.sampler import SamplerView
from sampling.types import Draft, Drafter, DraftTree, Facts, Rule, Sampler, Verdict
from sampling.verify.facts import AllFacts
from sampling.vocabulary import best, single_thread_if_small


class Seconds(NamedTuple):
    """A row's share of a round's time."""

    draft: float
    verify: float
    sample: float
    overhead: float


def step_of(
    tree: DraftTree,
    path: list[int],
    token: int | None,
    facts: Sequence[Facts],
    chosen: bool,
    row: int,
    gamma: int,
    calls: tuple[Call, ...],
    seconds: Seconds,
) -> Step:
    """Return the Step of a row: its draft, the accepted nodes and the target's own token, p(x) and q(x) of the examined
    drafts and the gap where the round ended. `facts`: of the root and of each accepted node.
    """
    ended = facts[len(path) if token is not None else len(path) - 1]
    examined = list(zip(path, facts, strict=False))
    if token is not None:
        examined += [(child, ended) for child in tree.children[path[-1] + 1 if path else 0]]
    return Step(
        drafted=tuple(tree.tokens),
        parents=tuple(tree.parents),
        source=tuple(tree.source),
        path=tuple(path),
        token=token,
        target_p=tuple([known.p(tree.tokens[node]) for node, known in examined]),
        draft_p=tuple([tree.draft_prob[node] for node, _ in examined]),
        top2_gap=ended.gap,
        chosen=chosen and bool(tree.tokens),
        row=row,
        gamma=gamma,
        calls=calls,
        draft_s=seconds.draft,
        verify_s=seconds.verify,
        sample_s=seconds.sample,
        overhead_s=seconds.overhead,
    )


def facts_on(verdict: Verdict, row: int, nodes: Sequence[int]) -> list[Facts]:
    """Return the facts after these nodes of a row: the verifier's, or else computed from its logits on the host."""
    facts = [known for node in nodes if (known := verdict.distributions.facts(row, node)) is not None]
    if len(facts) == len(nodes):
        return facts
    return [AllFacts(logits) for logits in verdict.logits[row, [node + 1 for node in nodes]].float().cpu()]


# -- the alternatives at each position of a round, and the trials that decided it -------------------------------------
#
# The loop computes them after the round, while its clock does not count, from the round's distributions and random
# numbers.


class CoinNotes(SamplerView):
    """A sampler that records its coins."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.tossed: list[tuple[Tensor, Tensor]] = []  # chances [M], keys [M, 4]

    notes = True

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        self.tossed.append((prob, keys))
        return self._sampler.coin(prob, keys)


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
        logits, tree = verdict.logits[index].float().cpu(), draft.trees[index]
        visited = [-1, *verdict.path[index]][: len(step.emitted)]
        facts = {node: AllFacts(logits[node + 1]) for node in {*visited, *tree.parents}}
        examined: list[list[int]] = [[] for _ in visited]  # the step's nodes, by depth
        for node in (*step.path, *step.rejected):
            examined[step.depths[node]].append(node)
        positions, processed = [], list[dict[int, float]]()
        for depth, (token, node) in enumerate(zip(step.emitted, visited, strict=True)):
            own, at = [token, *tree.path_tokens(examined[depth])], facts[node]
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
        trials, drawn = self._tossed(step, tree, verdict.path[index]), self.rule is Rule.POINT
        known = {trial.node for trial in trials}
        trials += [  # if coins decide, a draft without one had no chance
            Trial(node, p if drawn else 0.0, None, None if self.sampler.greedy else p)
            for depth, nodes in enumerate(examined)
            for node in nodes
            if node not in known and self.rule is not Rule.TYPICAL  # which draws nothing: p at temperature 1 decides
            for p in [processed[depth][step.drafted[node]]]
        ]
        if not drawn:
            trials = [self._compared(trial, index, draft, verdict, facts) for trial in trials]
        each = zip(tree.tokens, tree.parents, tree.draft_prob, strict=True)
        odds = tuple(Odds(facts[parent].p(token), q) for token, parent, q in each)
        return replace(step, positions=tuple(positions), odds=odds, trials=tuple(trials))

    def _processed(
        self, verdict: Verdict, index: int, node: int, known: AllFacts, tokens: Sequence[int]
    ) -> Sequence[float]:
        """Return the probabilities of some tokens in the distribution of the draw there."""
        if self.sampler.greedy:
            return [float(token == known.argmax) for token in tokens]
        if (filters := self.sampler.filters) is not None and filters == Filters(filters.temperature):
            return [known.p_at(token, filters.temperature) for token in tokens]
        with single_thread_if_small(known.logits.numel()):
            return cast(list[float], verdict.distributions.at([index], [node])[0][list(tokens)].tolist())

    def _tossed(self, step: Step, tree: DraftTree, accepted: list[int]) -> list[Trial]:
        """Return the trials of a row that coins decided."""
        visited, trials = [-1, *accepted], []
        for chances, keys in self.sampler.tossed:
            coins = self.sampler.coin_uniforms(keys)
            for chance, (row, position, start, turn), coin in zip(chances.tolist(), keys.tolist(), coins, strict=True):
                if row == step.row:
                    depth = position - start
                    # A block has coins after a rejection too.
                    parent = visited[depth] if depth < len(visited) else depth - 1
                    trials.append(Trial(tree.children[parent + 1][turn], chance, coin))
        return trials

    def _compared(
        self, trial: Trial, index: int, draft: Draft, verdict: Verdict, facts: Mapping[int, AllFacts]
    ) -> Trial:
        """Return a trial whose chance is that of its coin, at most 1, with p(x) and q(x). A drawn draft's coin has the
        chance p(x)/q(x), where p is what rejected siblings left."""
        tree, node = draft.trees[index], trial.node
        token, parent = tree.tokens[node], tree.parents[node]
        q = 1.0 if draft.probs is None else float(draft.probs[index, node, token])
        if self.rule is Rule.DRAWN and trial.number is not None:
            p = trial.chance * q
        else:
            (p,) = self._processed(verdict, index, parent, facts[parent], [token])
        return trial._replace(chance=min(1.0, trial.chance), p=min(1.0, p), q=q)
