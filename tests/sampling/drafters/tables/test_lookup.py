"""Look-ups as a drafter: which continuation they follow, the growing index, recalled tokens, and shared noise."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from app.lanes.drafters import PairDrafters
from app.settings.table import Settings
from sampling.drafters import proposal
from sampling.drafters.draft_model import ModelSource, NoDrafter
from sampling.drafters.proposal import AFTER_DRAFTED, AFTER_DRAFTED_WORTH, Node
from sampling.drafters.tables import lookup
from sampling.drafters.tables.lookup import (
    CHANCE,
    LookupDrafter,
    Recalled,
    TextSoFar,
    likeliest_tokens,
)
from sampling.drafters.tables.table_file import StaticTables
from sampling.gamma.ratios import Ratios
from sampling.sampler import MEAN, KeyedSampler
from sampling.types import Budget, Draft, Drafter, Rows, Verdict
from tests.support.runs import answers, decode, drafting, emitted, sampler, steps
from tests.support.toys import ALONE, Given, TableLM, chain_lm, parents_of
from training.tables.build import Passage, arrays_of, count_levels

SAMPLER = sampler()
TOKEN = st.integers(0, 3)
AGAIN = [1, 2, 3, 1, 2, 4, 1, 2]


def tables_of(*passages: list[int], max_n: int = 5) -> StaticTables:
    """Tables counted from these sequences."""
    return StaticTables({}, [arrays_of(level) for level in count_levels([Passage(ids) for ids in passages], max_n)])


def proposed(drafter: Drafter, rows: Rows, want: int, drawing: KeyedSampler = SAMPLER) -> Draft:
    drafter.start(rows, ALONE, ALONE)
    return drafter.propose(rows, Budget([want] * len(rows)), drafting(drawing, rows))


def named(drafter: Drafter, draft: Draft) -> list[tuple[int, str]]:
    """(token, source) of each node of the first row."""
    assert draft.probs is None
    (tree, *_) = draft.trees
    return [(token, drafter.traits.names[source]) for token, source in zip(tree.tokens, tree.source, strict=True)]


def drafted(drafter: Drafter, row: list[int], want: int = 4) -> list[tuple[int, str]]:
    return named(drafter, proposed(drafter, [row], want))


# -- which continuation ---------------------------------------------------------------------------


def test_the_longest_known_context_wins_and_unknown_ones_back_off() -> None:
    tables = tables_of([1, 2, 3, 4], [9, 2, 3, 5], [8, 3, 6], [7, 3, 6], [0, 3, 6])
    assert [next(tables.entries(tail))[1] for tail in ([1, 2, 3], [9, 2, 3], [8, 3], [3])] == [4, 5, 6, 6]
    assert next(tables.entries([1, 2, 3]))[0] == 3
    assert next(tables.entries([50, 60, 3]))[0] == 1
    assert not list(tables.entries([50]))
    assert not list(tables.entries([]))


def test_a_tie_goes_to_what_follows_the_shorter_context_more_often() -> None:
    assert next(tables_of([1, 2, 3], [1, 2, 4], [7, 2, 4]).entries([1, 2]))[1] == 4


def test_confidence_rises_with_sightings_and_falls_with_dissent() -> None:
    often, once = tables_of(*[[1, 2]] * 9, [5, 6]), tables_of([1, 2], [5, 6])
    split = tables_of(*[[1, 2]] * 9, *[[1, 3]] * 9, [5, 6])
    chance = [next(tables.entries([1]))[2] for tables in (often, once, split)]
    assert chance[0] > chance[1]
    assert chance[0] > chance[2]
    assert all(0 < one <= 1 for one in chance)


def test_the_likeliest_offer_is_followed() -> None:
    """Matches of one and two tokens hold with .17 and .42; what the tables say is counted."""
    tables = tables_of(*[[1, 2, 30]] * 4, *[[8, 5, token] for token in range(31, 37)])
    known = {context[-1]: next(tables.entries(context))[2] for context in ([1, 2], [8, 5])}
    assert known[5] < CHANCE[1] < CHANCE[2] < known[2] < CHANCE[5]
    drafter = LookupDrafter(tables, least=0)
    assert drafted(drafter, [1, 2, 3, 0, 1, 2], 1) == [(30, "tables")]
    assert drafted(drafter, [8, 5, 3, 0, 8, 5], 1) == [(3, "match")]
    assert drafted(drafter, [7, 7, 7, 1, 2, 3, 7, 7, 7, 1, 2], 1) == [(3, "match")]
    assert drafted(drafter, [3, 0, 1, 2], 1) == [(30, "tables")]
    assert drafted(LookupDrafter(tables, matches=False), [7, 7, 7, 1, 2, 3, 7, 7, 7, 1, 2], 1) == [(30, "tables")]


def test_the_longest_and_then_the_latest_match_is_followed() -> None:
    drafter = LookupDrafter(least=0)
    assert drafted(drafter, [1, 2, 3, 9, 2, 4, 1, 2], 1) == [(3, "match")]
    assert drafted(drafter, [2, 3, 7, 2, 4, 8, 2], 1) == [(4, "match")]


def test_a_chain_goes_on_over_its_own_tokens_and_ends_at_the_unknown() -> None:
    known = LookupDrafter(tables_of([1, 2, 3, 4]), least=0)
    assert drafted(known, [9, 1], 8) == [(2, "tables"), (3, "tables"), (4, "tables")]
    assert drafted(known, [7, 8], 8) == []
    mixed = LookupDrafter(tables_of([3, 4, 20, 21]), least=0)
    assert drafted(mixed, [1, 2, 3, 4, 1, 2], 4) == [(token, "match") for token in (3, 4, 1, 2)]
    assert drafted(mixed, [0, 3, 4], 4) == [(20, "tables"), (21, "tables")]


def test_a_chain_ends_before_the_token_that_makes_it_unlikely() -> None:
    tables = tables_of(*[[1, 2]] * 50, *[[2, token] for token in range(10, 40)])
    whole, cut = (drafted(LookupDrafter(tables, least=least), [1]) for least in (0, 0.3))
    assert cut == whole[:1]
    assert drafted(LookupDrafter(tables, least=1), [1]) == []


def test_a_tree_of_matches_by_hand() -> None:
    """1 2 was followed by 3 (.42), then matches grow longer: 9 (.5), 7 (.7), 2 and 5 (.85 each). Of each of these
    .85 is hoped for, .0554 in all. 2 alone was last followed by 5: .17 of the .58 left at the root, .0986.
    """
    draft = proposed(drafter := LookupDrafter(tree=True, least=0.05), [[1, 2, 3, 9, 7, 2, 5, 1, 2]], 6)
    assert named(drafter, draft) == [(token, "match") for token in (3, 9, 7, 5, 2, 5)]
    assert parents_of(draft) == [-1, 0, 1, -1, 2, 4]
    assert CHANCE == (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
    assert drafted(LookupDrafter(tree=True), [1, 2, 3], 8) == []  # nothing is known


@pytest.mark.parametrize("tree", [False, True])
def test_what_comes_behind_drafted_tokens_is_learned_where_they_were_accepted(tree: bool) -> None:
    row, ratios = [1, 2, 3, 9, 7, 2, 5, 1, 2], Ratios()
    drafter = LookupDrafter(tree=tree, least=0.05, ratios=ratios)

    def after(path: list[int], other: Draft | None = None) -> float:
        draft = proposed(drafter, [row], 3)  # 3, 9, 7
        drafter.observe([row], other or draft, Verdict([path], [0], Given(torch.ones(1, 4, 4)), torch.ones(1, 4, 4)))
        return ratios.of("further", AFTER_DRAFTED, AFTER_DRAFTED_WORTH).value

    begun, refused, taken, nothing, theirs = (
        AFTER_DRAFTED,
        after([0]),
        after([0, 1, 2]),
        after([]),
        after([0], Draft.of([[3, 9, 8]])),
    )
    assert refused < begun < taken  # 9 was refused, then 9 and 7 were taken
    assert taken == nothing == theirs  # nothing is known of what comes behind it, nor from somebody else's draft


# -- the index of the conversation ----------------------------------------------------------------


def naive(row: list[int], tail: list[int], longest: int = 5) -> list[tuple[int, int]]:
    """The oracle: scan backwards for every length."""
    return [
        (size, row[end])
        for size in range(min(longest, len(tail)), 0, -1)
        for end in [
            next((end for end in range(len(row) - 1, size - 1, -1) if row[end - size : end] == tail[-size:]), 0)
        ]
        if end
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(TOKEN, max_size=7), max_size=6), st.lists(TOKEN, max_size=4), st.data())
def test_the_growing_index_equals_a_rescan(pieces: list[list[int]], ahead: list[int], data: st.DataObject) -> None:
    """Also of a row that goes back any way, as one with uncommitted drafts does, and of a copy."""
    index, row = TextSoFar(), []
    for piece in pieces:
        row = row[: data.draw(st.integers(0, len(row)), label="shared")] + piece
        index.follow(row)
        tail = [*row, *ahead]
        assert index.matches(tail) == naive(row, tail)
        twin = deepcopy(index)
        index.follow([*row, 9, 9])
        assert twin.matches(tail) == naive(row, tail)


def test_ragged_rows_are_drafted_each_on_its_own() -> None:
    rows = [[1, 2, 3, 1, 2], [9], [5, 6, 5, 6, 5]]
    drafter = LookupDrafter(tables_of([9, 8]), least=0)
    drafter.start(rows, ALONE, ALONE)
    draft = drafter.propose(rows, Budget([2, 4, 0]), SAMPLER)
    assert draft.tokens == [[3, 1], [8], []]
    assert [tree.source for tree in draft.trees] == [[0, 0], [1], []]
    assert drafter.propose(rows, Budget([0, 0, 0]), SAMPLER).tokens == [[], [], []]


def test_steps_tell_who_proposed_what_in_every_row() -> None:
    lm = chain_lm(40, [1, 2], [3, 1, 2, 3, 1, 2, 3])
    drafter = LookupDrafter(tables_of(*[[3, 1]] * 50), least=0)
    rounds = steps(decode(lm, [[1, 2]], drafter, SAMPLER, length=7, gamma=2))
    assert {drafter.traits.names[source] for step in rounds for source in step.source} == {"match", "tables"}


# -- what is recalled ------------------------------------------------------------------------------


def test_a_law_that_leaves_no_choice_is_not_kept() -> None:
    known, laws = Recalled(), torch.eye(6)[None, :1]
    known.learn([7], likeliest_tokens(Verdict([[]], [0], Given(laws), laws.log()), [-1]))
    assert known.offers(Node(0, [7])) == []


def accepted(make: Callable[[], Drafter], model: TableLM) -> tuple[int, int]:
    """Accepted and drafted nodes of some sampled answers."""
    runs = [decode(model, [[1, 2]], make(), sampler(1.0, seed), length=150, gamma=4) for seed in range(8)]
    rounds = [step for run in runs for step in steps(run)]
    return sum(len(step.path) for step in rounds), sum(len(step.drafted) for step in rounds)


def growing(**how: Any) -> LookupDrafter:
    return LookupDrafter(tree=True, least=0.0, **how)


def test_more_is_accepted_of_what_is_recalled() -> None:
    model = TableLM(12, seed=4, sharpness=1.5)
    assert accepted(lambda: growing(recall=True), model)[0] > 1.1 * accepted(growing, model)[0]


def test_the_default_pairs_tables_recall_and_matches_alone_do_not(default_pair: Any) -> None:
    from app.lanes.lane import PairEngine

    made: PairDrafters = PairEngine(default_pair).drafters
    found = {kind: made.make(kind, Settings(gamma="auto")) for kind in ("tables", "match", "static")}
    assert {one.traits.tree for one in found.values()} == {True}
    assert {kind: one.traits.names for kind, one in found.items()} == {
        "tables": ("match", "tables", "recalled"),
        "match": ("match",),
        "static": ("tables",),
    }


# -- the noise that is told is the noise that decides ----------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.6])
def test_logits_and_noise_together_say_what_is_drawn(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = list(range(40))
    for position in range(60):
        logits = torch.randn(1, 40, generator=generator) * 2
        drawing = sampler(temperature, seed=position)
        drawn = drawing.draw(drawing.probs(logits, []), torch.tensor([[3, position]]))
        told = temperature * torch.tensor(drafting(drawing, [[1]]).noise(3, position, ids))
        assert int(drawn) == int((logits[0].log_softmax(-1) + told).argmax())


def test_it_is_gumbels_whatever_the_temperature() -> None:
    many = sampler(0.8).noise(0, 5, range(20_000))
    assert stats.kstest(many, "gumbel_r").pvalue > 1e-3
    assert abs(sum(many) / len(many) - MEAN) < 0.025
    assert abs(stats.tstd(many) - math.pi / math.sqrt(6)) < 0.025
    assert sampler(1.6).noise(0, 5, [7]) == sampler(0.8).noise(0, 5, [7])
    assert sampler(0.0).noise(0, 5, [7, 8]) == [0.0, 0.0]


@pytest.mark.parametrize("drawing", [sampler(0.0), sampler(0.7)])
def test_without_noise_nothing_changes(drawing: KeyedSampler) -> None:
    plain, same = (
        proposed(growing(shared_noise=peek), [AGAIN], 6, drawing) for peek in (False, drawing.processor.greedy)
    )
    assert plain.tokens == same.tokens


def test_rows_keep_their_noise_when_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "at_hand", lambda: False)  # compiled calls make the noise themselves
    noise = Mock(side_effect=lambda key, position, ids: [0.0] * len(ids))
    monkeypatch.setattr(proposal, "gumbel", noise)
    made = growing(shared_noise=True)
    made.start([AGAIN, [5, 6, 5], AGAIN], ALONE, ALONE)
    made.select(torch.tensor([2]))
    facts = {"greedy": False, "constraint": None, "banned": frozenset[int]()}
    made.propose([AGAIN], Budget([3]), Mock(**facts, noise_key=lambda row: (row, 1.0)))  # its key is the row's number
    assert [*dict.fromkeys(call.args[:2] for call in noise.call_args_list)] == [
        (2, len(AGAIN) + depth) for depth in range(3)
    ]


def test_guesses_get_better_by_the_noise() -> None:
    """Of equally many drafts more are accepted: the noise tells which of the likely tokens it will be."""
    model = TableLM(4, seed=4, sharpness=1.0)
    (peeked, of), (plain, others) = (accepted(lambda: growing(shared_noise=peek), model) for peek in (True, False))  # noqa: B023
    assert peeked / of > 1.1 * plain / others


@pytest.mark.parametrize("joint", [False, True])
def test_any_temperature_can_be_peeked_at(joint: bool) -> None:
    """Noise in a logit is as large as the temperature: e to the power of it is no number at some thousands."""
    made = growing(shared_noise=True, model=ModelSource(TableLM(12, seed=1)) if joint else None)
    alone = answers(TableLM(12), [AGAIN], NoDrafter(), sampler(1e5, 1), length=20)
    assert emitted(decode(TableLM(12), [AGAIN], made, sampler(1e5, 1), length=20, gamma=4)) == alone
