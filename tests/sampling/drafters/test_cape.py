"""CaPE: siblings by confidence within a budget, exact whether chosen or drawn; and the same siblings found a slow way,
one by one, the whole law made anew for each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sampling.drafters.cape import Expansion, siblings_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.drawing import Column, Drawing
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Rows
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.branching import softmax
from tests.support.reference import NaiveLaw, chi_square_p, exact_law, same_or_tied, transformers_greedy
from tests.support.runs import answers, decode, drafting, enumeration_error, sample_counts, steps
from tests.support.tiny import noisy_copy, tiny_model
from tests.support.toys import ScriptedLM, TableLM
from utils.logits_processors import make_processor

HOPELESS, SAMPLES = 1e-6, 8_000

IDS = [2, 3, 5, 6, 7, 8, 11, 12, 13, 17]  # a short list of 20
Leaf = tuple[int, int, int, float]  # row, parent, token, raw


@pytest.mark.parametrize(
    ("confidence", "count"), [(0.05, 7), (0.3, 7), (0.31, 5), (0.6, 5), (0.7, 3), (0.8, 3), (0.81, 1), (1.0, 1)]
)
def test_the_papers_bins(confidence: float, count: int) -> None:
    assert siblings_of(confidence) == count


def proposed(lm: Any, rows: Rows, gamma: int, nodes: int, temperature: float = 0.0) -> Draft:
    drafter = ModelDrafter(lm, expansion=Expansion(nodes))
    drafter.start(rows, lm.open(rows), lm.open(rows))
    sampler = KeyedSampler(make_processor(temperature, 0, 1.0, 0.0))
    return drafter.propose(rows, Budget([gamma] * len(rows)), drafting(sampler, rows))


def log(*chances: float) -> list[float]:
    return torch.tensor(chances, dtype=torch.float64).log().tolist()


SCRIPT = ScriptedLM(4, {(0,): log(0.1, 0.5, 0.15, 0.25), (0, 1): log(0.02, 0.03, 0.9, 0.05)})


def test_the_tree_by_hand() -> None:
    """.5 at the root: 5 siblings, 3 are there (3, 2, 0 by chance); .9 behind 1: one sibling (3)."""
    draft = proposed(SCRIPT, [[0]], 2, 100)
    assert draft.tokens.tolist() == [[1, 2, 3, 2, 0, 3]]
    assert draft.parents is not None
    assert draft.parents.tolist() == [-1, 0, -1, -1, -1, 0]
    assert draft.probs is None
    assert draft.draft_prob is not None
    assert draft.draft_prob[0].tolist() == pytest.approx([0.5, 0.9, 0.25, 0.15, 0.1, 0.05])
    assert [call.passes for call in draft.calls] == [2]


@pytest.mark.parametrize(("nodes", "tokens"), [(1, [1, 2]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 3, 2, 0])])
def test_the_budget_keeps_the_most_promising_ones(nodes: int, tokens: list[int]) -> None:
    """Worth: .25, .15, .1 at the root, .5 × .05 behind 1. The chain is never cut."""
    draft = proposed(SCRIPT, [[0]], 2, nodes)
    assert draft.tokens.tolist() == [tokens]
    assert (draft.parents is None) == (nodes <= 2)


def test_drawn_siblings_are_other_tokens_and_bring_the_law_they_were_drawn_from() -> None:
    draft = proposed(SCRIPT, [[0]], 1, 100, temperature=1.0)
    tokens = draft.tokens[0].tolist()
    assert sorted(tokens) == [0, 1, 2, 3]
    assert draft.probs is not None
    law = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)
    for node, token in enumerate(tokens):
        torch.testing.assert_close(draft.probs[0, node].double(), law / law.sum(), atol=1e-6, rtol=0)
        law = law.clone()
        law[token] = 0


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize(("gamma", "nodes"), [(1, 2), (1, 9), (2, 3), (2, 9)])
def test_an_expanded_chain_is_exact(gamma: int, nodes: int, drafts: str) -> None:
    law = NaiveLaw(top_k=2) if gamma == 2 else softmax
    make = lambda: ModelDrafter(TableLM(3, seed=9), expansion=Expansion(nodes))  # noqa: E731
    target = sure_start(3, 1)
    error = enumeration_error(target, make, prompt=PROMPT, length=gamma + 2, gamma=gamma, law=law, drafts=drafts)
    assert error < EXACT


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_chi_square_through_the_real_noise(coupling: Any) -> None:
    target, drafter, processor = TableLM(8, seed=21), TableLM(8, seed=22), make_processor(1.0, 5, 1.0, 0.0)

    def sampler(seed: int) -> KeyedSampler:
        return KeyedSampler(processor, seed, coupling=coupling)

    make = lambda: ModelDrafter(drafter, expansion=Expansion(6))  # noqa: E731
    counts = sample_counts(target, make, sampler, prompt=[0, 1], length=3, gamma=2, samples=SAMPLES)
    assert chi_square_p(counts, exact_law(target, [0, 1], NaiveLaw(top_k=5), 3)) > HOPELESS


def test_point_mass_trees_say_plain_decodings_text_with_the_same_seed() -> None:
    target, drafter, processor = TableLM(8, seed=21), TableLM(8, seed=22), make_processor(0.9, 0, 0.9, 0.0)
    for seed in range(5):
        sampler = lambda: KeyedSampler(processor, seed, draft_sampling="greedy")  # noqa: B023, E731
        plain = answers(target, [[0, 1], [2]], None, sampler(), length=30)
        tree = ModelDrafter(drafter, expansion=Expansion(12))
        assert answers(target, [[0, 1], [2]], tree, sampler(), length=30, gamma=3) == plain


def test_a_real_network_says_the_same_and_keeps_its_cache() -> None:
    """Ragged rows, siblings accepted on the way: the slots are gathered, the text is plain decoding's."""
    model = tiny_model()
    target, drafter = CausalLM(model), CausalLM(noisy_copy(model, 0.3), "drafter")
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    sampler = KeyedSampler(make_processor(0.0, 0, 1.0, 0.0))
    events = decode(target, prompts, ModelDrafter(drafter, expansion=Expansion(14)), sampler, length=40, gamma=3)
    for row, prompt in enumerate(prompts):
        said = [token for step in steps(events, row) for token in step.emitted]
        assert same_or_tied(said, transformers_greedy(model, prompt, 40, ())) != "different"
    beside = [node for step in steps(events) for node in step.path if step.parents[node] != node - 1]
    assert beside, "no sibling was ever accepted: the test shows nothing"


