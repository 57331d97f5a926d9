"""Token trees: exact by taking every branch, children drawn or chosen; a chain is a tree of one child."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import sampling.verify.distributions
import sampling.verify.rules
from sampling.types import Budget, Draft, DraftTree, Rows, Rule, Sampler
from sampling.verify.distributions import prefixes_of
from sampling.verify.rules import Examined, Keys, verify
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.branching import softmax
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.runs import crossed, decode, enumeration_error, sample_counts, sampler, steps
from tests.support.toys import LawDrafter, TableLM, TreeDrafter

CAUGHT = 1e-3
HOPELESS = 1e-6
DRAFTER = TableLM(3, seed=9)
SHAPES = [(2,), (3,), (2, 1), (1, 2), (2, 2)]


def error_of(
    make: Callable[[], TreeDrafter], gamma: int, drafts: str = "law", length: int = 4, **options: object
) -> float:
    return enumeration_error(
        sure_start(3, 1), make, prompt=PROMPT, length=length, gamma=gamma, drafts=drafts, **options
    )


@pytest.mark.parametrize(
    ("widths", "holes"), crossed([*SHAPES, (3, 2), (3, 3), (2, 2, 1), (1, 1, 2), (2, 2, 2)], [False, True])
)
def test_trees_of_point_masses_are_exact(widths: tuple[int, ...], holes: bool) -> None:
    assert error_of(lambda: TreeDrafter(DRAFTER, widths, holes=holes), len(widths), "greedy", len(widths) + 2) < EXACT


@pytest.mark.parametrize(("widths", "replacing"), crossed(SHAPES, [False, True]))
def test_trees_of_drawn_children_are_exact(widths: tuple[int, ...], replacing: bool) -> None:
    law = NaiveLaw(top_k=2) if len(widths) > 1 else NaiveLaw()  # two of three tokens: fewer forks
    make = lambda: TreeDrafter(DRAFTER, widths, replacing=replacing)  # noqa: E731
    assert error_of(make, len(widths), length=len(widths) + 2, law=law) < EXACT


@pytest.mark.parametrize(
    ("widths", "length", "top_k"), [((2, 1, 1), 4, 2), ((1, 2, 1), 4, 2), ((1, 1, 2), 5, 2), ((3, 1), 3, 0)]
)
def test_deep_trees_of_drawn_children_are_exact(widths: tuple[int, ...], length: int, top_k: int) -> None:
    """Three levels where two of three tokens are possible, two levels with three children."""
    assert error_of(lambda: TreeDrafter(DRAFTER, widths), len(widths), length=length, law=NaiveLaw(top_k=top_k)) < EXACT


@pytest.mark.parametrize("stop", [{0}, {1, 2}])
@pytest.mark.parametrize("drafts", ["law", "greedy"])
def test_a_stop_inside_a_tree_ends_the_row(drafts: str, stop: set[int]) -> None:
    assert error_of(lambda: TreeDrafter(DRAFTER, (2, 1)), 2, drafts, stop=stop) < EXACT


def test_rules_that_look_back_see_the_path_to_each_node() -> None:
    assert (
        error_of(lambda: TreeDrafter(DRAFTER, (2, 1)), 2, law=NaiveLaw(1.3, repetition_penalty=1.6, no_repeat_ngram=2))
        < EXACT
    )


# -- mistakes that must be caught ---------------------------------------------------------------


@pytest.mark.parametrize("widths", [(2,), (2, 1), (1, 2), (1, 1, 2)])
def test_drawing_from_the_full_law_after_a_refused_sibling_is_caught(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the siblings stand. The chains in these trees are judged rightly: only what has siblings is wrong."""
    right = sampling.verify.rules.examine_drawn

    def judged(p: Tensor, laws: list[Tensor], *rest: Any) -> Examined:
        with monkeypatch.context() as wrong:
            if len(laws) > 1 and bool((rest[0][:, 1] >= 0).any()):
                wrong.setattr(sampling.verify.rules, "residual", lambda p, q: p)
            return right(p, laws, *rest)

    monkeypatch.setattr(sampling.verify.rules, "examine_drawn", judged)
    law = NaiveLaw(top_k=2) if len(widths) > 1 else softmax
    assert error_of(lambda: TreeDrafter(DRAFTER, widths), len(widths), length=len(widths) + 2, law=law) > CAUGHT


