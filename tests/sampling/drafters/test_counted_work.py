"""What a round costs beside its passes, counted in steps and not in seconds: what is new, what was asked for, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sampling.verify.distributions
from sampling.drafters.cascade import cascade_of, chain_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.fallback import FallbackDrafter
from sampling.drafters.max_gram import MaxGramDrafter, SuffixMatches
from sampling.drafters.tables.ngram import NgramDrafter, NgramStore
from sampling.drafters.tables.prompt_lookup import MatchIndex, TablesDrafter
from sampling.drafters.tables.tree import TableTreeDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.models.cache import GROW, Buffer
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Drafter, FixedPace, Limits, Rows, Rule, Verdict, depths_of
from sampling.verify.rules import verify
from tests.support.cascades import big
from tests.support.toy_drafters import PointDrafter
from tests.support.toys import ALONE, TableLM, ToySession
from utils import logits_processors
from utils.logits_processors import LogitsProcessor, NucleusProcessor, make_processor

V = 8
NOTHING: Any = None


class Operations(TorchDispatchMode):
    """Counts torch's operations by name, and the elements of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, found[0] if isinstance(found, tuple) else found
        self.calls[name] += 1
        self.elements[name] += given.numel() if isinstance(given, Tensor) else 0
        return found


# -- matches behind other drafters ------------------------------------------------------------------


class Token(int):
    """An id that counts how often some context with it is looked up, put into an index or taken out."""

    hashed = 0

    def __hash__(self) -> int:
        Token.hashed += 1
        return super().__hash__()


