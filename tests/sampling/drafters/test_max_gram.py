"""Max-gram drafting: which place it copies from, how it goes on behind a short copy, and that it follows any rows."""

import pytest
from hypothesis import given, settings, strategies as st

from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.tables.table_file import StaticTables
from sampling.types import Budget
from tests.sampling.drafters.tables.test_lookup import tables_of
from tests.support.runs import answers, decode, greedy, sampler, steps
from tests.support.toys import ALONE, TableLM, chain_lm

MAXGRAM, BIGRAM = 0, 1  # places among the names of the drafter's traits


def proposed(drafter: MaxGramDrafter, rows: list[list[int]], want: list[int]) -> list[list[tuple[int, int]]]:
    """(token, source) of each row's chain."""
    draft = drafter.propose(rows, Budget(want), sampler())
    assert draft.probs is None
    assert draft.calls == ()
    assert all(tree.is_chain for tree in draft.trees)
    return [list(zip(tree.tokens, tree.source, strict=True)) for tree in draft.trees]


def drafted(prompt: list[int], generated: list[int], want: int = 1, tables: StaticTables | None = None) -> list[int]:
    """The chain behind prompt ++ generated; all of it copied."""
    drafter = MaxGramDrafter(tables)
    drafter.start([prompt], ALONE, ALONE)
    [chain] = proposed(drafter, [prompt + generated], [want])
    assert {source for _, source in chain} <= {MAXGRAM}
    return [token for token, _ in chain]


# -- which place ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "want", "copied"), [([7, 1, 7, 2, 7, 3], 1, [1]), ([7, 1, 7, 2], 3, [1, 7, 2])])
def test_on_a_tie_the_earliest_place_is_copied_from(prompt: list[int], want: int, copied: list[int]) -> None:
    assert drafted(prompt, [7], want) == copied


def test_nothing_is_matched_before_something_is_generated() -> None:
    assert drafted([4, 5, 4], [], 3) == []
    drafter = MaxGramDrafter(tables_of([4, 9, 8]))
    drafter.start([[4, 5, 4]], ALONE, ALONE)
    assert proposed(drafter, [[4, 5, 4]], [3]) == [[(9, BIGRAM), (8, BIGRAM)]]


# -- behind a short copy --------------------------------------------------------------------------


@pytest.mark.parametrize("want", [6, 3, 2])
def test_a_short_copy_is_gone_on_with_once(want: int) -> None:
    """9 | 1 2 1 2 1: the match 1 2 1 is followed by 2 1, and that is the end. With them, 1 2 1 2 1 is followed by
    2 1; a third time is not tried."""
    assert drafted([9], [1, 2, 1, 2, 1], want) == [2, 1, 2, 1][:want]


def test_a_copy_longer_than_what_is_remembered_leaves_no_trace() -> None:
    """Going on behind 200 copied tokens, and going back from them."""
    prompt, drafter = list(range(200)), MaxGramDrafter()
    drafter.start([prompt], ALONE, ALONE)
    copied = [*range(1, 200), 0]
    for _ in range(2):
        [chain] = proposed(drafter, [[*prompt, 0]], [500])
        assert [token for token, _ in chain] == copied + copied
    [chain] = proposed(drafter, [[*prompt, 0, 7]], [3])
    assert [token for token, _ in chain] == [8, 9, 10]


def test_bigrams_fill_the_rest_and_an_id_that_none_knows_ends_the_chain() -> None:
    drafter = MaxGramDrafter(tables_of([2, 30, 31], [31, 32]))
    assert drafter.traits.names == ("maxgram", "bigram")
    drafter.start([[1, 2], [1, 2], [1, 2]], ALONE, ALONE)
    copied, tail = [(2, MAXGRAM), (1, MAXGRAM)] * 2, [(2, BIGRAM)]
    rows = [[1, 2, 1], [1, 2, 9, 2], [1, 2, 9]]
    assert proposed(drafter, rows, [9, 9, 9]) == [
        copied,  # 2 1, once more 2 1; no bigram knows 1
        [(9, MAXGRAM), (2, MAXGRAM), (9, MAXGRAM), (2, MAXGRAM), (30, BIGRAM), (31, BIGRAM), (32, BIGRAM)],
        [],  # 9 never stood before, and no bigram knows it
    ]
    known = MaxGramDrafter(tables_of([1, 2]))
    known.start([[1, 2]], ALONE, ALONE)
    assert proposed(known, [[1, 2, 1]], [5]) == [copied + tail]


def test_only_contexts_of_one_token_are_bigrams() -> None:
    """The tables know 8 2 → 40 too, which is no bigram."""
    drafter = MaxGramDrafter(tables_of([8, 2, 40], *[[7, 2, 41]] * 2))
    drafter.start([[1]], ALONE, ALONE)
    assert proposed(drafter, [[1, 8, 2]], [1]) == [[(41, BIGRAM)]]


