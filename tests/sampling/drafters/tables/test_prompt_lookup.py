"""The tables drafter: which continuation it follows, how it keeps its index, and that output stays the target's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.drafters.tables.prompt_lookup import MATCH, TABLES, MatchIndex, TablesDrafter
from sampling.drafters.tables.table_file import StaticTables
from sampling.sampler import KeyedSampler
from sampling.types import Budget
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.reference import NaiveLaw
from tests.support.runs import answers, decode, enumeration_error, steps
from tests.support.toys import ALONE, TableLM, chain_lm
from training.tables.build import Passage, arrays_of, count_levels
from utils.errors import UserError
from utils.logits_processors import make_processor

NOTHING: Any = None
TOKEN = st.integers(0, 3)


def tables_of(*passages: list[int], max_n: int = 5) -> StaticTables:
    """Tables counted from these sequences."""
    return StaticTables({}, [arrays_of(level) for level in count_levels([Passage(ids) for ids in passages], max_n)])


def drafted(drafter: TablesDrafter, row: list[int], want: int = 4) -> list[tuple[int, int]]:
    """(token, source) of one row's chain."""
    drafter.start([row], ALONE, ALONE)
    draft = drafter.propose([row], Budget([want]), NOTHING)
    assert draft.probs is None
    assert draft.source is not None
    return list(zip(draft.tokens[0].tolist(), draft.source[0].tolist(), strict=True))


# -- which continuation ---------------------------------------------------------------------------


def test_the_longest_known_context_wins_and_unknown_ones_back_off() -> None:
    tables = tables_of([1, 2, 3, 4], [9, 2, 3, 5], [8, 3, 6], [7, 3, 6], [0, 3, 6])
    assert [tables.next(tail).token for tail in ([1, 2, 3], [9, 2, 3], [8, 3], [3])] == [4, 5, 6, 6]  # type: ignore[union-attr]
    assert tables.next([1, 2, 3]).size == 3  # type: ignore[union-attr]
    assert tables.next([50, 60, 3]).size == 1  # type: ignore[union-attr]
    assert tables.next([50]) is None
    assert tables.next([]) is None


def test_a_tie_goes_to_what_follows_the_shorter_context_more_often() -> None:
    tables = tables_of([1, 2, 3], [1, 2, 4], [7, 2, 4])
    assert tables.next([1, 2]).token == 4  # type: ignore[union-attr]


def test_confidence_rises_with_sightings_and_falls_with_dissent() -> None:
    often, once = tables_of(*[[1, 2]] * 9, [5, 6]), tables_of([1, 2], [5, 6])
    split = tables_of(*[[1, 2]] * 9, *[[1, 3]] * 9, [5, 6])
    chance = [tables.next([1]).confidence for tables in (often, once, split)]  # type: ignore[union-attr]
    assert chance[0] > chance[1]
    assert chance[0] > chance[2]
    assert all(0 < one <= 1 for one in chance)


def test_a_sure_match_comes_before_the_tables_and_a_match_of_one_behind_them() -> None:
    tables = tables_of(*[[1, 2, 30]] * 20, *[[5, 31]] * 20)
    drafter = TablesDrafter(tables, least=0)
    assert drafted(drafter, [1, 2, 3, 0, 1, 2], 1) == [(3, MATCH)]  # two tokens match
    assert drafted(drafter, [4, 2, 3, 0, 1, 2], 1) == [(30, TABLES)]  # one token does: a context of two is known
    assert drafted(drafter, [5, 3, 0, 5], 1) == [(3, MATCH)]  # one token does, only the bigram is known
    assert drafted(drafter, [3, 0, 5], 1) == [(31, TABLES)]  # no match


def test_the_longest_and_then_the_latest_match_is_followed() -> None:
    drafter = TablesDrafter(None, least=0)
    assert drafted(drafter, [1, 2, 3, 9, 2, 4, 1, 2], 1) == [(3, MATCH)]
    assert drafted(drafter, [2, 3, 7, 2, 4, 8, 2], 1) == [(4, MATCH)]


def test_a_chain_goes_on_over_its_own_tokens_and_ends_at_the_unknown() -> None:
    tables = tables_of([1, 2, 3, 4])
    assert drafted(TablesDrafter(tables, least=0), [9, 1], 8) == [(2, TABLES), (3, TABLES), (4, TABLES)]
    assert drafted(TablesDrafter(tables, least=0), [7, 8], 8) == []
    mixed = TablesDrafter(tables_of([3, 4, 20, 21]), least=0)
    assert drafted(mixed, [1, 2, 3, 4, 1, 2], 4) == [(3, MATCH), (4, MATCH), (1, MATCH), (2, MATCH)]
    assert drafted(mixed, [0, 3, 4], 4) == [(20, TABLES), (21, TABLES)]


def test_a_weak_chain_is_cut_before_the_token_that_weakens_it() -> None:
    tables = tables_of(*[[1, 2]] * 50, *[[2, token] for token in range(10, 40)])
    whole, cut = drafted(TablesDrafter(tables, least=0), [1]), drafted(TablesDrafter(tables, least=0.3), [1])
    assert cut == whole[:1]
    assert drafted(TablesDrafter(tables, least=1), [1]) == []


def test_chances_are_those_of_the_first_tokens_that_would_be_drafted() -> None:
    tables = tables_of(*[[1, 2, 3]] * 4, [1, 5], [1, 6], [1, 7])
    drafter, known = TablesDrafter(tables, least=0.1), tables.next([1])
    assert known is not None
    rows = [[1], [9], [4, 8, 4, 8]]
    drafter.start(rows, ALONE, ALONE)
    chances = drafter.confidence(rows)
    assert chances[0] == pytest.approx(known.confidence)
    assert chances[1] == 0.0
    assert chances[2] > 0.0
    sure = TablesDrafter(tables, least=known.confidence + 0.01)
    sure.start([[1]], ALONE, ALONE)
    assert sure.confidence([[1]]) == [0.0]


