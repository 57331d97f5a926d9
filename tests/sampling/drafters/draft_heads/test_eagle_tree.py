"""Dynamic trees of a feature drafter: the likeliest nodes, computed as a chain along each path would be; lossless."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.drafters.draft_heads.eagle import FeatureLM, FeatureSession
from sampling.drafters.draft_model import ModelDrafter, ModelSource
from sampling.drafters.proposal import Proposer
from sampling.models.causal import CausalLM
from sampling.types import Budget, Draft, Rows, Sampler
from tests.sampling.drafters.draft_heads.test_exact import (
    EXACT,
    FAIL_BELOW,
    PROMPTS,
    counted,
    enumerated,
    greedy,
    same_rounds,
)
from tests.support.reference import NaiveLaw
from tests.support.runs import answers, decode, drafting, emitted, sampler, steps
from tests.support.students import fed, make_student, make_target, text
from tests.support.toys import ToyLM, ToySession, parents_of

NOTHING = Draft.empty(1)
SAMPLER = drafting(greedy(), [[0]])
SHORT = [0, 2, 3, 4, 5, 6, 7]


def tree_lm(target: Any, layers: int = 1, seed: int = 2, **shape: Any) -> FeatureLM:
    return FeatureLM(make_student("feature", target, SHORT, seed, num_hidden_layers=layers, **shape), "feature", None)


def growing(lm: Any, nodes: int = 4, width: int = 4, least: float = 0.0) -> Proposer:
    return Proposer([ModelSource(lm, width=width)], tree=True, nodes=nodes, least=least)


def beside(drafter: Proposer, target: Any, row: list[int]) -> Proposer:
    """The drafter, begun beside a new session of the target that holds all of `row` but its last token."""
    held = fed(target, [row], [len(row) - 1], hidden=True)
    drafter.start([row], held, held)
    return drafter


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens on the way down to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens[0], parents_of(draft), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


# -- the tree by hand -----------------------------------------------------------------------------


class Told(ToySession):
    """A session without a network: probabilities of the next token by the path behind the row."""

    can_grow = True

    def __init__(self, lm: ToyLM, prompt: Rows) -> None:
        super().__init__(lm, prompt)
        self.levels: list[list[tuple[int, ...]]] = []

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        return self._log([()])[None]

    def grow(self, tokens: list[int], parents: list[int]) -> Tensor:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        self.levels.append(paths[sum(map(len, self.levels)) :])
        return self._log(self.levels[-1])

    def _log(self, paths: list[tuple[int, ...]]) -> Tensor:
        return torch.tensor([CHANCES.get(path, (0.25,) * 4) for path in paths], dtype=torch.float64).log()


class Telling(ToyLM):
    def open(self, prompt: Rows, **how: Any) -> Told:
        return Told(self, prompt)


CHANCES: dict[tuple[int, ...], tuple[float, ...]] = {
    (): (0.5, 0.3, 0.15, 0.05),
    (0,): (0.1, 0.58, 0.22, 0.1),  # .05 .29 .11 .05
    (1,): (0.02, 0.03, 0.9, 0.05),  # .006 .009 .27 .015
    (1, 2): (0.8, 0.1, 0.05, 0.05),  # .216
}


def by_hand(depth: int, nodes: int, width: int, least: float = 0.0) -> tuple[Draft, Told]:
    drafter: Any = growing(Telling(4, lambda prefix: [0.0] * 4), nodes, width, least)
    told = ToyLM(4, lambda prefix: [0.0] * 4).open([[3]])
    drafter.start([[3]], told, told)
    return drafter.propose([[3]], Budget([depth]), SAMPLER), drafter.sessions[0]


def test_the_tree_by_hand() -> None:
    """Two of a level are computed: 0 and 1, then 0 1 (.29) and 1 2 (.27); the best six of all that were drawn."""
    draft, told = by_hand(3, 6, 2)
    assert paths_of(draft) == [(0,), (1,), (0, 1), (1, 2), (1, 2, 0), (2,)]
    assert told.levels == [[(0,), (1,)], [(0, 1), (1, 2)]]
    assert draft.trees[0].draft_prob == pytest.approx([0.5, 0.3, 0.58, 0.9, 0.8, 0.15])
    assert draft.probs is None
    assert [call[:2] for call in draft.calls] == [("toy", 3)]


@pytest.mark.parametrize(
    ("depth", "nodes", "width", "least", "levels"),
    [
        (1, 6, 2, 0.0, []),  # the first level needs the row alone
        (3, 1, 2, 0.0, []),  # nothing below the best node can be better than it
        (3, 3, 2, 0.0, [[(0,), (1,)]]),  # best: .5 .3 .29, the last of them 0 1; below it nothing is kept
        (3, 6, 1, 0.0, [[(0,)], [(0, 1)]]),
        (3, 6, 2, 0.4, [[(0,)]]),  # a path of .3 is not drafted
        (3, 6, 2, 0.6, []),
    ],
)
def test_only_what_may_be_kept_is_computed(depth: int, nodes: int, width: int, least: float, levels: Any) -> None:
    draft, told = by_hand(depth, nodes, width, least)
    assert told.levels == levels
    assert draft.width <= nodes
    assert draft.calls[0].passes == len(levels) + 1


# -- what a node sees -----------------------------------------------------------------------------

LEVELS = [([2, 5, 7], [-1, -1, -1]), ([3, 0, 6], [1, 0, 1]), ([4, 4], [5, 3])]


def grown(target: Any, lm: FeatureLM, row: list[int]) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """The logits of LEVELS behind `row`, and the path to each of its nodes."""
    session: Any = beside(growing(lm), target, row).sessions[0]
    session.score_reduced([row], NOTHING)
    tokens, parents, logits, paths = [], [], [], []
    for more, above in LEVELS:
        tokens, parents = tokens + more, parents + above
        logits += session.grow(tokens, parents)
        paths += [(*(paths[parent] if parent >= 0 else ()), token) for token, parent in zip(more, above, strict=True)]
    return logits, paths


def worst(target: Any, lm: FeatureLM, row: list[int]) -> float:
    """How far a node's logits lie from those of a chain that was fed its path."""
    found = []
    for logits, path in zip(*grown(target, lm, row), strict=True):
        chain: Any = beside(ModelDrafter(lm), target, row).sessions[0]
        wanted = chain.score_reduced([[*row, *path]], NOTHING)[0, 0]
        found.append(float((logits - wanted).abs().max() / wanted.abs().max()))
    return max(found)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("length", [1, 9])
