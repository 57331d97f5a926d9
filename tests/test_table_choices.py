"""Tables with several next tokens of a context: counted, pruned, written, read back and drafted as siblings."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.drafters.table_file import StaticTables
from sampling.drafters.table_tree import TableTreeDrafter
from sampling.drafters.tables import TablesDrafter
from sampling.sampler import KeyedSampler
from training.ngram_counts import LEAST, PRIOR, Passage, count_levels
from training.tables import build
from utils.logits_processors import make_processor

SAMPLER = KeyedSampler(make_processor(0.0))
# behind 1: 2 three times, 3 twice, 4 once; behind 0 1: 2 three times, 3 once
CORPUS = [Passage([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 3, 5, 1, 3, 6, 1, 4])]


def opened(folder: Path, choices: int, corpus: list[Passage] = CORPUS, max_mb: float = 1.0) -> StaticTables:
    build(corpus, folder / "t.bin", vocab_size=64, fingerprint=None, source="", choices=choices, max_mb=max_mb, max_n=3)
    return StaticTables.open(folder / "t.bin")


def test_a_context_has_its_likeliest_tokens_in_falling_order(tmp_path: Path) -> None:
    tables = opened(tmp_path, 3)
    bigram = [(one.token, one.size) for one in tables.every([9, 1], most=4)]
    assert bigram == [(2, 1), (3, 1), (4, 1)]
    assert [one.token for one in tables.every([0, 1], most=2)] == [2, 3, 2, 3]
    confidences = [one.confidence for one in tables.every([9, 1], most=4)]
    assert confidences == sorted(confidences, reverse=True)
    assert [one.token for one in tables.every([9, 1])] == [2]
    assert tables.next([9, 1]) == next(tables.every([9, 1]))


def test_one_choice_is_what_it_was(tmp_path: Path) -> None:
    """A chain drafts the same from a file with more choices: the first entry of a context is the only one of it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, more = opened(tmp_path / "a", 1), opened(tmp_path / "b", 4)
    assert len(more) > len(one)
    for tail in ([1], [0, 1], [5, 1], [2], [3, 6, 1], [8]):
        assert one.next(tail) == more.next(tail)
    drafters = [TablesDrafter(tables, longest=0, least=0.0) for tables in (one, more)]
    for drafter in drafters:
        drafter.start([[0, 1]], None, None)  # type: ignore[arg-type]
    first, second = (drafter.propose([[0, 1]], [5], SAMPLER).tokens.tolist() for drafter in drafters)
    assert first == second != [[]]


@given(ids=st.lists(st.integers(0, 5), min_size=3, max_size=80), most=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_a_plain_count(ids: list[int], most: int) -> None:
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    shares = Counter(ids[1:])
    for before, after in itertools.pairwise(ids):
        seen[before][after] += 1
    level = count_levels([Passage(ids)], 1, most=most)[0]
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for key, token, confidence in zip(level.keys, level.tokens, level.confidence, strict=True):
        found[int(key)].append((int(token), float(confidence)))
    assert set(found) == set(seen)
    for context, counts in seen.items():
        total = sum(counts.values())
        law = {w: (c + PRIOR * shares[w] / (len(ids) - 1)) / (total + PRIOR) for w, c in counts.items()}
        ranked = sorted(law, key=lambda w: (-law[w], w))
        kept = [w for place, w in enumerate(ranked[:most]) if place == 0 or law[w] >= LEAST]
        assert [token for token, _ in found[context]] == kept
        assert [chance for _, chance in found[context]] == pytest.approx([law[w] for w in kept])


def test_pruning_takes_further_choices_before_frequent_contexts(tmp_path: Path) -> None:
    corpus = [Passage([a, b, c] * 6) for a in range(8) for b in range(8, 16) for c in range(16, 24)]
    whole = opened(tmp_path, 3, corpus)
    some = opened(tmp_path, 3, corpus, max_mb=(4096 + 7 * (len(whole) // 2)) / 1e6)
    assert len(some) == len(whole) // 2
    for token in range(24):
        assert some.next([token]) == whole.next([token])


def test_a_tree_has_the_choices_of_a_context_as_siblings(tmp_path: Path) -> None:
    drafter = TableTreeDrafter(opened(tmp_path, 3), least=0.01, longest=0)
    drafter.start([[9, 1]], None, None)  # type: ignore[arg-type]
    draft = drafter.propose([[9, 1]], [8], SAMPLER)
    assert draft.parents is not None
    roots = [
        token for token, parent in zip(draft.tokens[0].tolist(), draft.parents.tolist(), strict=True) if parent < 0
    ]
    assert roots == [2, 3, 4]
