"""Naive drafters for the proofs: written token by token from a toy's logits, without sessions.

Each is independent of `sampling.drafters`. Row numbers are followed through `select`, as a real
drafter must.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sampling.types import Budget, Draft, Drafter, DraftTree, Rows, Rule, Sampler, Session, Traits
from tests.support.toys import ToyLM


def present(tokens: list[int], parents: list[int]) -> tuple[DraftTree, list[int]]:
    """The tree of those of these nodes that are there, -1 being absent and so being its descendants; their numbers."""
    kept: dict[int, int] = {-1: -1}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in kept:
            kept[node] = len(kept) - 1
    nodes = [node for node in kept if node >= 0]
    return DraftTree.of([tokens[node] for node in nodes], [kept[parents[node]] for node in nodes]), nodes


class ToyDrafter(Drafter):
    """The parts that every naive drafter shares; `chain` drafts one row."""

    traits = Traits(("toy drafter",))

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ids: list[int] = []

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self.ids = list(range(len(prompt)))

    def select(self, rows: Tensor) -> None:
        self.ids = [self.ids[row] for row in rows.tolist()]

    def chain(self, name: int, row: list[int], want: int, sampler: Sampler) -> list[tuple[int, Tensor]]:
        """At most `want` (token, law [V]) pairs for row number `name`."""
        raise NotImplementedError

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        asked = zip(self.ids, rows, budget.max_depth, strict=True)
        chains = [self.chain(name, list(row), want, sampler) for name, row, want in asked]
        width = max(map(len, chains))
        probs = torch.full((len(rows), width, self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        for place, chain in enumerate(chains):
            for depth, (_, law) in enumerate(chain):
                probs[place, depth] = law
        return Draft.of([[token for token, _ in chain] for chain in chains], None if sampler.point_mass else probs)


class LawDrafter(ToyDrafter):
    """Draws from the processed law of a toy; stops *before* drawing where the law is not sure enough."""

    def __init__(self, lm: ToyLM, least_top: float = 0.0, rule: Rule = Rule.DRAWN) -> None:
        super().__init__(lm.vocab_size)
        self.lm, self.least_top, self.traits = lm, least_top, replace(self.traits, rule=rule)

    def chain(self, name: int, row: list[int], want: int, sampler: Sampler) -> list[tuple[int, Tensor]]:
        drafted: list[tuple[int, Tensor]] = []
        for _ in range(want):
            law = self.law_of(row, sampler)
            if float(law.max()) < self.least_top:
                break
            token = int(sampler.draw(law[None], torch.tensor([[name, len(row)]])))
            drafted.append((token, law))
            row.append(token)
        return drafted

    def law_of(self, row: list[int], sampler: Sampler) -> Tensor:
        return sampler.probs(self.lm.logits([row]), [row] if sampler.needs_prefixes else [])[0]


class PointDrafter(ToyDrafter):
    """Point masses chosen by `choose(row)`: a token, or None to stop."""

    traits = replace(ToyDrafter.traits, rule=Rule.POINT)

    def __init__(self, vocab_size: int, choose: Callable[[list[int]], int | None]) -> None:
        super().__init__(vocab_size)
        self.choose = choose

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        return Draft.of([self._points(list(row), want) for row, want in zip(rows, budget.max_depth, strict=True)])

    def _points(self, row: list[int], want: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < want and (token := self.choose([*row, *drafted])) is not None:
            drafted.append(token)
        return drafted


class FixedLawDrafter(LawDrafter):
    """Draws every token from one fixed law, whatever the prefix and the processors."""

    def __init__(self, law: Sequence[float]) -> None:
        ToyDrafter.__init__(self, len(law))
        self.law, self.least_top = torch.tensor(law, dtype=torch.float64), 0.0

    def law_of(self, row: list[int], sampler: Sampler) -> Tensor:
        return self.law


class MixedDrafter(LawDrafter):
    """The first draft is drawn, the others are point masses promoted to one-hot laws."""

    def chain(self, name: int, row: list[int], want: int, sampler: Sampler) -> list[tuple[int, Tensor]]:
        drafted = super().chain(name, list(row), min(want, 1), sampler)
        row.extend(token for token, _ in drafted)
        for _ in range(want - len(drafted)):
            token = int(self.lm.logits([row])[0].argmax())
            drafted.append((token, torch.eye(self.vocab_size, dtype=torch.float64)[token]))
            row.append(token)
        return drafted


class TreeDrafter(LawDrafter):
    """Full trees: `widths[d]` children of every node at depth d, drawn one after the other from the toy's distribution.

    `replacing`: each from the same law, so that siblings may be equal; else from what earlier siblings leave of it.
    Where the sampler's drafts are point masses the children are the most likely tokens. `extra` absent nodes are
    strewn in. `wrong_laws` sends the law itself along for every sibling, which is the truth only when replacing.
    """

    def __init__(
        self,
        lm: ToyLM,
        widths: Sequence[int],
        *,
        replacing: bool = False,
        holes: bool = False,
        wrong_laws: bool = False,
    ) -> None:
        super().__init__(lm)
        self.widths, self.replacing, self.holes, self.wrong_laws = tuple(widths), replacing, holes, wrong_laws

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        parents: list[int] = []
        level = [-1]
        for width in self.widths[: max(budget.max_depth)]:
            level = [self._node(parents, parent) for parent in level for _ in range(width + self.holes)]
        tokens = torch.full((len(rows), len(parents)), -1, dtype=torch.long)
        probs = torch.full((len(rows), len(parents), self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        trees, laws = list[DraftTree](), list[Tensor]()
        for place, (name, row, want) in enumerate(zip(self.ids, rows, budget.max_depth, strict=True)):
            self._grow(tokens[place], probs[place], parents, name, row, want, sampler)
            tree, kept = present(tokens[place].tolist(), parents)
            trees.append(tree)
            laws.append(probs[place, [*kept, *[0] * (len(parents) - len(kept))]] if parents else probs[place])
        width = max(len(tree.tokens) for tree in trees)
        return Draft(trees, None if sampler.point_mass else torch.stack(laws)[:, :width])

    def _node(self, parents: list[int], parent: int) -> int:
        parents.append(parent)
        return len(parents) - 1

    def _grow(
        self, tokens: Tensor, probs: Tensor, parents: list[int], name: int, row: list[int], want: int, sampler: Sampler
    ) -> None:
        texts = {-1: list(row)}
        for parent in sorted(set(parents)):
            if parent not in texts or len(texts[parent]) - len(row) >= want:
                continue
            kids = [node for node, above in enumerate(parents) if above == parent]
            law = self.law_of(texts[parent], sampler)
            left = law
            for node in kids[1:] if self.holes else kids:
                if float(left.sum()) <= 0:
                    break
                token = int(sampler.draw(left[None], torch.tensor([[name, len(texts[parent]), node]])))
                tokens[node], probs[node] = token, law if self.wrong_laws else left
                texts[node] = [*texts[parent], token]
                if not self.replacing or sampler.point_mass:
                    left = left.clone()
                    left[token] = 0
                    left = left / left.sum() if float(left.sum()) > 0 else left