@pytest.mark.parametrize("wrong", [{"least": -0.1}, {"least": 1.1}, {"longest": 6}, {"longest": -1}])
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        TablesDrafter(None, **wrong)


# -- the index of the conversation ----------------------------------------------------------------


def naive(row: list[int], tail: list[int], longest: int) -> tuple[int, int] | None:
    """The oracle: scan backwards for every length."""
    found = (naive_of_size(row, tail, size) for size in range(min(longest, len(tail)), 0, -1))
    return next((one for one in found if one is not None), None)


def naive_of_size(row: list[int], tail: list[int], size: int) -> tuple[int, int] | None:
    for end in range(len(row) - 1, size - 1, -1):
        if row[end - size : end] == tail[-size:]:
            return size, row[end]
    return None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=7), max_size=6), st.lists(st.integers(0, 3), max_size=4), st.data()
)
def test_the_growing_index_equals_a_rescan(pieces: list[list[int]], ahead: list[int], data: st.DataObject) -> None:
    """Also of a row that goes back any way, as one with uncommitted drafts does, and of a copy."""
    index, row = MatchIndex(), []
    for piece in pieces:
        row = row[: data.draw(st.integers(0, len(row)), label="shared")] + piece
        index.follow(row)
        tail = [*row, *ahead]
        assert index.next(tail) == naive(row, tail, 5)
        for size in range(1, min(5, len(tail)) + 1):
            assert next(index.every(tail, size, size), None) == naive_of_size(row, tail, size)
        twin = deepcopy(index)
        index.follow([*row, 9, 9])
        assert twin.next(tail) == naive(row, tail, 5)


def test_ragged_rows_are_drafted_each_on_its_own() -> None:
    rows = [[1, 2, 3, 1, 2], [9], [5, 6, 5, 6, 5]]
    drafter = TablesDrafter(tables_of([9, 8]), least=0)
    drafter.start(rows, ALONE, ALONE)
    draft = drafter.propose(rows, Budget([2, 4, 0]), NOTHING)
    assert draft.tokens.tolist() == [[3, 1], [8, -1], [-1, -1]]
    assert draft.source is not None
    assert draft.source.tolist() == [[MATCH, MATCH], [TABLES, 0], [0, 0]]
    assert drafter.propose(rows, Budget([0, 0, 0]), NOTHING).tokens.shape == (3, 0)


def test_selected_rows_keep_their_index_and_repeated_ones_part_ways() -> None:
    drafter = TablesDrafter(None, least=0)
    drafter.start([[1, 2, 1], [3, 4, 3]], ALONE, ALONE)
    drafter.select(torch.tensor([1, 1, 0]))
    rows = [[3, 4, 3, 5, 3], [3, 4, 3, 6, 3], [1, 2, 1]]
    for _ in range(2):
        assert drafter.propose(rows, Budget([1, 1, 1]), NOTHING).tokens.tolist() == [[5], [6], [2]]
    drafter.select(torch.tensor([2]))
    assert drafter.propose([[1, 2, 1]], Budget([1]), NOTHING).tokens.tolist() == [[2]]


def test_steps_tell_who_proposed_what_in_every_row() -> None:
    lm = chain_lm(40, [1, 2], [3, 1, 2, 3, 1, 2, 3])
    drafter = TablesDrafter(tables_of(*[[3, 1]] * 50), least=0)
    rounds = steps(decode(lm, [[1, 2]], drafter, KeyedSampler(make_processor(0.0)), length=7, gamma=2))
    told = {drafter.traits.names[source] for step in rounds for source in step.source}
    assert told == {"match", "tables"}


# -- the output is the target's -------------------------------------------------------------------

MAKERS = {
    "matches": lambda: TablesDrafter(None, least=0),
    "tables": lambda: TablesDrafter(tables_of([0, 1, 2, 0, 2, 1, 1, 0]), longest=0, least=0),
    "both": lambda: TablesDrafter(tables_of([2, 0, 1, 2, 2, 0]), least=0),
    "both, cut": lambda: TablesDrafter(tables_of([2, 0, 1, 2, 2, 0]), least=0.2),
}


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_exact_law_is_the_targets(name: str, drafts: str) -> None:
    error = enumeration_error(sure_start(3, 1), MAKERS[name], prompt=PROMPT, length=4, gamma=2, drafts=drafts)
    assert error < EXACT


@pytest.mark.parametrize("law", [NaiveLaw(temperature=0), NaiveLaw(top_k=2), NaiveLaw(temperature=1.7, top_p=0.8)])
def test_the_exact_law_is_the_targets_under_processors_and_stops(law: NaiveLaw) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "length": 4, "gamma": 2, "law": law}
    assert enumeration_error(sure_start(3, 4), MAKERS["both"], **options) < EXACT
    assert enumeration_error(sure_start(3, 5), MAKERS["both"], **options, stop={1}) < EXACT


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_and_noise_are_plain_decodings(temperature: float, gamma: int) -> None:
    lm, prompt = TableLM(8, seed=3, sharpness=4.0), [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
    known = tables_of(answers(lm, [[7]], None, KeyedSampler(make_processor(0.0)), length=40)[0])

    def sampler() -> KeyedSampler:
        return KeyedSampler(make_processor(temperature), 11)

    plain = answers(lm, prompt, None, sampler(), length=40, stop={0})
    before = lm.passes
    assert answers(lm, prompt, TablesDrafter(known, least=0), sampler(), length=40, gamma=gamma, stop={0}) == plain
    assert lm.passes - before < max(map(len, plain))  # drafts were accepted