def test_a_law_that_siblings_were_not_drawn_from_is_caught() -> None:
    assert error_of(lambda: TreeDrafter(DRAFTER, (2,), wrong_laws=True), 1) > CAUGHT


# -- a chain as a tree ----------------------------------------------------------------------------


def random_draft(seed: int, rows: int, count: int, vocab: int, laws: bool) -> tuple[Tensor, Draft, Rows, Keys]:
    noise = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, count + 1, vocab, generator=noise)
    q = torch.softmax(2 * torch.randn(rows, count, vocab, generator=noise), dim=-1)
    tokens = torch.multinomial(q.reshape(-1, vocab), 1, generator=noise).reshape(rows, count)
    lengths = torch.randint(0, count + 1, (rows,), generator=noise).tolist()
    lengths[0] = count
    chains = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    return (
        logits,
        Draft.of(chains, q if laws else None),
        [[1] * 7 for _ in range(rows)],
        [(row, 7) for row in range(rows)],
    )


@given(seed=st.integers(0, 10_000), laws=st.booleans(), temperature=st.sampled_from([0.0, 0.7, 1.0]))
@settings(max_examples=60, deadline=None)
def test_a_tree_that_is_a_chain_has_the_chains_verdict(seed: int, laws: bool, temperature: float) -> None:
    logits, draft, rows, keys = random_draft(seed, 5, 4, 6, laws and temperature > 0)
    drawing = lambda: sampler(temperature, seed)  # noqa: E731
    rule = Rule.POINT if draft.probs is None else Rule.DRAWN
    chain = verify(logits, draft, rows, keys, drawing(), rule)
    trees = [DraftTree.of(tokens, list(range(-1, len(tokens) - 1))) for tokens in draft.tokens]
    tree = verify(logits, replace(draft, trees=trees), rows, keys, drawing(), rule)
    assert (chain.path, chain.token) == (tree.path, tree.token)
    assert torch.equal(chain.distributions.all(), tree.distributions.all())


@pytest.mark.parametrize("drafts", ["law", "greedy"])
def test_a_drafter_that_calls_its_chains_trees_decodes_as_it_does_with_chains(drafts: Any) -> None:
    """Bit for bit: every round of both, through the real noise."""

    class Treelike(LawDrafter):
        def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
            draft = super().propose(rows, budget, sampler)
            return replace(
                draft, trees=[DraftTree.of(tokens, list(range(-1, len(tokens) - 1))) for tokens in draft.tokens]
            )

    target, drafter, prompts = TableLM(8, seed=21), TableLM(8, seed=22), [[0, 1], [2, 3, 4]]
    accepted = 0
    for seed in range(5):
        runs = []
        for kind in (LawDrafter, Treelike):
            drawing = sampler(0.9, seed, draft_sampling=drafts, top_p=0.95)
            events = decode(target, prompts, kind(drafter, least_top=0.2), drawing, length=25, gamma=4)
            runs.append([(one.drafted, one.path, one.token) for row in (0, 1) for one in steps(events, row)])
        assert runs[0] == runs[1]
        accepted += sum(len(path) for _, path, _ in runs[0])
    assert accepted > 20


def test_children_depths_and_prefixes_by_hand() -> None:
    draft = Draft.of([[10, 11, 12, 13, 14]], parents=[-1, 0, -1, 0, 1])
    (tree,), chain = draft.trees, DraftTree.of([7, 8])
    assert tree.children == [[0, 2], [1, 3], [4], [], [], []]
    assert tree.depths == [1, 2, 1, 2, 3]
    assert not tree.is_chain
    assert chain.children == [[0], [1], []]
    assert (chain.depths, chain.parents, chain.is_chain) == ([1, 2], [-1, 0], True)
    assert prefixes_of([[5]], draft) == [[5], [5, 10], [5, 10, 11], [5, 12], [5, 10, 13], [5, 10, 11, 14]]