MATCHING: dict[str, Callable[[], Drafter]] = {
    "tables": lambda: TablesDrafter(None, least=0),
    "tree": lambda: TableTreeDrafter(None, recall=True),
    "maxgram": MaxGramDrafter,
}
PLACES: dict[str, Callable[[Drafter], Drafter]] = {
    "alone": lambda drafter: drafter,
    "chain": lambda drafter: chain_of([PointDrafter(V, lambda row: (row[-1] + 1) % V), drafter], [3, 3]),
    "cascade": lambda drafter: cascade_of([ModelDrafter(big(V)), drafter], [[1, 1], [0, 2]]),
    "take-over in a chain": lambda drafter: chain_of(
        [PointDrafter(V, lambda row: row[-1] // 2), FallbackDrafter(drafter, ModelDrafter(big(V)), sure=0.5)], [2, 3]
    ),
}


def work(place: str, matching: str, length: int, patch: pytest.MonkeyPatch) -> int:
    """Steps of the rounds behind a prompt of `length` tokens, its own indexing left out."""
    appended, append = [0], SuffixMatches._append

    def counting(self: SuffixMatches, token: int) -> None:
        appended[0] += 1
        append(self, token)

    lm, prompt = TableLM(V, 5), [Token(at % 6) for at in range(length)]
    drafter, sampler = PLACES[place](MATCHING[matching]()), KeyedSampler(make_processor(0.0))
    done = []
    with patch.context() as inner:
        inner.setattr(SuffixMatches, "_append", counting)
        inner.setattr(ToySession, "_check", lambda self, rows: None)  # the toys' own look at all ids is not counted
        for event in generate(lm, [prompt], drafter, sampler, Limits(30), pace=FixedPace(6)):
            if isinstance(event, Step):
                done.append(Token.hashed + appended[0])
    assert len(done) > 5
    return done[-1] - done[0]


@pytest.mark.parametrize("matching", MATCHING)
@pytest.mark.parametrize("place", PLACES)
def test_a_round_costs_what_is_new_however_long_the_context(
    place: str, matching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert work(place, matching, 60, monkeypatch) == work(place, matching, 3000, monkeypatch)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "alone"])
def test_an_index_made_anew_is_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of `follow`: where drafts were not committed everything is read again."""
    follow = MatchIndex.follow

    def anew(self: MatchIndex, row: list[int]) -> None:
        if row[: len(self._row)] != self._row:
            self.__init__(self.longest)  # type: ignore[misc]
        follow(self, row)

    monkeypatch.setattr(MatchIndex, "follow", anew)
    assert work(place, "tables", 3000, monkeypatch) > work(place, "tables", 60, monkeypatch) + 3000


# -- the n-gram store -------------------------------------------------------------------------------


@st.composite
def judged(draw: st.DrawFn) -> tuple[Rows, Draft, Verdict]:
    """Up to three rows with a tree of drafts, and a path in it for each."""
    rows = draw(st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=5), min_size=1, max_size=3))
    count = draw(st.integers(0, 5))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    tokens = torch.tensor([[draw(st.integers(0, V - 1)) for _ in range(count)] for _ in rows]).long()
    paths = []
    for _ in rows:
        path: list[int] = []
        while kids := [node for node, parent in enumerate(parents) if parent == (path[-1] if path else -1)]:
            chosen = draw(st.sampled_from([*kids, -1]))
            if chosen < 0:
                break
            path.append(chosen)
        paths.append(path)
    depth = max(depths_of(torch.tensor(parents).long(), count), default=0)
    logits = torch.randn(len(rows), count + 1, V, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    own = torch.tensor([draw(st.integers(0, V - 1)) for _ in rows])
    padded = torch.tensor([path + [-1] * (depth - len(path)) for path in paths]).long().view(len(rows), depth)
    return (
        rows,
        Draft(tokens.view(len(rows), count), parents=torch.tensor(parents).long()),
        Verdict(padded, own, logits, logits),
    )


def naive_stores(rows: Rows, draft: Draft, verdict: Verdict, filler: int) -> list[NgramStore]:
    """The oracle: position by position, all ids sorted."""
    stores = []
    for place, row in enumerate(rows):
        store, before, node = NgramStore(), list(row), -1
        store.fill(row)
        path = [one for one in verdict.path[place].tolist() if one >= 0]
        for after in [*path, -1]:
            token = int(verdict.token[place] if after < 0 else draft.tokens[place, after])
            store.add(before, token)
            likely = sorted(range(V), key=lambda one: -float(verdict.logits[place, node + 1, one]))[:filler]
            for one in likely if filler > 1 else []:
                store.add(before, one)
            before, node = [*before, token], after
        stores.append(store)
    return stores


def looked(drafter: NgramDrafter, rows: Rows, draft: Draft, verdict: Verdict) -> int:
    """Positions whose likeliest ids were looked for."""
    drafter.start(rows, ALONE, ALONE)
    with Operations() as spy:
        drafter.observe(rows, draft, verdict)
    return spy.elements["topk"] // drafter.top_k_filler


@settings(max_examples=100, deadline=None)
@given(judged(), st.integers(1, 4))
def test_the_store_counts_what_was_likely_where_the_row_stood(case: tuple[Rows, Draft, Verdict], filler: int) -> None:
    rows, _, verdict = case
    drafter = NgramDrafter(V, top_k_filler=filler)
    stood = len(rows) + int((verdict.path >= 0).sum())
    assert looked(drafter, *case) == (stood if filler > 1 else 0)
    for store, expected in zip(drafter._stores, naive_stores(*case, filler), strict=True):
        assert store.counts == expected.counts
        assert store.best == expected.best


class Everywhere(NgramDrafter):
    """A mutant: the likeliest ids of all nodes, visited or not."""

    def _fillers(self, paths: list[list[int]], logits: Tensor) -> Iterator[list[int]]:
        found = logits.topk(self.top_k_filler, dim=-1).indices.tolist()
        return (found[place][node + 1] for place, path in enumerate(paths) for node in (-1, *path))


def test_a_look_at_all_nodes_is_seen() -> None:
    logits = torch.randn(1, 5, V, generator=torch.Generator().manual_seed(0))
    verdict = Verdict(torch.tensor([[0, -1, -1, -1]]), torch.tensor([1]), logits, logits)
    case: tuple[Rows, Draft, Verdict] = [[3, 4]], Draft(torch.tensor([[1, 2, 3, 4]])), verdict
    assert looked(NgramDrafter(V), *case) == 2
    assert looked(Everywhere(V), *case) == 5


# -- prefixes ---------------------------------------------------------------------------------------


def built(patch: pytest.MonkeyPatch, whole: bool, seed: int) -> tuple[int, int]:
    """(places where rows stood, prefixes that were built) of one verdict; `whole`: the mutant, of all nodes."""
    count, prefixes_of = [0], sampling.verify.distributions.prefixes_of

    def counting(rows: Rows, draft: Draft, *places: Any) -> Rows:
        everywhere = prefixes_of(rows, draft)
        found = prefixes_of(rows, draft, *places)
        count[0] += len(everywhere if whole else found)
        return found

    source = torch.Generator().manual_seed(seed)
    draft = Draft(torch.randint(0, V, (2, 5), generator=source), parents=torch.tensor([-1, 0, 0, -1, 3]))
    logits = torch.randn(2, 6, V, generator=source)
    with patch.context() as inner:
        inner.setattr(sampling.verify.distributions, "prefixes_of", counting)
        sampler = KeyedSampler(LogitsProcessor(temperature=0.7, repetition_penalty=1.2), seed)
        verdict = verify(logits, draft, [[1, 2], [3]], torch.tensor([[0, 2], [1, 1]]), sampler, Rule.POINT)
    return 2 + int((verdict.path >= 0).sum()), count[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_prefix_is_built_where_its_law_is_asked_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stood, prefixes = built(monkeypatch, False, seed)
    assert prefixes == stood
    stood, prefixes = built(monkeypatch, True, seed)
    assert prefixes > stood


@settings(max_examples=100, deadline=None)
@given(judged())
def test_asked_prefixes_are_those_of_all(case: tuple[Rows, Draft, Verdict]) -> None:
    rows, draft, _ = case
    parents = [-1, *([] if draft.parents is None else draft.parents.tolist())]
    expected: Rows = []
    for row, tokens in zip(rows, draft.tokens.tolist(), strict=True):
        at = [row]
        for parent, token in zip(parents[1:], tokens, strict=True):
            at.append([*at[parent + 1], token])
        expected += at
    assert sampling.verify.distributions.prefixes_of(rows, draft) == expected
    count = draft.tokens.shape[1]
    places = [(row, node) for row in reversed(range(len(rows))) for node in range(count - 1, -2, -1)]
    assert sampling.verify.distributions.prefixes_of(rows, draft, places) == [
        expected[row * (count + 1) + node + 1] for row, node in places
    ]


# -- the nucleus ------------------------------------------------------------------------------------


def sorting(spread: float) -> Counter[str]:
    """The operations of a nucleus of 49,152 ids; the smaller the spread, the flatter the law."""
    noise = torch.randn(1, 49_152, generator=torch.Generator().manual_seed(1))
    with Operations() as spy:
        NucleusProcessor(1.0, 0.9)(spread * noise)
    return spy.calls


def test_a_flat_law_costs_what_a_peaked_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two looks at all values; ids are never sorted: of so many that takes torch milliseconds."""
    flat, usual, peaked = map(sorting, (0.1, 2.0, 8.0))
    assert flat == usual
    assert sum(flat.values()) < 1.5 * sum(peaked.values())
    assert not {"sort", "argsort", "topk"} & set(flat + peaked)
    monkeypatch.setattr(logits_processors, "_largest", lambda values, count: values.topk(count, dim=-1).values)
    assert sorting(0.1)["topk"] == 2  # the mutant is seen


# -- caches -----------------------------------------------------------------------------------------

COPIES = ("copy_", "index_select", "index", "clone", "cat", "gather")


def copied(buffer: Buffer, held: Tensor, length: int, order: list[int]) -> int:
    """Numbers that were written to give the first `length` slots of `held` these rows."""
    buffer.append(held)
    buffer.crop(length)
    with Operations() as spy:
        buffer.select(torch.tensor(order))
    return sum(spy.elements[name] for name in COPIES)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 6), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_reordering_a_cache_copies_what_is_filled_once(rows: int, length: int, order: list[int]) -> None:
    order = [min(one, rows - 1) for one in order]
    buffer, held = Buffer(), torch.randn(rows, 2, 6, 3)
    chosen = held[order][:, :, :length]
    in_place = all(one < other for one, other in pairwise(order))  # rows only drop out: those in front stay
    moved = [row for place, row in enumerate(order) if not in_place or place != row]
    assert copied(buffer, held, length, order) == chosen[: len(moved)].numel()
    assert torch.equal(buffer.view(), chosen)
    room, new = buffer.data, torch.randn(len(order), 2, GROW, 3)
    assert torch.equal(buffer.append(new), torch.cat([chosen, new], dim=2))  # rows that were one part ways
    assert buffer.data is room


class Twice(Buffer):
    """A mutant: the rows are chosen first and then copied into their room."""

    def select(self, rows: Tensor) -> None:
        chosen = self.view().index_select(0, rows)
        self.data = chosen.new_empty((*chosen.shape[:2], GROW, chosen.shape[3]))
        self.data[:, :, : self.length] = chosen


def test_a_second_copy_is_seen() -> None:
    held = torch.randn(2, 2, 6, 3)
    assert copied(Twice(), held, 6, [1, 1]) == 2 * copied(Buffer(), held, 6, [1, 1])
