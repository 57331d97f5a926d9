"""Best-first trees of matches and tables: by hand, in falling worth, exact, and never less than the chain brings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.drafters.table_tree import TableTreeDrafter
from sampling.drafters.tables import CHANCE, StaticTables, TablesDrafter
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Rows
from tests.branching import softmax
from tests.reference import NaiveLaw
from tests.runs import answers, enumeration_error
from tests.test_enumeration import EXACT, PROMPT, sure_start
from tests.toys import TableLM
from training.ngram_counts import Passage
from training.tables import build
from utils.logits_processors import make_processor

SAMPLER = KeyedSampler(make_processor(0.0))


def tree(drafter: TablesDrafter, row: list[int], nodes: int) -> tuple[list[int], list[int], Draft]:
    drafter.start([row], None, None)  # type: ignore[arg-type]
    draft = drafter.propose([row], [nodes], SAMPLER)
    tokens = draft.tokens[0].tolist()
    return tokens, list(range(-1, len(tokens) - 1)) if draft.parents is None else draft.parents.tolist(), draft


def test_a_tree_of_matches_by_hand() -> None:
    """1 2 was followed by 3 (.42), then matches grow longer: 9 (.5), 7 (.7), 2 and 5 (.85 each), .106 in all; 2 alone
    was last followed by 5: .17 of the .58 that are left at the root, .0986.
    """
    row = [1, 2, 3, 9, 7, 2, 5, 1, 2]
    tokens, parents, draft = tree(TableTreeDrafter(None, least=0.05), row, 6)
    assert tokens == [3, 9, 7, 2, 5, 5]
    assert parents == [-1, 0, 1, 2, 3, -1]
    assert CHANCE == (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
    assert draft.probs is None
    assert draft.source is not None
    assert draft.source.tolist() == [[0] * len(tokens)]


def test_nothing_known_drafts_nothing() -> None:
    assert tree(TableTreeDrafter(None), [1, 2, 3], 8)[0] == []


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> StaticTables:
    file = Path(tmp_path_factory.mktemp("tables"), "t.bin")
    noise = torch.Generator().manual_seed(1)
    texts = [Passage(torch.randint(0, 6, (60,), generator=noise).tolist(), 0) for _ in range(30)]
    build(texts, file, vocab_size=6, fingerprint=None, source="noise", max_mb=1.0)
    return StaticTables.open(file)


@given(row=st.lists(st.integers(0, 5), min_size=2, max_size=40), nodes=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_nodes_come_best_first_and_siblings_differ(row: list[int], nodes: int, tables: StaticTables) -> None:
    drafter = TableTreeDrafter(tables, least=0.01)
    tokens, parents, _ = tree(drafter, row, nodes)
    assert len(tokens) <= nodes
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
    assert all(parent < node for node, parent in enumerate(parents))
    fewer = tree(drafter, row, max(1, nodes // 2))
    assert tokens[: len(fewer[0])] == fewer[0]  # a smaller tree is the beginning of a larger one
    whole = tree(drafter, row, 1 << 10)
    chain = tree(TablesDrafter(tables, least=0.01), row, 1)[0]
    roots = {token for token, parent in zip(*whole[:2], strict=True) if parent == -1}
    assert set(chain) <= roots  # what a chain would begin with is one of what the tree may begin with


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_trees_of_tables_are_exact(nodes: int) -> None:
    prompt = [*PROMPT, 2, 0, 1, 1, 2, 0, 1, 0]
    target = TableLM(3, seed=1)
    make = lambda: TableTreeDrafter(None, least=0.0)  # noqa: E731
    error = enumeration_error(target, make, prompt=prompt, length=4, gamma=nodes, law=NaiveLaw(top_k=2))
    assert error < EXACT


def test_sampled_text_is_plain_decodings_with_the_same_seed(tables: StaticTables) -> None:
    target, processor = TableLM(6, seed=4), make_processor(0.8, 0, 0.95, 0.0)
    prompt: Rows = [[0, 1, 2, 3, 0, 1]]
    for seed in range(6):
        plain = answers(target, prompt, None, KeyedSampler(processor, seed), length=40)
        drafter = TableTreeDrafter(tables, least=0.0)
        assert answers(target, prompt, drafter, KeyedSampler(processor, seed), length=40, gamma=9) == plain


def test_rows_of_a_batch_get_chains(tables: StaticTables) -> None:
    rows = [[0, 1, 2, 0, 1], [3, 4, 3, 4, 3]]
    one, other = TableTreeDrafter(tables), TablesDrafter(tables)
    for drafter in (one, other):
        drafter.start(rows, None, None)  # type: ignore[arg-type]
    found, wanted = (drafter.propose(rows, [4, 3], SAMPLER) for drafter in (one, other))
    assert found.parents is None
    assert torch.equal(found.tokens, wanted.tokens)


def test_softmax_is_the_targets_law() -> None:
    """An uncertain start, all three tokens."""
    make = lambda: TableTreeDrafter(None, least=0.0)  # noqa: E731
    assert enumeration_error(sure_start(3, 1), make, prompt=PROMPT, length=4, gamma=3, law=softmax) < EXACT