# -- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "early"), crossed([1, 2, 3], [0.55, 0.0]))
def test_blocks_are_exact(gamma: int, early: float) -> None:
    law = NaiveLaw(top_k=2) if gamma == 3 else NaiveLaw()
    make = lambda: LawDrafter(DRAFTER, least_top=early, rule=Rule.BLOCK)  # noqa: E731
    assert enumeration_error(sure_start(3, 1), make, prompt=PROMPT, length=gamma + 2, gamma=gamma, law=law) < EXACT


def test_a_block_drawn_from_the_plain_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """norm((p − q)⁺) where norm((rp − q)⁺) belongs."""
    import sampling.verify.rules

    real = sampling.verify.rules.carried

    def judged_wrongly(law: Tensor, q: Tensor, tokens: Tensor, present: Tensor) -> Tensor:
        carried = real(law, q, tokens, present)
        carried[:, 1:-1] = 1.0
        return carried

    monkeypatch.setattr(sampling.verify.rules, "carried", judged_wrongly)
    make = lambda: LawDrafter(DRAFTER, rule=Rule.BLOCK)  # noqa: E731
    assert enumeration_error(sure_start(3, 1), make, prompt=PROMPT, length=4, gamma=2) > CAUGHT


def counted(near: float, count: int, rule: Rule) -> Tensor:
    """Tokens accepted in each of 20,000 rounds [R]; the share `near` of a draft's distribution is the target's own."""
    logits, draft, rows, keys = random_draft(5, 20_000, count, 8, True)
    assert draft.probs is not None
    law = near * torch.softmax(logits[:, :-1], dim=-1) + (1 - near) * draft.probs
    noise = torch.Generator().manual_seed(6)
    tokens = torch.multinomial(law.reshape(-1, 8), 1, generator=noise).reshape(law.shape[:2]).tolist()
    draft = Draft.of([row[: len(old)] for row, old in zip(tokens, draft.tokens, strict=True)], law)
    return torch.tensor(list(map(len, verify(logits, draft, rows, keys, sampler(1.0, 3), rule).path)))


@pytest.mark.parametrize(("near", "count"), crossed([0.0, 0.5, 0.9], [2, 4]))
def test_blocks_accept_at_least_as_many(count: int, near: float) -> None:
    """20,000 rounds, the same drafts and the same noise: more by two standard errors of the paired difference."""
    more = (counted(near, count, Rule.BLOCK) - counted(near, count, Rule.DRAWN)).double()
    assert float(more.mean()) > 2 * float(more.std()) / len(more) ** 0.5


def test_a_block_of_one_and_a_block_of_the_targets_own_drafts_are_judged_as_tokens_are() -> None:
    """Round by round: of one draft the chance is the same, of drafts drawn from p all are accepted."""
    assert torch.equal(counted(0.3, 1, Rule.BLOCK), counted(0.3, 1, Rule.DRAWN))
    assert torch.equal(counted(1.0, 3, Rule.BLOCK), counted(1.0, 3, Rule.DRAWN))


@pytest.mark.parametrize("way", ["block", "tree"])
def test_chi_square_through_the_real_noise(way: str) -> None:
    target, drafter = TableLM(8, seed=21), TableLM(8, seed=22)

    def make() -> LawDrafter:
        return LawDrafter(drafter, rule=Rule.BLOCK) if way == "block" else TreeDrafter(drafter, (2, 2))

    counts = sample_counts(target, make, partial(sampler, 1.0), prompt=[0, 1], length=3, gamma=2, samples=4_000)
    assert chi_square_p(counts, exact_law(target, [0, 1], softmax, 3)) > HOPELESS