# -- against a slow way ----------------------------------------------------------------------------


def slow(columns: list[Column], lengths: list[int], nodes: int, ids: list[int] | None) -> list[Leaf]:
    """The siblings of point masses, by depth and in their order; row b's chain has lengths[b] tokens."""
    laws = [column.logits.double().softmax(dim=-1) for column in columns]
    found: list[Leaf] = []
    for row, length in enumerate(lengths):
        taken: list[tuple[float, int, int, float]] = []
        reach = 1.0
        for depth in range(length):
            law, token = laws[depth][row], int(columns[depth].tokens[row])
            at, left = token if ids is None else ids.index(token), law.clone()
            for _ in range(siblings_of(float(law.max().float()))):
                left[at] = 0.0
                if float(left.sum()) <= 0:
                    break
                left = left / left.sum()
                at = int(left.argmax())
                taken.append((reach * float(law[at]), depth, at if ids is None else ids[at], float(law[at])))
            reach *= float(law[token if ids is None else ids.index(token)])
        kept = sorted(taken, key=lambda one: (-one[0], -one[1]))[: max(0, nodes - length)]
        found += [(row, one[1] - 1, one[2], one[3]) for one in taken if one in kept]
    return found


def chain_of(drawing: Drawing, columns: list[Column]) -> Draft:
    tokens, raw = (
        torch.stack(each, dim=1) for each in zip(*((one.tokens, one.draft_prob) for one in columns), strict=True)
    )
    return Draft(tokens, drawing.probs(columns), raw)


def fast(draft: Draft, depth: int) -> list[Leaf]:
    parents = list(range(-1, depth - 1)) if draft.parents is None else draft.parents.tolist()
    assert draft.draft_prob is not None
    leaves = [
        (row, parents[node], token, draft.draft_prob[row, node].item())
        for row, tokens in enumerate(draft.tokens.tolist())
        for node, token in enumerate(tokens)
        if node >= depth and token >= 0
    ]
    return sorted(leaves, key=lambda leaf: leaf[:2])  # the order of siblings is kept


def logits_of(noise: torch.Generator, rows: int, kind: str, size: int) -> Tensor:
    """Every figure apart, a few figures only (many ties), or ids without mass."""
    if kind == "ties":
        return torch.randint(0, 3, (rows, size), generator=noise).float()
    found = 2.0 * torch.randn(rows, size, generator=noise)
    if kind == "holes":
        found[torch.rand(rows, size, generator=noise) < 0.7] = float("-inf")
        found[:, 0] = 0.0
    return found


@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["apart", "ties", "holes"]),
    rows=st.integers(1, 4),
    short=st.booleans(),
    nodes=st.integers(1, 30),
    coupling=st.sampled_from(["greedy", "gumbel"]),
)
@settings(max_examples=150, deadline=None)
def test_one_look_finds_the_siblings_that_one_by_one_finds(
    seed: int, kind: str, rows: int, short: bool, nodes: int, coupling: str
) -> None:
    """The same tokens, parents and probabilities, whatever the noise draws for the chain itself."""
    noise = torch.Generator().manual_seed(seed)
    ids, vocab = (IDS, 20) if short else (None, 10)
    sampler = KeyedSampler(make_processor(0.0 if coupling == "greedy" else 1.0), seed, coupling="gumbel")
    texts: Rows = [[1] * (row + 1) for row in range(rows)]
    drawing = Drawing(drafting(sampler, texts), list(range(rows)), vocab, torch.tensor(ids) if ids else None)
    assert drawing.sampler.point_mass
    lengths = torch.randint(0, 4, (rows,), generator=noise).tolist()
    lengths[0] = max(1, lengths[0])
    columns = [
        drawing.column(logits_of(noise, rows, kind, 10), texts, [length > depth for length in lengths])
        for depth in range(max(lengths))
    ]
    draft = Expansion().grow(chain_of(drawing, columns), drawing, columns, texts, nodes)
    found, wanted = fast(draft, len(columns)), slow(columns, lengths, nodes, ids)
    assert [leaf[:3] for leaf in found] == [leaf[:3] for leaf in wanted]
    assert [leaf[3] for leaf in found] == pytest.approx([leaf[3] for leaf in wanted], abs=1e-6)


def test_ties_go_to_the_lower_id_wherever_they_are_cut() -> None:
    """Of 5,000 equal ids seven are kept: `topk` alone would take any."""
    logits = torch.zeros(1, 5_000)
    drawing: Any = Drawing(drafting(KeyedSampler(make_processor(0.0)), [[1]]), [0], 5_000)
    column = drawing.column(logits, [[1]], [True])
    draft = Expansion().grow(chain_of(drawing, [column]), drawing, [column], [[1]], 1 << 20)
    assert draft.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
