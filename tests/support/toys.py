"""Toy language models that keep the session protocol and watch that their caller does too.

A toy's logits are a function of the token prefix alone: a seeded table over the last two tokens
(`TableLM`), a dict from prefix to logits (`ScriptedLM`) or a fixed continuation (`chain_lm`). Knows
no transformers, no cache tensors and no randomness while decoding.

The drafters behind them, for the proofs, are written token by token from a toy's logits, without sessions. Each is
independent of `sampling.drafters`. Row numbers are followed through `select`, as a real drafter must.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sampling.types import LM, Budget, Draft, Drafter, DraftTree, Rows, Rule, Sampler, Session, Traits

Prefix = tuple[int, ...]
ALONE: Any = SimpleNamespace(vocab_size=1 << 62, takes_trees=True, source=None)
"""Stands for the target's session where a drafter is looked at by itself: nothing bounds its ids."""
PEAK = 30.0  # logit of the one scripted token: every other one has probability ~1e-13


class ProtocolMisuseError(AssertionError):
    """The caller did what the protocol of `sampling.types` does not allow."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolMisuseError(what)


class ToyLM(LM):
    """An LM whose logits are `logits_of(prefix)`, [V]. Counts its passes and the tokens fed."""

    def __init__(
        self,
        vocab_size: int,
        logits_of: Callable[[Prefix], Sequence[float] | Tensor],
        name: str = "toy",
        context: int = 1 << 20,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.name, self.vocab_size, self.context, self.dtype = name, vocab_size, context, dtype
        self._logits_of = logits_of
        self.passes = 0  # forward calls of all sessions
        self.fed = 0  # tokens fed by all sessions, draft nodes included
        self.widths: list[int] = []  # draft nodes of each pass

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """[len(contexts), V] logits after each prefix."""
        return torch.stack([torch.as_tensor(self._logits_of(tuple(context)), dtype=self.dtype) for context in contexts])

    def open(
        self, prompt: Rows, *, previous: "ToySession | None" = None, target: object = None, hidden: bool = False
    ) -> "ToySession":
        session = ToySession(self, prompt)
        require(getattr(target, "vocab_size", self.vocab_size) == self.vocab_size, "a toy drafts for its own ids alone")
        if previous is not None:
            session.cached = [list(row) for row in previous.cached]
            previous.alive = False
            session.rollback(prompt)
        return session


class TableLM(ToyLM):
    """Logits by the last two tokens from a seeded table; `sharpness` scales them."""

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        sharpness: float = 1.5,
        name: str = "toy",
        dtype: torch.dtype = torch.float64,
        context: int = 1 << 20,
    ) -> None:
        super().__init__(vocab_size, lambda prefix: [], name, context, dtype)
        noise = torch.Generator().manual_seed(seed)
        size = vocab_size + 1  # the extra index stands for "no such token yet"
        self.table = (torch.randn((size, size, vocab_size), generator=noise, dtype=torch.float64) * sharpness).to(dtype)

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        none = self.vocab_size
        last = [context[-1] if context else none for context in contexts]
        before = [context[-2] if len(context) > 1 else none for context in contexts]
        return self.table[torch.tensor(before), torch.tensor(last)]


class ScriptedLM(ToyLM):
    """Logits by exact prefix; a prefix not in the script gets `default` (uniform if absent)."""

    def __init__(
        self,
        vocab_size: int,
        script: Mapping[Prefix, Sequence[float]],
        default: Sequence[float] | None = None,
        name: str = "toy",
        context: int = 1 << 20,
    ) -> None:
        fallback = list(default) if default is not None else [0.0] * vocab_size
        super().__init__(vocab_size, lambda prefix: script.get(prefix, fallback), name, context)


def chain_lm(
    vocab_size: int, prompt: Sequence[int], answer: Sequence[int], name: str = "toy", context: int = 1 << 20
) -> ToyLM:
    """After `prompt` this toy says `answer`, whatever really followed; past its end, token 0."""

    def logits_of(prefix: Prefix) -> list[float]:
        index = len(prefix) - len(prompt)
        wanted = answer[index] if 0 <= index < len(answer) else 0
        return [PEAK if token == wanted else -0.01 * token for token in range(vocab_size)]

    return ToyLM(vocab_size, logits_of, name, context)


class ToySession(Session):
    """Session of a ToyLM: `cached` are the tokens whose states a real model would hold."""

    def __init__(self, lm: ToyLM, prompt: Rows) -> None:
        require(all(isinstance(row, list) for row in prompt), "rows are lists of ids on the host")
        self.lm = lm
        self._initial = [list(row) for row in prompt]
        self.cached: Rows = [[] for _ in prompt]
        self.alive = True
        self._pending: Draft | None = None

    @property
    def vocab_size(self) -> int:
        return self.lm.vocab_size

    @property
    def initial(self) -> Rows:
        return self._initial

    def rollback(self, rows: Rows) -> list[int]:
        self._check(rows)
        self._pending = None
        self.cached = [_common_prefix(held, row) for held, row in zip(self.cached, rows, strict=True)]
        return [len(held) for held in self.cached]

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        self._check(rows)
        nodes = _check_draft(draft, len(rows), self.lm.vocab_size)
        missing = [len(row) - len(_common_prefix(held, row)) for held, row in zip(self.cached, rows, strict=True)]
        present = [len(tokens) for tokens in draft.tokens]
        deepest = max((len(row) + count for row, count in zip(rows, present, strict=True)), default=0)
        require(deepest <= self.lm.context, f"{deepest} tokens do not fit the context of {self.lm.context}")
        self.lm.passes += 1
        self.lm.fed += sum(max(count, 1) for count in missing) + sum(present)
        self.lm.widths.append(draft.width)
        self.cached = [list(row) for row in rows]
        self._pending = draft
        contexts = [row + node for row, drafts in zip(rows, nodes, strict=True) for node in drafts]
        return self.lm.logits(contexts).reshape(len(rows), draft.width + 1, -1).clone()

    def commit(self, path: Rows) -> None:
        draft = self._pending
        require(draft is not None, "keep follows score, once")
        assert draft is not None
        require(len(path) == len(self.cached), f"a path for each row, got {len(path)}")
        for held, nodes, tree in zip(self.cached, path, draft.trees, strict=True):
            last = -1
            for node in nodes:
                if not 0 <= node < len(tree.tokens):
                    raise ProtocolMisuseError(f"node {node} is absent and cannot be kept")
                if tree.parents[node] != last:
                    raise ProtocolMisuseError(f"node {node} does not follow node {last}")
                held.append(tree.tokens[node])
                last = node
        self._pending = None

    def select(self, rows: Tensor) -> None:
        self._alive()
        chosen = rows.tolist()
        self.cached = [list(self.cached[row]) for row in chosen]
        self._initial = [self._initial[row] for row in chosen]
        if self._pending is not None:
            self._pending = None

    def fork(self) -> "ToySession":
        self._alive()
        twin = ToySession(self.lm, self._initial)
        twin.cached = [list(row) for row in self.cached]
        return twin

    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("a toy has no keys and values")

    def hidden(self) -> Tensor:
        raise NotImplementedError("a toy has no hidden states")

    def _alive(self) -> None:
        require(self.alive, "this session was handed on as `previous` and must not be used again")

    def _check(self, rows: Rows) -> None:
        self._alive()
        require(len(rows) == len(self.cached), f"{len(rows)} rows for a session of {len(self.cached)}")
        require(all(rows), "a row must hold at least one token to be scored")
        ids = set().union(*rows)
        require(ids <= set(range(self.lm.vocab_size)), f"ids outside the vocabulary: {sorted(ids)}")


def _common_prefix(held: list[int], row: list[int]) -> list[int]:
    if row[: len(held)] == held:
        return held
    length = 0
    while length < min(len(held), len(row)) and held[length] == row[length]:
        length += 1
    return held[:length]


class Given:
    """The distributions [B, N+1, V] of a verdict, given as a tensor."""

    def __init__(self, laws: Tensor) -> None:
        self.laws = laws

    def all(self) -> Tensor:
        return self.laws

    def at(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        return self.laws[list(rows), [node + 1 for node in nodes]]

    def facts(self, row: int, node: int) -> None:
        return None


def parents_of(draft: Draft) -> list[int]:
    """The parents of the first row's nodes."""
    return draft.trees[0].parents


def _check_draft(draft: Draft, rows: int, vocab_size: int) -> list[Rows]:
    """The draft's own token paths: for each row the empty path, then the path to each node; empty ones up to N + 1."""
    require(len(draft.trees) == rows, f"a draft of {len(draft.trees)} rows for {rows}")
    width = draft.width
    if draft.probs is not None:
        require(draft.probs.shape == (rows, width, vocab_size), f"draft laws of shape {tuple(draft.probs.shape)}")
    paths: list[Rows] = []
    for tree in draft.trees:
        require(all(0 <= token < vocab_size for token in tree.tokens), "a drafted id outside the vocabulary")
        require(all(parent < node for node, parent in enumerate(tree.parents)), "a parent comes before its children")
        again = DraftTree.of(tree.tokens, tree.parents, tree.source, tree.draft_prob)
        require(again == tree, "depths and children are those of the parents, and every node has a source")
        found: Rows = [[]]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            found.append([*found[parent + 1], token])
        paths.append([*found, *[[]] * (width - len(tree.tokens))])
    return paths


# -- drafters -------------------------------------------------------------------------------------


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
