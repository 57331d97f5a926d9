"""What was said before: what the index finds, what it forgets, what a look costs, and that no text changes by it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import sampling.drafters.tables.suffix as suffix
from sampling.drafters.draft_model import ModelSource, NoDrafter
from sampling.drafters.tables.lookup import CHANCE, LookupDrafter
from sampling.drafters.tables.suffix import DOUBT, LOOKS, READ, SIZES, SuffixIndex
from sampling.types import Budget, Rows
from tests.sampling.drafters.tables.test_lookup import SAMPLER, drafted, tables_of
from tests.sampling.verify.test_enumeration import EXACT, PROMPT
from tests.support.reference import NaiveLaw
from tests.support.runs import answers, crossed, decode, emitted, enumeration_error, sampler, steps
from tests.support.toys import ALONE, TableLM


def index_of(*said: list[int], room: int = suffix.ROOM) -> SuffixIndex:
    index = SuffixIndex(room)
    for answer in said:
        index.add([], answer)
    return index


def counted(said: list[list[int]], tail: list[int]) -> dict[int, float]:
    """The same without an index: the newest places of the same context."""
    for size in SIZES:
        places = [
            (tuple(answer[at - size : at]), answer[at]) for answer in said for at in range(size, len(answer)) if size
        ]
        context = tuple(tail[-size:])
        counts = Counter([token for known, token in places if known == context][-LOOKS:])
        if counts and len(tail) >= size:
            return {token: count / (counts.total() + DOUBT[size]) for token, count in counts.items()}
    return {}


@given(
    said=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=12),
    tail=st.lists(st.integers(0, 3), max_size=20),
)
@settings(max_examples=150, deadline=None)
def test_it_counts_what_followed_the_longest_known_context(said: list[list[int]], tail: list[int]) -> None:
    for end in [tail, *(answer[:-1] for answer in said)]:
        found = index_of(*said).after(end)
        assert dict(found) == counted(said, end)
        assert [chance for _, chance in found] == sorted((chance for _, chance in found), reverse=True)


def test_the_oldest_answers_go() -> None:
    index = index_of([1, 2, 3], room=64)
    assert dict(index.after([1, 2])) == {3: 1 / (1 + DOUBT[2])}
    for _ in range(10):
        index.add([], [7, 8] * 5)
    assert index.after([1, 2]) == []
    assert dict(index.after([7, 8]))[7] > 0.6
    index.clear()
    assert not index
    assert index.after([7, 8]) == []


def test_what_was_asked_finds_what_was_said() -> None:
    """The end of the prompt is held too, and not more of it."""
    index, prompt = SuffixIndex(), list(range(100, 300))
    index.add(prompt, [1, 2])
    assert index.after(prompt) == [(1, 1 / (1 + DOUBT[16]))]
    assert index.after([*prompt, 1]) == [(2, 1 / (1 + DOUBT[16]))]
    assert index.after(prompt[: 1 - READ]) == []


# -- as a drafter ----------------------------------------------------------------------------------


def test_an_answer_that_is_over_drafts_and_the_conversations_own_matches_come_before_unlikelier_ones() -> None:
    row, said = [9, 5, 1, 2, 3, 7, 8, 5, 1, 2], index_of([5, 1, 2, 4, 6, 6])
    for drafter in (LookupDrafter(finished=said, least=0.0), LookupDrafter(tree=True, finished=said, least=0.0)):
        drafter.start([row], ALONE, ALONE)
        draft = drafter.propose([row], Budget([1]), SAMPLER)
        assert draft.tokens == [[3]]  # three tokens of its own, against two of another answer
        row_of_another = [9, 9, 1, 2]
        drafter.start([row_of_another], ALONE, ALONE)
        draft = drafter.propose([row_of_another], Budget([3]), SAMPLER)
        assert draft.tokens == [[4, 6, 6]]
        assert {drafter.traits.names[one] for one in draft.trees[0].source} == {"suffix"}
    assert CHANCE[3] > 1 / (1 + DOUBT[2])


@pytest.mark.parametrize("tree", [False, True])
def test_who_says_more_of_a_token_keeps_it(tree: bool) -> None:
    tables = tables_of([1, 2, 30])
    assert drafted(LookupDrafter(tables, finished=index_of([1, 2, 30]), tree=tree), [1, 2], 1) == [(30, "tables")]
    assert drafted(LookupDrafter(tables, finished=index_of(*[[0, 1, 2, 31]] * 40), tree=tree), [0, 1, 2], 1) == [
        (31, "suffix")
    ]


V = 6
SPOKEN = [answers(TableLM(V, seed=4), [[1, 2]], NoDrafter(), sampler(0.8, seed), length=60)[0] for seed in range(5)]

MADE: dict[str, Callable[[SuffixIndex], Any]] = {
    "chain": lambda said: LookupDrafter(finished=said, least=0.0),
    "tree": lambda said: LookupDrafter(tree=True, finished=said, least=0.0, recall=True, shared_noise=True),
    "joint": lambda said: LookupDrafter(
        finished=said, model=ModelSource(TableLM(V, seed=9)), tree=True, least=0.0, recall=True, shared_noise=True
    ),
}


@pytest.mark.parametrize(("name", "temperature"), crossed(MADE, [0.0, 0.8]))
def test_the_text_is_plain_decodings_with_that_seed(name: str, temperature: float) -> None:
    taken = 0
    prompts: tuple[Rows, ...] = ([[1, 2, 0]], [[1, 2], [3, 0, 4]])
    for prompt in prompts:
        for seed in range(6):
            lm, made = TableLM(V, seed=4), MADE[name](index_of(*SPOKEN))
            run = decode(lm, prompt, made, sampler(temperature, seed), length=30, gamma=5)
            assert emitted(run, len(prompt)) == answers(lm, prompt, None, sampler(temperature, seed), length=30)
            each = [step for row in range(len(prompt)) for step in steps(run, row)]
            taken += sum(made.traits.names[step.source[node]] == "suffix" for step in each for node in step.path)
    assert taken > 20


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_the_law_is_the_targets(name: str) -> None:
    said = index_of([2, 0, 1, 1, 2, 0, 1, 0], [1, 0, 2, 1])
    make = lambda: MADE[name](said)  # noqa: E731
    assert (
        enumeration_error(TableLM(3, seed=1), make, prompt=[*PROMPT, 2, 0], length=4, gamma=3, law=NaiveLaw(top_k=2))
        < EXACT
    )


def test_what_is_asked_again_takes_few_passes() -> None:
    lm, prompt = TableLM(40, seed=4), [1, 2]
    text = answers(lm, [prompt], None, sampler(0.0), length=60)[0]
    passes = []
    for said in (SuffixIndex(), SuffixIndex()):
        if passes:
            said.add(prompt, text)
        run = decode(lm, [prompt], LookupDrafter(finished=said), sampler(0.0), length=60, gamma=8)
        assert emitted(run)[0] == text
        passes.append(len(steps(run)))
    assert 3 * passes[1] < passes[0]