def test_a_node_is_computed_as_a_chain_along_its_path_would(layers: int, length: int) -> None:
    target = make_target(8, seed=10)
    assert worst(target, tree_lm(target, layers), text(1, length, 8)) < 2e-5


@pytest.mark.parametrize("wrong", ["the next node's parent", "everything before it", "one position on"])
def test_a_wrong_parent_state_mask_or_position_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sampling.drafters.draft_heads.eagle as eagle

    grow, at, places = FeatureSession.grow, eagle.at, eagle.places

    def mistaken(*given: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(eagle, "at", lambda states, slots: at(states, slots.roll(1)))
            return grow(*given)

    def misplaced(*given: Any) -> tuple[Tensor, Tensor]:
        positions, seen = places(*given)
        return (
            (positions + 1, seen) if wrong == "one position on" else (positions, torch.ones_like(seen).tril(given[3]))
        )

    if wrong == "the next node's parent":
        monkeypatch.setattr(FeatureSession, "grow", mistaken)
    else:
        monkeypatch.setattr(eagle, "places", misplaced)
    target = make_target(8, seed=10)
    assert worst(target, tree_lm(target), text(1, 9, 8)) > 1e-3


def test_the_best_nodes_of_all_are_found_where_a_level_is_wide_enough() -> None:
    """Against every path of three tokens, each computed as a chain."""
    target = make_target(8, seed=10)
    lm, row = tree_lm(target), text(3, 9, 8)
    session: Any = beside(ModelDrafter(lm), target, row).sessions[0]
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(3):
        for path in product(SHORT, repeat=depth):
            law = session.score([[*row, *path]], NOTHING)[0, 0].softmax(-1)
            worth |= {(*path, token): worth[path] * float(law[token]) for token in SHORT}
    wanted = sorted(list(worth)[1:], key=lambda path: -worth[path])[:12]
    tree: Any = beside(growing(lm, 12, width=12), target, row)
    assert set(paths_of(tree.propose([row], Budget([3]), SAMPLER))) == set(wanted)


# -- through the loop -----------------------------------------------------------------------------


class Audited(Proposer):
    """Each round's draft is that of a drafter that begins now, beside a new session of the target."""

    def __init__(self, lm: FeatureLM, target: Any, nodes: int) -> None:
        super().__init__([ModelSource(lm)], tree=True, nodes=nodes, least=0.0)
        self.target, self.rounds = target, 0

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        fresh = beside(growing(self.models[0], nodes=20), self.target, rows[0])
        draft, wanted = super().propose(rows, budget, sampler), fresh.propose(rows, budget, sampler)
        assert draft.tokens == wanted.tokens
        assert parents_of(draft) == parents_of(wanted)
        probs = (torch.tensor(each.trees[0].draft_prob) for each in (draft, wanted))
        torch.testing.assert_close(*probs, atol=1e-5, rtol=1e-4)
        self.rounds += 1
        return draft


@pytest.mark.parametrize("layers", [1, 2])
def test_every_round_drafts_what_a_new_session_would_and_the_text_is_plain_decodings(layers: int) -> None:
    target = make_target(8, seed=10)
    lm, student = CausalLM(target), tree_lm(target, layers)
    accepted = []
    for prompt in PROMPTS[:3]:
        drafter = Audited(student, target, nodes=20)
        run = decode(lm, [prompt], drafter, greedy(), length=16, gamma=3)
        assert emitted(run) == answers(lm, [prompt], None, greedy(), length=16)
        assert drafter.rounds > 4
        accepted += [(step.path, step.parents) for step in steps(run)]
    assert any(len(path) > 1 for path, _ in accepted)
    assert any(node and parents[node] != node - 1 for path, parents in accepted for node in path)


def test_sampled_text_is_plain_decodings_with_the_same_seed() -> None:
    """Under rejection too, where chains would be drawn from their laws; and across the turns of a chat."""
    target = make_target(8, seed=10)
    lm, student = CausalLM(target), tree_lm(target)
    drafter, session, prompt = growing(student, 7), None, [1, 2, 3, 4]
    for seed in range(5):
        session = lm.open([prompt], previous=session, hidden=True)
        drawing = lambda: sampler(0.9, seed, top_p=0.95)  # noqa: B023, E731
        run = decode(lm, [prompt], drafter, drawing(), length=14, gamma=3, session=session)
        assert emitted(run) == answers(lm, [prompt], None, drawing(), length=14)
        same_rounds(run, decode(lm, [prompt], growing(student, 7), drawing(), length=14, gamma=3))
        prompt = [*prompt, *emitted(run)[0], 5, seed]


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("kind", ["feature", "eagle"])
def test_trees_are_exact_by_every_branch(kind: str, drafts: str) -> None:
    assert enumerated(kind, lambda chain: growing(chain.lm), drafts, NaiveLaw(top_k=2)) < EXACT


@pytest.mark.parametrize("kind", ["feature", "eagle"])
def test_rows_of_a_batch_get_chains_and_keep_the_targets_law(kind: str) -> None:
    assert counted(kind, "rejection, shaped", 2_500, make=lambda chain: growing(chain.lm, 5)) > FAIL_BELOW


def test_limits_are_kept() -> None:
    """Nodes, depth, and the student's context: a tree is no deeper than tokens fit."""
    target = make_target(8, seed=10)
    lm, student = CausalLM(target), tree_lm(target, max_position_embeddings=20)
    for prompt, nodes, gamma in ((text(4, 12, 8), 5, 4), (text(5, 3, 8), 11, 2), (text(6, 30, 8), 4, 3)):
        run = steps(decode(lm, [prompt], growing(student, nodes), greedy(), length=12, gamma=gamma))
        assert [token for step in run for token in step.emitted] == answers(lm, [prompt], None, greedy(), length=12)[0]
        length = len(prompt)
        for step in run:
            depth = max(step.depths, default=-1) + 1
            assert len(step.drafted) <= nodes
            assert depth <= min(gamma, max(0, 20 - length))
            length += len(step.emitted)
        assert any(step.drafted for step in run) == (len(prompt) < 20)