def test_ids_beyond_the_targets_are_nobodys_bigram() -> None:
    drafter = MaxGramDrafter(tables_of([2, 30, 31, 32]))
    for vocab_size, tail in ((31, [30]), (30, []), (33, [30, 31, 32])):
        drafter.start([[1]], TableLM(vocab_size).open([[1]]), ALONE)
        assert proposed(drafter, [[1, 2]], [4]) == [[(token, BIGRAM) for token in tail]]


# -- any rows -------------------------------------------------------------------------------------


def naive(prompt: list[int], generated: list[int], most: int, bigrams: dict[int, int]) -> list[tuple[int, int]]:
    """The rules word by word: try every suffix from the longest on, every place from the earliest on."""
    chain: list[tuple[int, int]] = []
    for _ in range(2):
        own = generated + [token for token, _ in chain]
        chain += [(token, MAXGRAM) for token in behind_longest(prompt, own)[: most - len(chain)]]
    last = chain[-1][0] if chain else [*prompt, *generated][-1]
    while len(chain) < most and last in bigrams:
        last = bigrams[last]
        chain.append((last, BIGRAM))
    return chain


def behind_longest(prompt: list[int], own: list[int]) -> list[int]:
    whole, searched = prompt + own, prompt + own[:-1]
    for size in range(len(own), 0, -1):
        for place in range(len(searched) - size + 1):
            if searched[place : place + size] == own[-size:]:
                return whole[place + size :]
    return []


TOKEN = st.integers(0, 2)


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(TOKEN, min_size=1, max_size=10),
    moves=st.lists(
        st.tuples(st.integers(0, 8), st.lists(TOKEN, max_size=5), st.integers(0, 12)), min_size=1, max_size=6
    ),
    bigrams=st.dictionaries(TOKEN, TOKEN, max_size=2),
)
def test_rows_that_grow_and_go_back_are_drafted_as_the_rules_say(
    prompt: list[int], moves: list[tuple[int, list[int], int]], bigrams: dict[int, int]
) -> None:
    """A cascade shows speculative rows: each time some tokens are taken back and others added."""
    drafter = MaxGramDrafter(tables_of(*[list(pair) for pair in bigrams.items()]) if bigrams else None)
    generated: list[int] = []
    drafter.start([prompt], ALONE, ALONE)
    for back, more, want in moves:
        generated = generated[: max(0, len(generated) - back)] + more
        assert proposed(drafter, [prompt + generated], [want]) == [naive(prompt, generated, want, bigrams)]


def test_every_answer_begins_without_a_match() -> None:
    """The next turn's prompt holds the last answer, which is then no longer generated."""
    drafter = MaxGramDrafter()
    drafter.start([[8, 1, 9, 8]], ALONE, ALONE)
    assert proposed(drafter, [[8, 1, 9, 8, 1]], [1]) == [[(9, MAXGRAM)]]
    drafter.start([[2, 1, 7, 8, 1, 9, 8]], ALONE, ALONE)
    assert proposed(drafter, [[2, 1, 7, 8, 1, 9, 8, 1]], [1]) == [[(7, MAXGRAM)]]


# -- in the loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_plain_decodings(temperature: float) -> None:
    """Point masses keep every token, whatever they are."""
    lm, drafter = TableLM(6, seed=3, sharpness=2.0), MaxGramDrafter(tables_of([1, 2, 3, 4, 5, 0, 1]))
    accepted = 0
    for prompt in ([1, 2, 3], [5], [0, 1] * 4):
        for gamma in (1, 4, 12):
            drawing = sampler(temperature, seed=gamma)
            alone = answers(lm, [prompt], None, sampler(temperature, seed=gamma), length=30)
            run = decode(lm, [prompt], drafter, drawing, length=30, gamma=gamma)
            assert [token for step in steps(run) for token in step.emitted] == alone[0]
            accepted += sum(len(step.path) for step in steps(run))
    assert accepted > 50


def test_a_repeating_text_is_copied_and_saves_the_targets_passes() -> None:
    """3 4 5 6 again and again: once it has begun anew the copies are right. By hand, gamma 4, prompt 9:
    opening 3; nothing matches 3, 4, 5, 6 | 3 → 4 5 6 3 and then 4 | 5 6 3 4 and 5 | 6 3 4 5 and 6 | 3 4 5 6 …"""
    run = steps(decode(chain_lm(10, [9], [3, 4, 5, 6] * 10), [[9]], MaxGramDrafter(), greedy(), length=40, gamma=4))
    assert [len(step.drafted) for step in run] == [0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4]
    assert all(len(step.path) == len(step.drafted) for step in run)
    assert {source for step in run for source in step.source} == {MAXGRAM}
